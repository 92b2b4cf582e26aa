"""A batch's run in pieces that hand over to each other at every collective."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tpoverlap.comm import use_scheduler
from tpoverlap.errors import PieceMismatchError
from tpoverlap.microbatch.batch import Batch
from tpoverlap.microbatch.foreign_collectives import ForeignCollectiveWatch
from tpoverlap.microbatch.lane import CommLane, Measurement, PendingCollective, Stamp
from tpoverlap.microbatch.outputs import Output, join_outputs
from tpoverlap.microbatch.runs import Forward, PieceContext, num_bytes
from tpoverlap.microbatch.shared_cpu import SharedCpu
from tpoverlap.microbatch.stats import IntervalKind
from tpoverlap.microbatch.thread_state import ThreadState
from tpoverlap.microbatch.worker import Worker

T = TypeVar("T")
_UNWATCHED = nullcontext()


class PieceStopped(BaseException):
    """Unwinds a piece whose run has failed elsewhere. Not an Exception, so that model code does not swallow it."""


class SplitRun:
    """Runs the pieces in one worker thread each; exactly one of them is at work at any time.

    A piece keeps the turn until it calls a collective. That is handed to the communication lane, then the turn goes
    to the next piece; once it is back, the piece waits for its collective. So segment j of piece k is always issued
    after segment j of piece k - 1, whose cache writes it may read.
    """

    def __init__(
        self,
        workers: list[Worker],
        lane: CommLane,
        make_watch: Callable[[], ForeignCollectiveWatch] | None = None,
        *,
        cpu: SharedCpu | None = None,
    ) -> None:
        """make_watch: for a run whose pieces are watched for collectives that are not the group's. cpu: where the
        workers take turns, so that caches stay warm and no sleeping CPU has to be woken at a hand-over; None: anywhere.
        """
        self.measurements: list[Measurement] = []
        self._workers = workers
        self._lane = lane
        self._make_watch = make_watch
        self._cpu = cpu
        self._state = ThreadState.of_this_thread()
        # A piece's turn: its queue gets an item when the turn comes to it.
        self._turns: list[SimpleQueue[None]] = [SimpleQueue() for _ in workers]
        # Behind piece k: the others in their order, then itself.
        self._after = [(*range(k + 1, len(workers)), *range(k + 1)) for k in range(len(workers))]
        self._finished = [False] * len(workers)
        self._counts = [0] * len(workers)
        self._outputs: list[Any] = [None] * len(workers)
        self._idle = [threading.Event() for _ in workers]
        for idle in self._idle:
            idle.set()
        # Memory of collectives that compute has not waited for yet: the lane may be at work on it.
        self._in_flight: list[PendingCollective | None] = [None] * len(workers)
        self._error: BaseException | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._handed_over_s: float | None = None
        # The last moment at which a piece stopped computing, and the last at which one went on.
        self._suspended: Stamp = None
        self._resumed: Stamp = None

    def execute(self, forward: Forward, pieces: list[Batch], piece_context: PieceContext) -> Output:
        watches = [self._make_watch() if self._make_watch else None for _ in pieces]
        for k, (worker, piece, watch) in enumerate(zip(self._workers, pieces, watches, strict=True)):
            context = contextvars.copy_context()
            scheduler = _PieceScheduler(self, k, piece, piece_context, watch)

            def task(k: int = k, context: Any = context, scheduler: _PieceScheduler = scheduler) -> None:
                try:
                    context.run(self._run_piece, k, forward, scheduler)
                finally:
                    self._idle[k].set()

            self._idle[k].clear()
            try:
                worker.start(task)
            except BaseException:
                self._idle[k].set()
                raise
        self._turns[0].put(None)
        for idle in self._idle:
            idle.wait()
        error, self._error = self._error, None
        if error is not None:
            self._outputs.clear()
            try:
                raise error
            finally:
                del error  # with the frames that it refers to, it would keep the pieces' tensors until a collection
        return join_outputs(self._outputs, [piece.num_tokens for piece in pieces])

    def settle(self) -> None:
        # An interrupt of the caller comes here while the pieces are at work.
        self._stop(None)
        for idle in self._idle:
            idle.wait()
        self._lane.settle()

    def _run_piece(self, k: int, forward: Forward, scheduler: _PieceScheduler) -> None:
        try:
            worker = self._workers[k]
            if self._cpu is None:
                worker.run_on(None)
            elif k == 0:
                self._cpu.settle(worker.run_on)
            self._take_turn(k)
            if self._cpu is not None:
                worker.run_on(self._cpu.cpu)
            with self._state.applied(), use_scheduler(scheduler):
                self._outputs[k] = scheduler.run_forward(forward)
            self._check_counts(k)
            self._finished[k] = True
            self._pass_turn(k)
        except PieceStopped:
            pass
        except BaseException as e:
            self._stop(e)

    # Turns

    def _take_turn(self, k: int) -> None:
        self._turns[k].get()
        if self._stopped:
            raise PieceStopped
        if self._handed_over_s is not None:
            self.record("handover", k, "handover", self._handed_over_s, time.perf_counter())
            self._handed_over_s = None

    def _pass_turn(self, k: int) -> None:
        for q in self._after[k]:
            if not self._finished[q]:
                self._handed_over_s = time.perf_counter() if q != k else None
                self._turns[q].put(None)
                return

    def _stop(self, error: BaseException | None) -> None:
        """Ends the run: the first error is kept, the other pieces stop where they next take their turn."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._stopped = True
        for turn in self._turns:
            turn.put(None)

    # Collectives

    def collective(self, k: int, name: str, inputs: Sequence[torch.Tensor], launch: Callable[[], T]) -> T:
        index = self._counts[k]
        if any(self._finished):
            ended = self._finished.index(True)
            raise PieceMismatchError(
                f"piece {ended} ended after {self._counts[ended]} collectives, piece {k} calls number {index + 1} "
                f"({name}): every piece must make the same collectives"
            )
        self._counts[k] += 1
        pending = self._in_flight[k] = self._lane.submit(launch, self._suspended, lambda: self._stopped)
        self._pass_turn(k)
        self._take_turn(k)
        waiting = self._lane.now() if self._lane.idle_between_stamps else self._suspended
        result: T = pending.result()
        self._in_flight[k] = None
        if self._stopped:
            raise PieceStopped
        self._resumed = self._lane.now()
        self.record("communication", k, name, pending.start, pending.end, num_bytes(inputs), index)
        self.record("exposed", k, name, waiting, self._resumed, 0, index)
        return result

    def _check_counts(self, k: int) -> None:
        """A piece that ends must have made as many collectives as those before it have, or will have."""
        mine = self._counts[k]
        for q, count in enumerate(self._counts):
            if (self._finished[q] and count != mine) or count > mine:
                raise PieceMismatchError(
                    f"piece {k} ended after {mine} collectives, piece {q} has made {count}: "
                    "every piece must make the same collectives"
                )

    def resume(self) -> Stamp:
        """The moment at which the piece whose turn it is goes on: that of its last collective's end, if it had one."""
        resumed, self._resumed = self._resumed, None
        return self._lane.now() if resumed is None else resumed

    def suspend(self) -> Stamp:
        """The moment at which the piece whose turn it is stops."""
        self._suspended = self._lane.now()
        return self._suspended

    def record(
        self, kind: IntervalKind, k: int, name: str, start: Stamp, end: Stamp, size: int = 0, index: int = 0
    ) -> None:
        self.measurements.append(Measurement(kind, k, name, start, end, size, index))


class _PieceScheduler:
    """The CollectiveScheduler of one piece's thread."""

    def __init__(
        self,
        run: SplitRun,
        k: int,
        piece: Batch,
        piece_context: PieceContext,
        watch: ForeignCollectiveWatch | None,
    ) -> None:
        self._run = run
        self._watch = watch
        self._k = k
        self._piece = piece
        self._piece_context = piece_context
        self._context: AbstractContextManager[Any] | None = None
        self._segment_start: Stamp = None
        self._segment = 0

    def run_forward(self, forward: Forward) -> Output:
        self._resume()
        try:
            with self._watch.watching() if self._watch else _UNWATCHED:
                output = forward(self._piece)
        except BaseException as e:
            self._suspend(e)
            raise
        self._suspend()
        return output

    def run(self, name: str, inputs: Sequence[torch.Tensor], launch: Callable[[], T]) -> T:
        self._suspend()
        with self._watch.collective_of_the_group() if self._watch else _UNWATCHED:
            result = self._run.collective(self._k, name, inputs, launch)
        self._resume()
        return result

    def _resume(self) -> None:
        context = self._piece_context(self._piece)
        context.__enter__()
        self._context = context
        self._segment_start = self._run.resume()

    def _suspend(self, error: BaseException | None = None) -> None:
        """Ends a segment. Does nothing when the piece fails between two segments, where no context is entered."""
        context, self._context = self._context, None
        if context is None:
            return
        try:
            self._run.record("compute", self._k, "segment", self._segment_start, self._run.suspend(), 0, self._segment)
        except Exception:
            if error is None:  # else a broken device cannot take the time: its first error is the one to be told
                raise
        finally:
            self._segment += 1
            context.__exit__(*((type(error), error, error.__traceback__) if error else (None, None, None)))

"""Runs a forward pass in pieces, so that one piece's collectives hide behind the other pieces' compute.

Each piece runs in a thread of its own, because it must stop deep inside unmodified model code; exactly one piece
issues work at a time, in piece order, and hands over where it calls a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter
from contextlib import nullcontext

import torch

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import ChannelError, ConfigError, UnsupportedError
from tpoverlap.microbatch.batch import Batch
from tpoverlap.microbatch.cpu_choice import cpus_for
from tpoverlap.microbatch.cpu_lane import CpuCommLane
from tpoverlap.microbatch.cuda_lane import CudaCommLane
from tpoverlap.microbatch.engine_features import EngineFeatures, check_supported
from tpoverlap.microbatch.foreign_collectives import foreign_collective_watch
from tpoverlap.microbatch.lane import CommLane, Measurement
from tpoverlap.microbatch.outputs import Output
from tpoverlap.microbatch.piece_counts import PieceCounts
from tpoverlap.microbatch.runs import Forward, PieceContext, PlainRun, Run, WholeRun
from tpoverlap.microbatch.shared_cpu import SharedCpu
from tpoverlap.microbatch.split import check_split_options, split_tokens
from tpoverlap.microbatch.split_run import SplitRun
from tpoverlap.microbatch.stats import RunStats
from tpoverlap.microbatch.worker import Worker

logger = logging.getLogger("tpoverlap")


class MicroBatchExecutor:
    """Runs forward passes over a group's ranks in overlapping pieces.

    group: whose collectives the forward pass calls; every rank makes an executor with the same arguments and runs
    the same batches. config: when and how to cut. state_block, balance_position: see
    :func:`~tpoverlap.microbatch.split.split_tokens`. features: of the engine whose batches these are; ConfigError
    where they are not supported. One thread at a time calls :meth:`run`.
    """

    def __init__(
        self,
        group: GroupCoordinator,
        config: OverlapConfig | None = None,
        *,
        state_block: int | None = None,
        balance_position: float = math.inf,
        features: EngineFeatures | None = None,
    ) -> None:
        if features is not None:
            check_supported(features)
            if features.tensor_parallel_size != group.world_size:
                raise ConfigError(
                    f"tensor_parallel_size={features.tensor_parallel_size} is not supported with a group of "
                    f"{group.world_size} ranks: give the group that the model is sharded over"
                )
            if features.recurrent_state_cache_mode == "align" and state_block is None:
                raise ConfigError(
                    "recurrent_state_cache_mode='align' is not supported without state_block: give the tokens of a "
                    "block of the state cache, which cuts must keep to"
                )
        self._foreign_operators = features.collective_operators if features is not None else frozenset()
        self._watched_sizes: set[int] = set()
        self._run_counts: Counter[str] = Counter()
        self._group = group
        self._config = config or OverlapConfig()
        check_split_options(self._config.cut_multiple, state_block, balance_position)
        if self._config.min_tokens == 0:
            logger.info("batches run whole, since min_tokens is 0: OverlapConfig(min_tokens=...) has larger ones cut")
        self._state_block = state_block
        self._balance_position = balance_position
        cpus = cpus_for(group.device, group.rank_in_group, group.world_size) if group.device.type == "cuda" else []
        self._cpu = SharedCpu(cpus) if cpus else None
        self._workers: list[Worker] = []
        self._lane: CommLane | None = None
        self._counts = PieceCounts(group, self._config)
        self._running = threading.Lock()
        self._pid = os.getpid()
        self._generation = group.generation
        self._stats = RunStats(num_tokens=0, piece_tokens=())
        self._unresolved: list[Measurement] = []

    @property
    def stats(self) -> RunStats:
        """Of the last run, also of one that failed. On a device, asking waits until that run has ended there."""
        if self._unresolved:
            assert self._lane is not None
            self._stats.intervals += [m.resolve(self._lane) for m in self._unresolved]
            self._unresolved = []
            self._stats.add_up()
        return self._stats

    @property
    def run_counts(self) -> dict[str, int]:
        """How many runs were cut into pieces ("split"), and how many ran whole for each bypass reason."""
        return dict(self._run_counts)

    def run(self, forward: Forward, batch: Batch, *, piece_context: PieceContext | None = None) -> Output:
        """``forward(batch)``, in pieces where that is possible; the pieces' outputs joined along tokens.

        forward: takes a Batch and returns a tensor, or a tuple of tensors, with one row a token. piece_context: makes
        a context manager for a piece; it is entered at every resume of the piece and left at every hand-over, for
        engines that keep a batch's metadata in globals. Where kernels are batch-invariant the result is the unsplit
        run's, bit for bit.

        UnsupportedError: the batch has fields that it does not know how to cut, or a piece issues a collective by
        other means than the group, which is looked for in the first split batch and in the first of each further size
        (power of two of tokens a piece), because engines choose fused operators by size.

        The first exception of a piece (or of the unsplit run) is raised here as it was; the other ranks' collectives
        then end with CollectiveAbortedError, and the next run of all ranks resets the group. PieceMismatchError: the
        pieces made different numbers of collectives. ChannelError: in a process that was forked from the executor's.
        """
        if os.getpid() != self._pid:
            raise ChannelError(
                "this executor was made before a fork, and its threads are in the parent process: make another one here"
            )
        if not self._running.acquire(blocking=False):
            raise UnsupportedError("this executor is already running a batch: one thread at a time may call run")
        try:
            self._recover()
            self._group.begin_run()
            run: Run | None = None
            started_s = time.perf_counter()
            try:
                pieces, reason = self._pieces(batch)
                self._stats = RunStats(
                    num_tokens=batch.num_tokens,
                    piece_tokens=tuple(p.num_tokens for p in pieces),
                    bypass_reason=reason,
                )
                self._run_counts[reason or "split"] += 1
                self._unresolved = []
                run = self._run_for(pieces, reason)
                output = run.execute(forward, pieces, piece_context or (lambda piece: nullcontext()))
                if self._group.device.type != "cpu":
                    # A device's collectives end after the call that issued them. On CPU each has raised by itself.
                    self._group.end_run()
                watched = reason is None and _size_class(pieces) not in self._watched_sizes
                self._counts.ran(batch.num_tokens, len(pieces), is_typical=not watched)
                if reason is None:
                    self._watched_sizes.add(_size_class(pieces))
                return output
            except BaseException as e:
                # Peers may already wait for this rank's next collective, and a piece of this rank for theirs.
                words = f": {e}" if str(e) else ""
                self._group.abort(f"{type(e).__name__} on rank {self._group.rank}{words}", raised=True)
                if run is not None:
                    with contextlib.suppress(Exception):  # of a broken device: the first error is the one to be told
                        run.settle()
                raise
            finally:
                if run is not None:
                    self._stats.wall_s = self._stats.issue_s = time.perf_counter() - started_s
                    self._unresolved = run.measurements
        finally:
            self._running.release()

    def close(self) -> None:
        """Ends the worker threads. The executor makes new ones if it runs again."""
        try:
            _ = self.stats  # which needs the lane
        finally:
            self._end_threads()

    def _end_threads(self) -> None:
        self._unresolved = []
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _recover(self) -> None:
        if self._group.failed:
            if not self._group.failure_delivered:
                self._group.check()
            self._group.reset()
        if self._group.generation != self._generation:
            # Ranks may have met the failure in different runs, and what they know of sizes may differ since.
            self._generation = self._group.generation
            self._counts.forget()
            self._watched_sizes.clear()

    def _pieces(self, batch: Batch) -> tuple[list[Batch], str | None]:
        reason = self._bypass_reason(batch)
        if reason is None:
            count = self._counts.choose(batch.num_tokens, lambda: self.stats)
            cut = split_tokens(
                batch.query_start_loc,
                batch.seq_lens,
                num_pieces=count,
                cut_multiple=self._config.cut_multiple,
                state_block=self._state_block,
                balance_position=self._balance_position,
            )
            if len(cut) > 1:
                return [batch.piece(p) for p in cut], None
            reason = "no_valid_cut"
        return [batch], reason

    def _bypass_reason(self, batch: Batch) -> str | None:
        """Why the batch runs whole; a function of what all ranks share."""
        if self._group.world_size == 1:
            return "world_size_1"
        if self._config.min_tokens == 0:
            return "off"
        if batch.num_tokens < self._config.min_tokens:
            return "below_min_tokens"
        if batch.num_draft_tokens:
            return "draft_tokens"
        if batch.num_padding_tokens:
            return "padded"
        if self._is_captured():
            return "captured"
        if _is_decode(batch):
            return "decode_only"
        return None

    def _is_captured(self) -> bool:
        return self._group.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _run_for(self, pieces: list[Batch], reason: str | None) -> Run:
        on_device = self._group.device.type == "cuda"
        if on_device and reason is not None:
            batch = pieces[0]
            # Steps in which a few microseconds a collective would be felt, and those that a graph would keep.
            if self._is_captured() or _is_decode(batch) or batch.num_draft_tokens or batch.num_padding_tokens:
                return PlainRun()
        if self._lane is None:
            self._lane = CudaCommLane(self._group.device) if on_device else CpuCommLane("tpoverlap-comm")
            weakref.finalize(self, self._lane.close).atexit = False
        self._lane.begin_run()
        if reason is not None:
            return WholeRun(self._lane)
        while len(self._workers) < len(pieces):
            worker = Worker(f"tpoverlap-piece-{len(self._workers)}")
            weakref.finalize(self, worker.close).atexit = False
            self._workers.append(worker)
        watched = _size_class(pieces) in self._watched_sizes
        return SplitRun(
            self._workers[: len(pieces)],
            self._lane,
            None if watched else lambda: foreign_collective_watch(self._foreign_operators),
            # Compilers start threads and processes in the first run of a size, which would inherit the one CPU.
            cpu=self._cpu if watched else None,
        )


def _is_decode(batch: Batch) -> bool:
    return all(b - a <= 1 for a, b in itertools.pairwise(batch.query_start_loc))


def _size_class(pieces: list[Batch]) -> int:
    return max(piece.num_tokens for piece in pieces).bit_length()

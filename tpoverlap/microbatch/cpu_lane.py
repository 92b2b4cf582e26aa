"""The lane of CPU tensors: one thread, first come first served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from tpoverlap.microbatch.thread_state import ThreadState


class CpuPending:
    """A collective in the thread's queue."""

    def __init__(self, launch: Callable[[], Any], cancelled: Callable[[], bool]) -> None:
        self._launch = launch
        self._cancelled = cancelled
        self._state = ThreadState.of_this_thread()
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self.start = self.end = 0.0

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """Called by the lane's thread."""
        self.start = time.perf_counter()
        try:
            if not self._cancelled():
                with self._state.applied():
                    self._result = self._launch()
        except BaseException as e:
            self._error = e
        self.end = time.perf_counter()
        self._done.set()


class CpuCommLane:
    """The thread. It takes a communication stream's place: collectives run in the order of their submission."""

    idle_between_stamps = True

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[CpuPending | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()

    def begin_run(self) -> None:
        pass

    def submit(self, launch: Callable[[], Any], ready: float, cancelled: Callable[[], bool]) -> CpuPending:
        pending = CpuPending(launch, cancelled)
        self._queue.put(pending)
        return pending

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp

    def settle(self) -> None:
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def _serve(queue: SimpleQueue[CpuPending | threading.Event | None]) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
        else:
            item.run()
        del item  # what it refers to must not live on until the next one comes

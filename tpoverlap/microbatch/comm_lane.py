"""Where collectives of CPU tensors run while the pieces compute: one thread, first come first served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from tpoverlap.microbatch.thread_state import ThreadState


class PendingCollective:
    """A collective that has been submitted. start_s, end_s: when it ran, on the host's monotonic clock."""

    def __init__(self, launch: Callable[[], Any], state: ThreadState, cancelled: Callable[[], bool]) -> None:
        self._launch = launch
        self._state = state
        self._cancelled = cancelled
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self.start_s = self.end_s = 0.0

    def wait(self) -> None:
        """Until the collective has ended, in whatever way."""
        self._done.wait()

    def result(self) -> Any:
        """Waits for the collective's end; its result, or the exception that it ended with."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """Called by the lane's thread."""
        self.start_s = time.perf_counter()
        try:
            if not self._cancelled():
                with self._state.applied():
                    self._result = self._launch()
        except BaseException as e:
            self._error = e
        self.end_s = time.perf_counter()
        self._done.set()


class CpuCommLane:
    """The thread. It takes a communication stream's place: collectives run in the order of their submission."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[PendingCollective | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()

    def submit(self, launch: Callable[[], Any], state: ThreadState, cancelled: Callable[[], bool]) -> PendingCollective:
        """Queues ``launch``; it is left out if ``cancelled()`` by the time its turn comes."""
        pending = PendingCollective(launch, state, cancelled)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def _serve(queue: SimpleQueue[PendingCollective | None]) -> None:
    while (pending := queue.get()) is not None:
        pending.run()
        del pending

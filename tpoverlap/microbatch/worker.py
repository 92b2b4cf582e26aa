"""A persistent thread that runs one task at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Runs the tasks that :meth:`start` is given, one after the other; a task must not raise."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()

    def start(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()


def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # what the task refers to must not live on until the next one

"""A persistent thread that runs one task at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue


class Worker:
    """Runs the tasks that :meth:`start` is given, one after the other; a task must not raise."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._cpu: int | None = None
        self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()

    def run_on(self, cpu: int | None) -> bool:
        """Called by a task: keeps the thread on that CPU from now on; None: on any that the process may use.

        Returns whether it is so: a container may forbid it, or the CPU is gone. Then the thread runs where it ran.
        """
        if cpu != self._cpu:
            if not move_to(os.sched_getaffinity(os.getpid()) if cpu is None else {cpu}):
                return False
            self._cpu = cpu
        return True

    def start(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()


def move_to(cpus: Collection[int]) -> bool:
    """Keeps the calling thread on these CPUs, where the system allows it; returns whether it does."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return False
    return True


def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # what the task refers to must not live on until the next one

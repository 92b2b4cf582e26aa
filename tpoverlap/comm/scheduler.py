"""Who decides when a collective runs.

Every collective of a coordinator, whichever provider serves it, goes through the scheduler of the calling thread. The
default runs it at once; an executor that overlaps pieces installs its own in the threads that it owns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from tpoverlap.comm.provider import Completion

T = TypeVar("T")


class CollectiveScheduler(Protocol):
    """Runs collectives on behalf of one thread."""

    def run(self, name: str, inputs: Sequence[torch.Tensor], launch: Callable[[], T]) -> T:
        """Runs one collective and returns its result.

        name: the operation, such as ``"all_reduce"``. inputs: the tensors that it reads; a scheduler that launches
        on another stream or thread keeps them alive and orders the launch after their producers. launch: issues the
        collective on the current stream (CPU: runs it) and returns its result; must be called exactly once.
        """
        ...


class InlineScheduler:
    """Runs each collective at once, in the calling thread. The default."""

    def run(self, name: str, inputs: Sequence[torch.Tensor], launch: Callable[[], T]) -> T:
        return launch()


class _Current(threading.local):
    scheduler: CollectiveScheduler = InlineScheduler()


_current = _Current()


def current_scheduler() -> CollectiveScheduler:
    """The calling thread's scheduler."""
    return _current.scheduler


@contextmanager
def use_scheduler(scheduler: CollectiveScheduler) -> Iterator[None]:
    """Makes ``scheduler`` the calling thread's own inside the ``with`` block; the former one comes back after it."""
    before = current_scheduler()
    _current.scheduler = scheduler
    try:
        yield
    finally:
        _current.scheduler = before


def run_to_the_end(
    name: str, x: torch.Tensor, result: torch.Tensor, issue: Callable[[], Completion | None]
) -> torch.Tensor:
    """Runs a collective of ``x`` by the thread's scheduler; what it leaves to do runs in the caller's stream."""
    completion: Completion | None = None

    def launch() -> torch.Tensor:
        nonlocal completion
        completion = issue()
        return result

    result = current_scheduler().run(name, (x,), launch)
    if completion is not None:
        completion()
    return result

"""The ranks of a job: how they meet, agree on errors, share values, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tpoverlap.errors import ConfigError, PeerLostError, TpOverlapError

T = TypeVar("T")

# How long ranks wait here for the others, which may be loading a model; a rank that died is noticed at once.
_PATIENCE = timedelta(minutes=15)


class JobError(TpOverlapError):
    """Something that ends the job on every rank. ``reporter`` is the rank that tells the user."""

    def __init__(self, message: str, reporter: int) -> None:
        super().__init__(message)
        self.reporter = reporter


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process while native code waits for the other ranks and Python cannot handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@dataclass(frozen=True)
class World:
    """This process among the ranks that torchrun started, or alone. local_size: ranks on this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def join(cls) -> World:
        """Meets the other ranks, in a default process group on gloo."""
        if "RANK" not in os.environ:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return cls(rank=0, size=1, local_rank=0, local_size=1)
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
            if not (0 <= rank < size and 0 <= local_rank < local_size):
                raise ValueError(f"rank {rank} of {size}, {local_rank} of {local_size} on this host")
            with _interruptible():
                dist.init_process_group("gloo", rank=rank, world_size=size, timeout=_PATIENCE)
        except (KeyError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot join the other ranks ({error!r}): start this script with torchrun") from None
        return cls(rank, size, local_rank, local_size)

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Does ``work`` on rank 0, whose result stays there; an error of it raises JobError on every rank."""
        value, error = self._attempt(work) if self.rank == 0 else (None, None)
        [error] = self._broadcast([error])
        if error is not None:
            raise JobError(error, reporter=0)
        return value

    def share(self, value: T | None) -> T:
        """Rank 0's value, which must be picklable, on every rank; the others give None."""
        shared: Any
        [shared] = self._broadcast([value])
        return shared

    def on_each(self, work: Callable[[], T]) -> T:
        """Does ``work`` on every rank and waits for all; where one fails, JobError on every rank."""
        value, error = self._attempt(work)
        errors: list[str | None] = [None] * self.size
        self._talk(lambda: dist.all_gather_object(errors, error))
        for rank, message in enumerate(errors):
            if message is not None:
                raise JobError(message, reporter=rank)
        return value  # type: ignore[return-value]  # no error: the work has returned

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks in rank order, on rank 0; None elsewhere."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._talk(lambda: dist.gather_object(value, values))
        return values

    def say(self, message: str) -> None:
        """Prints a result, once for all ranks."""
        if self.rank == 0:
            print(message, flush=True)

    def leave(self) -> None:
        dist.destroy_process_group()

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, str | None]:
        try:
            return work(), None
        except (TpOverlapError, OSError) as error:
            return None, str(error)

    def _broadcast(self, values: list[Any]) -> list[Any]:
        self._talk(lambda: dist.broadcast_object_list(values, src=0))
        return values

    def _talk(self, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except RuntimeError:  # gloo has no type of its own for a connection that a peer's end closed
            raise PeerLostError("another rank ended, or does not answer") from None

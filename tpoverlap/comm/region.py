"""The protocol words and slots of one mode, and their counters. Modes share no slot and no word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tpoverlap.comm.layout import CPU_CONSUMED, CPU_PUBLISHED, NUM_SLOTS, Layout
from tpoverlap.comm.words import MASK, SharedWords

_WAIT_SLICE_S = 0.05


class Region(Protocol):
    """A mode's part of the segment, as the channel and its watcher see it."""

    def release(self) -> None:
        """After a failure, again and again: lets whoever waits in this region go on. Called by the watcher's thread."""
        ...

    def waiting_s(self) -> float:
        """How long operations that the host has left to a device have waited for peers since they published."""
        ...

    def restore(self) -> None:
        """In a reset, once all ranks have drained: sets counters and this rank's own words to their start."""
        ...


class Device(Protocol):
    """Runs operations that the host has only queued, in one region or several."""

    def drain(self) -> None:
        """In a reset, while the watcher still releases: returns once no operation of this rank is under way."""
        ...

    def close(self) -> None:
        """When this rank leaves, while the watcher still releases: drains it and frees what the group holds of it."""
        ...


class CpuRegion:
    """Counters of the two-word protocol (see :mod:`tpoverlap.comm.protocol`) as rank ``rank`` sees them.

    check: called while a wait goes on; raises when the group has failed. first_number: where the cyclic counters start
    (tests start them just below their wrap).
    """

    def __init__(
        self, words: SharedWords, layout: Layout, rank: int, check: Callable[[], None], first_number: int = 0
    ) -> None:
        ranks = range(layout.world_size)
        self._words = words
        self._rank = rank
        self._check = check
        self._first_number = first_number & MASK
        self._published = [layout.word(q, CPU_PUBLISHED) // 4 for q in ranks]
        self._consumed = [layout.word(q, CPU_CONSUMED) // 4 for q in ranks]
        self.restore()

    def restore(self) -> None:
        self.operation = self._first_number
        self._base = self._first_number
        self._words.store(self._published[self._rank], self._base)
        self._words.store(self._consumed[self._rank], self.operation)

    def begin_operation(self) -> int:
        """Numbers the next operation; returns the slot that it uses."""
        self.operation = (self.operation + 1) & MASK
        return self.operation % NUM_SLOTS

    def end_operation(self, pieces_published: int) -> None:
        self._base = (self._base + pieces_published) & MASK

    def publish(self, count: int) -> None:
        self._words.store(self._published[self._rank], self._base + count)

    def consume(self) -> None:
        self._words.store(self._consumed[self._rank], self.operation)

    def wait_published(self, rank: int, count: int) -> None:
        self._wait(self._published[rank], (self._base + count) & MASK)

    def wait_consumed(self, rank: int) -> None:
        """Until ``rank`` has read what this operation's slot held before."""
        self._wait(self._consumed[rank], (self.operation - NUM_SLOTS) & MASK)

    def release(self) -> None:
        """Makes every waiter look at the group's failure.

        The words keep their values: a host waiter asks the failure record, so nothing need be written to let it pass
        (waits of a device are another matter, see POISON_OFFSET), and an operation whose data has all arrived still
        completes. So a rank that is one call behind reports the failure in the call where the others do.
        """
        for index in (*self._published, *self._consumed):
            self._words.wake(index)

    def waiting_s(self) -> float:
        return 0.0  # the host waits itself, and its calls say since when

    def _wait(self, index: int, target: int) -> None:
        while not self._words.wait(index, target, _WAIT_SLICE_S):
            self._check()

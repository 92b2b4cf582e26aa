"""Words that a device writes and waits for: their poison, and how long it has been waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from tpoverlap.comm.gpu import GpuSegment
from tpoverlap.comm.layout import COPY_CONSUMED, COPY_PUBLISHED
from tpoverlap.comm.protocol import POISON_OFFSET
from tpoverlap.comm.words import MASK, reached


class StuckClock:
    """Tells for how long a device's words have stood still while it waits. For the watcher's thread."""

    def __init__(self, signature: Callable[[], tuple[int, ...] | None]) -> None:
        """signature: the words that move while operations proceed; None when the device waits for nobody."""
        self._signature = signature
        self._seen: tuple[int, ...] | None = None
        self._since_s = 0.0

    def restart(self) -> None:
        """A reset sets the words to what they may have been when the device was last seen waiting."""
        self._seen = None

    def waiting_s(self) -> float:
        seen = self._signature()
        if seen is None or seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        return 0.0 if seen is None else time.monotonic() - self._since_s


class CopyRegion:
    """Counters of the two-word protocol (see :mod:`tpoverlap.comm.protocol`) for eager copy-engine operations.

    The host numbers operations as it issues them; the words are written and waited for by the device's streams.
    """

    def __init__(self, segment: GpuSegment, first_number: int = 0) -> None:
        layout, base = segment.layout, segment.device_address
        ranks = range(layout.world_size)
        self._segment = segment
        self._first_number = first_number & MASK
        self._words = segment.channel.segment.words
        self._published = [layout.word(q, COPY_PUBLISHED) // 4 for q in ranks]
        self._consumed = [layout.word(q, COPY_CONSUMED) // 4 for q in ranks]
        self.published_address = [base + 4 * index for index in self._published]
        self.consumed_address = [base + 4 * index for index in self._consumed]
        self._clock = StuckClock(self._signature)
        self._number = self._base = self._first_number
        self._ledger: deque[tuple[int, int]] = deque()
        self.restore()

    def next_operation(self, num_pieces_published: int, num_slots: int) -> tuple[int, int, int]:
        """(number, pieces published before it, slot) of the operation that the host issues now."""
        number, base = (self._number + 1) & MASK, self._base
        self._base = (base + num_pieces_published) & MASK
        # The watcher's thread reads the ledger: it must know of the operation before the device can have begun it.
        self._ledger.append((number, self._base))
        self._number = number
        return number, base, number % num_slots

    def release(self) -> None:
        for index in self._published:
            self._words[index] = (self._base + POISON_OFFSET) & MASK
        for index in self._consumed:
            self._words[index] = (self._number + POISON_OFFSET) & MASK

    def waiting_s(self) -> float:
        return self._clock.waiting_s()

    def restore(self) -> None:
        self._number = self._base = self._first_number
        self._ledger = deque([(self._number, self._base)])
        rank = self._segment.rank
        self._words[self._published[rank]] = self._base
        self._words[self._consumed[rank]] = self._number
        self._clock.restart()

    def _signature(self) -> tuple[int, ...] | None:
        rank, ledger = self._segment.rank, self._ledger
        consumed, published = self._words[self._consumed[rank]], self._words[self._published[rank]]
        while len(ledger) > 1 and reached(consumed, ledger[1][0]):
            ledger.popleft()
        # Behind a consumed operation, published moves on once this rank has published a piece of the next one.
        return None if published == ledger[0][1] else (consumed, published)

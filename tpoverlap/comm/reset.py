"""How the ranks of a group come to one reset, though each of them may give up on the way and come again.

A rank that has drained says so in the segment, with a number that none of its attempts has had before. When all have
drained, it restores its words and says for which attempts of all ranks. Rank 0 commits the reset once every rank has
restored for the same ones; until then the failure stays recorded, so that nobody calls. The watcher of a rank that
gives up writes poison again: the rank withdraws first, and the others restore anew when it has come again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tpoverlap.comm.failure import FailureRecord
from tpoverlap.comm.layout import RESETS, Layout
from tpoverlap.comm.segment import Segment
from tpoverlap.errors import CollectiveTimeoutError

_PAUSE_S = 0.001


class ResetRendezvous:
    """One rank's side of all resets of a group."""

    def __init__(self, segment: Segment, layout: Layout, record: FailureRecord, rank: int, timeout_s: float) -> None:
        self._quads = segment.quads
        self._record = record
        self._rank = rank
        self._timeout_s = timeout_s
        ranks = range(layout.world_size)
        self._attempts_at = [layout.reset_attempt(q) // 8 for q in ranks]
        self._restored_at = [layout.restored_for(q) // 8 for q in ranks]
        self._number = 0
        self._restored_for: list[int] = []

    @property
    def count(self) -> int:
        """Resets of the group until now."""
        return self._quads[RESETS // 8]

    def join(self, restore: Callable[[], None], check: Callable[[], None]) -> None:
        """Returns once the group is reset. To be called when this rank has drained and its watcher is silent.

        restore: sets the rank's own words to their start; may be called several times. check: called now and then; may
        end the wait by an exception. Raises CollectiveTimeoutError naming the ranks that do not come.
        """
        before = self.count
        give_up_s = time.monotonic() + self._timeout_s
        self._number += 1
        self._restored_for = []
        try:
            self._quads[self._attempts_at[self._rank]] = _attempt(before, self._number)
            while self.count == before:
                missing = self._go_on(before, restore)
                check()
                if missing and time.monotonic() > give_up_s:
                    raise CollectiveTimeoutError(
                        f"ranks {missing} did not come to the reset within {self._timeout_s:g} s"
                    )
                time.sleep(_PAUSE_S)
        except BaseException:
            self._quads[self._restored_at[self._rank]] = self._quads[self._attempts_at[self._rank]] = 0
            raise

    def _go_on(self, before: int, restore: Callable[[], None]) -> list[int]:
        """Goes on as far as the other ranks are; returns the ranks that it waits for."""
        attempts = [self._quads[at] for at in self._attempts_at]
        missing = [q for q, attempt in enumerate(attempts) if not _belongs(attempt, before)]
        if missing:
            return missing
        if attempts != self._restored_for:
            restore()
            self._restored_for = attempts
            at = self._restored_at[self._rank]
            # The first one last: a vector that is half written equals nobody's.
            self._quads[at] = 0
            for q in (*range(1, len(attempts)), 0):
                self._quads[at + q] = attempts[q]
        missing = self._unlike(attempts)
        # A rank that withdraws later finds no failure recorded, and records its own.
        if self._rank == 0 and not missing and self._record.clear(lambda: not self._unlike(attempts)):
            self._quads[RESETS // 8] += 1
        return missing or [0]

    def _unlike(self, attempts: list[int]) -> list[int]:
        """The ranks that have not restored for these attempts."""
        n = len(attempts)
        return [q for q, at in enumerate(self._restored_at) if self._quads[at : at + n].tolist() != attempts]


def _attempt(resets: int, number: int) -> int:
    return (resets + 1) << 32 | number


def _belongs(attempt: int, resets: int) -> bool:
    return attempt >> 32 == resets + 1

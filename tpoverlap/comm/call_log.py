"""What each rank is doing, for the others to see: its calls' numbers, descriptors and times in the segment.

Only a rank itself writes its part. A call counts for the others once its descriptor is complete.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable

from tpoverlap.comm.layout import DESCRIPTOR_TEXT_BYTES, LINE, NUM_DESCRIPTORS, Layout
from tpoverlap.comm.segment import Segment


class CallLog:
    """The log of a group as rank ``rank`` writes and reads it. number: of this rank's last call, begun or finished."""

    def __init__(self, segment: Segment, layout: Layout, rank: int) -> None:
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._peers = [q for q in range(layout.world_size) if q != rank]
        # Every call comes here twice: its places in the segment are worked out once.
        self._started_at, self._call_at, self._finished_at = (
            at // 8 for at in (layout.started_ns(rank), layout.call(rank), layout.finished_call(rank))
        )
        self._calls_at = [layout.call(q) // 8 for q in range(layout.world_size)]
        self._lines_at = [layout.descriptor(q, 0) for q in range(layout.world_size)]
        self.number = 0
        self._compared = [0] * layout.world_size

    # This rank's calls

    def begin(self, operation: str) -> None:
        number = self.number = self.number + 1
        at = self._lines_at[self._rank] + number % NUM_DESCRIPTORS * LINE
        segment, quads = self._segment, self._segment.quads
        quads[at // 8] = 0
        segment.bytes[at + 8 : at + LINE] = _behind_number(operation)
        quads[at // 8] = number
        quads[self._call_at] = number
        quads[self._started_at] = time.monotonic_ns()

    def restart_clock(self) -> None:
        self._segment.quads[self._started_at] = time.monotonic_ns()

    def end(self, completed: bool) -> None:
        """completed: the call has read all that it needed."""
        quads = self._segment.quads
        quads[self._started_at] = 0
        if completed:
            quads[self._finished_at] = self.number

    def restore(self) -> None:
        """In a reset: this rank's part, and what it knows of the others', back to the start."""
        quads, layout = self._segment.quads, self._layout
        self.number = 0
        self._compared = [0] * layout.world_size
        for at in (self._started_at, self._call_at, self._finished_at):
            quads[at] = 0
        for call in range(NUM_DESCRIPTORS):
            quads[layout.descriptor(self._rank, call) // 8] = 0

    # What the log says

    @property
    def operation(self) -> str:
        """Of this rank's last call; empty before the first."""
        return self._descriptor(self._rank, self.number) or ""

    def waited_s(self) -> float:
        """For how long this rank has waited in the call under way; 0 between calls."""
        started_ns = self._segment.quads[self._started_at]
        return (time.monotonic_ns() - started_ns) * 1e-9 if started_ns else 0.0

    def absent(self) -> list[int]:
        """The peers that have not come to this rank's last call."""
        return self._before(self._layout.call)

    def unfinished(self) -> list[int]:
        """The peers that have not finished it. What is left to a device never counts as finished."""
        return self._before(self._layout.finished_call)

    def difference(self, peer: int) -> str:
        """How the peer's call of the present number differs from this rank's; empty if it does not or has not come."""
        data, mine, theirs = self._segment.bytes, *(self._layout.descriptor(q, self.number) for q in (self._rank, peer))
        if data[mine : mine + LINE] == data[theirs : theirs + LINE]:
            return ""  # nearly always: nothing to take apart
        return self._difference(peer, self.number)

    def next_difference(self) -> tuple[int, str] | None:
        """The first call not yet compared here in which a peer differs: the peer, and how."""
        data, quads, lines_at, compared = self._segment.bytes, self._segment.quads, self._lines_at, self._compared
        for q in self._peers:
            last = min(quads[self._call_at], quads[self._calls_at[q]])
            # A peer so far ahead that it has reused a descriptor's line cannot be compared there any more.
            for call in range(max(compared[q], last - NUM_DESCRIPTORS) + 1, last + 1):
                at = call % NUM_DESCRIPTORS * LINE
                mine, theirs = lines_at[self._rank] + at, lines_at[q] + at
                if data[mine : mine + LINE] != data[theirs : theirs + LINE]:
                    difference = self._difference(q, call)
                    if difference:
                        return q, difference
            compared[q] = last
        return None

    def _before(self, at: Callable[[int], int]) -> list[int]:
        quads = self._segment.quads
        return [q for q in self._peers if quads[at(q) // 8] < quads[self._call_at]]

    def _difference(self, peer: int, call: int) -> str:
        mine, theirs = self._descriptor(self._rank, call), self._descriptor(peer, call)
        if mine is None or theirs is None or mine == theirs:
            return ""
        return f"rank {self._rank} calls {mine}, rank {peer} calls {theirs}"

    def _descriptor(self, rank: int, call: int) -> str | None:
        """What ``rank`` does in its call of that number; None if it has not come there, or is far past it."""
        at = self._layout.descriptor(rank, call)
        segment = self._segment
        if segment.quads[at // 8] != call:
            return None
        text = bytes(segment.bytes[at + 12 : at + 12 + min(segment.words[at // 4 + 2], DESCRIPTOR_TEXT_BYTES)])
        return text.decode(errors="replace") if segment.quads[at // 8] == call else None


@functools.lru_cache(maxsize=1024)
def _behind_number(operation: str) -> bytes:
    """What a descriptor's line holds behind the call's number: the text's length and the text."""
    text = operation.encode()[:DESCRIPTOR_TEXT_BYTES]
    return struct.pack(f"=I{DESCRIPTOR_TEXT_BYTES}s", len(text), text)

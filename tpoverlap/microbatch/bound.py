"""How fast pieces can possibly run: a recurrence over two resources that serve first come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Compute of the whole batch up to a collective, and that collective, in seconds (0: none follows)."""

    compute_s: float
    communication_s: float


def overlapped_time(segments: Sequence[Segment], num_pieces: int, overhead_s: float = 0.0) -> float:
    """Seconds that ``num_pieces`` equal pieces take at best, each segment costing ``overhead_s`` more than its share.

    Piece k's segment j is computed after piece k - 1's segment j and after its own collective j - 1; collectives run in
    the order in which they become ready. One piece gives the serial time.
    """
    compute_s = communication_s = 0.0
    ready_s = [0.0] * num_pieces
    for segment in segments:
        for k in range(num_pieces):
            compute_s = max(compute_s, ready_s[k]) + segment.compute_s / num_pieces + overhead_s
            if segment.communication_s:
                communication_s = max(communication_s, compute_s) + segment.communication_s / num_pieces
                ready_s[k] = communication_s
            else:
                ready_s[k] = compute_s
    return max(ready_s)


def best_piece_count(segments: Sequence[Segment], overhead_s: float, counts: Sequence[int] = (2, 3, 4)) -> int:
    """The count whose bound is least; the fewer pieces of two that are equal."""
    return min(counts, key=lambda count: (overlapped_time(segments, count, overhead_s), count))

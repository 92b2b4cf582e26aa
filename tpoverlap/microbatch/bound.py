"""How fast pieces can possibly run: a recurrence over resources that serve first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Compute up to a collective, and that collective, in seconds (0: none follows).

    slowdown: by which part of itself the compute takes longer while any collective is under way (0.2: 1.2 times).
    issue_s: what the host needs to issue both where a device runs them; compute cannot end before.
    """

    compute_s: float
    communication_s: float
    slowdown: float = 0.0
    issue_s: float = 0.0


def overlapped_time(segments: Sequence[Segment], num_pieces: int, overhead_s: float = 0.0) -> float:
    """Seconds that ``num_pieces`` equal pieces take at best, each segment costing ``overhead_s`` more than its share.

    segments: of the whole batch, but for issue_s: a piece takes the host as long as the whole does. One piece gives the
    serial time.
    """
    shares = (
        Segment(s.compute_s / num_pieces, s.communication_s / num_pieces, s.slowdown, s.issue_s) for s in segments
    )
    return pieces_time(([share] * num_pieces for share in shares), overhead_s)


def pieces_time(rows: Iterable[Sequence[Segment]], overhead_s: float = 0.0) -> float:
    """Seconds that pieces of any sizes take at best, each segment costing ``overhead_s`` more than its own time.

    rows: for each segment, in order, every piece's own part of it; all rows have as many pieces. Piece k's segment j is
    computed after piece k - 1's segment j and after its own collective j - 1; collectives run in the order in which
    they become ready; the host issues in the order of compute. ValueError for rows of different lengths.
    """
    compute_s = communication_s = host_s = 0.0
    ready_s: list[float] = []
    # Spans of communication that may lie beside compute still to come, in order.
    busy: deque[tuple[float, float]] = deque()
    for row in rows:
        ready_s = ready_s or [0.0] * len(row)
        if len(row) != len(ready_s):
            raise ValueError(f"every segment needs a part for each of {len(ready_s)} pieces, got {len(row)}")
        for k, part in enumerate(row):
            start_s = max(compute_s, ready_s[k], host_s)
            host_s += part.issue_s
            compute_s = max(host_s, _end_of_compute(start_s, part.compute_s + overhead_s, part.slowdown, busy))
            ready_s[k] = compute_s
            if part.communication_s:
                begin_s = max(communication_s, compute_s)
                ready_s[k] = communication_s = begin_s + part.communication_s
                busy.append((begin_s, communication_s))
    return max(ready_s, default=0.0)


def best_piece_count(segments: Sequence[Segment], overhead_s: float, counts: Sequence[int] = (2, 3, 4)) -> int:
    """The count that promises to be fastest; the fewer pieces of two that are equal."""
    return min(counts, key=lambda count: (overlapped_time(segments, count, overhead_s), count))


def _end_of_compute(start_s: float, work_s: float, slowdown: float, busy: deque[tuple[float, float]]) -> float:
    """When work ends that takes ``work_s`` alone. Collectives that are issued later begin after it, so ``busy`` is all
    that can slow it; compute never starts earlier than before, so spans that have ended are dropped for good."""
    while busy and busy[0][1] <= start_s:
        busy.popleft()
    if not slowdown:
        return start_s + work_s
    now_s = start_s
    for begin_s, end_s in busy:
        alone_s = max(0.0, begin_s - now_s)
        if work_s <= alone_s:
            break
        now_s, work_s = now_s + alone_s, work_s - alone_s
        done_s = (end_s - now_s) / (1 + slowdown)
        if work_s <= done_s:
            return now_s + work_s * (1 + slowdown)
        now_s, work_s = end_s, work_s - done_s
    return now_s + work_s

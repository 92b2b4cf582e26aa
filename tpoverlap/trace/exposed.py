"""How much communication no compute hides: interval arithmetic over what a run recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tpoverlap.microbatch.stats import Interval, IntervalKind

Span = tuple[float, float]


def exposed_communication(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one collective is under way and nothing computes.

    The measure of (union of the ``communication`` intervals) minus (union of the ``compute`` intervals), of one rank,
    by a sweep over the sorted end points. It uses only those two kinds, so it checks the ``exposed`` waits that the
    executor measured and does not depend on them. Raises ValueError for an interval that ends before it starts or is
    not finite.
    """
    return measure(exposed_spans(intervals))


def exposed_spans(intervals: Iterable[Interval]) -> list[Span]:
    """The stretches of time that :func:`exposed_communication` adds up: (start, end) in s, disjoint, ascending."""
    boundaries: list[tuple[float, int, int]] = []
    for interval in intervals:
        check_interval(interval)
        communicates, computes = interval.kind == "communication", interval.kind == "compute"
        if communicates or computes:
            boundaries.append((interval.start_s, communicates, computes))
            boundaries.append((interval.end_s, -communicates, -computes))
    boundaries.sort()

    spans: list[Span] = []
    communicating = computing = 0
    previous = -math.inf
    for time_s, communication_step, compute_step in boundaries:
        if communicating and not computing and time_s > previous:
            if spans and spans[-1][1] == previous:
                spans[-1] = (spans[-1][0], time_s)
            else:
                spans.append((previous, time_s))
        communicating += communication_step
        computing += compute_step
        previous = time_s
    return spans


def union(intervals: Iterable[Interval], kind: IntervalKind) -> list[Span]:
    """The union of the intervals of one kind: (start, end) in seconds, disjoint, ascending."""
    spans: list[Span] = []
    for start, end in sorted((i.start_s, i.end_s) for i in intervals if i.kind == kind):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    return spans


def measure(spans: Sequence[Span]) -> float:
    """Total length of disjoint spans, seconds."""
    return math.fsum(end - start for start, end in spans)


def check_interval(interval: Interval) -> None:
    """ValueError for a negative piece, a time that is not finite, or an end before the start."""
    if interval.piece < 0:
        raise ValueError(f"an interval needs a piece number of 0 or greater, got {interval}")
    if not (math.isfinite(interval.start_s) and math.isfinite(interval.end_s)):
        raise ValueError(f"an interval needs finite times in seconds, got {interval}")
    if interval.end_s < interval.start_s:
        raise ValueError(f"an interval must not end before it starts, got {interval}")

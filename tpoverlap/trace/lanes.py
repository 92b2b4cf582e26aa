"""The picture's structure, free of any format: per rank one lane a piece, one for its collectives, and its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tpoverlap.microbatch.stats import Interval, RunStats
from tpoverlap.trace.exposed import Span, check_interval, exposed_spans


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval with the number of the run that recorded it."""

    interval: Interval
    run: int


@dataclass(frozen=True)
class Lane:
    """What is drawn on one line. piece: its compute, waits and hand-overs; None: the collectives of all pieces."""

    piece: int | None
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run that left intervals. number: its place among all runs of the rank."""

    number: int
    stats: RunStats

    @cached_property
    def span(self) -> Span:
        intervals = self.stats.intervals
        return min(i.start_s for i in intervals), max(i.end_s for i in intervals)

    @property
    def label(self) -> str:
        stats = self.stats
        if stats.num_pieces > 1:
            return f"{stats.num_tokens} tokens = {' + '.join(map(str, stats.piece_tokens))}"
        reason = f" ({stats.bypass_reason})" if stats.bypass_reason else ""
        return f"{stats.num_tokens} tokens, whole{reason}"


@dataclass(frozen=True)
class RankLanes:
    """All that one rank recorded. num_unrecorded: its runs without intervals, which no lane and no total shows."""

    rank: int
    runs: tuple[RecordedRun, ...]
    lanes: tuple[Lane, ...]
    exposed: tuple[Span, ...]
    num_unrecorded: int

    @property
    def intervals(self) -> list[Interval]:
        return [interval for run in self.runs for interval in run.stats.intervals]


def rank_lanes(rank: int, runs: Sequence[RunStats]) -> RankLanes:
    """Sorts a rank's intervals into lanes. ValueError where no run has one, or one has impossible times."""
    recorded = tuple(RecordedRun(number, stats) for number, stats in enumerate(runs) if stats.intervals)
    if not recorded:
        raise ValueError(
            f"rank {rank} has no intervals in its {len(runs)} runs: a timeline is drawn from RunStats.intervals, "
            "so pass the statistics of runs that recorded them"
        )
    bars = [Bar(interval, run.number) for run in recorded for interval in run.stats.intervals]
    for bar in bars:
        check_interval(bar.interval)
    bars.sort(key=lambda bar: (bar.interval.start_s, bar.interval.end_s))
    collectives = tuple(bar for bar in bars if bar.interval.kind == "communication")
    by_piece: dict[int, list[Bar]] = {piece: [] for piece in sorted({bar.interval.piece for bar in bars})}
    for bar in bars:
        if bar.interval.kind != "communication":
            by_piece[bar.interval.piece].append(bar)
    lanes = [Lane(piece, tuple(own)) for piece, own in by_piece.items()]
    if collectives:
        lanes.append(Lane(None, collectives))
    exposed = exposed_spans(bar.interval for bar in bars)
    return RankLanes(rank, recorded, tuple(lanes), tuple(exposed), len(runs) - len(recorded))


def pack(intervals: Sequence[Interval]) -> list[int]:
    """A track number for each interval (sorted by start) such that no two on one track overlap.

    First fit, which needs as many tracks as intervals overlap at once (interval graph colouring). One stream of
    collectives gives one track; more appear only where several are under way together.
    """
    ends: list[float] = []
    tracks = []
    for interval in intervals:
        free = next((track for track, end in enumerate(ends) if end <= interval.start_s), len(ends))
        ends[free : free + 1] = [interval.end_s]
        tracks.append(free)
    return tracks


def typical_window(rank: RankLanes, collectives_per_piece: int = 4) -> Span | None:
    """A few layers out of the middle of the rank's longest split run (of its longest, where none is split).

    A dense layer has two collectives a piece, so the default shows about two layers. None where the timeline is so
    short that it can be read as a whole.
    """
    run = max(rank.runs, key=lambda run: (run.stats.num_pieces > 1, len(run.stats.intervals)))
    collectives = sorted(
        (i for i in run.stats.intervals if i.kind == "communication"), key=lambda i: (i.start_s, i.end_s)
    )
    shown = collectives_per_piece * max(1, run.stats.num_pieces)
    first = (len(collectives) - shown) // 2
    if first < 0 or not collectives:
        return None
    chosen = collectives[first : first + shown]
    start, end = chosen[0].start_s, max(i.end_s for i in chosen)
    whole = rank.runs[-1].span[1] - rank.runs[0].span[0]
    return (start, end) if end - start < 0.5 * whole else None

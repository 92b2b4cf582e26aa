"""The timeline of a job: what computed, what was communicated, and which part of it nothing hid, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpoverlap.microbatch.stats import RunStats
from tpoverlap.trace.exposed import Span, exposed_communication, measure, union
from tpoverlap.trace.lanes import Lane, RankLanes, rank_lanes, typical_window


@dataclass(frozen=True)
class RankSummary:
    """One rank's totals over its recorded runs, seconds.

    wall_s: sum of the runs' wall times (of their recorded spans where a run has none). compute_s, communication_s:
    time in which something computes, or is communicated. exposed_s: communication that no compute hides.
    """

    rank: int
    wall_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    num_collectives: int
    collective_bytes: int

    @property
    def hidden_fraction(self) -> float | None:
        """The part of the communication that compute hides, 0 to 1; None where there is no communication."""
        return 1.0 - self.exposed_s / self.communication_s if self.communication_s > 0 else None


@dataclass(frozen=True)
class Timeline:
    """Build it with :meth:`from_runs`. ``ranks`` are in ascending order."""

    title: str
    emulated: bool
    ranks: tuple[RankLanes, ...]

    @classmethod
    def from_runs(
        cls, runs: Sequence[tuple[int, Sequence[RunStats]]], *, title: str, emulated: bool = False
    ) -> Timeline:
        """A timeline of (rank, its runs in order) pairs, whose intervals share one clock.

        Split and whole runs may be mixed; runs without intervals are counted, not drawn. emulated: the link was slowed
        on purpose, and every title and summary says so. Raises ValueError where there is no rank, a rank appears twice
        or has no interval, or an interval is impossible.
        """
        if not runs:
            raise ValueError("a timeline needs the runs of at least one rank, got none: there are no intervals to draw")
        numbers = [rank for rank, _ in runs]
        if len(set(numbers)) != len(numbers) or min(numbers) < 0:
            raise ValueError(f"each rank (0 or greater) belongs into a timeline once, got ranks {numbers}")
        ranks = tuple(rank_lanes(rank, stats) for rank, stats in sorted(runs, key=lambda pair: pair[0]))
        return cls(title, emulated, ranks)

    @property
    def heading(self) -> str:
        """The title, which says "emulated" where the link was."""
        if self.emulated and "emulated" not in self.title.lower():
            return f"{self.title} (emulated link)"
        return self.title

    @property
    def span(self) -> Span:
        """First start and last end of all ranks, seconds on the clock of the intervals; a microsecond at least."""
        runs = [run.span for rank in self.ranks for run in rank.runs]
        start = min(start for start, _ in runs)
        return start, max(start + 1e-6, *(end for _, end in runs))

    @property
    def num_pieces(self) -> int:
        return 1 + max(lane.piece for rank in self.ranks for lane in rank.lanes if lane.piece is not None)

    def piece_name(self, piece: int) -> str:
        return "whole batch" if self.num_pieces == 1 else f"piece {piece}"

    def lane_label(self, lane: Lane) -> str:
        return "collectives" if lane.piece is None else self.piece_name(lane.piece)

    def window(self) -> Span | None:
        """A few layers from the middle of the first rank's longest split run; None where all can be read at once."""
        return typical_window(self.ranks[0])

    def exposed_communication_s(self, rank: int) -> float:
        """Seconds of the rank's communication that no compute hides; see :func:`exposed_communication`."""
        return exposed_communication(self._lanes(rank).intervals)

    def summary(self, rank: int) -> RankSummary:
        lanes = self._lanes(rank)
        intervals = lanes.intervals
        collectives = [i for i in intervals if i.kind == "communication"]
        return RankSummary(
            rank=rank,
            wall_s=sum(run.stats.wall_s or run.span[1] - run.span[0] for run in lanes.runs),
            compute_s=measure(union(intervals, "compute")),
            communication_s=measure(union(intervals, "communication")),
            exposed_s=measure(lanes.exposed),
            num_collectives=len(collectives),
            collective_bytes=sum(i.num_bytes for i in collectives),
        )

    def summary_line(self, rank: int) -> str:
        """One line of text: wall, compute, communication, exposed, and the part that is hidden."""
        summary = self.summary(rank)
        name = f"rank {rank} (emulated link)" if self.emulated else f"rank {rank}"
        hidden = "no communication" if summary.hidden_fraction is None else f"{summary.hidden_fraction:.1%} hidden"
        return (
            f"{name}: wall {duration(summary.wall_s)}, compute {duration(summary.compute_s)}, "
            f"communication {duration(summary.communication_s)}, exposed {duration(summary.exposed_s)}, {hidden}"
        )

    def _lanes(self, rank: int) -> RankLanes:
        for lanes in self.ranks:
            if lanes.rank == rank:
                return lanes
        raise ValueError(f"rank {rank} is not in this timeline, which has ranks {[lanes.rank for lanes in self.ranks]}")


def duration(seconds: float) -> str:
    """Three significant digits with a unit that suits: us, ms or s."""
    scale, unit = next(
        ((s, u) for limit, s, u in ((9.995e-4, 1e6, "us"), (0.9995, 1e3, "ms")) if seconds < limit), (1, "s")
    )
    value = seconds * scale
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"

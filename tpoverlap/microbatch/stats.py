"""What a run of the executor reports: totals, and the intervals that a timeline is drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

IntervalKind = Literal["compute", "communication", "exposed", "handover"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time of one piece on one rank.

    kind: ``compute`` (the piece runs between two collectives), ``communication`` (a collective is under way),
    ``exposed`` (compute has nothing to do but wait for that collective) or ``handover`` (from one piece's stop to the
    next one's start). name: the operation. start_s, end_s: seconds on the host's monotonic clock, comparable between
    processes of one host. num_bytes: payload of a collective. index: of the segment or collective among those of
    its piece, from 0.
    """

    kind: IntervalKind
    piece: int
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    index: int = 0


@dataclass
class RunStats:
    """One run. Times in seconds; ``bypass_reason`` is None for a split run.

    issue_s: how long the call took the host; a device's work may end later, and wall_s is the longer of both.
    """

    num_tokens: int
    piece_tokens: tuple[int, ...]
    bypass_reason: str | None = None
    wall_s: float = 0.0
    issue_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    handover_s: float = 0.0
    num_collectives: int = 0
    collective_bytes: int = 0
    intervals: list[Interval] = field(default_factory=list)

    @property
    def num_pieces(self) -> int:
        return len(self.piece_tokens)

    def add_up(self) -> None:
        """Fills the totals from the intervals; a device may still work when the call that issued the run is over."""
        seconds = {"compute": 0.0, "communication": 0.0, "exposed": 0.0, "handover": 0.0}
        for interval in self.intervals:
            seconds[interval.kind] += interval.end_s - interval.start_s
        self.compute_s, self.communication_s = seconds["compute"], seconds["communication"]
        self.exposed_s, self.handover_s = seconds["exposed"], seconds["handover"]
        if self.intervals:
            span_s = max(i.end_s for i in self.intervals) - min(i.start_s for i in self.intervals)
            self.wall_s = max(self.wall_s, span_s)
        collectives = [i for i in self.intervals if i.kind == "communication"]
        self.num_collectives = len(collectives)
        self.collective_bytes = sum(i.num_bytes for i in collectives)

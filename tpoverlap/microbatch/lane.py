"""Where collectives run while the pieces compute, and the clock by which both are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tpoverlap.microbatch.stats import Interval, IntervalKind

Stamp = Any
"""A moment: seconds on the host's monotonic clock, or what :meth:`CommLane.seconds` turns into them, such as an event
of a device."""


class PendingCollective(Protocol):
    """A collective that has been submitted."""

    start: Stamp
    end: Stamp

    def result(self) -> Any:
        """Makes the piece's further work wait for the collective; its result, or the exception that it ended with."""
        ...


class CommLane(Protocol):
    """Runs collectives in the order of their submission, beside the pieces' compute.

    idle_between_stamps: whether time may pass between two moments at which compute had nothing to do in between; on a
    device's stream they are one moment.
    """

    idle_between_stamps: bool

    def begin_run(self) -> None:
        """Stamps of former runs are not asked for any more."""
        ...

    def submit(self, launch: Callable[[], Any], ready: Stamp, cancelled: Callable[[], bool]) -> PendingCollective:
        """Starts ``launch`` behind ``ready``, a moment of :meth:`now`, in the calling thread's torch state.

        Where it only starts later, it is left out if ``cancelled()`` by then.
        """
        ...

    def now(self) -> Stamp:
        """The moment at which the calling thread's compute comes here."""
        ...

    def seconds(self, stamp: Stamp) -> float:
        """On the host's monotonic clock. May wait for the device to come to the stamp."""
        ...

    def settle(self) -> None:
        """Returns once no collective is under way."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Measurement:
    """An interval whose moments may still be events."""

    kind: IntervalKind
    piece: int
    name: str
    start: Stamp
    end: Stamp
    num_bytes: int = 0
    index: int = 0

    def resolve(self, lane: CommLane) -> Interval:
        return Interval(
            self.kind,
            self.piece,
            self.name,
            lane.seconds(self.start),
            lane.seconds(self.end),
            self.num_bytes,
            self.index,
        )

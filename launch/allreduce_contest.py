"""What bench_allreduce.py times at one payload on one set of ranks, and what it found there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from bench_common import Arm, Comparison, Spread
from job_world import World

from tpoverlap.errors import TpOverlapError


class WrongResultError(TpOverlapError):
    """An arm's result is not what it must be; nothing is timed then."""


@dataclass(frozen=True)
class Ratio:
    """Time of arm ``ours`` over arm ``against``. goal: what it should not exceed; None where there is no goal."""

    ours: str
    against: str
    goal: float | None = None


@dataclass(frozen=True)
class Contest:
    """Arms that are timed in turn, and the ratios to report of them.

    floors: the arms among them that stand for what the hardware itself takes, drawn as such.
    """

    arms: Sequence[Arm]
    ratios: Sequence[Ratio]
    floors: Sequence[str] = ()


@dataclass(frozen=True)
class Extra:
    """A contest that is about no single payload's all-reduce, reported in a table of its own, a row for each arm."""

    title: str
    contest: Contest


class Contests(Protocol):
    """Makes the contests of one kind of device, the same on every rank; what they share lives until :meth:`close`.

    what: name of the record. subject: what is reduced, for titles. notes: what a reader of the figures must know.
    """

    what: ClassVar[str]
    subject: ClassVar[str]
    notes: ClassVar[tuple[str, ...]]

    def __init__(self, world: World, dtype: torch.dtype) -> None: ...

    def contest(self, num_bytes: int) -> Contest:
        """For a payload of ``num_bytes`` on each rank. A collective. What an earlier one made is gone then."""
        ...

    def extras(self) -> Iterator[Extra]:
        """Those to run behind all payloads; one is run before the next is asked for. A collective."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExtraMeasurement:
    """The slowest rank's seconds of each arm's turns, and the ratios to report of them."""

    ranks: int
    title: str
    slowest: Comparison
    ratios: tuple[Ratio, ...]

    def ratio(self, ratio: Ratio) -> Spread:
        return self.slowest.ratio(ratio.ours, ratio.against)

    def missed(self) -> list[Ratio]:
        """The ratios whose median is above their goal."""
        return [ratio for ratio in self.ratios if ratio.goal is not None and self.ratio(ratio).median > ratio.goal]


@dataclass(frozen=True)
class Measurement(ExtraMeasurement):
    """Of one payload's all-reduce: seconds are those of one call."""

    num_bytes: int
    floors: tuple[str, ...]

    def gb_per_s(self, arm: str) -> float:
        """Payload over the median time, in 10^9 bytes a second."""
        return self.num_bytes / self.slowest.time(arm).median / 1e9


def slowest_rank(comparisons: Sequence[Comparison]) -> Comparison:
    """Of each arm's turn, the largest time of any rank: an all-reduce is done when its last rank is.

    comparisons: one a rank, of the same arms and turns.
    """
    turns = {
        arm: tuple(max(times) for times in zip(*(one.turns[arm] for one in comparisons), strict=True))
        for arm in comparisons[0].turns
    }
    return Comparison(turns)

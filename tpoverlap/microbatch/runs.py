"""Ways to run a batch whole, and what every way of running one has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from tpoverlap.comm import use_scheduler
from tpoverlap.microbatch.batch import Batch
from tpoverlap.microbatch.lane import CommLane, Measurement, Stamp
from tpoverlap.microbatch.outputs import Output
from tpoverlap.microbatch.stats import IntervalKind

T = TypeVar("T")
Forward = Callable[[Batch], Output]
PieceContext = Callable[[Batch], AbstractContextManager[Any]]


class Run(Protocol):
    """A way to run a batch. measurements: what it has taken so far."""

    measurements: list[Measurement]

    def execute(self, forward: Forward, pieces: list[Batch], piece_context: PieceContext) -> Output: ...

    def settle(self) -> None:
        """After a failure: returns once nothing of the run is at work any more."""
        ...


class PlainRun:
    """Runs the batch in the caller's thread and measures nothing: for steps that must cost no more than they do."""

    def __init__(self) -> None:
        self.measurements: list[Measurement] = []

    def execute(self, forward: Forward, pieces: list[Batch], piece_context: PieceContext) -> Output:
        with piece_context(pieces[0]):
            return forward(pieces[0])

    def settle(self) -> None:
        pass


class WholeRun:
    """Runs the batch in the caller's thread, each collective at once, and takes the times."""

    def __init__(self, lane: CommLane) -> None:
        self.measurements: list[Measurement] = []
        self._lane = lane
        self._segment_start: Stamp = None
        self._collectives = 0

    def execute(self, forward: Forward, pieces: list[Batch], piece_context: PieceContext) -> Output:
        with use_scheduler(self), piece_context(pieces[0]):
            self._segment_start = self._lane.now()
            output = forward(pieces[0])
            self._record("compute", "segment", self._segment_start, self._lane.now())
        return output

    def run(self, name: str, inputs: Sequence[torch.Tensor], launch: Callable[[], T]) -> T:
        start = self._lane.now()
        self._record("compute", "segment", self._segment_start, start)
        result = launch()
        end = self._segment_start = self._lane.now()
        self._record("communication", name, start, end, num_bytes(inputs))
        self._record("exposed", name, start, end)
        self._collectives += 1
        return result

    def settle(self) -> None:
        pass

    def _record(self, kind: IntervalKind, name: str, start: Stamp, end: Stamp, size: int = 0) -> None:
        self.measurements.append(Measurement(kind, 0, name, start, end, size, self._collectives))


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)

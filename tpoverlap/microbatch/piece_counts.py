"""How many pieces a batch is cut into: as configured, or what measured segment times promise to be fastest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.microbatch.bound import Segment, best_piece_count
from tpoverlap.microbatch.stats import RunStats

_FIRST = 2
# What a further piece adds to each segment on a device: launches that are smaller than the device is wide.
_OVERHEAD_S = 20e-6


class PieceCounts:
    """Chooses the number of pieces; the same on all ranks, which run the same batches.

    "auto": the second of two batches in a row of a size (in units of ``cut_multiple`` tokens) and number of pieces is
    measured; the first one prepares what is kept of its shapes. Two pieces' segment times, of the slowest rank, and the
    host time that a piece took on a device tell the count that promises to be fastest
    (:func:`~tpoverlap.microbatch.bound.best_piece_count`). What was promised may not come true, where hosts are slow at
    times for instance: a count above the first one is on trial until it has been measured, and is kept if it was faster
    than the run that it was told from.
    """

    def __init__(self, group: GroupCoordinator, config: OverlapConfig) -> None:
        self._group = group
        self._config = config
        self._chosen: dict[int, int] = {}
        self._trials: dict[int, _Trial] = {}
        # The count that the batch before this one was to have.
        self._asked = 0
        # Size and count of the batch before this one, and of that one if the one before it had the same and its own
        # times are those of others.
        self._last: tuple[int, int] | None = None
        self._measured: tuple[int, int] | None = None

    def choose(self, num_tokens: int, last_stats: Callable[[], RunStats]) -> int:
        """A collective at the batches of a size that measurements of the one before decide. last_stats: of that run."""
        if self._config.num_pieces != "auto":
            return self._config.num_pieces
        size = num_tokens // self._config.cut_multiple
        if size not in self._chosen:
            trial = self._trials.get(size)
            if self._measured == (size, trial.count if trial else _FIRST):
                self._decide(size, trial, last_stats())
        self._asked = self._chosen.get(size) or (self._trials[size].count if size in self._trials else _FIRST)
        return self._asked

    def ran(self, num_tokens: int, num_pieces: int, *, is_typical: bool = True) -> None:
        """A batch has run to its end on this rank. num_pieces: fewer than were asked for, where cuts allow no more.
        is_typical: whether its times are those of others of its size."""
        batch = (num_tokens // self._config.cut_multiple, self._asked if num_pieces > 1 else 1)
        self._measured = batch if is_typical and batch == self._last else None
        self._last = batch

    def forget(self) -> None:
        """After a failure, which ranks may have met in different runs."""
        self._chosen.clear()
        self._trials.clear()
        self._last = self._measured = None

    def _decide(self, size: int, trial: _Trial | None, stats: RunStats) -> None:
        if trial is not None:
            self._chosen[size] = trial.count if self._slowest([[stats.wall_s]])[0][0] < trial.before_s else _FIRST
            del self._trials[size]
            return
        count, seconds = self._promising(stats)
        if count == _FIRST:
            self._chosen[size] = count
        else:
            self._trials[size] = _Trial(count, seconds)

    def _promising(self, stats: RunStats) -> tuple[int, float]:
        """The count that promises most, and how long the measured run took."""
        compute: defaultdict[int, float] = defaultdict(float)
        communication: defaultdict[int, float] = defaultdict(float)
        for interval in stats.intervals:
            if interval.kind == "compute":
                compute[interval.index] += interval.end_s - interval.start_s
            elif interval.kind == "communication":
                communication[interval.index] += interval.end_s - interval.start_s
        issue_s = stats.issue_s if self._group.device.type != "cpu" else 0.0  # on CPU, computing is issuing
        rows = [[issue_s, stats.wall_s], *([compute[i], communication[i]] for i in range(len(compute)))]
        (issue_s, wall_s), *segments = self._slowest(rows)
        each_s = issue_s / _FIRST / max(1, len(segments))
        return best_piece_count([Segment(t, c, issue_s=each_s) for t, c in segments], _OVERHEAD_S), wall_s

    def _slowest(self, rows: list[list[float]]) -> list[list[float]]:
        """The largest of each value on all ranks."""
        mine = torch.tensor(rows, dtype=torch.float32)
        slowest: list[list[float]] = self._group.all_gather(mine[None], 0).amax(0).tolist()
        return slowest


@dataclass(frozen=True)
class _Trial:
    """before_s: how long the run took that ``count`` was told from."""

    count: int
    before_s: float

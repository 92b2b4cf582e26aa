"""How many pieces a batch is cut into: as configured, or what measured segment times promise to be fastest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

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

    "auto": a batch that comes directly after one of its size (in units of ``cut_multiple`` tokens) takes that one's
    segment times, of the slowest rank, and keeps the count that promises to be fastest: by
    :func:`~tpoverlap.microbatch.bound.best_piece_count`, with the host time that a piece took on a device.
    """

    def __init__(self, group: GroupCoordinator, config: OverlapConfig) -> None:
        self._group = group
        self._config = config
        self._chosen: dict[int, int] = {}
        self._last_size: int | None = None

    def choose(self, num_tokens: int, last_stats: Callable[[], RunStats]) -> int:
        """A collective at the second batch of a size. last_stats: of the run before this one."""
        if self._config.num_pieces != "auto":
            return self._config.num_pieces
        size = num_tokens // self._config.cut_multiple
        if size not in self._chosen and self._last_size == size:
            self._chosen[size] = self._measured(last_stats())
        return self._chosen.get(size, _FIRST)

    def ran(self, num_tokens: int, num_pieces: int, *, is_typical: bool = True) -> None:
        """A batch has run to its end on this rank. is_typical: whether its times are those of others of its size."""
        fits = num_pieces == _FIRST and is_typical
        self._last_size = num_tokens // self._config.cut_multiple if fits else None

    def forget(self) -> None:
        """After a failure, which ranks may have met in different runs."""
        self._chosen.clear()
        self._last_size = None

    def _measured(self, stats: RunStats) -> int:
        compute: defaultdict[int, float] = defaultdict(float)
        communication: defaultdict[int, float] = defaultdict(float)
        for interval in stats.intervals:
            if interval.kind == "compute":
                compute[interval.index] += interval.end_s - interval.start_s
            elif interval.kind == "communication":
                communication[interval.index] += interval.end_s - interval.start_s
        issue_s = stats.issue_s if self._group.device.type != "cpu" else 0.0  # on CPU, computing is issuing
        rows = [[issue_s, 0.0], *([compute[i], communication[i]] for i in range(len(compute)))]
        mine = torch.tensor(rows, dtype=torch.float32)
        (issue_s, _), *segments = self._group.all_gather(mine[None], 0).amax(0).tolist()
        each_s = issue_s / _FIRST / max(1, len(segments))
        return best_piece_count([Segment(t, c, issue_s=each_s) for t, c in segments], _OVERHEAD_S)

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
# What a further piece adds to each segment: a hand-over and the launches of its kernels.
_OVERHEAD_S = 50e-6


class PieceCounts:
    """Chooses the number of pieces; the same on all ranks, which run the same batches.

    "auto": the second batch of a size (in units of ``cut_multiple`` tokens) that comes directly after the first takes
    the first one's segment times, of the slowest rank, and keeps what
    :func:`~tpoverlap.microbatch.bound.best_piece_count`
    makes of them.
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

    def ran(self, num_tokens: int, num_pieces: int) -> None:
        """A batch has run to its end on this rank."""
        self._last_size = num_tokens // self._config.cut_multiple if num_pieces == _FIRST else None

    def forget_unmeasured(self) -> None:
        """After a failure, which ranks may have met in different runs."""
        self._last_size = None

    def _measured(self, stats: RunStats) -> int:
        compute: defaultdict[int, float] = defaultdict(float)
        communication: defaultdict[int, float] = defaultdict(float)
        for interval in stats.intervals:
            if interval.kind == "compute":
                compute[interval.index] += interval.end_s - interval.start_s
            elif interval.kind == "communication":
                communication[interval.index] += interval.end_s - interval.start_s
        mine = torch.tensor([[compute[i], communication[i]] for i in range(len(compute))], dtype=torch.float32)
        slowest = self._group.all_gather(mine[None], 0).amax(0)
        segments = [Segment(t, c) for t, c in slowest.tolist()]
        return best_piece_count(segments, _OVERHEAD_S)

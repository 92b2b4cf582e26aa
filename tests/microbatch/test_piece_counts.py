"""The choice of the number of pieces: measured, tried, and kept or taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tpoverlap.config import OverlapConfig
from tpoverlap.microbatch.piece_counts import PieceCounts
from tpoverlap.microbatch.stats import Interval, RunStats


@dataclass
class TwoRanks:
    """A group whose other rank gives what ``theirs`` says, in order; None: the same as this one."""

    theirs: list[Any] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        other = self.theirs.pop(0) if self.theirs else None
        return torch.cat([x, x if other is None else torch.tensor([other], dtype=x.dtype)])


def stats(wall_s: float, segments: int = 20, each_s: float = 0.01) -> RunStats:
    """Of two pieces whose compute and communication take equally long: more pieces promise more."""
    intervals = []
    for index in range(segments):
        for piece in range(2):
            intervals.append(Interval("compute", piece, "segment", 0.0, each_s, index=index))
            intervals.append(Interval("communication", piece, "all_reduce", 0.0, each_s, index=index))
    return RunStats(num_tokens=400, piece_tokens=(200, 200), wall_s=wall_s, intervals=intervals)


def make(group: TwoRanks | None = None) -> PieceCounts:
    return PieceCounts(group or TwoRanks(), OverlapConfig(min_tokens=1, cut_multiple=4))  # type: ignore[arg-type]


def run(counts: PieceCounts, last: RunStats, tokens: int = 400, *, is_typical: bool = True) -> int:
    count = counts.choose(tokens, lambda: last)
    counts.ran(tokens, count, is_typical=is_typical)
    return count


def first_two(counts: PieceCounts) -> None:
    """The batches that are measured before a count is tried."""
    assert run(counts, stats(9.0)) == 2
    assert run(counts, stats(9.0)) == 2


@pytest.mark.parametrize(("trial_s", "keeps"), [(0.9, True), (1.0, False), (1.1, False)])
def test_a_count_that_is_no_faster_than_two_is_taken_back(trial_s: float, keeps: bool) -> None:
    counts = make()
    first_two(counts)
    tried = run(counts, stats(1.0))
    assert tried > 2
    assert run(counts, stats(50.0)) == tried  # the first of a new shape
    settled = run(counts, stats(trial_s))
    assert settled == (tried if keeps else 2)
    assert run(counts, stats(50.0)) == settled


def test_the_slowest_rank_counts() -> None:
    group = TwoRanks()
    counts = make(group)
    first_two(counts)
    assert run(counts, stats(1.0)) > 2
    assert run(counts, stats(0.5)) > 2
    group.theirs = [[[1.2]]]
    assert run(counts, stats(0.5)) == 2


def test_a_watched_run_decides_nothing() -> None:
    counts = make()
    assert run(counts, stats(9.0), is_typical=False) == 2
    assert run(counts, stats(0.1), is_typical=False) == 2
    assert run(counts, stats(0.1)) == 2
    tried = run(counts, stats(1.0), is_typical=False)  # pieces of a new size are watched
    assert tried > 2
    assert run(counts, stats(99.0)) == tried
    assert run(counts, stats(0.9)) == tried
    assert run(counts, stats(99.0)) == tried


def test_a_trial_waits_for_two_batches_in_a_row() -> None:
    counts = make()
    first_two(counts)
    tried = run(counts, stats(1.0))
    assert run(counts, stats(7.0), tokens=800) == 2
    assert run(counts, stats(7.0)) == tried  # the one before was of another size
    assert run(counts, stats(2.0)) == tried
    assert run(counts, stats(2.0)) == 2


@pytest.mark.parametrize(("trial_s", "keeps"), [(0.9, True), (1.1, False)])
def test_a_trial_ends_where_cuts_allow_fewer_pieces(trial_s: float, keeps: bool) -> None:
    counts = make()
    first_two(counts)
    for last in (1.0, 5.0):
        tried = counts.choose(400, lambda last=last: stats(last))  # type: ignore[misc]
        assert tried > 2
        counts.ran(400, tried - 1)
    assert run(counts, stats(trial_s)) == (tried if keeps else 2)


def test_two_is_kept_at_once_where_it_promises_most() -> None:
    counts = make()
    first_two(counts)
    few = stats(1.0, segments=1, each_s=1e-6)
    assert run(counts, few) == 2
    assert run(counts, stats(0.1)) == 2


def test_a_failure_forgets_trials_and_choices() -> None:
    counts = make()
    first_two(counts)
    assert run(counts, stats(1.0)) > 2
    counts.forget()
    first_two(counts)
    assert run(counts, stats(1.0)) > 2

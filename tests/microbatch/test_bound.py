"""The bound on overlapped time, and the choice of a piece count from it."""

from __future__ import annotations

import pytest
from rank_harness import run_ranks
from test_executor import RowwiseModel, make_batch, make_group

from tpoverlap.config import OverlapConfig
from tpoverlap.microbatch import MicroBatchExecutor
from tpoverlap.microbatch.bound import Segment, best_piece_count, overlapped_time


def _layers(ratio: float, count: int = 64) -> list[Segment]:
    """Layers of one second: attention 28 %, MLP 72 %, each followed by half of the layer's communication."""
    return [Segment(0.28, ratio / 2), Segment(0.72, ratio / 2)] * count


@pytest.mark.parametrize(
    ("num_pieces", "expected"),
    [
        (2, {0.8: 1.12, 1.0: 1.22, 1.1: 1.16}),
        (3, {0.8: 1.00, 1.0: 1.06, 1.1: 1.00}),
        (4, {0.8: 1.0, 1.0: 1.0, 1.1: 1.0}),
    ],
)
def test_known_bounds_of_attention_and_mlp_layers(num_pieces: int, expected: dict[float, float]) -> None:
    for ratio, bound in expected.items():
        segments = _layers(ratio)
        total = len(segments) / 2
        assert overlapped_time(segments, num_pieces) / (total * max(1, ratio)) == pytest.approx(bound, abs=0.02)


def test_one_piece_is_serial_and_nothing_beats_either_resource() -> None:
    segments = [Segment(3.0, 1.0), Segment(2.0, 4.0), Segment(1.0, 0.0)]
    assert overlapped_time(segments, 1) == pytest.approx(11)
    for count in (2, 3, 4):
        assert 6 <= overlapped_time(segments, count) < 11


def test_fewest_pieces_of_equal_bounds_and_overhead_counts() -> None:
    assert best_piece_count([Segment(1.0, 0.001)] * 8, overhead_s=0.01) == 2
    assert best_piece_count(_layers(1.0), overhead_s=0.0) == 4
    assert best_piece_count(_layers(1.0), overhead_s=0.1) == 2


def _auto(rank: int) -> list[int]:
    group = make_group(emulate_link_gbps=0.0005)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=4))
    model = RowwiseModel(group)
    counts = []
    # The second batch of a size in a row decides for that size; another size begins anew.
    for tokens in (400, 400, 400, 200, 400, 200, 200):
        executor.run(model, make_batch(tokens))
        counts.append(executor.stats.num_pieces)
    group.destroy()
    return counts


def test_auto_settles_on_one_count_on_all_ranks() -> None:
    first, *others = run_ranks(_auto, 2)
    assert all(counts == first for counts in others)
    assert first[0] == first[3] == first[5] == 2  # not measured yet
    assert first[1] == first[2] == first[4]
    assert set(first) <= {2, 3, 4}

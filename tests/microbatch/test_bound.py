"""The bound on overlapped time, and the choice of a piece count from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_harness import run_ranks
from test_executor import RowwiseModel, make_batch, make_group

from tpoverlap.config import OverlapConfig
from tpoverlap.microbatch import MicroBatchExecutor
from tpoverlap.microbatch.bound import Segment, best_piece_count, overlapped_time, pieces_time


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
    # A host that takes as long for a piece as half of the work lasts cannot feed more than two.
    assert best_piece_count(_issued_in(0.5), overhead_s=0.0) == 2
    assert best_piece_count(_issued_in(0.25), overhead_s=0.0) == 4


def _issued_in(share: float) -> list[Segment]:
    """Those layers, a piece of which takes the host that share of the time that four pieces would otherwise take."""
    layers = _layers(1.0)
    issue_s = share * overlapped_time(layers, 4) / len(layers)
    return [Segment(s.compute_s, s.communication_s, issue_s=issue_s) for s in layers]


def test_nothing_runs_before_the_host_has_issued_it() -> None:
    # Compute ends at 3 and at 4, when the host, which began at 0, has issued both.
    assert pieces_time([[Segment(3, 1, issue_s=2), Segment(1, 1, issue_s=2)]]) == 4 + 1
    assert pieces_time([[Segment(1, 1, issue_s=5), Segment(1, 1, issue_s=5)]]) == 10 + 1
    layers = [Segment(1, 0.5, issue_s=0.1)] * 10
    assert overlapped_time(layers, 2) == overlapped_time([Segment(1, 0.5)] * 10, 2)  # it runs ahead


def test_pieces_of_other_sizes_by_hand() -> None:
    # compute: piece 0 to 1, piece 1 to 4; link: 1 to 3, 4 to 5; then piece 0 waits for nothing, piece 1 for its own.
    rows = [[Segment(1, 2), Segment(3, 1)], [Segment(2, 0), Segment(1, 4)]]
    assert pieces_time(rows) == 7 + 4
    assert pieces_time(rows, overhead_s=0.5) == pytest.approx(13)


def test_compute_is_slower_only_beside_communication() -> None:
    # The second piece begins at 1, beside a collective until 4: 3 s in which 2 of its 5 s are done; 3 more alone.
    rows = [[Segment(1, 3, slowdown=0.5), Segment(5, 1, slowdown=0.5)]]
    assert pieces_time(rows) == pytest.approx(4 + 3 + 1)
    assert pieces_time([[Segment(1, 9, slowdown=0.5), Segment(2, 1, slowdown=0.5)]]) == pytest.approx(10 + 1)
    # Alone in the gap from 4 to 5 between two collectives, at half speed within them.
    rows = [[Segment(1, 3), Segment(4, 2)], [Segment(1, 0, 1.0), Segment(2, 1, 1.0)]]
    assert pieces_time(rows) == pytest.approx(10)
    serial = [Segment(1, 3, slowdown=0.5), Segment(5, 1, slowdown=0.5)]
    assert overlapped_time(serial, 1) == 10  # one piece never computes beside its own collective


@given(
    rows=st.lists(
        st.tuples(*[st.tuples(*[st.integers(1, 9)] * 2)] * 3).map(lambda row: [Segment(*part) for part in row]),
        min_size=1,
        max_size=12,
    ),
    slowdown=st.sampled_from([0.0, 0.25, 1.0]),
)
def test_pieces_lie_between_the_busier_resource_and_the_serial_run(rows: list[list[Segment]], slowdown: float) -> None:
    rows = [[Segment(part.compute_s, part.communication_s, slowdown) for part in row] for row in rows]
    compute = sum(part.compute_s for row in rows for part in row)
    communication = sum(part.communication_s for row in rows for part in row)
    time = pieces_time(rows)
    assert max(compute, communication) < time + 1e-9
    assert time <= compute * (1 + slowdown) + communication + 1e-9
    assert time >= pieces_time([[Segment(p.compute_s, p.communication_s) for p in row] for row in rows]) - 1e-9


def test_rows_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="each of 2 pieces, got 1"):
        pieces_time([[Segment(1, 1)] * 2, [Segment(1, 1)]])


def _auto(rank: int) -> list[int]:
    group = make_group(emulate_link_gbps=0.0005)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=4))
    model = RowwiseModel(group)
    counts = []
    # A size's first batch is watched, which takes long; the next one's times decide what the third and fourth one try.
    for tokens in (400, 400, 400, 400, 400, 200, 400, 200, 200):
        executor.run(model, make_batch(tokens))
        counts.append(executor.stats.num_pieces)
    group.destroy()
    return counts


def test_auto_settles_on_one_count_on_all_ranks() -> None:
    first, *others = run_ranks(_auto, 2)
    assert all(counts == first for counts in others)
    assert first[0] == first[1] == first[5] == first[7] == 2  # not measured yet
    assert first[2] == first[3]
    assert first[4] == first[6]
    assert first[4] in (2, first[2])
    assert set(first) <= {2, 3, 4}

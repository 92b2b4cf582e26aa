"""Split-KV by waves: a pure function, and what the launcher asks it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.attention.turing import choose_num_splits
from tpoverlap.attention.turing.launch import BLOCK_ROWS, count_blocks, launch_grid


@pytest.mark.parametrize(
    ("num_ctas", "slots", "num_tiles", "expected"),
    [
        (150, 72, 3000, 4),  # 3 waves, in quarters 9
        (76, 72, 3000, 4),  # 2 waves, in quarters 5
        (72, 72, 3000, 1),  # one full wave
        (144, 72, 3000, 1),
        (1, 72, 3000, 4),
        (18, 72, 3000, 4),
        (24, 72, 3000, 3),
        (36, 72, 3000, 2),  # 2 and 4 fill all slots: the smallest
        (73, 72, 3000, 4),
        (1, 72, 1, 1),  # no part is less than a tile
        (1, 72, 2, 2),
        (1, 72, 3, 3),
        (150, 72, 3, 3),
        (1, 68, 3000, 4),
        (1, 40, 3000, 4),
        (150, 132, 3000, 7),  # 8 sevenths of a wave: more slots, more parts
        (76, 132, 3000, 5),
        (48, 132, 3000, 8),
        (1, 132, 3000, 8),
        (192, 132, 3000, 2),
        (150, 132, 447, 6),  # a seventh part would be shorter than 64 tiles
        (48, 132, 255, 2),
        (0, 72, 3000, 1),
        (1, 72, 0, 1),
    ],
)
def test_table(num_ctas: int, slots: int, num_tiles: int, expected: int) -> None:
    assert choose_num_splits(num_ctas, slots, num_tiles) == expected


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 10_000))
def test_it_is_the_smallest_of_the_best(num_ctas: int, slots: int, num_tiles: int) -> None:
    chosen = choose_num_splits(num_ctas, slots, num_tiles)
    bound = min(max(4, min(math.ceil(slots / 18), num_tiles // 64)), num_tiles)
    assert 1 <= chosen <= bound
    waves = {s: math.ceil(num_ctas * s / slots) / s for s in range(1, bound + 1)}
    assert waves[chosen] == pytest.approx(min(waves.values()))
    assert all(waves[s] > waves[chosen] * (1 + 1e-9) for s in range(1, chosen))


@given(st.integers(1, 5000), st.integers(1, 72), st.integers(1, 10_000))
def test_up_to_72_slots_there_are_at_most_four_parts(num_ctas: int, slots: int, num_tiles: int) -> None:
    assert 1 <= choose_num_splits(num_ctas, slots, num_tiles) <= min(4, num_tiles)


@pytest.mark.parametrize(("tokens", "blocks"), [(2048, 96), (1600, 75), (801, 38), (512, 24), (96, 5), (1, 1)])
def test_blocks_of_one_request_are_exact(tokens: int, blocks: int) -> None:
    q, cache = torch.empty(tokens, 12, 256, device="meta"), torch.empty(9, 16, 2, 256, device="meta")
    assert count_blocks(q, cache, 1) == blocks


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([1, 3, 6, 8]))
def test_the_grid_covers_every_request(lengths: list[int], group: int) -> None:
    q, cache = torch.empty(sum(lengths), group, 256, device="meta"), torch.empty(9, 16, 1, 256, device="meta")
    table = torch.empty(len(lengths), 3, device="meta")
    needed = sum(-(-n * group // BLOCK_ROWS) for n in lengths)
    assert needed <= launch_grid(q, cache, table)[0] <= needed + len(lengths) + 1

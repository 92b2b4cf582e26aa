"""The Turing kernels' own source, run on the CPU with shared-memory races, bank conflicts and stray loads detected."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import turing_emulation as emulation
from attention_cases import Case, assert_close, make_case, solve
from emulated_build import COMPILER

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    # The first test compiles the emulation.
    pytest.mark.timeout(200),
]


def make(
    seed: int, requests: Sequence[tuple[int, int]], q_heads: int = 2, kv_heads: int = 1, **options: object
) -> Case:
    shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 256, "dtype": torch.float16}
    return make_case(seed, requests, **shape, **options)  # type: ignore[arg-type]


def check(case: Case, *, splits: int = 1, scale: float | None = None, seed: int = 0) -> None:
    """Output within twice the error that the definition has in FP16, plus 1e-5; log-sum-exp to FP32's precision."""
    want, want_lse = solve(case, scale=scale)
    out, lse = emulation.run(case, splits=splits, scale=scale, seed=seed)
    error = (solve_in_half(case, 256**-0.5 if scale is None else scale).double() - want).abs().max().item()
    assert_close((out, torch.zeros(1)), (want, torch.zeros(1)), 2 * error + 1e-5)
    largest = want_lse[~want_lse.isinf()].abs().max().item() if not want_lse.isinf().all() else 0.0
    assert_close((torch.zeros(1), lse), (torch.zeros(1), want_lse), 1e-5 + 1e-6 * largest)


def solve_in_half(case: Case, scale: float) -> torch.Tensor:
    """The output with scores, weights and results in FP16."""
    out = torch.zeros_like(case.q)
    block_size, kv_heads = case.k_cache.shape[1:3]
    group = case.q.shape[1] // kv_heads
    starts = case.cu_seqlens_q.tolist()
    for r, keys in enumerate(case.seq_lens.tolist()):
        blocks = case.block_table[r, : -(-keys // block_size)].long()
        k, v = (x[blocks].flatten(0, 1)[:keys].repeat_interleave(group, 1) for x in (case.k_cache, case.v_cache))
        q = case.q[starts[r] : starts[r + 1]]
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        hidden = torch.arange(keys) > torch.arange(keys - len(q), keys)[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[starts[r] : starts[r + 1]] = torch.einsum("hij,jhd->ihd", weights.nan_to_num(), v)
    return out


@pytest.mark.parametrize(
    "requests",
    [[(1, 1)], [(1, 31)], [(2, 32)], [(3, 33)], [(5, 18)], [(64, 64)], [(65, 65)], [(33, 200)]],
    ids=str,
)
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths(requests: list[tuple[int, int]], splits: int) -> None:
    check(make(1, requests), splits=splits)


def test_a_ragged_batch_with_empty_requests() -> None:
    check(make(2, [(1, 130), (0, 7), (5, 18), (0, 0), (20, 40)], block_size=32), splits=2)


def test_more_requests_than_lanes() -> None:
    check(make(3, [(1, 1 + i % 5) for i in range(35)]))


def test_rows_that_see_no_key_and_rows_without_a_request_are_zero() -> None:
    case = make(4, [(4, 4), (3, 3)])
    # The first request's rows 0 and 1 precede its first key; the last row of q belongs to none.
    lens = torch.tensor([2, 3], dtype=torch.int32)
    starts = torch.tensor([0, 4, 6], dtype=torch.int32)
    for splits in (1, 2):
        trimmed = Case(case.q, case.k_cache, case.v_cache, case.block_table, starts, lens)
        out, lse = emulation.run(trimmed, splits=splits)
        want = solve(trimmed)
        want[0][6:], want[1][6:] = 0, -math.inf
        assert_close((out, lse), want, 2e-3)
        assert not out[[0, 1, 6]].any()


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("layout", ["plain", "interleaved", "heads"])
def test_block_sizes_and_layouts(block_size: int, layout: str) -> None:
    check(make(5, [(9, 75)], q_heads=4, kv_heads=2, block_size=block_size, layout=layout), splits=2)


@pytest.mark.parametrize("group", [1, 3, 6, 8])
def test_gqa_groups(group: int) -> None:
    check(make(6, [(23, 60)], q_heads=group))


@pytest.mark.parametrize("scale", [0.0, -0.1, 0.25, 20.0])
def test_scales(scale: float) -> None:
    check(make(7, [(10, 50)]), scale=scale)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_a_maximum_that_grows_again_and_again(splits: int) -> None:
    """Every tile brings a much larger score, so every tile rescales; then a row's last key dwarfs all others."""
    case = make(8, [(16, 170)])
    block_size = case.k_cache.shape[1]
    for j in range(170):
        key = case.k_cache[int(case.block_table[0, j // block_size]), j % block_size, 0]
        key.copy_(case.q[0, 0] * (0.02 * (j // 16)))
    case.q.copy_(case.q[:1, :1].expand_as(case.q))
    check(case, splits=splits)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_warps_gives_the_same_bits(seed: int) -> None:
    case = make(9, [(40, 140)])
    first = emulation.run(case, splits=2, seed=100)
    other = emulation.run(case, splits=2, seed=seed)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_single_tile_have_no_race(seed: int) -> None:
    """The smallest case for which compute-sanitizer's racecheck has reported one: see docs/turing-prefill.md."""
    check(make(seed, [(3, 0), (40, 70)], q_heads=2, kv_heads=2, block_size=64), splits=4, seed=seed)


def test_entries_out_of_range_do_not_lead_out_of_bounds() -> None:
    """Results are then undefined, but every load stays inside the tables and the cache."""
    case = make(10, [(8, 40), (8, 40)])
    case.block_table.fill_(10**9)
    case.seq_lens.fill_(2**30)
    case.cu_seqlens_q.copy_(torch.tensor([-5, 2**31 - 1, 3]))
    size = case.block_table.shape[1] * case.k_cache.shape[1]
    whole = [x for t in (case.block_table, case.k_cache, case.v_cache) for x in (t.data_ptr(), t.data_ptr() + t.nbytes)]
    emulation.run(case, ranges=whole)
    case.seq_lens.copy_(torch.tensor([-(2**31), size]))
    emulation.run(case, splits=2, ranges=whole)

"""The Turing backend on a GPU: compute capability 7.5 by its machine code, newer ones by its PTX."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import pytest
import torch
from attention_cases import Case, make_case

from tpoverlap.attention import paged_prefill, turing
from tpoverlap.errors import UnsupportedError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def make(
    seed: int, requests: Sequence[tuple[int, int]], q_heads: int = 12, kv_heads: int = 2, **options: object
) -> Case:
    shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 256, "dtype": torch.float16, "device": "cuda"}
    return make_case(seed, requests, **shape, **options)  # type: ignore[arg-type]


def run(case: Case, num_splits: int | None = None, scale: float = 256**-0.5) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(case.q, math.nan)
    lse = torch.full(case.q.shape[:2], math.nan, device="cuda")
    launch(case, out, lse, num_splits, scale)
    return out, lse


def launch(case: Case, out: torch.Tensor, lse: torch.Tensor | None, num_splits: int | None, scale: float) -> None:
    start = turing.prepare_prefill(
        *case.prefill,
        scale=scale,
        sliding_window=None,
        softcap=None,
        num_splits=num_splits,
        max_query_len=case.q.shape[0],
        out=out,
        lse=lse,
    )
    start(*case.prefill, out, lse)


def solve(case: Case, scale: float = 256**-0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in FP32, and the output of torch's attention in FP16 on the same values."""
    kv_heads = case.k_cache.shape[2]
    group = case.q.shape[1] // kv_heads
    out = torch.zeros(case.q.shape, device="cuda")
    half = torch.zeros(case.q.shape, dtype=torch.float16, device="cuda")
    lse = torch.full(case.q.shape[:2], -math.inf, device="cuda")
    starts = case.cu_seqlens_q.tolist()
    for r, keys in enumerate(case.seq_lens.tolist()):
        q = case.q[starts[r] : starts[r + 1]].transpose(0, 1)
        n = q.shape[1]
        if not keys or not n:
            continue
        blocks = case.block_table[r, : -(-keys // case.k_cache.shape[1])].long()
        k, v = (
            x[blocks].flatten(0, 1)[:keys].transpose(0, 1).repeat_interleave(group, 0)
            for x in (case.k_cache, case.v_cache)
        )
        visible = torch.arange(keys, device="cuda") <= torch.arange(keys - n, keys, device="cuda")[:, None]
        seen = visible.any(-1)
        rows = torch.arange(starts[r], starts[r + 1], device="cuda")[seen]
        half[rows] = torch.nn.functional.scaled_dot_product_attention(
            q[:, seen], k, v, attn_mask=visible[seen], scale=scale
        ).transpose(0, 1)
        for head in range(q.shape[0]):  # a head at a time: the scores of all are large
            scores = (q[head].float() @ k[head].float().T * scale).masked_fill(~visible, -math.inf)[seen]
            out[rows, head] = scores.softmax(-1) @ v[head].float()
            lse[rows, head] = scores.logsumexp(-1)
    return out, lse, half


def check(case: Case, num_splits: int | None = None, scale: float = 256**-0.5) -> None:
    compare(run(case, num_splits, scale), solve(case, scale))


def compare(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    out, lse = got
    exact, exact_lse, half = want
    assert not out.isnan().any()
    error, reference = (out.float() - exact).abs().max().item(), (half.float() - exact).abs().max().item()
    # With few elements the reference may be lucky: no result is closer than half a unit in the last place.
    reference = max(reference, exact.abs().max().item() * 2**-11)
    assert error <= 2 * reference + 1e-5, f"error {error:.3g}, of torch in FP16 {reference:.3g}"
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    torch.testing.assert_close(lse, exact_lse, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 511, 512, 513, 4097, 10000])
@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 4, 8])
def test_lengths(keys: int, num_splits: int | None) -> None:
    check(make(keys, [(min(keys, 129), keys)]), num_splits)
    check(make(keys, [(1, keys)]), num_splits)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("layout", ["plain", "interleaved", "heads"])
def test_a_ragged_batch(num_splits: int | None, block_size: int, layout: str) -> None:
    requests = [(1, 1328), (5, 18), (129, 463), (0, 40), (0, 0), (700, 700)]
    check(make(1, requests, block_size=block_size, layout=layout), num_splits)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (3, 1), (12, 2), (8, 1), (40, 4)])
def test_gqa(q_heads: int, kv_heads: int) -> None:
    check(make(2, [(150, 1000), (70, 70)], q_heads, kv_heads))


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("scale", [0.0, -0.05, 0.5])
def test_scales(num_splits: int, scale: float) -> None:
    check(make(3, [(70, 600)]), num_splits, scale)


def test_many_requests() -> None:
    check(make(4, [(1 + i % 7, 10 + 13 * i) for i in range(100)]))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_that_see_no_key_are_zero(num_splits: int) -> None:
    case = make(5, [(200, 200), (90, 90)])
    case.seq_lens.copy_(torch.tensor([120, 0]))
    check(case, num_splits)
    out, lse = run(case, num_splits)
    assert not out[:80].any()
    assert not out[200:].any()
    assert lse[:80].isneginf().all()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_q_and_out_of_any_strides(num_splits: int) -> None:
    case = make(6, [(100, 300)])
    want = solve(case)
    wide = torch.full((*case.q.shape, 2), math.nan, dtype=torch.float16, device="cuda")
    wide[..., 0] = case.q
    strided = Case(wide[..., 0], *case.prefill[1:])
    out = torch.full((12, 100, 257), math.nan, dtype=torch.float16, device="cuda").transpose(0, 1)[..., 1:]
    lse = torch.full((12, 100), math.nan, device="cuda").T
    launch(strided, out, lse, num_splits, 256**-0.5)
    compare((out, lse), want)
    odd = torch.full((case.q.numel() + 1,), math.nan, dtype=torch.float16, device="cuda")[1:].view(case.q.shape)
    odd.copy_(case.q)
    compare(run(Case(odd, *case.prefill[1:]), num_splits), want)


def test_a_cache_with_rows_that_cannot_be_loaded_by_16_bytes_is_refused() -> None:
    case = make(7, [(70, 100)], layout="strided")
    with pytest.raises(UnsupportedError, match="16-byte aligned"):
        run(case)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_offsets_past_2_to_the_31(num_splits: int) -> None:
    """All blocks of the request lie beyond 2^31 elements, in a cache whose storage interleaves K and V."""
    small = make(8, [(130, 500)], block_size=32)
    count, block_size, kv_heads, dim = small.k_cache.shape
    first = 2**31 // (2 * block_size * kv_heads * dim) + 1
    storage = torch.empty(first + count, 2, block_size, kv_heads, dim, dtype=torch.float16, device="cuda")
    storage[first:, 0], storage[first:, 1] = small.k_cache, small.v_cache
    table = torch.where(
        (small.block_table >= 0) & (small.block_table < count), small.block_table + first, small.block_table
    )
    large = Case(small.q, storage[:, 0], storage[:, 1], table, small.cu_seqlens_q, small.seq_lens)
    got, want = run(large, num_splits), run(small, num_splits)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    compare(got, solve(small))


@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_a_graph_sees_every_changed_input(num_splits: int | None) -> None:
    first = make(9, [(129, 463), (70, 900), (1, 50)])
    out, lse = torch.empty_like(first.q), torch.empty(first.q.shape[:2], device="cuda")
    launch(first, out, lse, num_splits, 256**-0.5)
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(first, out, lse, num_splits, 256**-0.5)
    for seed, requests in ((10, [(60, 900), (139, 463), (1, 50)]), (11, [(0, 463), (200, 900), (0, 0)])):
        other = make(seed, requests)
        for mine, new in zip(first.prefill, other.prefill, strict=True):
            mine.fill_(math.nan if mine.is_floating_point() else 0)
            mine[tuple(slice(n) for n in new.shape)].copy_(new[tuple(slice(n) for n in mine.shape)])
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        compare((out, lse), solve(first))


@pytest.mark.parametrize("num_splits", [None, 0, 1, 3])
def test_the_public_call_takes_it_by_name(num_splits: int | None) -> None:
    case = make(15, [(129, 463), (70, 300)])
    got = paged_prefill(*case.prefill, backend="turing", num_splits=num_splits, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, run(case, num_splits or None), strict=True))


def test_repeated_runs_give_the_same_bits() -> None:
    case = make(12, [(300, 4097), (129, 463)])
    first = run(case, 4)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(case, 4), strict=True))


def test_nothing_else_on_the_device_is_written() -> None:
    case = make(13, [(77, 333)])
    canary = torch.full((79, 12, 256), 7.0, dtype=torch.float16, device="cuda")
    want = run(case, 2)
    out = canary[1:78]
    lse = torch.empty(77, 12, device="cuda")
    launch(case, out, lse, 2, 256**-0.5)
    assert torch.equal(out, want[0])
    assert (canary[0] == 7).all()
    assert (canary[78] == 7).all()


def test_no_tokens() -> None:
    case = make(14, [(0, 40)])
    out, _ = run(case)
    assert out.shape == (0, 12, 256)

"""Packed prefill, split-KV decode and the cache write on a GPU."""

from __future__ import annotations

import dataclasses
import gc
import math
import random

import pytest
import torch
from attention_cases import Case, assert_close, make_case, solve, strided_lengths, without_hidden_keys
from attention_on_gpu import check, dense

from tpoverlap.attention import (
    allocate_kv_cache,
    decode_workspace_size,
    paged_decode,
    paged_prefill,
    write_kv,
)
from tpoverlap.attention.triton import rows
from tpoverlap.attention.triton.configs import decode_tiles
from tpoverlap.attention.triton.decode import decode_rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HALF = [torch.float16, torch.bfloat16]
RAGGED = [(1, 1328), (5, 18), (129, 463), (0, 0), (0, 40), (7, 3), (33, 33), (2, 0)]
OPTIONS = [{}, {"sliding_window": 37}, {"softcap": 5.0}, {"sliding_window": 300, "softcap": 20.0, "scale": 0.2}]


def prefill(case: Case, **options) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(case.q, math.nan)
    return paged_prefill(*case.prefill, backend="triton", out=out, return_lse=True, **options)


def decode(case: Case, **options) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(case.q, math.nan)
    return paged_decode(*case.decode, backend="triton", out=out, return_lse=True, **options)


def assert_same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_head_dims_and_dtypes(head_dim, dtype):
    case = make_case(head_dim, RAGGED, q_heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype, device="cuda")
    check(case, prefill(case))
    single = make_case(
        head_dim,
        [(1, n) for n in (0, 1, 33, 700)],
        q_heads=6,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
    )
    check(single, decode(single))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("layout", "block_size"), [("interleaved", 16), ("heads", 64), ("strided", 48), ("plain", 256)]
)
def test_options_layouts_and_block_sizes(options, layout, block_size):
    shape = {"q_heads": 8, "kv_heads": 1, "head_dim": 128, "block_size": block_size, "dtype": torch.float16}
    case = make_case(1, RAGGED, layout=layout, device="cuda", **shape)
    check(case, prefill(case, **options), **options)
    single = make_case(2, [(1, n) for n in (0, 1, 31, 511, 2000)], layout=layout, device="cuda", **shape)
    for num_splits in (1, 16):
        check(single, decode(single, num_splits=num_splits, **options), **options)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [1, 37])
def test_keys_before_every_window_may_be_gone_and_lengths_strided(window, block_size):
    case = make_case(1, [(1, 700), (9, 300), (0, 40)], block_size=block_size, device="cuda")
    left = strided_lengths(without_hidden_keys(case, window))
    assert_close(prefill(left, sliding_window=window), solve(case, sliding_window=window), 1e-5)
    single = make_case(2, [(1, 700), (1, 38), (1, 0)], block_size=block_size, device="cuda")
    left = strided_lengths(without_hidden_keys(single, window))
    assert_close(decode(left, sliding_window=window), solve(single, sliding_window=window), 1e-5)


@pytest.mark.parametrize("keys", [0, 1, 31, 32, 33, 511, 512, 513, 4097, 10000])
def test_lengths(keys):
    case = make_case(
        keys,
        [(min(keys, 300), keys), (1, keys)],
        q_heads=12,
        kv_heads=2,
        head_dim=128,
        dtype=torch.float16,
        device="cuda",
    )
    check(case, prefill(case))
    single = case.only(1)
    for num_splits in (1, 2, 16, 128):
        check(single, decode(single, num_splits=num_splits))


def test_groups_of_query_heads():
    for q_heads, kv_heads in ((5, 5), (3, 1), (40, 2)):
        case = make_case(
            3, [(1, 700), (70, 200)], q_heads=q_heads, kv_heads=kv_heads, dtype=torch.bfloat16, device="cuda"
        )
        check(case, prefill(case))
        single = case.only(0)
        check(single, decode(single))


def test_fp32_products_are_exact(monkeypatch):
    """Not TF32, whose products would be off by 1e-3 or so, whatever the process allows elsewhere."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    case = make_case(4, [(70, 513), (1, 513)], q_heads=6, kv_heads=2, head_dim=128, device="cuda")
    want = dense(case, torch.float64)
    assert_close(prefill(case), tuple(x.cpu() for x in want), 1e-5)
    single = case.only(1)
    assert_close(decode(single), tuple(x[-1:].cpu() for x in want), 1e-5)


def test_offsets_beyond_2_to_the_31():
    """Three blocks, 2^30 elements apart: the last lies 2^31 elements from the first."""
    block, keys = 16, 48
    case = make_case(5, [(20, keys), (1, keys)], q_heads=6, kv_heads=2, head_dim=64, dtype=torch.float16, device="cuda")
    storage = torch.full((2**31 + 2**16,), math.nan, dtype=torch.float16, device="cuda")
    size = (3, block, 2, 64)
    strides = (2**30, 128, 64, 1)
    far_k = storage.as_strided(size, strides, 0)
    far_v = storage.as_strided(size, strides, 2**15)
    table = torch.tensor([[2, 0, 1], [2, 0, 1]], dtype=torch.int32, device="cuda")
    used = case.block_table[0, :3].long()
    far_k[[2, 0, 1]] = case.k_cache[used]
    far_v[[2, 0, 1]] = case.v_cache[used]
    near = dataclasses.replace(case, block_table=case.block_table[:1, :3].repeat(2, 1))
    far = dataclasses.replace(near, k_cache=far_k, v_cache=far_v, block_table=table)
    assert_same(prefill(far), prefill(near))
    assert_same(decode(far.only(1)), decode(near.only(1)))
    k, v = torch.randn(2, 1, 2, 64, dtype=torch.float16, device="cuda")
    write_kv(k, v, far_k, far_v, torch.tensor([2 * block + 5], device="cuda"))
    assert torch.equal(far_k[2, 5], k[0])
    assert torch.equal(far_v[2, 5], v[0])


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_prefill_row_does_not_depend_on_its_company(head_dim):
    """Alone, in a batch, in a chunk that is cut anywhere: its place in a tile changes, its bits do not."""
    shape = {"q_heads": 12, "kv_heads": 2, "head_dim": head_dim, "dtype": torch.float16, "device": "cuda"}
    case = make_case(6, [(3, 70), (300, 1000), (1, 513), (40, 40)], **shape)
    starts = case.cu_seqlens_q.tolist()
    for options in ({}, {"sliding_window": 200}):
        out, lse = prefill(case, **options)
        for r in range(4):
            part = slice(starts[r], starts[r + 1])
            assert_same((out[part], lse[part]), prefill(case.only(r), **options))
        chunk = case.only(1)
        for cut in (1, 7, 133, 299):
            pieces = [
                prefill(
                    dataclasses.replace(chunk, q=q, cu_seqlens_q=_int32(0, len(q)), seq_lens=_int32(keys)), **options
                )
                for q, keys in ((chunk.q[:cut], 700 + cut), (chunk.q[cut:], 1000))
            ]
            whole = slice(starts[1], starts[2])
            assert_same((out[whole], lse[whole]), tuple(torch.cat(x) for x in zip(*pieces, strict=True)))


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "num_splits"), [(128, 1), (128, 5), (128, 16), (128, 128), (256, 16), (256, 64), (80, 128)]
)
def test_a_decode_row_alone_in_a_batch_and_captured_has_the_same_bits(dtype, head_dim, num_splits):
    """30000 keys are 118 parts of 128 splits: the separate merge takes them in two rounds."""
    lengths = [1, 513, 30000, 0, 129, 4097, 64]
    shape = {"q_heads": 8, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype, "device": "cuda"}
    case = make_case(7, [(1, n) for n in lengths], **shape)
    batch = decode(case, num_splits=num_splits)
    for r in range(len(lengths)):
        assert_same(decode(case.only(r), num_splits=num_splits), tuple(x[r : r + 1] for x in batch))
    graph, captured = _capture(lambda: decode(case, num_splits=num_splits))
    for x in captured:
        x.fill_(math.nan)
    graph.replay()
    assert_same(captured, batch)
    needed = decode_workspace_size(len(lengths), 8, head_dim, num_splits)
    workspace = torch.full((needed,), math.nan, device="cuda")
    assert_same(decode(case, num_splits=num_splits, workspace=workspace), batch)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_splits"),
    [((2, 2), 128, 16), ((12, 2), 128, 128), ((16, 2), 80, 16), ((16, 2), 192, 64), ((5, 1), 256, 16)],
)
def test_the_ring_of_tiles_has_the_bits_of_the_plain_kernel(dtype, heads, head_dim, num_splits):
    """Few programs and many, whose rings differ; parts that end within a step and beyond the ids that a warp holds."""
    tiles = decode_tiles(torch.cuda.get_device_capability(), dtype, head_dim, num_splits)
    if not tiles.ring_stages:
        pytest.skip("this GPU has no ring of tiles")
    shape = {"q_heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "dtype": dtype, "device": "cuda"}
    for lengths in ([1, 700], [0, 17, 64, 2047, 20011] + [129] * 300):
        case = make_case(len(lengths), [(1, n) for n in lengths], **shape)
        results = []
        for chosen in (tiles, dataclasses.replace(tiles, ring_stages=0)):
            out = torch.full_like(case.q, math.nan)
            lse = torch.full(case.q.shape[:2], math.nan, device="cuda")
            decode_rows(
                *case.decode[:4],
                None,
                case.seq_lens,
                scale=head_dim**-0.5,
                sliding_window=None,
                softcap=None,
                num_splits=num_splits,
                out=out,
                lse=lse,
                workspace=None,
                merge_in_launch=False,
                first_row=0,
                rows=len(lengths),
                tiles=chosen,
            )
            results.append((out, lse))
        check(case, results[0])
        assert_same(*results)


def _capture(call):
    call()
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_results_do_not_depend_on_the_buffers_history():
    cases = [
        make_case(n, [(1, keys)] * n, q_heads=8, kv_heads=kv, head_dim=d, dtype=torch.float16, device="cuda")
        for n, keys, kv, d in ((3, 2000, 2, 128), (20, 700, 8, 64), (1, 9000, 1, 256), (3, 150, 4, 128))
    ]
    first = [decode(case) for case in cases]
    order = [random.Random(8).randrange(4) for _ in range(60)]
    for i in order:
        assert_same(decode(cases[i]), first[i])


def test_one_graph_of_each_serves_all_lengths_and_inputs():
    longest = 3000
    shape = {"q_heads": 12, "kv_heads": 2, "head_dim": 128, "dtype": torch.float16, "device": "cuda"}
    single = make_case(9, [(1, longest)] * 4, **shape)
    packed = make_case(10, [(300, longest), (200, longest), (12, longest)], **shape)
    decode_graph, decoded = _capture(lambda: decode(single))
    prefill_graph, prefilled = _capture(lambda: prefill(packed))
    for seed in range(6):
        gen = random.Random(seed)
        new = make_case(100 + seed, [(1, longest)] * 4, **shape)
        for old, x in zip(single.decode, new.decode, strict=True):
            old.copy_(x)
        single.seq_lens.copy_(_int32(*(gen.choice([0, 1, gen.randrange(1, longest), longest]) for _ in range(4))))
        decode_graph.replay()
        check(single, decoded)
        assert_same(decoded, decode(single))
        new = make_case(200 + seed, [(300, longest), (200, longest), (12, longest)], **shape)
        for old, x in zip(packed.prefill, new.prefill, strict=True):
            old.copy_(x)
        cuts = sorted(gen.randrange(0, 513) for _ in range(2))
        packed.cu_seqlens_q.copy_(_int32(0, *cuts, gen.randrange(cuts[1], 513)))
        packed.seq_lens.copy_(_int32(*(gen.randrange(0, longest + 1) for _ in range(3))))
        prefill_graph.replay()
        check(packed, prefilled)
        assert_same(prefilled, prefill(packed))


def test_streams_do_not_share_partial_buffers():
    cases = [
        make_case(seed, [(1, 5000)] * 8, q_heads=8, kv_heads=2, head_dim=128, dtype=torch.float16, device="cuda")
        for seed in range(4)
    ]
    want = [decode(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(decode(case))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert_same(result, want[i % 4])


def test_rows_of_the_per_row_prefill_have_the_bits_of_decode():
    case = make_case(
        11, [(200, 700), (0, 5), (3, 2), (60, 60)], q_heads=6, kv_heads=2, dtype=torch.float16, device="cuda"
    )
    out, lse = torch.full_like(case.q, math.nan), torch.full((263, 6), math.nan, device="cuda")
    rows.paged_prefill(
        *case.prefill,
        scale=64**-0.5,
        sliding_window=None,
        softcap=None,
        num_splits=None,
        max_query_len=200,
        out=out,
        lse=lse,
    )
    check(case, (out, lse))
    for row, request, keys in ((0, 0, 501), (199, 0, 700), (203, 3, 1), (262, 3, 60)):
        single = dataclasses.replace(
            case.only(request), q=case.q[row : row + 1], cu_seqlens_q=_int32(0, 1), seq_lens=_int32(keys)
        )
        assert_same((out[row : row + 1], lse[row : row + 1]), decode(single))


def test_wrong_ids_and_lengths_read_nothing_outside():
    case = make_case(12, [(3, 40), (1, 20)], dtype=torch.float16, device="cuda")
    good = prefill(case)
    case.block_table[1] = _int32(2**31 - 1, -(2**31), 10**6, -5)[: case.block_table.shape[1]]
    case.seq_lens[1] = 2**31 - 1
    assert_same(tuple(x[:3] for x in prefill(case)), tuple(x[:3] for x in good))
    decode(case.only(1))
    torch.cuda.synchronize()


def test_a_row_count_of_zero_and_an_empty_cache():
    case = make_case(13, [(1, 9)], dtype=torch.float16, device="cuda")
    none = dataclasses.replace(
        case, q=case.q[:0], block_table=case.block_table[:0], cu_seqlens_q=_int32(0), seq_lens=case.seq_lens[:0]
    )
    assert prefill(none)[0].shape == decode(none)[0].shape == (0, 4, 64)
    empty = dataclasses.replace(case, k_cache=case.k_cache[:0], v_cache=case.v_cache[:0])
    for out, lse in (prefill(empty), decode(empty)):
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("merge", [False, True])
def test_an_unaligned_cache_takes_the_general_launch(merge):
    case = make_case(14, [(1, 700), (1, 90)], q_heads=4, kv_heads=2, dtype=torch.float16, device="cuda")
    want = decode(case)
    moved = torch.empty(case.k_cache.numel() + 1, dtype=torch.float16, device="cuda")[1:].view(case.k_cache.shape)
    moved.copy_(case.k_cache)
    out, lse = torch.full_like(case.q, math.nan), torch.full((2, 4), math.nan, device="cuda")
    for k_cache in (moved, case.k_cache, moved):
        decode_rows(
            case.q,
            k_cache,
            *case.decode[2:4],
            None,
            case.seq_lens,
            scale=64**-0.5,
            sliding_window=None,
            softcap=None,
            num_splits=16,
            out=out,
            lse=lse,
            workspace=None,
            merge_in_launch=merge,
            first_row=0,
            rows=2,
        )
        assert_same((out, lse), want)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("head_dim", "half", "q_heads"), [(128, 64, 12), (80, 40, 5), (256, 32, 6), (64, 0, 0)])
def test_cache_write(dtype, head_dim, half, q_heads):
    gen = torch.Generator("cuda").manual_seed(half)
    fused = torch.randn(300, q_heads + 4, head_dim, generator=gen, device="cuda").to(dtype)
    q, k, v = fused.split([q_heads, 2, 2], 1)
    angles = torch.rand(300, half, generator=gen, device="cuda") * 100
    rotary = {"cos": angles.cos(), "sin": angles.sin()} if half else {}
    slots = torch.randperm(40 * 16, generator=gen, device="cuda")[:300]
    slots[::7] = -1
    k_cache, v_cache = allocate_kv_cache(40, 16, 2, head_dim, dtype=dtype, device="cuda")
    host = [x.cpu() for x in (k, v, k_cache, v_cache, slots, q)]
    host_rotary = {name: x.cpu() for name, x in rotary.items()}
    write_kv(*host[:5], q=host[5] if half else None, **host_rotary)
    write_kv(k, v, k_cache, v_cache, slots, q=q if half else None, **rotary)
    tol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for got, want in zip((k_cache, v_cache, q), (host[2], host[3], host[5]), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=tol, atol=tol)

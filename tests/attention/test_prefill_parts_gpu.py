"""Parts of the packed prefill on a GPU, and on Hopper its warp-specialized kernel beside the plain one."""

from __future__ import annotations

import dataclasses
import gc
import math

import pytest
import torch
from attention_cases import make_case, without_hidden_keys
from attention_on_gpu import check
from prefill_part_cases import Result, assert_same, chunk, joined, prefill_in_parts

from tpoverlap.attention import paged_prefill
from tpoverlap.attention.triton.configs import PrefillTiles, prefill_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HALF = [torch.float16, torch.bfloat16]
REQUESTS = [(3, 256), (3, 258), (300, 1100), (0, 0), (0, 90), (9, 4), (1, 700), (520, 520)]
OPTIONS = [{}, {"sliding_window": 37}, {"softcap": 5.0}, {"sliding_window": 300, "softcap": 20.0, "scale": 0.2}]


def tiles_of(dtype: torch.dtype, head_dim: int, part_keys: int = 256) -> PrefillTiles:
    tiles = prefill_tiles(torch.cuda.get_device_capability(), dtype, head_dim)
    return dataclasses.replace(tiles, part_keys=part_keys)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_rows_of_several_parts(head_dim, dtype):
    case = make_case(1, REQUESTS, q_heads=6, kv_heads=2, head_dim=head_dim, dtype=dtype, device="cuda")
    tiles = tiles_of(dtype, head_dim)
    got = prefill_in_parts(case, tiles)
    check(case, got)
    assert_same(prefill_in_parts(case, dataclasses.replace(tiles, specialized_stages=0)), got)
    padded = dataclasses.replace(case, q=torch.cat([case.q, torch.full_like(case.q[:3], math.nan)]))
    out, lse = prefill_in_parts(padded, tiles)
    assert_same((out[:-3], lse[:-3]), got)
    assert (out[-3:] == 0).all()
    assert lse[-3:].isneginf().all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("layout", "block_size"), [("interleaved", 16), ("heads", 64), ("plain", 48), ("plain", 256)])
def test_options_layouts_and_block_sizes(options, layout, block_size):
    shape = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": block_size, "dtype": torch.float16}
    case = make_case(2, REQUESTS, layout=layout, device="cuda", **shape)
    tiles = tiles_of(torch.float16, 128)
    got = prefill_in_parts(case, tiles, **options)
    check(case, got, **options)
    assert_same(prefill_in_parts(case, dataclasses.replace(tiles, specialized_stages=0), **options), got)
    if "sliding_window" in options:
        left = without_hidden_keys(case, options["sliding_window"])
        assert_same(prefill_in_parts(left, tiles, **options), got)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_row_has_the_same_bits_alone_in_chunks_and_in_any_launch(head_dim, options):
    shape = {"q_heads": 12, "kv_heads": 2, "head_dim": head_dim, "dtype": torch.float16, "device": "cuda"}
    case = make_case(3, REQUESTS, **shape)
    tiles = tiles_of(torch.float16, head_dim)
    whole = prefill_in_parts(case, tiles, **options)
    starts = case.cu_seqlens_q.tolist()
    for request, cuts in ((1, (1,)), (2, (1, 7, 133, 299)), (7, (1, 255, 256, 300))):
        rows = slice(starts[request], starts[request + 1])
        count = REQUESTS[request][0]
        for cut in cuts:
            pieces = [
                prefill_in_parts(chunk(case, request, a, b), tiles, **options) for a, b in ((0, cut), (cut, count))
            ]
            assert_same(joined(pieces), (whole[0][rows], whole[1][rows]))
    assert_same(prefill_in_parts(case, tiles, max_partial_bytes=1 << 20, **options), whole)
    wide = dataclasses.replace(case, block_table=torch.nn.functional.pad(case.block_table, (0, 9000), value=-1))
    assert_same(prefill_in_parts(wide, tiles, **options), whole)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_default_parts_of_long_rows_eager_and_captured(head_dim):
    requests = [(300, 35_000), (100, 16_384), (70, 16_390), (600, 600)]
    shape = {"q_heads": 6, "kv_heads": 1, "head_dim": head_dim, "dtype": torch.float16, "device": "cuda"}
    case = make_case(4, requests, **shape)

    def prefill() -> Result:
        out = torch.full_like(case.q, math.nan)
        return paged_prefill(*case.prefill, backend="triton", out=out, return_lse=True)

    eager = prefill()
    check(case, eager)
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prefill()
    for seed in (4, 5):
        for old, new in zip(case.prefill, make_case(seed, requests, **shape).prefill, strict=True):
            old.copy_(new)
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        assert_same(captured, prefill())
    case.seq_lens.copy_(torch.tensor([20_000, 150, 16_385, 599], dtype=torch.int32))
    graph.replay()
    assert_same(captured, prefill())
    check(case, captured)


def test_a_tensor_off_a_16_byte_boundary_has_the_same_bits():
    case = make_case(6, REQUESTS, q_heads=6, kv_heads=2, head_dim=128, dtype=torch.float16, device="cuda")
    want = paged_prefill(*case.prefill, backend="triton")
    for name in ("q", "k_cache", "v_cache"):
        x = getattr(case, name)
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
        assert torch.equal(paged_prefill(*dataclasses.replace(case, **{name: moved}).prefill, backend="triton"), want)
        assert torch.equal(paged_prefill(*case.prefill, backend="triton"), want)
    out = torch.empty(case.q.numel() + 1, dtype=torch.float16, device="cuda")[1:].view(case.q.shape)
    assert torch.equal(paged_prefill(*case.prefill, backend="triton", out=out), want)


def test_streams_at_once():
    tiles = tiles_of(torch.float16, 128)
    shape = {"q_heads": 12, "kv_heads": 2, "head_dim": 128, "dtype": torch.float16, "device": "cuda"}
    cases = [make_case(seed, [(200, 3000)], **shape) for seed in range(4)]
    want = [prefill_in_parts(case, tiles) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(prefill_in_parts(case, tiles))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert_same(result, want[i % 4])

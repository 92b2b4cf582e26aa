"""The fused product of 1 to 8 rows against FP64."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nvfp4_reference import all_codes, random_weight

from tpoverlap.errors import UnsupportedError
from tpoverlap.quant import DequantWorkspace, NVFP4Linear
from tpoverlap.quant.nvfp4 import NVFP4Tensor, concat_columns, dequantize, small_batch, small_batch_bulk
from tpoverlap.quant.nvfp4.small_batch_bulk import Plan

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)


def random_rows(m: int, k: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def assert_close_to_fp64(
    got: torch.Tensor, x: torch.Tensor, weight: NVFP4Tensor, bias: torch.Tensor | None = None
) -> None:
    """Within rounding of the output, plus FP32 rounding of sums of the products' magnitudes."""
    scale = weight.scales.double().repeat_interleave(16, 1) * weight.global_scale.double().reshape(-1, 1)
    ones = torch.ones(weight.scales.shape, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    code = dequantize(NVFP4Tensor(weight.codes, ones, one, weight.shape), torch.float32).double()
    w = code * scale
    wanted = x.double() @ w.T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ w.abs().T
    assert got.shape == wanted.shape
    nan = wanted.isnan()
    assert torch.equal(got.isnan(), nan)
    bound = wanted.abs() * torch.finfo(got.dtype).eps / 2 * 1.01 + magnitude * 2e-6 + torch.finfo(got.dtype).tiny
    error = (got.double() - wanted).abs()
    assert (error <= bound)[~nan].all(), f"largest error {error[~nan].max():.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize(
    ("n", "k"), [(1, 32), (16, 128), (100, 160), (128, 512), (129, 96), (300, 1056), (33, 4192), (1024, 2048)]
)
def test_matches_fp64(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    weight = random_weight(n, k, seed=n + k, per_row=bool(m % 2)).to("cuda")
    x = random_rows(m, k, m, dtype)
    bias = random_rows(1, n, m + 1, dtype)[0] if m % 3 == 0 else None
    assert_close_to_fp64(small_batch.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("blocks", [small_batch.FEW_ROWS, small_batch.SOME_ROWS, small_batch.MANY_ROWS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(100, 160), (300, 1056), (2048, 2048)])
def test_any_blocks_match_fp64_and_give_a_row_its_bits(
    n: int, k: int, dtype: torch.dtype, blocks: small_batch.Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small weights take the first ones alone."""
    monkeypatch.setattr(small_batch, "_layout_for", lambda n, k, aligned, ordinal, dtype: blocks)
    weight = random_weight(n, k, seed=n, per_row=True).to("cuda")
    x = random_rows(8, k, 9, dtype)
    batch = small_batch.linear(x, weight)
    assert_close_to_fp64(batch, x, weight)
    for row in range(8):
        assert torch.equal(small_batch.linear(x[row : row + 1], weight), batch[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(dtype: torch.dtype) -> None:
    """One column of x at a time is one, so each output is one weight; NaN scales reach their rows alone."""
    t = all_codes(0.5).to("cuda")
    wide = concat_columns([t, t, t, t])
    values = dequantize(wide, torch.float32)
    for column in range(0, 128, 8):
        x = torch.zeros(8, 128, dtype=dtype, device="cuda")
        x[torch.arange(8), column + torch.arange(8)] = 1.0
        got = small_batch.linear(x, wide)
        wanted = values[:, column : column + 8].T.to(dtype)
        assert torch.equal(got.isnan(), wanted.isnan() | values.isnan().any(1))
        finite = ~got.isnan()
        assert torch.equal(got[finite], wanted[finite])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype) -> None:
    weight = random_weight(200, 1120, seed=1).to("cuda")
    x = random_rows(8, 1120, 2, dtype)
    batch = small_batch.linear(x, weight)
    for row in range(8):
        assert torch.equal(small_batch.linear(x[row : row + 1], weight), batch[row : row + 1])


def test_repeated_launches_give_the_same_bits() -> None:
    weight = random_weight(2000, 4096, seed=3).to("cuda")
    x = random_rows(5, 4096, 4, torch.bfloat16)
    first = small_batch.linear(x, weight)
    assert all(torch.equal(small_batch.linear(x, weight), first) for _ in range(200))


def test_two_streams_at_once() -> None:
    weights = [random_weight(3000, 4096, seed=s).to("cuda") for s in (5, 6)]
    x = random_rows(3, 4096, 7, torch.float16)
    wanted = [small_batch.linear(x, weight) for weight in weights]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(small_batch.linear(x, weights[i]))
    torch.cuda.synchronize()
    assert all(torch.equal(y, wanted[i]) for i in (0, 1) for y in got[i])


def test_graphs_replay_with_new_inputs_beside_eager_calls() -> None:
    weights = [random_weight(n, 4096, seed=n).to("cuda") for n in (700, 3000)]
    x = random_rows(4, 4096, 8, torch.float16)
    for weight in weights:
        small_batch.linear(x, weight)
    gc.collect()
    pool = torch.cuda.graph_pool_handle()
    graphs, outputs = [], []
    for _ in range(2):  # two captures that share a pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs.append([small_batch.linear(x, weight) for weight in (*weights, *weights)])
        graphs.append(graph)
    side = torch.cuda.Stream()
    for turn in range(20):
        x.copy_(random_rows(4, 4096, 100 + turn, torch.float16))
        wanted = [small_batch.linear(x, weight) for weight in (*weights, *weights)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graphs[turn % 2].replay()
        beside = [small_batch.linear(x, weight) for weight in weights]
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outputs[turn % 2], wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(beside, wanted, strict=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_sized_linear_reads_the_packed_weight(dtype: torch.dtype) -> None:
    workspace = DequantWorkspace()
    weight = random_weight(272, 320, seed=9, per_row=True).to("cuda")
    bias = random_rows(1, 272, 10, dtype)[0]
    layer = NVFP4Linear(weight, bias, dtype=dtype, workspace=workspace)
    for shape in ((320,), (1, 320), (2, 3, 320), (8, 320)):
        x = random_rows(8, 320, 11, dtype).flatten()[: torch.Size(shape).numel()].view(shape)
        got = layer(x)
        assert got.shape == (*shape[:-1], 272)
        assert_close_to_fp64(got.view(-1, 272), x.reshape(-1, 320), weight, bias)
    assert workspace.dequantizations == 0
    layer(random_rows(9, 320, 12, dtype))
    assert workspace.dequantizations == 1


def test_strided_and_unaligned_rows() -> None:
    weight = random_weight(64, 96, seed=13).to("cuda")
    wide = random_rows(6, 200, 14, torch.float16)
    for x in (wide[::2, :96], wide[:, 1:97], wide.flatten()[1 : 1 + 3 * 96].view(3, 96)):
        assert_close_to_fp64(small_batch.linear(x, weight), x, weight)


def test_what_the_kernel_does_not_take_is_refused_with_the_reason() -> None:
    weight = random_weight(64, 96, seed=15).to("cuda")
    narrow = random_weight(64, 48, seed=16).to("cuda")
    half = torch.float16
    for x, w, reason in (
        (random_rows(9, 96, 1, half), weight, "1 to 8"),
        (random_rows(0, 96, 1, half), weight, "0 rows"),
        (random_rows(1, 48, 1, half), narrow, "multiple of 32"),
        (random_rows(1, 96, 1, torch.float32), weight, "float32"),
        (random_rows(1, 96, 1, half).cpu(), weight, "cpu"),
        (random_rows(1, 96, 1, half), weight.to("cpu"), "weight on cpu"),
    ):
        assert reason in str(small_batch.rejection(x, w))
        with pytest.raises(UnsupportedError, match=reason):
            small_batch.linear(x, w)
    with pytest.raises(ValueError, match="bias"):
        small_batch.linear(random_rows(1, 96, 1, half), weight, torch.ones(64, device="cuda"))
    layer = NVFP4Linear(narrow, dtype=half)
    x = random_rows(2, 48, 17, half)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, dequantize(narrow, half)))


in_bulk = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)


@pytest.fixture
def bulk_always_pays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Plan, "pays", True)
    small_batch._layout_for.cache_clear()
    yield
    small_batch._layout_for.cache_clear()


@in_bulk
@pytest.mark.usefixtures("bulk_always_pays")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "m"),
    [
        (1, 512, 1),
        (16, 512, 3),
        (129, 1536, 5),
        (300, 2560, 2),
        (33, 5120, 7),
        (5000, 2560, 8),
        (5120, 8704, 8),
        (4000, 3584, 6),
        (2111, 6656, 4),
        (2113, 9216, 8),
        (8192, 5120, 8),
        (17_408, 5120, 4),
        (60_007, 512, 6),
        (151_936, 1024, 1),
    ],
)
def test_weights_that_bulk_copies_bring(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    weight = random_weight(n, k, seed=n + k, per_row=bool(m % 2)).to("cuda")
    assert isinstance(small_batch._layout(weight, 0, dtype), Plan)
    x = random_rows(m, k, m, dtype)
    bias = random_rows(1, n, m + 1, dtype)[0] if m % 3 == 0 else None
    got = small_batch.linear(x, weight, bias)
    assert_close_to_fp64(got, x, weight, bias)
    for row in range(m):
        assert torch.equal(small_batch.linear(x[row : row + 1], weight, bias), got[row : row + 1])


@in_bulk
@pytest.mark.usefixtures("bulk_always_pays")
def test_a_thread_that_has_done_nothing_with_the_device_yet() -> None:
    """It makes the weight's tensor maps, and may have no context of its own before."""
    weight = random_weight(700, 1024, seed=31).to("cuda")
    x = random_rows(2, 1024, 32, torch.bfloat16)
    wanted = small_batch.linear(x, weight)
    small_batch_bulk.tensor_maps.cache_clear()
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(small_batch.linear, x, weight).result(), wanted)


@in_bulk
@pytest.mark.usefixtures("bulk_always_pays")
def test_a_weight_in_the_place_of_another() -> None:
    """Tensor maps are kept by address: a weight of another shape there has its own."""
    memory = torch.zeros(1024 * 2048, dtype=torch.uint8, device="cuda")
    for n, k in ((1024, 1024), (512, 2048), (2048, 512), (1024, 1024)):
        weight = random_weight(n, k, seed=n).to("cuda")
        codes, scales = memory[: n * k // 2].view(n, k // 2), memory[n * k // 2 :][: n * k // 16].view(n, k // 16)
        codes.copy_(weight.codes)
        scales.copy_(weight.scales.view(torch.uint8))
        there = NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), weight.global_scale, (n, k))
        x = random_rows(3, k, 33, torch.bfloat16)
        assert torch.equal(small_batch.linear(x, there), small_batch.linear(x, weight))


@in_bulk
@pytest.mark.usefixtures("bulk_always_pays")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale_in_bulk(dtype: torch.dtype) -> None:
    wide = concat_columns([all_codes(0.5).to("cuda")] * 16)
    assert isinstance(small_batch._layout(wide, 0, dtype), Plan)
    values = dequantize(wide, torch.float32)
    for column in (*range(0, 64, 8), 248, 504):
        x = torch.zeros(8, 512, dtype=dtype, device="cuda")
        x[torch.arange(8), column + torch.arange(8)] = 1.0
        got = small_batch.linear(x, wide)
        wanted = values[:, column : column + 8].T.to(dtype)
        assert torch.equal(got.isnan(), wanted.isnan() | values.isnan().any(1))
        assert torch.equal(got[~got.isnan()], wanted[~got.isnan()])


@in_bulk
@pytest.mark.usefixtures("bulk_always_pays")
def test_scales_that_start_on_two_bytes_take_the_other_kernel() -> None:
    weight = random_weight(300, 512, seed=21).to("cuda")
    memory = torch.zeros(weight.scales.numel() + 2, dtype=torch.uint8, device="cuda")
    memory[2:] = weight.scales.view(torch.uint8).flatten()
    scales = memory[2:].view(300, 32).view(torch.float8_e4m3fn)
    moved = NVFP4Tensor(weight.codes, scales, weight.global_scale, weight.shape)
    assert isinstance(small_batch._layout(moved, 0, torch.bfloat16), small_batch.Blocks)
    x = random_rows(4, 512, 22, torch.bfloat16)
    assert_close_to_fp64(small_batch.linear(x, moved), x, weight)


@in_bulk
@pytest.mark.usefixtures("bulk_always_pays")
@pytest.mark.parametrize("in_graph", [False, True])
def test_launches_see_what_the_ones_before_wrote(in_graph: bool) -> None:
    """A chain in which each product's x is the result of the one before, and a weight is written between two products.

    Blocks of the next kernel start before the one before has ended.
    """
    weights = [random_weight(2048, 2048, seed=s).to("cuda") for s in range(4)]
    other = random_weight(2048, 2048, seed=9).to("cuda")
    first = random_rows(3, 2048, 23, torch.bfloat16)
    changing = random_weight(2048, 2048, seed=10).to("cuda")

    def chain(pause: bool) -> list[torch.Tensor]:
        results = [first]
        for i in range(12):
            weight = weights[i % 4]
            if i % 4 == 3:
                changing.codes.copy_((weight if i % 8 == 3 else other).codes)
                weight = changing
            results.append(small_batch.linear(small_batch.linear(results[-1], weight), weights[0]))
            results.append((results[-1] / results[-1].float().std()).to(torch.bfloat16))
            if pause:
                torch.cuda.synchronize()
        return results

    wanted = chain(pause=True)
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(pause=False)
    for _ in range(30):
        if in_graph:
            graph.replay()
        else:
            got = chain(pause=False)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))

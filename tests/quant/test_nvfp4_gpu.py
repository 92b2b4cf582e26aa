"""Dequantization and NVFP4Linear on a GPU: bit for bit as on the CPU, for every tile; graphs; large offsets."""

import gc

import pytest
import torch
from nvfp4_reference import GLOBAL_SCALES, all_codes, assert_same_bits, random_weight

from tpoverlap.quant import DequantWorkspace, NVFP4Linear
from tpoverlap.quant.nvfp4 import NVFP4Tensor, dequantize, from_qpn2, to_qpn2, torch_backend, triton_backend
from tpoverlap.quant.nvfp4.tiles import Tile

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROW_MAJOR_TILES = (Tile(16, 1), Tile(64, 4), Tile(256, 4), Tile(1024, 8))
QPN2_TILES = (Tile(1, 1), Tile(8, 4), Tile(16, 4), Tile(64, 8))


def on_cpu(t: NVFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(t, dtype, backend="torch")


def by_triton(t, dtype: torch.dtype, tile: Tile | None = None) -> torch.Tensor:
    out = torch.full(t.shape, 7.0, dtype=dtype, device="cuda")
    triton_backend.dequantize_into(t, out, tile)
    return out.cpu()


@pytest.mark.parametrize("global_scale", [*GLOBAL_SCALES, 1e-37, 1e35])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(global_scale: float, dtype: torch.dtype) -> None:
    """1e-37 gives subnormal scales and values, which must not be flushed; 1e35 overflows."""
    t = all_codes(global_scale)
    wanted = on_cpu(t, dtype)
    assert_same_bits(dequantize(t.to("cuda"), dtype, backend="torch").cpu(), wanted, "torch on the GPU")
    for tile in ROW_MAJOR_TILES:
        assert_same_bits(by_triton(t.to("cuda"), dtype, tile), wanted, f"row-major {tile}")
    for tile in QPN2_TILES:
        assert_same_bits(by_triton(to_qpn2(t.to("cuda")), dtype, tile), wanted, f"QPN2 {tile}")


@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (33, 160), (96, 80), (160, 1040), (1000, 272)])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_off_the_tiles(shape: tuple[int, int], per_row: bool, dtype: torch.dtype) -> None:
    t = random_weight(*shape, seed=shape[0], per_row=per_row, nan_scales=True)
    wanted = on_cpu(t, dtype)
    for tile in (None, *ROW_MAJOR_TILES):
        assert_same_bits(by_triton(t.to("cuda"), dtype, tile), wanted, f"row-major {tile}")
    if shape[0] % 32 == 0:
        for tile in (None, *QPN2_TILES):
            assert_same_bits(by_triton(to_qpn2(t.to("cuda")), dtype, tile), wanted, f"QPN2 {tile}")


@pytest.mark.parametrize("layout", ["row_major", "qpn2"])
def test_bf16_rounded_by_integers_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The path of GPUs older than 8.0, run on this one."""
    monkeypatch.setattr(triton_backend, "capability_of", lambda tensor: (7, 5))
    for global_scale in (*GLOBAL_SCALES, 1e-37, 1e35):
        t = all_codes(global_scale)
        source = t.to("cuda") if layout == "row_major" else to_qpn2(t.to("cuda"))
        assert_same_bits(by_triton(source, torch.bfloat16), on_cpu(t, torch.bfloat16))


def test_auto_takes_triton_on_this_device_and_out_is_written() -> None:
    t = random_weight(64, 96, seed=1)
    there = t.to("cuda")
    out = torch.full((64, 96), torch.nan, dtype=torch.float16, device="cuda")
    assert dequantize(there, out=out) is out
    assert_same_bits(out.cpu(), on_cpu(t, torch.float16))
    assert triton_backend.rejection(there) is None


def test_codes_that_do_not_start_on_a_word() -> None:
    t = random_weight(8, 64, seed=2).to("cuda")
    storage = torch.empty(8 * 32 + 1, dtype=torch.uint8, device="cuda")
    storage[1:] = t.codes.flatten()
    shifted = NVFP4Tensor(storage[1:].view(8, 32), t.scales, t.global_scale, t.shape)
    assert shifted.codes.data_ptr() % 4
    assert_same_bits(by_triton(shifted, torch.float16), on_cpu(t.to("cpu"), torch.float16))


@pytest.mark.parametrize("layout", ["row_major", "qpn2"])
def test_offsets_beyond_two_to_the_31(layout: str) -> None:
    """2.2e9 weights: the last rows are those that 32-bit offsets would misplace."""
    n, k = 67200, 32768
    assert n * k > 2**31
    t = NVFP4Tensor(
        torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
        torch.randint(0x20, 0x70, (n, k // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
        torch.rand(n, device="cuda"),
        (n, k),
    )
    source = t if layout == "row_major" else to_qpn2(t)
    out = dequantize(source, torch.float16)
    for first in (0, 65472, n - 64):
        rows = t.slice_rows(first, first + 64).to("cpu")
        assert_same_bits(out[first : first + 64].cpu(), on_cpu(rows, torch.float16), f"rows from {first}")


def test_layouts_convert_on_the_device() -> None:
    t = random_weight(96, 80, seed=3, per_row=True, nan_scales=True)
    back = from_qpn2(to_qpn2(t.to("cuda")))
    assert torch.equal(back.codes.cpu(), t.codes)
    assert torch.equal(back.scales.view(torch.uint8).cpu(), t.scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_sized_linear_equals_the_dense_layer(dtype: torch.dtype) -> None:
    workspace = DequantWorkspace()
    weight = random_weight(272, 320, seed=4, per_row=True).to("cuda")
    bias = torch.randn(272, device="cuda")
    layer = NVFP4Linear(weight, bias, dtype=dtype, workspace=workspace)
    for piece in range(3):
        x = torch.randn(37, 320, device="cuda", generator=torch.Generator("cuda").manual_seed(piece)).to(dtype)
        wanted = torch.nn.functional.linear(x, dequantize(weight, dtype, backend="torch"), bias.to(dtype))
        assert torch.equal(layer(x), wanted)
    assert workspace.dequantizations == 1


def test_a_captured_layer_does_not_depend_on_the_shared_workspace() -> None:
    workspace = DequantWorkspace(capacity=1)
    layers = [
        NVFP4Linear(random_weight(64, 64, seed=s).to("cuda"), dtype=torch.float16, workspace=workspace) for s in (5, 6)
    ]
    x = torch.randn(32, 64, device="cuda", dtype=torch.float16)
    wanted = [layer(x).clone() for layer in layers]  # the workspace now holds the second weight
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers[1](layers[1](x) * 0 + x) + 0 * layers[0](x)
    layers[0](x)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, wanted[1])
    assert torch.equal(layers[0](x), wanted[0])


def test_streams_do_not_share_buffers() -> None:
    workspace = DequantWorkspace(capacity=1)
    a, b = (random_weight(512, 1024, seed=s).to("cuda") for s in (7, 8))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    first = workspace.dense(a, torch.float16)
    with torch.cuda.stream(side):
        second = workspace.dense(b, torch.float16)
    torch.cuda.synchronize()
    assert first.data_ptr() != second.data_ptr()
    assert_same_bits(first.cpu(), on_cpu(a.to("cpu"), torch.float16))
    assert_same_bits(second.cpu(), on_cpu(b.to("cpu"), torch.float16))


def test_torch_path_on_the_device_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "BLOCK_WEIGHTS", 64)
    t = random_weight(333, 64, seed=9, per_row=True)
    assert_same_bits(dequantize(t.to("cuda"), backend="torch").cpu(), on_cpu(t, torch.float16))

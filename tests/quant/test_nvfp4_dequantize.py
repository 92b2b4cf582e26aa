"""Row-major dequantization in torch against the definition."""

import numpy as np
import pytest
import torch
from nvfp4_reference import GLOBAL_SCALES, all_codes, assert_same_bits, random_weight, reference_fp32

from tpoverlap.errors import ConfigError
from tpoverlap.quant import nvfp4
from tpoverlap.quant.nvfp4 import torch_backend

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """FP32 values rounded to nearest even, FP16 and BF16 by NumPy and by integer arithmetic instead of by torch."""
    if dtype == torch.float32:
        return torch.from_numpy(values)
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return torch.from_numpy(values.astype(np.float16))
    bits = values.view(np.uint32).astype(np.uint64)
    top = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    top[np.isnan(values)] = 0x7FC0
    return torch.from_numpy(top.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(global_scale: float, dtype: torch.dtype) -> None:
    t = all_codes(global_scale)
    got = nvfp4.dequantize(t, dtype)
    assert_same_bits(got, rounded(reference_fp32(t), dtype))
    assert got[0x7F].isnan().all()
    assert got[0xFF].isnan().all()
    assert not got[:0x7F].isnan().any()


@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (33, 160), (65, 1040)])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("seed", [3, 4])
def test_shapes_and_per_row_scales(shape: tuple[int, int], per_row: bool, seed: int) -> None:
    t = random_weight(*shape, seed, per_row=per_row, nan_scales=True)
    for dtype in DTYPES:
        assert_same_bits(nvfp4.dequantize(t, dtype), rounded(reference_fp32(t), dtype))


def test_order_of_the_products_matters_and_is_ours() -> None:
    """Rounding code * scale first gives other bits for some of these weights, so the order is observable."""
    t = random_weight(64, 256, seed=5, per_row=True)
    code = nvfp4.dequantize(
        nvfp4.NVFP4Tensor(t.codes, torch.full_like(t.scales, 1.0), torch.tensor(1.0), t.shape), torch.float32
    )
    other_order = (code * t.scales.float().repeat_interleave(16, 1)) * t.global_scale[:, None]
    got = nvfp4.dequantize(t, torch.float32)
    assert (got != other_order).any()
    assert_same_bits(got, torch.from_numpy(reference_fp32(t)))


def test_overflow_to_fp16_infinity_and_subnormals() -> None:
    values = nvfp4.dequantize(all_codes(24.5), torch.float16)
    assert values.isinf().any()
    tiny = nvfp4.NVFP4Tensor(*(getattr(all_codes(1.0), f) for f in ("codes", "scales")), torch.tensor(1e-37), (256, 32))
    assert_same_bits(nvfp4.dequantize(tiny, torch.float32), torch.from_numpy(reference_fp32(tiny)))


@pytest.mark.parametrize("block", [1, 64, 100, 1 << 10])
def test_blocks_of_any_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    t = random_weight(37, 64, seed=6, per_row=True)
    whole = {dtype: nvfp4.dequantize(t, dtype) for dtype in DTYPES}
    monkeypatch.setattr(torch_backend, "BLOCK_WEIGHTS", block)
    for dtype in DTYPES:
        assert_same_bits(nvfp4.dequantize(t, dtype), whole[dtype])


def test_empty_weights() -> None:
    for n, k in ((0, 32), (4, 0)):
        assert nvfp4.dequantize(random_weight(n, k, seed=7)).shape == (n, k)


def test_out_is_filled_and_returned() -> None:
    t = random_weight(5, 32, seed=8)
    out = torch.full((5, 32), torch.nan, dtype=torch.bfloat16)
    assert nvfp4.dequantize(t, torch.bfloat16, out=out) is out
    assert_same_bits(out, nvfp4.dequantize(t, torch.bfloat16))


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(5, 16, dtype=torch.float16),
        torch.empty(5, 32, dtype=torch.float32),
        torch.empty(32, 5, dtype=torch.float16).t(),
        torch.empty(5, 32, dtype=torch.float16, device="meta"),
    ],
    ids=["shape", "dtype", "strides", "device"],
)
def test_out_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="out is"):
        nvfp4.dequantize(random_weight(5, 32, seed=9), out=out)


def test_unknown_dtype_and_backend_are_refused() -> None:
    t = random_weight(2, 16, seed=10)
    with pytest.raises(ValueError, match="float64"):
        nvfp4.dequantize(t, torch.float64)
    with pytest.raises(ConfigError, match="cutlass"):
        nvfp4.dequantize(t, backend="cutlass")  # type: ignore[arg-type]

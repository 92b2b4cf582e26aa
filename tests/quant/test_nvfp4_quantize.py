"""Quantization: the scales that the definition gives, and codes that no other code beats."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_reference import random_weight

from tpoverlap.quant.nvfp4 import NVFP4Tensor, dequantize, quantize
from tpoverlap.quant.nvfp4.format import E2M1_VALUES


def values(t: NVFP4Tensor) -> torch.Tensor:
    return dequantize(t, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    groups=st.integers(1, 5),
    magnitude=st.floats(1e-30, 1e30),
    spread=st.floats(0, 6),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_scales_follow_the_definition_and_codes_are_nearest(
    n: int, groups: int, magnitude: float, spread: float, seed: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, 16 * groups, generator=g) * (torch.randn(n, 16 * groups, generator=g) * spread).exp() * magnitude
    w = w.clamp(-3e38, 3e38).to(dtype)
    t = quantize(w)
    w = w.float()
    assert t.global_scale.item() == pytest.approx(w.abs().max().item() / 2688, rel=1e-6)
    wanted = w.view(n, groups, 16).abs().amax(2) / 6 / t.global_scale
    assert torch.equal(t.scales.view(torch.uint8), wanted.clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8))
    step = (t.scales.float() * t.global_scale).double().repeat_interleave(16, 1)
    candidates = torch.tensor(E2M1_VALUES, dtype=torch.float64) * step[..., None]
    best = (candidates - w.double()[..., None]).abs().amin(-1)
    error = (values(t).double() - w.double()).abs()
    assert (error <= best + step * 1e-6).all()


def test_ties_go_to_the_even_code() -> None:
    """A weight of 2688 makes the global scale 1 and a group maximum of 6 its scale 1, so weights are the quotients."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16] = 2688.0, 6.0
    w[0, 17:24], w[0, 24:31] = torch.tensor(ties), -torch.tensor(ties)
    t = quantize(w)
    assert t.global_scale.item() == 1.0
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert values(t)[0, 17:24].tolist() == even
    assert values(t)[0, 24:31].tolist() == [-v for v in even]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.7, 6.1e-5])
def test_zero_and_constant_weights(constant: float, dtype: torch.dtype) -> None:
    w = torch.full((3, 32), constant, dtype=dtype)
    got = values(quantize(w))
    assert torch.allclose(got, w.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-38, 3e-36, 3.4e38])
def test_extreme_magnitudes_stay_finite(magnitude: float) -> None:
    w = torch.tensor([[1.0, -1.0, 0.5, 0.0] * 8]) * np.float32(magnitude)
    got = values(quantize(w))
    assert torch.isfinite(got).all()
    assert (got - w).abs().max() <= max(w.abs().max() / 8, torch.finfo(torch.float32).tiny * 2**-10)


def test_small_groups_beside_a_large_one_become_zero() -> None:
    w = torch.zeros(1, 32)
    w[0, :16], w[0, 16:] = 1000.0, 1e-4
    t = quantize(w)
    assert t.scales[0, 1].float().item() == 0.0
    assert not t.codes[0, 8:].any()


def test_quantizing_values_of_the_format_again_changes_nothing() -> None:
    t = quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)))
    again = quantize(values(t))
    assert torch.allclose(values(again), values(t), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_finite_weights_name_the_first_index(
    monkeypatch: pytest.MonkeyPatch, bad: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("tpoverlap.quant.nvfp4.encode._BLOCK_WEIGHTS", 64)  # several blocks of rows
    w = torch.ones(7, 32, dtype=dtype)
    w[5, 9] = bad
    w[6, 0] = torch.nan
    with pytest.raises(ValueError, match=r"weight\[5, 9\]"):
        quantize(w)


def test_a_weight_beyond_fp32_is_named_with_its_value() -> None:
    w = torch.ones(2, 16, dtype=torch.float64)
    w[1, 3] = 1e300
    with pytest.raises(ValueError, match=r"weight\[1, 3\] is 1e\+300.*finite in FP32"):
        quantize(w)


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(33, 48, generator=torch.Generator().manual_seed(2))
    whole = quantize(w)
    monkeypatch.setattr("tpoverlap.quant.nvfp4.encode._BLOCK_WEIGHTS", 100)
    parts = quantize(w)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales.view(torch.uint8), parts.scales.view(torch.uint8))


def test_shapes_and_dtypes_that_are_refused() -> None:
    for w in (torch.ones(4, 40), torch.ones(32), torch.ones(4, 32, dtype=torch.int32)):
        with pytest.raises(ValueError, match="cannot quantize"):
            quantize(w)
    assert quantize(torch.ones(0, 32)).shape == (0, 32)
    assert random_weight(0, 32, seed=0).shape == (0, 32)

"""Checkpoint conventions and the FP16 overflow rule."""

import pytest
import torch
from nvfp4_reference import all_codes, assert_same_bits, random_weight

from tpoverlap.errors import ConfigError
from tpoverlap.quant.nvfp4 import (
    NVFP4Tensor,
    check_fits,
    concat_rows,
    dequantize,
    from_compressed_tensors,
    from_modelopt,
)


@pytest.mark.parametrize("form", [(), (1,), (1, 1)])
def test_modelopt_multiplies_by_its_second_scale(form: tuple[int, ...]) -> None:
    t = random_weight(6, 48, seed=31)
    got = from_modelopt(t.codes, t.scales, t.global_scale.reshape(form))
    assert got.global_scale.shape == ()
    assert_same_bits(dequantize(got, torch.float32), dequantize(t, torch.float32))


@pytest.mark.parametrize("form", [(), (1,)])
def test_compressed_tensors_divides_by_its_global_scale(form: tuple[int, ...]) -> None:
    t = random_weight(6, 48, seed=32)
    stored = torch.tensor(2688.0 / 0.37)
    got = from_compressed_tensors(t.codes, t.scales, stored.reshape(form))
    assert got.global_scale.item() == (torch.tensor(1.0) / stored).item()
    divided = NVFP4Tensor(t.codes, t.scales, torch.tensor(1.0), t.shape)
    wanted = dequantize(divided, torch.float32).double() / stored.double()
    assert torch.allclose(dequantize(got, torch.float32).double(), wanted, rtol=2**-22, atol=0)


@pytest.mark.parametrize("convert", [from_modelopt, from_compressed_tensors])
def test_one_scale_per_row_is_taken_as_such(convert) -> None:
    t = random_weight(6, 48, seed=33, per_row=True)
    assert convert(t.codes, t.scales, t.global_scale).global_scale.shape == (6,)
    assert convert(t.codes, t.scales, t.global_scale[:, None]).global_scale.shape == (6,)


@pytest.mark.parametrize("convert", [from_modelopt, from_compressed_tensors])
def test_wrong_tensors_are_refused(convert) -> None:
    t = random_weight(6, 48, seed=34)
    for fields in (
        (t.codes.flatten(), t.scales, t.global_scale),
        (t.codes, t.scales.view(torch.uint8), t.global_scale),
        (t.codes, t.scales, torch.ones(5)),
        (t.codes, t.scales, t.global_scale.half()),
    ):
        with pytest.raises(ValueError):
            convert(*fields)


def test_fp16_overflow_is_refused_by_name_unless_bf16_was_asked() -> None:
    t = all_codes(24.5)
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.weight\[\d+, \d+\] is -?65856.*bfloat16") as caught:
        check_fits(t, torch.float16, "model.layers.3.weight")
    assert isinstance(caught.value, ValueError)
    check_fits(t, torch.bfloat16, "model.layers.3.weight")
    check_fits(t, torch.float32, "model.layers.3.weight")


def test_the_overflow_rule_looks_at_values_not_at_scales() -> None:
    """A scale of 448 * 24.5 overflows only under code 6; NaN scales do not count as overflow."""
    t = all_codes(24.5)
    no_six = t.codes.clone()
    for low in (0x7, 0xF):
        no_six[(no_six & 15) == low] = 0
        no_six[(no_six >> 4) == low] = 0
    check_fits(NVFP4Tensor(no_six, t.scales, t.global_scale, t.shape), torch.float16, "w")
    check_fits(all_codes(24.0), torch.float16, "w")


def test_overflow_in_one_part_of_a_fused_layer_names_its_row() -> None:
    small = random_weight(4, 32, seed=35)
    fused = concat_rows([small, all_codes(24.5), small])
    with pytest.raises(ConfigError, match=r"qkv\[130, "):
        check_fits(fused, torch.float16, "qkv")

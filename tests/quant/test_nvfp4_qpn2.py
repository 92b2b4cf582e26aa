"""The QPN2 layout: where each nibble lies, and an exact way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_reference import assert_same_bits, random_weight

from tpoverlap.quant.nvfp4 import QPN2Tensor, dequantize, from_qpn2, to_qpn2

K_ORDER = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


@settings(max_examples=20, deadline=None)
@given(tiles=st.integers(1, 3), groups=st.integers(1, 4), per_row=st.booleans(), seed=st.integers(0, 2**31))
def test_every_nibble_and_scale_is_where_the_layout_says(tiles: int, groups: int, per_row: bool, seed: int) -> None:
    t = random_weight(32 * tiles, 16 * groups, seed, per_row=per_row, nan_scales=True)
    p = to_qpn2(t)
    for tile in range(tiles):
        for group in range(groups):
            for lane in range(32):
                row = tile * 32 + ((lane >> 2) & 3) * 8 + (lane & 3) + 4 * (lane >= 16)
                assert p.scales.view(torch.uint8)[tile, group, lane] == t.scales.view(torch.uint8)[row, group]
                stored = [int(b) >> shift & 15 for b in p.codes[tile, group, lane] for shift in (0, 4)]
                source = [int(b) >> shift & 15 for b in t.codes[row, 8 * group : 8 * group + 8] for shift in (0, 4)]
                assert stored == [source[k] for k in K_ORDER]
    back = from_qpn2(p)
    assert torch.equal(back.codes, t.codes)
    assert torch.equal(back.scales.view(torch.uint8), t.scales.view(torch.uint8))
    assert torch.equal(back.global_scale, t.global_scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_values_equal_the_row_major_ones(dtype: torch.dtype, per_row: bool) -> None:
    t = random_weight(96, 80, seed=21, per_row=per_row, nan_scales=True)
    assert_same_bits(dequantize(to_qpn2(t), dtype), dequantize(t, dtype))


def test_rows_off_the_tile_are_refused_and_padding_helps() -> None:
    t = random_weight(33, 32, seed=22)
    with pytest.raises(ValueError, match="multiple of 32"):
        to_qpn2(t)
    assert_same_bits(dequantize(to_qpn2(t.pad(64, 32)))[:33], dequantize(t))


def test_wrong_fields_are_refused() -> None:
    p = to_qpn2(random_weight(64, 32, seed=23))
    for message, fields in {
        "codes": (p.codes.flatten(2), p.scales, p.global_scale, p.shape),
        "scales": (p.codes, p.scales.view(torch.uint8), p.global_scale, p.shape),
        "global_scale": (p.codes, p.scales, torch.ones(32), p.shape),
        "pad it first": (p.codes, p.scales, p.global_scale, (65, 32)),
        "one device": (p.codes, p.scales, p.global_scale.to("meta"), p.shape),
    }.items():
        with pytest.raises(ValueError, match=message):
            QPN2Tensor(*fields)

"""The row-major container: validation, cutting, joining, padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_reference import assert_same_bits, random_weight

from tpoverlap.quant.nvfp4 import NVFP4Tensor, concat_columns, concat_rows, dequantize


def dense(t: NVFP4Tensor) -> torch.Tensor:
    return dequantize(t, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40), groups=st.integers(1, 6), per_row=st.booleans(), seed=st.integers(0, 2**31), data=st.data()
)
def test_slices_equal_slices_of_the_values(n: int, groups: int, per_row: bool, seed: int, data: st.DataObject) -> None:
    t = random_weight(n, 16 * groups, seed, per_row=per_row)
    first = data.draw(st.integers(0, n))
    last = data.draw(st.integers(first, n))
    start = data.draw(st.integers(0, groups))
    stop = data.draw(st.integers(start, groups))
    assert_same_bits(dense(t.slice_rows(first, last)), dense(t)[first:last])
    assert_same_bits(dense(t.slice_columns(16 * start, 16 * stop)), dense(t)[:, 16 * start : 16 * stop])


def test_row_slices_are_views() -> None:
    t = random_weight(8, 32, seed=1)
    assert t.slice_rows(3, 6).codes.data_ptr() == t.codes[3:].data_ptr()


@pytest.mark.parametrize("cut", [(8, 32), (0, 24), (16, 0), (-16, 16), (0, 64)])
def test_column_slices_off_the_group_borders_are_refused(cut: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="columns"):
        random_weight(4, 48, seed=2).slice_columns(*cut)


@pytest.mark.parametrize("cut", [(-1, 2), (3, 2), (0, 5)])
def test_row_slices_out_of_range_are_refused(cut: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rows"):
        random_weight(4, 48, seed=2).slice_rows(*cut)


@pytest.mark.parametrize("per_row", [(False, False, False), (False, True, False), (True, True, True)])
def test_fused_parts_keep_their_own_global_scales(per_row: tuple[bool, ...]) -> None:
    parts = [random_weight(n, 64, seed=n, per_row=p) for n, p in zip((24, 8, 9), per_row, strict=True)]
    fused = concat_rows(parts)
    assert fused.global_scale.shape == (41,)
    assert_same_bits(dense(fused), torch.cat([dense(part) for part in parts]))
    assert_same_bits(dense(fused.slice_rows(20, 36)), dense(fused)[20:36])


def test_joining_nothing_or_unequal_columns_is_refused() -> None:
    for parts in ([], [random_weight(2, 16, seed=1), random_weight(2, 32, seed=1)]):
        with pytest.raises(ValueError, match="along N"):
            concat_rows(parts)


@pytest.mark.parametrize("per_row", [False, True])
def test_parts_along_columns_join_in_any_order(per_row: bool) -> None:
    t = random_weight(6, 96, seed=15, per_row=per_row)
    got = concat_columns([t.slice_columns(64, 96), t.slice_columns(0, 0), t.slice_columns(16, 32)])
    assert_same_bits(dense(got), torch.cat((dense(t)[:, 64:], dense(t)[:, 16:32]), dim=1))


def test_parts_of_different_weights_do_not_join_along_columns() -> None:
    t = random_weight(6, 32, seed=16)
    for other, message in ((random_weight(5, 32, seed=16), "N must agree"), (random_weight(6, 32, seed=17), "differ")):
        with pytest.raises(ValueError, match=message):
            concat_columns([t, other])
    with pytest.raises(ValueError, match="along K"):
        concat_columns([])


@pytest.mark.parametrize("per_row", [False, True])
def test_padding_is_zero_and_keeps_the_rest(per_row: bool) -> None:
    t = random_weight(5, 32, seed=11, per_row=per_row)
    got = dense(t.pad(9, 64))
    assert_same_bits(got[:5, :32], dense(t))
    assert not got[5:].any()
    assert not got[:, 32:].any()


@pytest.mark.parametrize("size", [(4, 32), (5, 16), (5, 40)])
def test_padding_to_less_or_off_the_groups_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="pad"):
        random_weight(5, 32, seed=12).pad(*size)


def test_wrong_fields_are_refused() -> None:
    t = random_weight(4, 32, seed=13)
    scalar = torch.tensor(1.0)
    bad = {
        "codes": (t.codes.to(torch.int8), t.scales, scalar, (4, 32)),
        "scales": (t.codes, t.scales.float(), scalar, (4, 32)),
        "scales is": (t.codes, t.scales[:, :1], scalar, (4, 32)),
        "global_scale": (t.codes, t.scales, scalar.double(), (4, 32)),
        "one per row": (t.codes, t.scales, torch.ones(3), (4, 32)),
        "multiple of 16": (t.codes, t.scales, scalar, (4, 40)),
        "one device": (t.codes, t.scales, scalar.to("meta"), (4, 32)),
    }
    for message, fields in bad.items():
        with pytest.raises(ValueError, match=message):
            NVFP4Tensor(*fields)


def test_strided_codes_are_stored_contiguously() -> None:
    t = random_weight(4, 64, seed=14)
    wide = torch.empty(4, 64, dtype=torch.uint8)
    wide[:, ::2] = t.codes
    got = NVFP4Tensor(wide[:, ::2], t.scales, t.global_scale, (4, 64))
    assert got.codes.is_contiguous()
    assert_same_bits(dense(got), dense(t))

"""Outputs that share memory with the input: refused wherever an element is both, taken where the two are apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpoverlap.comm.arguments import check_out

ROWS, COLUMNS = 3, 4
strides = st.sampled_from([(COLUMNS, 1), (1, ROWS), (2 * COLUMNS, 1), (2 * COLUMNS, 2), (0, 1)])


@example(begins=(0, 11), x_strides=(4, 1), out_strides=(4, 1))
@example(begins=(11, 0), x_strides=(4, 1), out_strides=(4, 1))
@example(begins=(12, 0), x_strides=(4, 1), out_strides=(4, 1))
@settings(max_examples=400, deadline=None)
@given(begins=st.tuples(st.integers(0, 40), st.integers(0, 40)), x_strides=strides, out_strides=strides)
def test_an_output_that_shares_elements_with_the_input_is_refused(
    begins: tuple[int, int], x_strides: tuple[int, int], out_strides: tuple[int, int]
) -> None:
    memory = torch.arange(80, dtype=torch.float32)
    x, out = (memory.as_strided((ROWS, COLUMNS), s, b) for s, b in zip((x_strides, out_strides), begins, strict=True))
    shared = set(x.flatten().tolist()) & set(out.flatten().tolist())
    if 0 in out_strides:
        with pytest.raises(ValueError, match="expanded"):
            check_out(x, out)
    elif shared and (begins[0] != begins[1] or x_strides != out_strides):
        with pytest.raises(ValueError, match="overlaps"):
            check_out(x, out)
    elif not shared and x.is_contiguous() and out.is_contiguous():  # views that lie between each other may be refused
        check_out(x, out)


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (2, 3)])
def test_the_input_itself_and_a_view_like_it_are_taken(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    check_out(x, None)
    check_out(x, x)
    check_out(x, x.view(shape))
    if x.dim() == 2:
        check_out(x.t(), x.t())

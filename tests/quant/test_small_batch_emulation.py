"""The fused product's own source, run on the CPU: values, bits, memory, barriers, planted mistakes."""

from __future__ import annotations

import ctypes
import functools

import emulated_small_batch as emulation
import pytest
import torch
from emulated_build import COMPILER
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_reference import all_codes, random_weight
from small_batch_problems import assert_equal, codes_times_scales, error_bound, exact, exact_problem, random_rows

from tpoverlap.quant.nvfp4 import NVFP4Tensor, concat_columns
from tpoverlap.quant.nvfp4.small_batch import MANY_ROWS, SOME_ROWS, Blocks

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    # The first tests compile the emulation.
    pytest.mark.timeout(200),
]

DTYPES = (torch.float16, torch.bfloat16)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
eight_and_four_warps = pytest.mark.parametrize("blocks", [SOME_ROWS, MANY_ROWS], ids=str)


@both_dtypes
@pytest.mark.parametrize("m", [1, 8])
def test_every_code_under_every_scale(m: int, dtype: torch.dtype) -> None:
    """One column of x at a time is one, so each output is one weight; NaN scales reach their rows alone."""
    weight = concat_columns([all_codes(0.5)] * 5)
    k = weight.shape[1]
    values = codes_times_scales(weight) * 0.5
    nan_rows = values.isnan().any(1)
    assert nan_rows.nonzero().flatten().tolist() == [0x7F, 0xFF]
    # A lane's 32 k hold every code, in a whole step and in the rest.
    for column in [*range(32, 64, m), *range(128, 160, m)] if m == 8 else [0, 159]:
        x = torch.zeros(m, k, dtype=dtype)
        x[torch.arange(m), column + torch.arange(m)] = 1.0
        want = values[:, column : column + m].T.to(dtype)
        want[:, nan_rows] = torch.nan
        assert_equal(emulation.linear(x, weight), want, f"column {column}:")


sizes = {
    "n": st.integers(1, 40),
    "k": st.integers(1, 80).map(lambda i: 32 * i),
    "m": st.integers(1, 8),
    "seed": st.integers(0, 2**32 - 1),
    "per_row": st.booleans(),
    "with_bias": st.booleans(),
}
few_examples = settings(max_examples=100, deadline=None)


@eight_and_four_warps
@both_dtypes
@few_examples
@given(**sizes)
def test_sums_that_fp32_holds_are_exact(
    n: int, k: int, m: int, seed: int, per_row: bool, with_bias: bool, dtype: torch.dtype, blocks: Blocks
) -> None:
    x, weight, bias = exact_problem(n, k, m, seed, dtype, per_row=per_row, with_bias=with_bias)
    assert_equal(emulation.linear(x, weight, bias, seed=seed, layout=blocks), exact(x, weight, bias).to(dtype))


@eight_and_four_warps
@both_dtypes
@few_examples
@given(**sizes)
def test_the_error_is_that_of_fp32_sums(
    n: int, k: int, m: int, seed: int, per_row: bool, with_bias: bool, dtype: torch.dtype, blocks: Blocks
) -> None:
    weight = random_weight(n, k, seed=seed, per_row=per_row)
    x = random_rows(m, k, seed, dtype)
    bias = random_rows(1, n, seed + 1, dtype)[0] if with_bias else None
    error = (emulation.linear(x, weight, bias, seed=seed, layout=blocks).double() - exact(x, weight, bias)).abs()
    assert (error <= error_bound(x, weight, bias, blocks)).all()


@eight_and_four_warps
@both_dtypes
@pytest.mark.parametrize("k", [32, 160, 1024, 1184])
def test_a_nan_scale_marks_its_row_wherever_it_stands(k: int, dtype: torch.dtype, blocks: Blocks) -> None:
    """Also where x is zero."""
    groups = k // 16
    weight = random_weight(groups + 1, k, seed=k)
    scales = weight.scales.view(torch.uint8)
    for group in range(groups):
        scales[group, group] = (0x7F, 0xFF)[group % 2]
    y = emulation.linear(torch.zeros(2, k, dtype=dtype), weight, layout=blocks)
    assert y[:, :groups].isnan().all()
    assert not y[:, groups:].any()


@both_dtypes
@pytest.mark.parametrize("k", [96, 1184])
def test_infinities_and_nans_of_x_reach_their_rows_of_the_result_alone(k: int, dtype: torch.dtype) -> None:
    weight = random_weight(20, k, seed=2)
    x = random_rows(8, k, 3, dtype)
    clean = emulation.linear(x, weight)
    x[1, k - 1], x[4, 0], x[6, k - 40], x[6, 3] = torch.nan, torch.inf, torch.inf, -torch.inf
    y = emulation.linear(x, weight)
    want = exact(x, weight, None)
    for row in range(8):
        if row in (1, 4, 6):
            assert not want[row].isfinite().any()
            assert_equal(y[row], want[row].to(dtype))
        else:
            assert torch.equal(y[row], clean[row])


@both_dtypes
def test_results_beyond_the_dtype_are_infinite(dtype: torch.dtype) -> None:
    codes = torch.full((3, 16), 0x77, dtype=torch.uint8)
    scales = torch.full((3, 2), 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = NVFP4Tensor(codes, scales, torch.tensor([1e-30, 1.0, 1e30]), (3, 32))
    largest = torch.finfo(dtype).max
    x = torch.full((1, 32), 60000.0 if dtype == torch.float16 else 1e30, dtype=dtype)
    y = emulation.linear(torch.cat((x, -x, x * 0)), weight)
    want = exact(torch.cat((x, -x, x * 0)), weight, None)
    assert_equal(y, want.to(dtype))
    assert (want.abs() > largest).any()


@eight_and_four_warps
@both_dtypes
@pytest.mark.parametrize("k", [160, 1184])
def test_a_row_has_the_same_bits_in_any_batch_and_any_order_of_warps(
    k: int, dtype: torch.dtype, blocks: Blocks
) -> None:
    weight = random_weight(20, k, seed=4)
    x = random_rows(8, k, 5, dtype)
    linear = functools.partial(emulation.linear, weight=weight, layout=blocks)
    batch = linear(x)
    for row in range(8):
        assert torch.equal(linear(x[row : row + 1], seed=row), batch[row : row + 1])
    for rows in ([7, 2], [3, 3, 1, 0, 6], list(range(8))[::-1]):
        assert torch.equal(linear(x[rows], seed=100 + len(rows)), batch[rows])


@both_dtypes
def test_strided_unaligned_and_batched_rows(dtype: torch.dtype) -> None:
    weight = random_weight(17, 96, seed=6, per_row=True)
    wide = random_rows(6, 200, 7, dtype)
    bias = random_rows(17, 2, 8, dtype)[:, 0]
    for x in (wide[::2, :96], wide[:, 1:97], wide.flatten()[1 : 1 + 6 * 96].view(2, 3, 96), wide[0, :96]):
        y = emulation.linear(x, weight, bias)
        assert y.shape == (*x.shape[:-1], 17)
        rows = x.reshape(-1, 96)
        error = (y.view(-1, 17).double() - exact(rows, weight, bias)).abs()
        assert (error <= error_bound(rows, weight, bias)).all()


FP16, BF16 = (torch.float16,), (torch.bfloat16,)
MISTAKES: list[emulation.Mistake] = [
    (FP16, "0x8E008E00u", "0x8C008C00u", "wrong results"),
    (FP16, "word >> 3", "word >> 2", "wrong results"),
    (FP16, "0x3F803F80u", "0x3F003F80u", "wrong results"),
    (FP16, "0x5C005C00u", "0x1C001C00u", "product .* is rounded"),
    (BF16, "0x81C081C0u", "0x818081C0u", "wrong results"),
    (BF16, "low << 2", "low << 3", "wrong results"),
    (BF16, "__funnelshift_r(high, high, 6)", "__funnelshift_l(high, high, 6)", "wrong results"),
    (BF16, "0x07F007F0u", "0x07E007F0u", "wrong results"),
    (DTYPES, "w < 2 ? 0x1010 : 0x3232", "0x1010", "wrong results"),
    (DTYPES, "bytes & 0x7F7F7F7Fu", "bytes", "wrong results"),  # negative scales as NaN
    (DTYPES, "__shfl_xor_sync(0xFFFFFFFFu, nan, 2)", "0u", "NaN scales"),
    (DTYPES, "i < 2 ? 0x0000FFFFu : 0xFFFF0000u", "0x0000FFFFu", "NaN scales"),
    (
        DTYPES,
        "__shfl_xor_sync(0xFFFFFFFFu, nan, 1)",
        "(lane < 16 ? __shfl_xor_sync(~0u, nan, 1) : 0u)",
        "every thread waits",
    ),
    (DTYPES, "__syncthreads()", "(void)0", "race|nobody has written"),
    (DTYPES, "__syncthreads()", "(warp < 7 ? __syncthreads() : (void)0)", "every thread waits"),
    (DTYPES, "whole_steps % kWarps == warp", "whole_steps == warp", "wrong results"),
    (DTYPES, "whole_steps * kStepK + in_quad * kThreadK < a.k", "true", "global load outside"),
    (DTYPES, "left > 1", "true", "global load outside"),
    (DTYPES, "min(quad + 8 * i, block_rows - 1)", "(quad + 8 * i)", "global load outside"),
    (DTYPES, "quad < a.m ? quad : 0", "quad", "global load outside"),
    (DTYPES, "row >= block_rows", "false", "written outside y"),
    (DTYPES, "output < kBlockRows * a.m", "output < kBlockRows * kMaxRows", "written outside y"),
]


def examine(emulated: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Small problems with several steps, a rest, a block that is not full, and NaN scales."""
    for with_bias in (False, True):
        x, weight, bias = exact_problem(20, 1184, 3, 1, dtype, per_row=True, with_bias=with_bias)
        assert_equal(emulation.linear(x, weight, bias, emulation=emulated), exact(x, weight, bias).to(dtype))
    want = exact(x, weight, bias).to(dtype)
    rows = torch.arange(0, 20, 3)
    weight.scales.view(torch.uint8)[rows, rows * 73 // 18] = 0x7F
    want[:, rows] = torch.nan
    assert_equal(emulation.linear(x, weight, bias, emulation=emulated), want, "NaN scales:")


@functools.cache
def with_mistakes(dtype: torch.dtype) -> ctypes.CDLL:
    return emulation.with_mistakes(MISTAKES, dtype)


@both_dtypes
def test_the_examination_finds_nothing_where_no_mistake_is_planted(dtype: torch.dtype) -> None:
    examine(emulation.library(dtype), dtype)
    emulated = with_mistakes(dtype)
    emulated.plant(-1)
    examine(emulated, dtype)


@pytest.mark.parametrize(
    ("dtype", "i"),
    [
        pytest.param(dtype, i, id=f"{dtype}-{wrong} for {right}")
        for i, (dtypes, right, wrong, _) in enumerate(MISTAKES)
        for dtype in dtypes
    ],
)
def test_planted_mistakes_are_seen(dtype: torch.dtype, i: int) -> None:
    emulated = with_mistakes(dtype)
    emulated.plant(i)
    with pytest.raises(AssertionError, match=MISTAKES[i][3]):
        examine(emulated, dtype)

"""The fused product that tensor copies feed, its own source run on the CPU: values, bits, races, planted mistakes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import emulated_small_batch as emulation
import pytest
import torch
from emulated_build import COMPILER
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_reference import all_codes, random_weight
from small_batch_problems import assert_equal, codes_times_scales, error_bound, exact, exact_problem, random_rows

from tpoverlap.cuda.device import DeviceFacts
from tpoverlap.quant.nvfp4 import concat_columns
from tpoverlap.quant.nvfp4.small_batch_bulk import Plan, plan_for

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    # The first tests compile the emulation.
    pytest.mark.timeout(200),
]

DTYPES = (torch.float16, torch.bfloat16)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def layout(n: int, k: int, num_sms: int = 3) -> Plan:
    """What a device of so few SMs takes, whose clusters then have several tiles."""
    plan = plan_for(n, k, DeviceFacts(0, "few SMs", (9, 0), num_sms, 232_448, 0))
    assert plan
    return plan


def with_slots(plan: Plan, slots: int) -> Plan:
    return dataclasses.replace(plan, slots=slots)


@both_dtypes
@pytest.mark.parametrize("m", [1, 8])
def test_every_code_under_every_scale(m: int, dtype: torch.dtype) -> None:
    """One column of x at a time is one, so each output is one weight; NaN scales reach their rows alone."""
    weight = concat_columns([all_codes(0.5)] * 16)
    n, k = weight.shape
    values = codes_times_scales(weight) * 0.5
    nan_rows = values.isnan().any(1)
    assert nan_rows.nonzero().flatten().tolist() == [0x7F, 0xFF]
    # A lane's 32 k hold every code.
    for column in range(32, 64, m) if m == 8 else [0, 511]:
        x = torch.zeros(m, k, dtype=dtype)
        x[torch.arange(m), column + torch.arange(m)] = 1.0
        want = values[:, column : column + m].T.to(dtype)
        want[:, nan_rows] = torch.nan
        assert_equal(emulation.linear(x, weight, layout=layout(n, k)), want, f"column {column}:")


sizes = {
    "n": st.integers(1, 150),
    "k": st.sampled_from([512, 1536, 2560, 3072, 3584, 4096]),
    "m": st.integers(1, 8),
    "seed": st.integers(0, 2**32 - 1),
    "per_row": st.booleans(),
    "with_bias": st.booleans(),
}
few_examples = settings(max_examples=12, deadline=None)


@both_dtypes
@few_examples
@given(**sizes)
def test_sums_that_fp32_holds_are_exact(
    n: int, k: int, m: int, seed: int, per_row: bool, with_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = exact_problem(n, k, m, seed, dtype, per_row=per_row, with_bias=with_bias)
    for slots in (2, 4):
        plan = with_slots(layout(n, k), slots)
        assert_equal(emulation.linear(x, weight, bias, seed=seed, layout=plan), exact(x, weight, bias).to(dtype))


@both_dtypes
@few_examples
@given(**sizes)
def test_the_error_is_that_of_fp32_sums(
    n: int, k: int, m: int, seed: int, per_row: bool, with_bias: bool, dtype: torch.dtype
) -> None:
    weight = random_weight(n, k, seed=seed, per_row=per_row)
    x = random_rows(m, k, seed, dtype)
    bias = random_rows(1, n, seed + 1, dtype)[0] if with_bias else None
    plan = layout(n, k)
    error = (emulation.linear(x, weight, bias, seed=seed, layout=plan).double() - exact(x, weight, bias)).abs()
    assert (error <= error_bound(x, weight, bias, plan)).all()


@both_dtypes
@pytest.mark.parametrize("k", [512, 3584])
def test_a_nan_scale_marks_its_row_wherever_it_stands(k: int, dtype: torch.dtype) -> None:
    """Also where x is zero."""
    groups = k // 16
    weight = random_weight(groups + 1, k, seed=k)
    scales = weight.scales.view(torch.uint8)
    for group in range(groups):
        scales[group, group] = (0x7F, 0xFF)[group % 2]
    y = emulation.linear(torch.zeros(2, k, dtype=dtype), weight, layout=layout(groups + 1, k))
    assert y[:, :groups].isnan().all()
    assert not y[:, groups:].any()


@both_dtypes
def test_a_row_has_the_same_bits_in_any_batch_any_order_of_warps_and_any_ring(dtype: torch.dtype) -> None:
    n, k = 170, 3584
    weight = random_weight(n, k, seed=4)
    x = random_rows(8, k, 5, dtype)
    linear = functools.partial(emulation.linear, weight=weight)
    batch = linear(x, layout=layout(n, k))
    for row in range(8):
        plan = (layout(n, k), with_slots(layout(n, k), 2), layout(n, k, num_sms=9))[row % 3]
        assert torch.equal(linear(x[row : row + 1], seed=row, layout=plan), batch[row : row + 1])
    assert torch.equal(linear(x[[3, 3, 1, 0, 6]], seed=100, layout=layout(n, k)), batch[[3, 3, 1, 0, 6]])


@both_dtypes
@pytest.mark.parametrize(("n", "num_sms"), [(41, 4), (20, 2), (9, 132)])
def test_the_longest_k(n: int, num_sms: int, dtype: torch.dtype) -> None:
    """All steps that a warp takes; a last cluster of fewer rows."""
    k = 9216
    x, weight, bias = exact_problem(n, k, 8, n, dtype, per_row=True, with_bias=True)
    plan = layout(n, k, num_sms)
    assert plan.steps == 3
    assert_equal(emulation.linear(x, weight, bias, layout=plan), exact(x, weight, bias).to(dtype))


class TooShort(Plan):
    """A layout whose launch is given 16 bytes less of shared memory."""

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes - 16


@pytest.mark.parametrize(("n", "k"), [(64, 512), (58, 3072), (100, 3584)])
def test_a_block_is_given_the_shared_memory_that_it_uses(n: int, k: int) -> None:
    x, weight, _ = exact_problem(n, k, 2, n, torch.bfloat16, per_row=False, with_bias=False)
    for slots in (2, 3):
        plan = with_slots(layout(n, k), slots)
        emulation.linear(x, weight, layout=plan)
        with pytest.raises(AssertionError, match="shared memory access"):
            emulation.linear(x, weight, layout=TooShort(**dataclasses.asdict(plan)))


FP16, BF16 = (torch.float16,), (torch.bfloat16,)
MISTAKES: list[emulation.Mistake] = [
    (BF16, "high << 2", "high << 3", "wrong results"),
    (BF16, "__funnelshift_r(mixed, mixed, 8)", "__funnelshift_r(mixed, mixed, 7)", "wrong results"),
    (FP16, "0x8E008E00u", "0x8C008C00u", "wrong results"),
    (DTYPES, "w < 2", "w < 3", "wrong results"),
    (DTYPES, "wait_for_previous_kernel()", "(void)0", "one ahead runs"),
    (DTYPES, "share.first + i / kSteps * kTileRows", "i / kSteps * kTileRows", "does not come"),
    (DTYPES, "i / kSteps * kTileRows", "i * kTileRows", "does not come"),
    (DTYPES, "min(a.slots, share.tiles * kSteps)", "a.slots", "does not come at all"),
    (DTYPES, "cluster_wait()", "(void)0", "race|nobody has made"),
    (DTYPES, "barrier_wait(kFull + 8 * ring.slot, ring.parity)", "(void)0", "race"),
    (DTYPES, "barrier_wait(kFree + 8 * ring.slot, ring.parity ^ 1)", "(void)0", "race|too many"),
    (DTYPES, "barrier_wait(kSumsFull + 8 * part, tile / kParts & 1)", "(void)0", "race|wrong results|every thread"),
    (DTYPES, "barrier_wait(kSumsFree + 8 * parts.slot, parts.parity ^ 1)", "(void)0", "race|too many"),
    (DTYPES, "barrier_wait_for_peer(kPassedFull + 8 * ring.slot, ring.parity)", "(void)0", "race|wrong results"),
    (DTYPES, "barrier_wait_for_peer(kPassedFree + 8 * ring.slot, ring.parity ^ 1)", "(void)0", "race"),
    (DTYPES, "tile + 2 * kPassed < share.tiles", "false", "every thread waits"),
    (DTYPES, "barrier_init(kFree + 8 * slot, kWarps)", "barrier_init(kFree + 8 * slot, kWarps - 1)", "race|too many"),
    (
        DTYPES,
        "barrier_arrive(kSumsFull + 8 * parts.slot)",
        "(warp ? barrier_arrive(kSumsFull + 8 * parts.slot) : (void)0)",
        "every thread waits",
    ),
    (DTYPES, "arrange(x[s])", "(s > 0 ? arrange(x[s]) : (void)0)", "wrong results"),
    (DTYPES, "k >= half", "false", "global load outside"),
    (DTYPES, "quad >= a.m", "false", "global load outside"),
    (DTYPES, "rank * half", "0", "wrong results"),
    (DTYPES, "s < kSteps - 1 || k_of(warp, 0, s, 3) < a.k / 2", "s < kSteps - 1", "wrong results"),
    (DTYPES, "h * 8 * 128 + ring.slot * kCodeBytes", "h * 8 * 128", "race|wrong results"),
    (DTYPES, "kRing + ring.slot * kCodeBytes", "kRing", "race|wrong results"),
    (DTYPES, "scales_of_slots + ring.slot * kScaleBytes", "scales_of_slots", "race|wrong results"),
    (DTYPES, "((at.warp % 2 * 4 + at.in_quad) ^ at.row)", "(at.warp % 2 * 4 + at.in_quad)", "wrong results"),
    (DTYPES, "i / 2 * kWarps", "i / 2", "wrong results"),
    (DTYPES, "in_halves(s) && k_of(warp, 0, s, 0) < a.k / 2", "false", "wrong results"),
    (DTYPES, "((at.warp % 4 * 2 + at.in_quad / 2) ^ at.row)", "(at.warp % 4 * 2 + at.in_quad / 2)", "wrong results"),
    (DTYPES, "at.in_quad % 2 * 8", "0", "wrong results"),
    (DTYPES, "first + kWarps / 4 * (kTileRows * 128)", "first", "wrong results"),
    (DTYPES, "scale + kWarps * (kHalfK / 16)", "scale", "wrong results"),
    (DTYPES, "kCodeBytes + kScaleBytes", "kCodeBytes", "every thread waits|race"),
    (DTYPES, "32 * 16", "31 * 16", "before its copies"),
    (DTYPES, "mine.x + passed.x", "mine.x", "wrong results"),
    (DTYPES, "row_of(quad) + 8 * (i >> 1)", "quad + 8 * (i >> 1)", "wrong results"),
    (DTYPES, "m >= a.m", "false", "written outside y"),
    (DTYPES, "row >= share.rows", "false", "written outside y"),
]
SIZE = (154, 5632)
# Whole steps and halves of which some warps have two, some one and some none.
EXAMINED = dataclasses.replace(layout(*SIZE), halves=True)


def examine(emulated: ctypes.CDLL, dtype: torch.dtype) -> None:
    """A last tile that is not full, a ring and sums that come round, steps that some warps do not have, NaN scales; and
    less than the ring holds."""
    n, k = SIZE
    run = functools.partial(emulation.linear, layout=EXAMINED, emulation=emulated)
    x, weight, bias = exact_problem(n, k, 3, 1, dtype, per_row=True, with_bias=True)
    assert_equal(run(x, weight, bias), exact(x, weight, bias).to(dtype))
    want = exact(x, weight, bias).to(dtype)
    rows = torch.arange(0, n, 7)
    weight.scales.view(torch.uint8)[rows, rows] = 0x7F
    want[:, rows] = torch.nan
    assert_equal(run(x, weight, bias, seed=1), want, "NaN scales:")
    x, weight, bias = exact_problem(25, k, 1, 2, dtype, per_row=False, with_bias=False)
    a_tile_each = dataclasses.replace(EXAMINED, blocks=4, block_rows=16)
    assert_equal(run(x, weight, layout=a_tile_each), exact(x, weight, bias).to(dtype))


@functools.cache
def with_mistakes(dtype: torch.dtype) -> ctypes.CDLL:
    return emulation.with_mistakes(MISTAKES, dtype, EXAMINED)


@both_dtypes
def test_the_examination_finds_nothing_where_no_mistake_is_planted(dtype: torch.dtype) -> None:
    examine(emulation.library(dtype, EXAMINED), dtype)
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

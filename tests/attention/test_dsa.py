"""DSA in torch on the CPU: against the definition in loops, and its argument checks."""

from __future__ import annotations

import pytest
import torch
from dsa_cases import check_case, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap.attention import dsa


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    width=st.sampled_from([1, 2, 7, 16, 73, 97, 130]),
    block_size=st.sampled_from([1, 3, 8, 16, 200]),
    num_blocks=st.integers(1, 20),
    row_repeat=st.sampled_from([1, 2, 4]),
    with_starts=st.booleans(),
    values=st.sampled_from(["normal", "ties", "special"]),
    strided=st.booleans(),
    bounds_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_twin_follows_the_definition(strided, bounds_dtype, seed, **shape):
    check_case(random_case(seed, **shape), "cpu", strided=strided, bounds_dtype=bounds_dtype)


def test_negative_starts_count_as_zero_and_far_candidates_are_harmless():
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([40, 25])
    starts = torch.tensor([-7, -(2**31)])
    assert torch.equal(dsa.block_scores(logits, starts, ends, 8), dsa.block_scores(logits, None, ends, 8))
    candidates = torch.tensor([[2**31 - 1, -5], [2**31 - 1, 1]], dtype=torch.int32)
    masked = logits.clone()
    dsa.apply_candidate_mask(masked, None, ends, candidates, 8)
    assert masked[0].isneginf().nonzero().flatten().tolist() == list(range(39))
    assert masked[1].isneginf().nonzero().flatten().tolist() == [*range(8), *range(16, 25)]


@pytest.mark.parametrize(("rows", "width"), [(0, 16), (3, 0)])
def test_empty_shapes(rows, width):
    logits, ends = torch.empty(rows, width), torch.zeros(rows, dtype=torch.int32)
    assert dsa.block_scores(logits, None, ends, 8).shape == (rows, -(-width // 8))
    candidates = dsa.select_candidate_blocks(logits, None, ends, 4, 8)
    assert candidates.tolist() == [[-1] * 4] * rows
    dsa.apply_candidate_mask(logits, None, ends, candidates, 8)


LOGITS, ENDS = torch.zeros(4, 32), torch.zeros(4, dtype=torch.int32)
CANDIDATES = torch.zeros(4, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dsa.block_scores(LOGITS[0], None, ENDS, 8), r"logits must be float32 \[rows, width\]"),
        (lambda: dsa.block_scores(LOGITS.double(), None, ENDS, 8), "logits must be float32"),
        (lambda: dsa.block_scores(LOGITS, None, ENDS[:3], 8), r"row_ends must be int32 or int64 \[4\]"),
        (lambda: dsa.block_scores(LOGITS, ENDS, ENDS[:2], 8, row_repeat=2), r"row_starts must be .* \[2\]"),
        (lambda: dsa.block_scores(LOGITS, None, ENDS.float(), 8), "row_ends must be int32 or int64"),
        (lambda: dsa.block_scores(LOGITS, None, ENDS, 0), "block_size must be an int from 1"),
        (lambda: dsa.block_scores(LOGITS, None, ENDS, 8, row_repeat=0), "row_repeat must be an int from 1"),
        (lambda: dsa.select_candidate_blocks(LOGITS, None, ENDS, -1, 8), "num_blocks must be an int from 0"),
        (
            lambda: dsa.select_candidate_blocks(LOGITS, None, ENDS, 3, 8, out=CANDIDATES),
            r"out must be int32 \[4, 3\]",
        ),
        (lambda: dsa.apply_candidate_mask(LOGITS, None, ENDS, CANDIDATES[:3], 8), r"candidates must be int32 \[4, any"),
        (lambda: dsa.apply_candidate_mask(LOGITS, None, ENDS, CANDIDATES.long(), 8), "candidates must be int32"),
        (
            lambda: dsa.apply_candidate_mask(LOGITS, None, ENDS, CANDIDATES.to("meta"), 8),
            "candidates must be on the device of logits",
        ),
    ],
)
def test_wrong_arguments_say_what_is_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""The top-k that DSA and QSA share, in torch on the CPU, against a sort of Python tuples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from topk_cases import check_topk, loop_topk, random_scores

from tpoverlap.attention.topk import order_keys, topk_indices


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.sampled_from([1, 5, 40, 129, 300]),
    k=st.sampled_from([1, 2, 7, 40, 301]),
    values=st.sampled_from(["normal", "ties", "equal", "special", "descending"]),
    order=st.sampled_from(["score", "index"]),
    skip_neg_inf=st.booleans(),
)
def test_torch_version_follows_the_definition(seed, width, k, values, order, skip_neg_inf):
    check_topk(seed, "cpu", rows=3, width=width, k=k, values=values, order=order, skip_neg_inf=skip_neg_inf)


def test_keys_order_every_kind_of_float():
    tiny, big = 2.0**-149, 3.4028234663852886e38
    ascending = [-math.inf, -big, -1.0, -tiny, 0.0, tiny, 1.0, big, math.inf, math.nan]
    keys = order_keys(torch.tensor(ascending)).tolist()
    assert keys == sorted(set(keys))
    assert order_keys(torch.tensor([0.0, -0.0])).unique().numel() == 1
    payloads = torch.tensor([0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    assert order_keys(payloads).unique().numel() == 1


def test_columns_past_a_length_are_not_candidates():
    scores = random_scores(3, 2, 50, "normal")
    lengths = torch.tensor([-4, 1000], dtype=torch.int32)
    got = topk_indices(scores, lengths, 4)
    assert got[0].tolist() == [-1] * 4
    assert got[1].tolist() == loop_topk(scores[1].tolist(), 50, 4, "score", False)


SCORES, LENGTHS = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topk_indices(SCORES.half(), LENGTHS, 2), r"scores must be float32 \[rows, width\]"),
        (lambda: topk_indices(SCORES[:, ::2], LENGTHS, 2), "unit stride"),
        (lambda: topk_indices(SCORES, LENGTHS[:1], 2), r"lengths must be int32 \[2\]"),
        (lambda: topk_indices(SCORES, LENGTHS.long(), 2), "lengths must be int32"),
        (lambda: topk_indices(SCORES, LENGTHS, -1), "k must be an int of at least 0"),
        (lambda: topk_indices(SCORES, LENGTHS, 2, out=SCORES), r"out must be int32 \[2, 2\]"),
    ],
)
def test_wrong_arguments_say_what_is_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()

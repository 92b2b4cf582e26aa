"""The torch path against the float64 loop, its argument checks, and independence of requests."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from attention_cases import DATA, assert_close, make_case, solve, strided_lengths, without_hidden_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap.attention import paged_decode, paged_prefill
from tpoverlap.attention import reference as reference_module

RAGGED = [(1, 1328), (5, 18), (129, 463), (0, 0), (0, 40), (7, 3), (33, 33), (2, 0)]


@pytest.mark.parametrize("layout", ["plain", "interleaved", "heads", "strided"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 37}, {"softcap": 5.0}, {"sliding_window": 1, "softcap": 2.0}]
)
def test_ragged_batches(layout, options):
    case = make_case(1, RAGGED, q_heads=6, kv_heads=2, layout=layout)
    assert_close(paged_prefill(*case.prefill, return_lse=True, **options), solve(case, **options), 1e-5)


@pytest.mark.parametrize("keys", [0, 1, 31, 32, 33, 511, 512, 513, 4097])
def test_lengths(keys):
    case = make_case(keys, [(1, keys)], q_heads=3, kv_heads=1, block_size=32)
    want = solve(case)
    assert_close(paged_prefill(*case.prefill, return_lse=True), want, 1e-5)
    assert_close(paged_decode(*case.decode, return_lse=True), want, 1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_head_dims_and_dtypes(head_dim, dtype):
    case = make_case(head_dim, [(20, 50), (1, 33)], head_dim=head_dim, dtype=dtype)
    out, lse = paged_prefill(*case.prefill, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    rounding = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 0.0}[dtype]
    assert_close((out, lse), solve(case), rounding + 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=1, max_size=4),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    block_size=st.integers(1, 40),
    window=st.one_of(st.none(), st.integers(1, 160)),
    softcap=st.one_of(st.none(), st.floats(0.5, 50)),
    scale=st.one_of(st.none(), st.floats(0.01, 1)),
)
def test_any_geometry(seed, requests, group, kv_heads, block_size, window, softcap, scale):
    case = make_case(seed, requests, q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=8, block_size=block_size)
    options = {"sliding_window": window, "softcap": softcap, "scale": scale}
    assert_close(paged_prefill(*case.prefill, return_lse=True, **options), solve(case, **options), 1e-5)


def test_long_chunk_crosses_every_block_boundary(monkeypatch):
    monkeypatch.setattr(reference_module, "_QUERY_BLOCK", 32)
    monkeypatch.setattr(reference_module, "_KEY_BLOCK", 48)
    case = make_case(3, [(130, 300), (64, 64)], q_heads=4, kv_heads=2, head_dim=16)
    for window in (None, 1, 47, 48, 49, 96, 299, 1000):
        options = {"sliding_window": window, "softcap": 30.0}
        assert_close(paged_prefill(*case.prefill, return_lse=True, **options), solve(case, **options), 1e-5)


@pytest.mark.parametrize("window", [1, 37])
def test_keys_before_every_window_may_be_gone(window):
    case = make_case(4, [(1, 100), (5, 71), (0, 40), (9, 9)])
    got = paged_prefill(*without_hidden_keys(case, window).prefill, sliding_window=window, return_lse=True)
    assert_close(got, solve(case, sliding_window=window), 1e-5)


@pytest.mark.parametrize("requests", [[], [(0, 0)], [(0, 9), (0, 0)], [(4, 0)]])
def test_batches_without_keys_or_tokens(requests):
    case = strided_lengths(make_case(6, requests))
    assert_close(paged_prefill(*case.prefill, return_lse=True), solve(case), 0.0)
    if not requests:
        assert paged_decode(*case.decode).shape == (0, 4, 64)


def test_a_request_alone_has_the_same_bits():
    case = make_case(5, RAGGED, q_heads=6, kv_heads=2)
    starts = case.cu_seqlens_q.tolist()
    for options in ({}, {"sliding_window": 40}):
        out, lse = paged_prefill(*case.prefill, return_lse=True, **options)
        for r in range(len(RAGGED)):
            alone, alone_lse = paged_prefill(*case.only(r).prefill, return_lse=True, **options)
            assert torch.equal(out[starts[r] : starts[r + 1]], alone)
            assert torch.equal(lse[starts[r] : starts[r + 1]], alone_lse)


@pytest.mark.parametrize("cut", [1, 100, 299])
def test_a_chunk_in_two_pieces_agrees_with_the_whole(cut):
    case = make_case(cut, [(300, 700)], q_heads=4, kv_heads=2)
    whole = paged_prefill(*case.prefill)
    first = dataclasses.replace(
        case,
        q=case.q[:cut],
        cu_seqlens_q=torch.tensor([0, cut], dtype=torch.int32),
        seq_lens=torch.tensor([400 + cut], dtype=torch.int32),
    )
    second = dataclasses.replace(case, q=case.q[cut:], cu_seqlens_q=torch.tensor([0, 300 - cut], dtype=torch.int32))
    pieces = torch.cat([paged_prefill(*first.prefill), paged_prefill(*second.prefill)])
    assert (pieces - whole).abs().max() <= 1e-5


def test_rows_past_the_last_request_are_padding():
    case = make_case(7, [(3, 9), (2, 2)])
    padded = dataclasses.replace(case, q=torch.cat([case.q, torch.full((4, 4, 64), math.nan)]))
    out, lse = paged_prefill(*padded.prefill, return_lse=True)
    assert torch.equal(out[:5], paged_prefill(*case.prefill))
    assert (out[5:] == 0).all()
    assert (lse[5:] == -math.inf).all()


def test_out_is_filled_whatever_it_held():
    case = make_case(8, [(5, 3), (0, 0), (6, 40)])
    want = paged_prefill(*case.prefill)
    storage = torch.full((11, 64, 4), math.nan)
    out = storage.transpose(1, 2)
    assert paged_prefill(*case.prefill, out=out) is out
    assert torch.equal(out, want)
    q = case.q.clone()
    assert torch.equal(paged_prefill(q, *case.prefill[1:], out=q), want)


@pytest.mark.parametrize("name", ["chunk", "decode", "d256", "odd-dim-empty"])
def test_worked_cases(name):
    with np.load(DATA / f"attention-{name}.npz") as f:
        d = {k: torch.from_numpy(f[k]) for k in f.files if k != "meta"}
    tensors = [d[k] for k in ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seq_lens")]
    want = (d["expected"].double(), d["expected_lse"].double())
    assert_close(paged_prefill(*tensors, return_lse=True), want, 2e-5)
    if name == "decode":
        assert_close(paged_decode(*tensors[:4], tensors[5], return_lse=True), want, 2e-5)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 4)}, "q must be"),
        ({"q": torch.zeros(5, 4, 64, dtype=torch.float64)}, "float16, bfloat16 or float32"),
        ({"q": torch.zeros(5, 3, 64)}, "multiple of kv_heads"),
        ({"q": torch.zeros(5, 4, 32)}, "head_dim of q"),
        ({"k_cache": torch.zeros(8, 16, 2, 64, dtype=torch.float16)}, "dtype of q"),
        ({"v_cache": torch.zeros(8, 16, 1, 64)}, "one shape"),
        ({"v_cache": torch.zeros(8, 16, 64)}, r"v_cache must be \[blocks"),
        ({"block_table": _int32(0, 1)}, r"block_table must be \[requests"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "must be int32"),
        ({"seq_lens": _int32(9)}, "seq_lens must have shape"),
        ({"cu_seqlens_q": _int32(0, 5)}, "cu_seqlens_q must have shape"),
        ({"cu_seqlens_q": _int32(0, 4, 3)}, "ascend"),
        ({"cu_seqlens_q": _int32(1, 4, 5)}, "ascend"),
        ({"cu_seqlens_q": _int32(0, 4, 6)}, "ascend"),
        ({"seq_lens": _int32(9, 49)}, "seq_lens.1. must be from 0 to 48"),
        ({"seq_lens": _int32(-1, 9)}, "seq_lens.0. must be from 0"),
        ({"block_table": torch.full((2, 2), 8, dtype=torch.int32)}, "must name blocks from 0 to"),
        ({"block_table": torch.full((2, 2), -1, dtype=torch.int32)}, "must name blocks from 0 to"),
    ],
)
def test_wrong_tensors_are_refused(change, message):
    case = dataclasses.replace(make_case(9, [(3, 9), (2, 20)]), **change)
    with pytest.raises(ValueError, match=message):
        paged_prefill(*case.prefill)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": math.inf}, "softcap"),
        ({"softcap": "5"}, "softcap must be None or a positive number, got '5'"),
        ({"softcap": torch.tensor(5.0)}, "softcap must be None or a positive number, got tensor"),
        ({"scale": math.nan}, "scale"),
        ({"scale": 0.0}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": torch.tensor(0.1)}, "scale must be None"),
        ({"num_splits": -1}, "num_splits"),
        ({"num_splits": False}, "num_splits"),
        ({"backend": "fastest"}, "unknown backend"),
        ({"max_query_len": -1}, "max_query_len"),
        ({"max_query_len": False}, "max_query_len"),
        ({"max_query_len": 2}, "max_query_len must be at least the 3 tokens that a request brings, got 2"),
        ({"out": torch.zeros(5, 4, 64, dtype=torch.float16)}, "out must have"),
        ({"out": torch.zeros(1, 4, 64).expand(5, 4, 64)}, "give a tensor that is not expanded"),
    ],
)
def test_wrong_options_are_refused(options, message):
    case = make_case(10, [(3, 9), (2, 20)])
    with pytest.raises(ValueError, match=message):
        paged_prefill(*case.prefill, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 0}, "num_splits"),
        ({"num_splits": 129}, "num_splits"),
        ({"num_splits": None}, "num_splits"),
        ({"backend": "turing"}, "unknown backend"),
        ({"out": torch.zeros(4, 1, 64).expand(4, 4, 64)}, "give a tensor that is not expanded"),
        ({"workspace": torch.zeros(10)}, "at least 16896 elements"),
        ({"workspace": torch.zeros(20000, dtype=torch.float16)}, "float32"),
    ],
)
def test_wrong_decode_options_are_refused(options, message):
    case = make_case(11, [(1, 9), (1, 20), (1, 0), (1, 5)])
    with pytest.raises(ValueError, match=message):
        paged_decode(*case.decode, **options)


def test_decode_takes_one_row_a_request():
    case = make_case(12, [(2, 9)])
    with pytest.raises(ValueError, match="one row of q a request"):
        paged_decode(*case.decode)


def test_what_is_refused_is_refused_after_an_equal_call_that_was_not():
    case = make_case(1, [(2, 9), (1, 4)], q_heads=2, kv_heads=1)
    paged_prefill(*case.prefill, num_splits=1, max_query_len=2)
    paged_prefill(*case.prefill, sliding_window=1, max_query_len=2)
    one = make_case(2, [(1, 9), (1, 3)], q_heads=2, kv_heads=1)
    paged_decode(*one.decode, num_splits=1)
    paged_decode(*one.decode, sliding_window=1)
    for wrong in (True, 1.0):
        with pytest.raises(ValueError, match="num_splits"):
            paged_prefill(*case.prefill, num_splits=wrong, max_query_len=2)
        with pytest.raises(ValueError, match="num_splits"):
            paged_decode(*one.decode, num_splits=wrong)
        with pytest.raises(ValueError, match="sliding_window"):
            paged_prefill(*case.prefill, sliding_window=wrong, max_query_len=2)
        with pytest.raises(ValueError, match="sliding_window"):
            paged_decode(*one.decode, sliding_window=wrong)
    with pytest.raises(ValueError, match="max_query_len"):
        paged_prefill(*case.prefill, num_splits=1, max_query_len=2.0)
    with pytest.raises(ValueError, match="seq_lens must be int32"):
        paged_prefill(*case.prefill[:-1], case.seq_lens.long(), num_splits=1, max_query_len=2)

"""The Triton attention kernels on CPU tensors. Run by test_triton_attention_interpreter.py under TRITON_INTERPRET=1."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import Case, assert_close, make_case, solve, strided_lengths, without_hidden_keys

from tpoverlap.attention import allocate_kv_cache, decode_workspace_size, paged_decode, paged_prefill, write_kv
from tpoverlap.attention.triton.decode import decode_rows

RAGGED = [(1, 70), (5, 18), (0, 0), (0, 40), (7, 3), (13, 63)]
DECODE = [(1, 0), (1, 1), (1, 33), (1, 130), (1, 200)]
ROUNDING = {torch.float32: 0.0, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("options", "layout", "block_size"),
    [
        ({}, "plain", 16),
        ({}, "strided", 64),
        ({"sliding_window": 37}, "heads", 5),
        ({"sliding_window": 1, "softcap": 2.0}, "interleaved", 16),
        ({"softcap": 5.0, "scale": 0.3}, "plain", 16),
    ],
)
def test_packed_prefill(dtype, options, layout, block_size):
    case = make_case(1, RAGGED, q_heads=6, kv_heads=2, head_dim=80, block_size=block_size, dtype=dtype, layout=layout)
    out = torch.full_like(case.q, math.nan)
    got = paged_prefill(*case.prefill, backend="triton", return_lse=True, out=out, **options)
    assert_close(got, solve(case, **options), ROUNDING[dtype] + 1e-5)


@pytest.mark.parametrize("softcap", [0.5, 50.0, 300.0, 5000.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_any_softcap_is_exact_in_fp32(softcap, scale):
    case = make_case(11, [(4, 60), (1, 90)], q_heads=2, kv_heads=1)
    want = solve(case, softcap=softcap, scale=scale)
    bound = 1e-5 + 1e-6 * want[1].abs().max().item()  # the scores themselves are rounded to FP32
    assert_close(
        paged_prefill(*case.prefill, backend="triton", return_lse=True, softcap=softcap, scale=scale), want, bound
    )
    got = paged_prefill(*case.prefill, backend="triton_rows", return_lse=True, softcap=softcap, scale=scale)
    assert_close(got, want, bound)


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 511, 512, 513])
def test_packed_prefill_lengths(keys):
    case = make_case(keys, [(1, keys), (min(keys, 12), keys)], q_heads=3, kv_heads=1, block_size=32)
    assert_close(paged_prefill(*case.prefill, backend="triton", return_lse=True), solve(case), 1e-5)


def test_a_prefill_request_alone_has_the_same_bits():
    case = make_case(5, RAGGED, q_heads=6, kv_heads=2, dtype=torch.float16)
    starts = case.cu_seqlens_q.tolist()
    out, lse = paged_prefill(*case.prefill, backend="triton", return_lse=True)
    for r in range(len(RAGGED)):
        alone = paged_prefill(*case.only(r).prefill, backend="triton", return_lse=True)
        assert torch.equal(out[starts[r] : starts[r + 1]], alone[0])
        assert torch.equal(lse[starts[r] : starts[r + 1]], alone[1])


def _padded(case: Case) -> tuple[torch.Tensor, ...]:
    return (torch.cat([case.q, torch.full_like(case.q[:3], math.nan)]), *case.prefill[1:])


def test_padding_rows_see_nothing():
    case = make_case(6, [(1, 9), (2, 1)], q_heads=1, kv_heads=1)
    for backend in ("triton", "triton_rows"):
        out, lse = paged_prefill(*_padded(case), backend=backend, return_lse=True)
        assert_close((out[:3], lse[:3]), solve(case), 1e-5)
        assert (out[3:] == 0).all()
        assert (lse[3:] == -math.inf).all()


@pytest.mark.parametrize(("window", "block_size"), [(1, 64), (37, 5), (37, 16)])
def test_keys_before_every_window_may_be_gone(window, block_size):
    shape = {"q_heads": 2, "kv_heads": 1, "block_size": block_size}
    case = make_case(8, [(1, 100), (4, 71), (0, 40)], **shape)
    left = without_hidden_keys(case, window)
    for backend in ("triton", "triton_rows"):
        got = paged_prefill(*left.prefill, backend=backend, sliding_window=window, num_splits=2, return_lse=True)
        assert_close(got, solve(case, sliding_window=window), 1e-5)
    case = make_case(9, [(1, 100), (1, 38)], **shape)
    left = without_hidden_keys(case, window)
    got = paged_decode(*left.decode, backend="triton", sliding_window=window, num_splits=2, return_lse=True)
    assert_close(got, solve(case, sliding_window=window), 1e-5)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**63, 2**70])
def test_a_window_wider_than_any_length_hides_no_key(window):
    case = make_case(13, [(1, 60), (1, 9)], q_heads=2, kv_heads=1)
    for backend in ("triton", "triton_rows"):
        got = paged_prefill(*case.prefill, backend=backend, sliding_window=window, return_lse=True)
        assert_close(got, solve(case), 1e-5)
    got = paged_decode(*case.decode, backend="triton", sliding_window=window, return_lse=True)
    assert_close(got, solve(case), 1e-5)


def test_lengths_may_be_strided():
    case = make_case(10, [(2, 40), (1, 20)], q_heads=2, kv_heads=1)
    for backend in ("triton", "triton_rows"):
        got = paged_prefill(*strided_lengths(case).prefill, backend=backend, num_splits=2, return_lse=True)
        assert_close(got, solve(case), 1e-5)
    case = make_case(11, [(1, 40), (1, 0), (1, 20)], q_heads=2, kv_heads=1)
    got = paged_decode(*strided_lengths(case).decode, backend="triton", num_splits=2, return_lse=True)
    assert_close(got, solve(case), 1e-5)


def test_rows_of_the_per_row_prefill_have_the_bits_of_decode():
    case = make_case(7, [(2, 150), (1, 20)], q_heads=2, kv_heads=1, dtype=torch.float16)
    out, lse = paged_prefill(*case.prefill, backend="triton_rows", return_lse=True)
    assert_close((out, lse), solve(case), 2e-3)
    last = torch.tensor([1, 2])
    decoded = paged_decode(case.q[last], *case.decode[1:], backend="triton", return_lse=True)
    assert torch.equal(out[last], decoded[0])
    assert torch.equal(lse[last], decoded[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("options", "layout", "block_size"),
    [
        ({"num_splits": 4}, "plain", 16),
        ({"sliding_window": 37, "num_splits": 2}, "heads", 64),
        ({"softcap": 5.0, "num_splits": 3}, "strided", 7),
        ({"num_splits": 1}, "interleaved", 16),
    ],
)
def test_decode(dtype, options, layout, block_size):
    case = make_case(2, DECODE, q_heads=6, kv_heads=2, head_dim=80, block_size=block_size, dtype=dtype, layout=layout)
    out = torch.full_like(case.q, math.nan)
    want = solve(case, **{k: v for k, v in options.items() if k != "num_splits"})
    got = paged_decode(*case.decode, backend="triton", return_lse=True, out=out, **options)
    assert_close(got, want, ROUNDING[dtype] + 1e-5)


@pytest.mark.parametrize(("head_dim", "num_splits"), [(64, 16), (80, 128)])
def test_one_launch_two_launches_and_a_row_alone_give_the_same_bits(head_dim, num_splits):
    """128 splits: the separate merge takes a head in pieces."""
    case = make_case(3, [(1, 513), (1, 1), (1, 0)], q_heads=4, kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    out, lse = paged_decode(*case.decode, backend="triton", num_splits=num_splits, return_lse=True)
    assert_close((out, lse), solve(case), 2e-3)
    two, two_lse = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    decode_rows(
        case.q,
        *case.decode[1:4],
        None,
        case.seq_lens,
        scale=head_dim**-0.5,
        sliding_window=None,
        softcap=None,
        num_splits=num_splits,
        out=two,
        lse=two_lse,
        workspace=torch.full((decode_workspace_size(3, 4, head_dim, num_splits),), math.nan),
        merge_in_launch=False,
        first_row=0,
        rows=3,
    )
    assert torch.equal(out, two)
    assert torch.equal(lse, two_lse)
    for r in range(2):
        alone = paged_decode(*case.only(r).decode, backend="triton", num_splits=num_splits, return_lse=True)
        assert torch.equal(out[r : r + 1], alone[0])
        assert torch.equal(lse[r : r + 1], alone[1])


@pytest.mark.parametrize(("keys", "num_splits"), [(513, 4), (700, 4), (700, 3)])
def test_a_grid_cut_to_what_a_table_holds_serves_its_longest_row(keys, num_splits):
    """513 and 700 keys are 3 parts of 256; of 4 splits one has no program."""
    case = make_case(keys, [(1, keys), (1, 20)], q_heads=2, kv_heads=1, dtype=torch.float16)
    assert_close(
        paged_decode(*case.decode, backend="triton", num_splits=num_splits, return_lse=True), solve(case), 2e-3
    )


def test_wrong_ids_and_lengths_read_nothing_outside():
    """A GPU cannot raise for them; what it computes is meaningless, but neither crashes nor touches other rows."""
    case = make_case(4, [(3, 40), (1, 20)])
    good = paged_prefill(*case.prefill, backend="triton")
    case.block_table[1] = torch.tensor([2**31 - 1, -(2**31), 10**6, -5])[: case.block_table.shape[1]]
    case.seq_lens[1] = 2**31 - 1
    bad = paged_prefill(*case.prefill, backend="triton")
    assert torch.equal(bad[:3], good[:3])


@pytest.mark.parametrize("starts", [(0, 3, 1000), (2**31 - 1, 0, 2**31 - 1), (-7, 90, -1000)])
def test_wrong_starts_write_nothing_outside(starts):
    case = make_case(4, [(3, 40), (1, 20)], q_heads=2, kv_heads=1)
    storage = torch.full((300, *case.q.shape[1:]), 7.0)
    tensors = (*case.prefill[:4], torch.tensor(starts, dtype=torch.int32), case.seq_lens)
    paged_prefill(*tensors, backend="triton", out=storage[148:152])
    assert (storage[:148] == 7.0).all()
    assert (storage[152:] == 7.0).all()


def test_the_per_row_prefill_takes_as_many_parts_as_decode():
    case = make_case(12, [(2, 9)])
    with pytest.raises(ValueError, match="num_splits must be an int from 0 to 128"):
        paged_prefill(*case.prefill, backend="triton_rows", num_splits=129)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("half", "q_heads"), [(0, 0), (32, 5), (10, 5), (40, 0)])
def test_cache_write(dtype, half, q_heads):
    gen = torch.Generator().manual_seed(half)
    k, v = torch.randn(2, 6, 3, 80, generator=gen).to(dtype)
    q = torch.randn(6, 2 * max(q_heads, 1), 80, generator=gen).to(dtype)[:, ::2] if q_heads else None
    angles = torch.rand(6, half, generator=gen)
    rotary = {"cos": angles.cos(), "sin": angles.sin()} if half else {}
    slots = torch.tensor([19, -1, 0, 7, 20, 8])
    k_cache, v_cache = allocate_kv_cache(5, 4, 3, 80, dtype=dtype, device="cpu")
    k_cache.fill_(math.nan)
    v_cache.fill_(math.nan)
    want_q = None if q is None else q.clone()
    kept = slots.clone()
    kept[slots >= 20] = -1
    want_k, want_v = k_cache.clone(), v_cache.clone()
    from tpoverlap.attention.kv_write import _write_torch

    _write_torch(k, v, want_k, want_v, kept, want_q, rotary.get("cos"), rotary.get("sin"))
    k_before = k.clone()
    write_kv(k, v, k_cache, v_cache, slots, q=q, **rotary)
    assert torch.equal(k, k_before)
    tol = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(k_cache, want_k, rtol=tol, atol=tol, equal_nan=True)
    torch.testing.assert_close(v_cache, want_v, rtol=0, atol=0, equal_nan=True)
    if q is not None:
        torch.testing.assert_close(q, want_q, rtol=tol, atol=tol)

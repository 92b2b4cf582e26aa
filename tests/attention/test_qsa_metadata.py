"""QSA metadata in torch on the CPU: against loops, and its argument checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qsa_cases import check_metadata, loop_metadata, random_batch

from tpoverlap.attention import qsa


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    ratio=st.integers(1, 8),
    storage_block_size=st.sampled_from([1, 2, 4, 16]),
    ring=st.sampled_from([0, 0, 4, 8]),
    extra_work=st.sampled_from([-3, 0, 7]),
)
def test_torch_version_follows_the_definition(seed, ratio, storage_block_size, ring, extra_work):
    check_metadata(seed, "cpu", ratio=ratio, storage_block_size=storage_block_size, ring=ring, extra_work=extra_work)


@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_k_work_capacity_is_enough_and_reached(ratio):
    largest = 0
    for seed in range(300):
        batch = random_batch(seed, ratio=ratio, storage_block_size=4)
        capacity = qsa.k_work_capacity(sum(batch.query_lens), len(batch.query_lens), ratio)
        work = loop_metadata(
            batch, storage_block_size=4, compress_ratio=ratio, circular_buffer_size=0, max_k_work=capacity + 1
        )["k_work"]
        used = work.index([-1, -1])
        assert used <= capacity
        largest = max(largest, used / max(1, capacity))
    assert largest == 1


@pytest.mark.parametrize("seed", range(20))
def test_slot_mappings_agree_with_the_metadata(seed):
    batch = random_batch(seed + 1000, ratio=4, storage_block_size=4)
    if not batch.query_lens:
        return
    starts, lens, common, table = batch.tensors("cpu")
    inputs = (starts, lens, common, table)
    sizes = {"num_tokens": batch.num_tokens, "storage_block_size": 4, "compress_ratio": 4}
    own = qsa.build_metadata(*inputs, **sizes)
    out = torch.full((batch.num_tokens + 5,), 7)
    got = qsa.compressed_slot_mapping(
        own.token_to_req,
        own.logical_positions,
        common[: batch.num_tokens],
        table,
        storage_block_size=4,
        compress_ratio=4,
        out=out,
    )
    assert torch.equal(got, own.slot_mapping)
    assert bool((out[batch.num_tokens :] == -1).all())

    ring = qsa.build_metadata(*inputs, **sizes, circular_buffer_size=8)
    known = ring.logical_positions >= 0
    got = qsa.circular_slot_mapping(ring.token_to_req, ring.logical_positions, table, 8, query_start_loc=starts)
    assert torch.equal(got[known], ring.slot_mapping[known])
    assert bool((got[~known] == -1).all())
    every = qsa.circular_slot_mapping(ring.token_to_req, ring.logical_positions, table, 8)
    assert torch.equal(every[got >= 0], got[got >= 0])
    block = table[:, 0].long()[ring.token_to_req.long()]
    assert torch.equal(every >= 0, known & (block >= 0))


def test_canonical_rope_positions():
    one = torch.tensor([5, 6], dtype=torch.int32)
    assert qsa.canonical_rope_positions(one).tolist() == [[[5, 5, 5]], [[6, 6, 6]]]
    assert qsa.canonical_rope_positions(one.unsqueeze(0)).tolist() == [[[5, 5, 5]], [[6, 6, 6]]]
    three = torch.tensor([[1, 2], [3, 4], [5, 6]])
    got = qsa.canonical_rope_positions(three)
    assert got.tolist() == [[[1, 3, 5]], [[2, 4, 6]]]
    assert got.dtype == torch.int64
    for wrong in (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(4), torch.zeros(1, 3, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="positions must be"):
            qsa.canonical_rope_positions(wrong)


I32 = torch.int32
GOOD = {
    "query_start_loc": torch.tensor([0, 2, 3], dtype=I32),
    "seq_lens": torch.tensor([4, 9], dtype=I32),
    "slot_mapping": torch.arange(3),
    "block_table": torch.zeros(2, 3, dtype=I32),
    "num_tokens": 3,
    "storage_block_size": 4,
    "compress_ratio": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": torch.zeros(2, dtype=I32)}, r"query_start_loc must be \[requests \+ 1\]"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int64)}, "query_start_loc must be int32"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be int32"),
        ({"block_table": torch.zeros(3, 3, dtype=I32)}, r"block_table must be \[2, any\]"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, r"slot_mapping must be int64 \[at least num_tokens = 3"),
        ({"slot_mapping": torch.zeros(3, dtype=I32)}, "slot_mapping must be int64"),
        ({"num_tokens": -1}, "num_tokens must be an int of at least 0"),
        ({"storage_block_size": 0}, "storage_block_size must be an int of at least 1"),
        ({"compress_ratio": 0}, "compress_ratio must be an int of at least 1"),
        ({"circular_buffer_size": -1}, "circular_buffer_size must be an int of at least 0"),
        ({"max_k_work": -1}, "max_k_work must be an int of at least 0"),
        ({"buffers": qsa.QSAMetadata.allocate(2, 0, "cpu")}, r"buffers.token_to_req must be .* \[at least 3\]"),
        (
            {"buffers": qsa.QSAMetadata.allocate(3, 4, "cpu"), "max_k_work": 5},
            r"buffers.k_work must be .*at least 5, 2",
        ),
    ],
)
def test_wrong_arguments_say_what_is_expected(change, message):
    with pytest.raises(ValueError, match=message):
        qsa.build_metadata(**(GOOD | change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, p, t: qsa.circular_slot_mapping(r, p, t, 0), "circular_buffer_size must be at least 1"),
        (lambda r, p, t: qsa.circular_slot_mapping(r.long(), p, t, 4), "token_to_req must be int32"),
        (lambda r, p, t: qsa.circular_slot_mapping(r, p[:1], t, 4), "logical_positions must be int64"),
        (lambda r, p, t: qsa.circular_slot_mapping(r, p, t[0], 4), "block_table must be int32"),
        (
            lambda r, p, t: qsa.circular_slot_mapping(r, p, t, 4, out=torch.zeros(1, dtype=torch.int64)),
            "out must be int64",
        ),
        (
            lambda r, p, t: qsa.circular_slot_mapping(r, p, t, 4, query_start_loc=torch.zeros(2, dtype=I32)),
            r"query_start_loc must be int32 \[3\], one entry more than block_table has rows",
        ),
        (
            lambda r, p, t: qsa.compressed_slot_mapping(r, p, p[:1], t, storage_block_size=4, compress_ratio=4),
            "slot_mapping must be int64",
        ),
    ],
)
def test_slot_mappings_check_their_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, dtype=I32), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=I32))

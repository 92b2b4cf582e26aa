"""Parts of the packed prefill on CPU tensors. Run by test_prefill_parts_interpreter.py under TRITON_INTERPRET=1."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import assert_close, make_case, solve, without_hidden_keys
from prefill_part_cases import assert_same, chunk, joined, prefill_in_parts

from tpoverlap.attention.triton import prefill as module
from tpoverlap.attention.triton.configs import PrefillTiles

TILES = PrefillTiles(32, 32, 4, 1, part_keys=64)
# Rows whose last key is the last of a part, the first of the next, and rows of many parts.
REQUESTS = [(3, 64), (3, 66), (20, 200), (0, 0), (0, 90), (9, 4), (1, 129), (33, 70)]
OPTIONS = [{}, {"sliding_window": 37}, {"sliding_window": 100, "softcap": 5.0}, {"softcap": 2.0, "scale": 0.3}]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize(
    ("options", "block_size", "dtype"),
    [
        (OPTIONS[0], 16, torch.float32),
        (OPTIONS[0], 5, torch.float16),
        (OPTIONS[1], 64, torch.float32),
        (OPTIONS[2], 16, torch.float16),
        (OPTIONS[2], 5, torch.float32),
        (OPTIONS[3], 16, torch.float16),
    ],
)
def test_rows_of_several_parts(options, block_size, dtype):
    case = make_case(1, REQUESTS, q_heads=2, kv_heads=1, block_size=block_size, dtype=dtype)
    got = prefill_in_parts(case, TILES, **options)
    assert_close(got, solve(case, **options), ROUNDING[dtype])
    padded = dataclasses.replace(case, q=torch.cat([case.q, torch.full_like(case.q[:3], torch.nan)]))
    out, lse = prefill_in_parts(padded, TILES, **options)
    assert_same((out[:-3], lse[:-3]), got)
    assert (out[-3:] == 0).all()
    assert lse[-3:].isneginf().all()


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float16), ({"sliding_window": 100}, torch.float32)])
def test_a_row_has_the_same_bits_alone_in_chunks_and_in_any_launch(monkeypatch, options, dtype):
    """Chunks begin with a tile: NumPy's products, unlike a GPU's, depend on the place of a row."""
    requests = [(3, 66), (20, 200), (0, 0), (33, 70)]
    case = make_case(2, requests, q_heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    whole = prefill_in_parts(case, TILES, **options)
    starts = case.cu_seqlens_q.tolist()
    for request, cut in ((1, 16), (3, 16), (3, 32)):
        count = requests[request][0]
        pieces = [prefill_in_parts(chunk(case, request, a, b), TILES, **options) for a, b in ((0, cut), (cut, count))]
        rows = slice(starts[request], starts[request + 1])
        assert_same(joined(pieces), (whole[0][rows], whole[1][rows]))
    # One tile a launch; one program for all parts of a tile, and one for each; a KV head after the other.
    assert_same(prefill_in_parts(case, TILES, max_partial_bytes=1, **options), whole)
    wide = dataclasses.replace(case, block_table=torch.nn.functional.pad(case.block_table, (0, 20), value=2**31 - 1))
    monkeypatch.setattr(module, "_PROGRAMS_A_MULTIPROCESSOR", 1)
    assert_same(prefill_in_parts(wide, TILES, **options), whole)
    monkeypatch.setattr(module, "_PROGRAMS_A_MULTIPROCESSOR", 10**6)
    monkeypatch.setattr(module, "_SHARED_BYTES", 0)
    assert_same(prefill_in_parts(case, TILES, **options), whole)


def test_a_row_of_one_part_has_the_bits_of_no_parts():
    case = make_case(3, [(40, 80)], q_heads=2, kv_heads=1, dtype=torch.float16)
    out, lse = prefill_in_parts(case, dataclasses.replace(TILES, part_keys=1 << 20))
    parts = prefill_in_parts(case, TILES)
    # Rows of the first 24 tokens see at most 64 keys; the last 8 of them share a tile with rows of two parts.
    assert_same((parts[0][:24], parts[1][:24]), (out[:24], lse[:24]))
    assert not torch.equal(parts[0][24:], out[24:])


@pytest.mark.parametrize("window", [1, 37, 70])
def test_keys_before_every_window_may_be_gone(window):
    case = make_case(4, [(1, 190), (40, 171), (0, 40)], q_heads=2, kv_heads=1)
    left = without_hidden_keys(case, window)
    got = prefill_in_parts(left, TILES, sliding_window=window)
    assert_close(got, solve(case, sliding_window=window), 1e-5)


def test_no_rows_and_no_blocks():
    case = make_case(5, [(3, 200)], q_heads=2, kv_heads=1)
    none = dataclasses.replace(case, q=case.q[:0], cu_seqlens_q=torch.zeros(2, dtype=torch.int32))
    assert prefill_in_parts(none, TILES)[0].shape == (0, 2, 64)
    empty = dataclasses.replace(case, k_cache=case.k_cache[:0], v_cache=case.v_cache[:0])
    out, lse = prefill_in_parts(empty, TILES)
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_wrong_ids_lengths_and_starts_reach_nothing_outside():
    case = make_case(6, [(3, 40), (1, 20)], q_heads=2, kv_heads=1)
    good = prefill_in_parts(case, TILES)
    case.block_table[1] = torch.tensor([2**31 - 1, -(2**31), 10**6, -5])[: case.block_table.shape[1]]
    case.seq_lens[1] = 2**31 - 1
    bad = prefill_in_parts(case, TILES)
    assert torch.equal(bad[0][:3], good[0][:3])
    for starts in ((0, 3, 1000), (2**31 - 1, 0, 2**31 - 1), (-7, 90, -1000)):
        prefill_in_parts(dataclasses.replace(case, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32)), TILES)

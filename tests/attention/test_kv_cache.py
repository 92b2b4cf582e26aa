"""Block tables, slots and cache writes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap.attention import (
    BlockTables,
    CacheFullError,
    allocate_kv_cache,
    decode_splits,
    slot_mapping,
    write_kv,
)


def test_blocks_grow_are_exclusive_and_come_back():
    tables = BlockTables(6, 4)
    tables.grow("a", 5)
    tables.grow("b", 4)
    tables.grow("a", 8)
    tables.grow("a", 3)
    assert len(tables.blocks("a")) == 2
    assert len(tables.blocks("b")) == 1
    assert not set(tables.blocks("a")) & set(tables.blocks("b"))
    assert tables.num_free == 3
    with pytest.raises(CacheFullError, match=r"needs 4 more blocks of 4 keys for 17 keys and 3 are free"):
        tables.grow("b", 17)
    assert len(tables.blocks("b")) == 1
    table = tables.table(["b", "a"], device="cpu")
    assert table.dtype == torch.int32
    assert table.tolist() == [[*tables.blocks("b"), -1], [*tables.blocks("a")]]
    assert tables.table(["b"], device="cpu", width=5).shape == (1, 5)
    assert tables.table([], device="cpu").shape == (0, 1)
    tables.free("a")
    assert tables.num_free == 5
    with pytest.raises(KeyError):
        tables.free("a")
    with pytest.raises(ValueError):
        tables.grow("b", -1)
    with pytest.raises(ValueError):
        BlockTables(0, 4)


@settings(max_examples=50, deadline=None)
@given(
    block_size=st.integers(1, 9),
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=4),
)
def test_slots_follow_the_table(block_size, requests):
    tables = BlockTables(400, block_size)
    starts, lens, want = [0], [], []
    for r, (count, prefix) in enumerate(requests):
        tables.grow(r, prefix + count)
        starts.append(starts[-1] + count)
        lens.append(prefix + count)
        blocks = tables.blocks(r)
        want += [blocks[p // block_size] * block_size + p % block_size for p in range(prefix, prefix + count)]
    table = tables.table(range(len(requests)), device="cpu")
    got = slot_mapping(table, starts, lens, block_size)
    assert got.dtype == torch.int64
    assert got.tolist() == want


def test_slots_of_missing_blocks_are_negative_and_bad_geometry_is_refused():
    table = torch.tensor([[3, -1]], dtype=torch.int32)
    assert slot_mapping(table, [0, 4], [6], 4).tolist() == [14, 15, -1, -1]
    with pytest.raises(ValueError, match="at least as many keys as tokens"):
        slot_mapping(table, [0, 4], [3], 4)
    with pytest.raises(ValueError, match="at most 8"):
        slot_mapping(table, [0, 4], [9], 4)
    with pytest.raises(ValueError, match="query_start_loc"):
        slot_mapping(table, [0, 4, 5], [9], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_writes_go_to_their_slots_and_nowhere_else(dtype):
    gen = torch.Generator().manual_seed(4)
    k_cache, v_cache = allocate_kv_cache(5, 4, 2, 8, dtype=dtype, device="cpu")
    assert (k_cache == 0).all()
    k_cache.fill_(math.nan)
    v_cache.fill_(math.nan)
    k, v = torch.randn(2, 6, 2, 8, generator=gen).to(dtype)
    slots = torch.tensor([19, -1, 0, 7, -5, 8])
    write_kv(k, v, k_cache, v_cache, slots)
    for cache, x in ((k_cache, k), (v_cache, v)):
        flat = cache.reshape(20, 2, 8)
        kept = slots >= 0
        assert torch.equal(flat[slots[kept]], x[kept])
        others = [s for s in range(20) if s not in slots.tolist()]
        assert flat[others].isnan().all()


def test_wrong_writes_are_refused():
    k_cache, v_cache = allocate_kv_cache(5, 4, 2, 8, dtype=torch.float32, device="cpu")
    x = torch.zeros(3, 2, 8)
    slots = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="below 20"):
        write_kv(x, x, k_cache, v_cache, torch.tensor([0, 1, 20]))
    with pytest.raises(ValueError, match="int64"):
        write_kv(x, x, k_cache, v_cache, slots.int())
    with pytest.raises(ValueError, match="v must be"):
        write_kv(x, x[:, :1], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="k must be"):
        write_kv(x.half(), x, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="alike"):
        write_kv(x, x, k_cache, v_cache[:4], slots)
    with pytest.raises(ValueError, match="at least 1"):
        allocate_kv_cache(5, 0, 2, 8, dtype=torch.float32, device="cpu")


def test_long_caches_get_more_splits():
    assert [decode_splits(keys) for keys in (1, 4096, 4097, 65_536, 65_537, 10**7)] == [16, 16, 64, 64, 128, 128]
    for keys in (0, -1, True, 4096.5):
        with pytest.raises(ValueError, match=f"max_keys must be an int at least 1, got {keys}"):
            decode_splits(keys)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.errors import ConfigError
from tpoverlap.model.sharding import shard_heads, shard_range

RANKS = st.integers(1, 8)


@given(kv_heads=st.integers(1, 12), group_size=st.integers(1, 9), ranks=RANKS)
def test_every_query_head_has_one_place_beside_its_own_kv_head(kv_heads: int, group_size: int, ranks: int) -> None:
    shards = shard_heads(kv_heads * group_size, kv_heads, ranks)
    assert len(shards) == ranks
    assert len({(len(shard.query_heads), len(shard.kv_heads)) for shard in shards}) == 1
    placed = [head for shard in shards for head in shard.query_heads if head is not None]
    assert placed == list(range(kv_heads * group_size))
    for shard in shards:
        width = len(shard.query_heads) // len(shard.kv_heads)
        assert width * len(shard.kv_heads) == len(shard.query_heads)
        for index, head in enumerate(shard.query_heads):
            if head is not None:
                assert shard.kv_heads[index // width] == head // group_size


@given(kv_heads=st.integers(1, 7), group_size=st.integers(1, 9), ranks=RANKS)
def test_more_ranks_than_groups_get_the_fewest_query_heads_per_rank(kv_heads: int, group_size: int, ranks: int) -> None:
    shard = shard_heads(kv_heads * group_size, kv_heads, ranks)[0]
    if ranks <= kv_heads:
        assert len(shard.kv_heads) == -(-kv_heads // ranks)
        assert len(shard.query_heads) == len(shard.kv_heads) * group_size
        return
    alternatives = []
    for width in range(1, group_size + 1):  # query heads a sub-group; all ways to cut a group evenly
        units = kv_heads * -(-group_size // width)
        alternatives.append((-(-units // ranks) * width, -(-units // ranks)))
    assert (len(shard.query_heads), len(shard.kv_heads)) == min(alternatives)


def test_three_groups_of_three_on_two_ranks_pad_one_group() -> None:
    first, second = shard_heads(9, 3, 2)
    assert first.query_heads == (0, 1, 2, 3, 4, 5)
    assert first.kv_heads == (0, 1)
    assert second.query_heads == (6, 7, 8, None, None, None)
    assert second.kv_heads == (2, None)


def test_three_groups_of_three_on_eight_ranks_cut_each_group_in_two() -> None:
    shards = shard_heads(9, 3, 8)
    assert [shard.query_heads for shard in shards] == [
        (0, 1),
        (2, None),
        (3, 4),
        (5, None),
        (6, 7),
        (8, None),
        (None, None),
        (None, None),
    ]
    assert [shard.kv_heads for shard in shards] == [(0,), (0,), (1,), (1,), (2,), (2,), (None,), (None,)]


@given(size=st.integers(1, 500), ranks=RANKS, multiple=st.sampled_from([1, 16]))
def test_ranges_cover_a_dimension_once_in_equal_padded_sizes(size: int, ranks: int, multiple: int) -> None:
    shards = [shard_range(size, ranks, rank, multiple=multiple) for rank in range(ranks)]
    assert [index for shard in shards for index in range(shard.start, shard.stop)] == list(range(size))
    padded = {shard.size for shard in shards}
    assert len(padded) == 1
    width = padded.pop()
    assert width % multiple == 0
    assert size <= width * ranks < size + multiple * ranks
    assert all(shard.stop - shard.start <= width and shard.start % multiple == 0 for shard in shards)


@pytest.mark.parametrize(("query_heads", "kv_heads", "ranks"), [(9, 2, 1), (0, 1, 1), (4, 0, 1), (4, 2, 0)])
def test_head_counts_that_do_not_fit_are_named(query_heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"{query_heads} query heads and {kv_heads} KV heads on {ranks} ranks"):
        shard_heads(query_heads, kv_heads, ranks)


@pytest.mark.parametrize(("size", "ranks", "rank"), [(0, 2, 0), (8, 0, 0), (8, 2, 2), (8, 2, -1)])
def test_ranges_that_do_not_exist_are_named(size: int, ranks: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} of {ranks}"):
        shard_range(size, ranks, rank)

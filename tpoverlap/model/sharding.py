"""Which part of a model each tensor-parallel rank holds: pure functions of shapes, the same answer on every rank.

Every rank holds the same shapes. Where a size does not divide, the surplus is padding that contributes exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpoverlap.errors import ConfigError

# NVFP4 scales 16 consecutive values of a row together, so a slice of a row-parallel weight must start on such a border.
INTERMEDIATE_MULTIPLE = 16


@dataclass(frozen=True)
class HeadShard:
    """Attention heads of one rank; None is a padding head, whose weights are zero.

    kv_heads: key/value heads, in order. query_heads: as many for each of them, those of the first one first.
    """

    query_heads: tuple[int | None, ...]
    kv_heads: tuple[int | None, ...]


@dataclass(frozen=True)
class RangeShard:
    """Entries ``start`` to ``stop`` of a dimension, padded at the end to ``size``, which is the same on every rank.

    A rank past the end of the dimension has the range 0 to 0.
    """

    start: int
    stop: int
    size: int


def shard_heads(num_query_heads: int, num_kv_heads: int, ranks: int) -> tuple[HeadShard, ...]:
    """Distributes grouped-query attention heads over ``ranks``; entry i is rank i's part.

    A KV group (one KV head and the query heads that share it) stays whole while there are at least as many groups as
    ranks. With more ranks than groups, each group is cut into sub-groups that replicate its KV head: into as many as
    make the query heads of a rank fewest, and into the fewest of those, since a KV head costs cache. Groups, and query
    heads in a group, are padded until all ranks hold the same shape.

    Errors: ConfigError for counts that are not positive or query heads that are no multiple of the KV heads.
    """
    if min(num_query_heads, num_kv_heads, ranks) < 1 or num_query_heads % num_kv_heads:
        raise ConfigError(
            f"{num_query_heads} query heads and {num_kv_heads} KV heads on {ranks} ranks are not supported: "
            "give positive counts, query heads a multiple of KV heads"
        )
    group_size = num_query_heads // num_kv_heads

    def units_per_rank(parts: int) -> int:
        return _ceil_div(num_kv_heads * parts, ranks)

    def query_heads_per_rank(parts: int) -> int:
        return units_per_rank(parts) * _ceil_div(group_size, parts)

    parts = 1 if ranks <= num_kv_heads else min(range(1, group_size + 1), key=query_heads_per_rank)
    per_part = _ceil_div(group_size, parts)
    per_rank = units_per_rank(parts)

    units: list[tuple[int | None, list[int | None]]] = []
    for kv_head in range(num_kv_heads):
        heads = range(kv_head * group_size, (kv_head + 1) * group_size)
        for part in range(parts):
            mine: list[int | None] = list(heads[part * per_part : (part + 1) * per_part])
            units.append((kv_head, mine + [None] * (per_part - len(mine))))
    units += [(None, [None] * per_part)] * (per_rank * ranks - len(units))
    return tuple(
        HeadShard(
            query_heads=tuple(head for _, heads in units[first : first + per_rank] for head in heads),
            kv_heads=tuple(kv_head for kv_head, _ in units[first : first + per_rank]),
        )
        for first in range(0, per_rank * ranks, per_rank)
    )


def shard_range(size: int, ranks: int, rank: int, *, multiple: int = 1) -> RangeShard:
    """Rank ``rank``'s contiguous part of a dimension that is padded to a multiple of ``multiple`` x ``ranks``.

    Errors: ConfigError unless size, ranks and multiple are positive and 0 <= rank < ranks.
    """
    if min(size, ranks, multiple) < 1 or not 0 <= rank < ranks:
        raise ConfigError(
            f"rank {rank} of {ranks} for a dimension of {size} in multiples of {multiple} is not supported: "
            "give positive sizes and 0 <= rank < ranks"
        )
    per_rank = _ceil_div(size, multiple * ranks) * multiple
    start, stop = rank * per_rank, min((rank + 1) * per_rank, size)
    return RangeShard(start, stop, per_rank) if start < size else RangeShard(0, 0, per_rank)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)

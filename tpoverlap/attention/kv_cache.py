"""The paged key-value cache of a runner: storage, blocks of each request, slots of tokens, and the write.

Slot s of a cache is row s % block_size of block s // block_size (PagedAttention, Kwon et al. 2023). A negative slot
means "not stored".
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from tpoverlap.errors import TpOverlapError


class CacheFullError(TpOverlapError):
    """A request needs more cache blocks than are free."""


def allocate_kv_cache(
    num_blocks: int, block_size: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed key and value caches of one layer, each [num_blocks, block_size, kv_heads, head_dim].

    One storage holds both, block by block. Raises ValueError for a size below 1.
    """
    if min(num_blocks, block_size, kv_heads, head_dim) < 1:
        raise ValueError(
            f"num_blocks, block_size, kv_heads and head_dim must be at least 1, got "
            f"{num_blocks}, {block_size}, {kv_heads}, {head_dim}"
        )
    storage = torch.zeros(num_blocks, 2, block_size, kv_heads, head_dim, dtype=dtype, device=device)
    return storage[:, 0], storage[:, 1]


class BlockTables:
    """Hands the blocks of a cache to requests as they grow, and makes the tensors that attention and writes take.

    All layers of a model share one; it lives on the host and owns no device memory.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request owns."""
        return len(self._free)

    def blocks(self, request: Hashable) -> tuple[int, ...]:
        """Blocks of the request, in the order of its keys."""
        return tuple(self._blocks.get(request, ()))

    def grow(self, request: Hashable, length: int) -> None:
        """Give the request the blocks that ``length`` keys need; a request is known from its first call on.

        Raises CacheFullError, having changed nothing, where too few are free.
        """
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        owned = self._blocks.get(request, [])
        missing = -(-length // self.block_size) - len(owned)
        if missing > len(self._free):
            raise CacheFullError(
                f"request {request!r} needs {missing} more blocks of {self.block_size} keys for {length} keys and "
                f"{len(self._free)} are free: free a finished request or allocate a larger cache"
            )
        self._blocks[request] = owned + [self._free.pop() for _ in range(missing)]

    def free(self, request: Hashable) -> None:
        """Take all blocks back. Raises KeyError for a request that owns nothing here."""
        if request not in self._blocks:
            raise KeyError(f"request {request!r} is not in the cache")
        self._free.extend(reversed(self._blocks.pop(request)))

    def table(self, requests: Sequence[Hashable], *, device: torch.device | str, width: int = 0) -> torch.Tensor:
        """int32 [len(requests), max_blocks] on ``device``, padded with -1, at least ``width`` columns."""
        rows = [self._blocks[request] for request in requests]
        columns = max([width, 1, *map(len, rows)])
        return torch.tensor(
            [row + [-1] * (columns - len(row)) for row in rows], dtype=torch.int32, device=device
        ).reshape(len(rows), columns)


def slot_mapping(
    block_table: torch.Tensor, query_start_loc: Sequence[int], seq_lens: Sequence[int], block_size: int
) -> torch.Tensor:
    """Slots of the new tokens of packed requests: int64 [query_start_loc[-1]] on the device of ``block_table``.

    block_table int32 [requests, max_blocks]; query_start_loc (requests + 1) and seq_lens (requests) are host ints as in
    :class:`~tpoverlap.microbatch.batch.Batch`: the n tokens of a request are its last n keys. Raises ValueError where
    they disagree or a token lies past the table.
    """
    starts = list(query_start_loc)
    if (
        len(starts) != len(seq_lens) + 1
        or len(seq_lens) != block_table.shape[0]
        or starts[0]
        or starts != sorted(starts)
    ):
        raise ValueError(
            f"query_start_loc must ascend from 0 with requests + 1 entries and seq_lens have one a request, "
            f"got {starts} and {list(seq_lens)} for {block_table.shape[0]} rows of block_table"
        )
    request_ids: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    for request, length in enumerate(seq_lens):
        count = starts[request + 1] - starts[request]
        if count > length or length > block_table.shape[1] * block_size:
            raise ValueError(
                f"request {request} brings {count} tokens and then has {length} keys: give at least as many keys as "
                f"tokens, and at most {block_table.shape[1] * block_size} (columns of block_table x block_size)"
            )
        positions.append(torch.arange(length - count, length))
        request_ids.append(torch.full((count,), request))
    if not positions:
        return torch.empty(0, dtype=torch.int64, device=block_table.device)
    position = torch.cat(positions).to(block_table.device)
    request_id = torch.cat(request_ids).to(block_table.device)
    block = block_table[request_id, position // block_size].long()
    return torch.where(block < 0, -1, block * block_size + position % block_size)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store the keys and values of tokens in their slots.

    k, v [tokens, kv_heads, head_dim] in the dtype of the caches [blocks, block_size, kv_heads, head_dim]; any
    strides. slots int64 [tokens], distinct where not negative; negative: the token is not stored. Raises ValueError
    where these do not fit and, on CPU, for a slot past the cache.
    """
    _check_write(k, v, k_cache, v_cache, slots)
    _write_torch(k, v, k_cache, v_cache, slots)


def _check_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache and v_cache must be [blocks, block_size, kv_heads, head_dim] alike, got {tuple(k_cache.shape)} "
            f"{k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [tokens], got {slots.dtype} {tuple(slots.shape)}")
    for name, x in (("k", k), ("v", v)):
        expected = (slots.shape[0], *k_cache.shape[2:])
        if tuple(x.shape) != expected or x.dtype != k_cache.dtype:
            raise ValueError(f"{name} must be {k_cache.dtype} {expected}, got {x.dtype} {tuple(x.shape)}")
    if len({x.device for x in (k, v, k_cache, v_cache, slots)}) > 1:
        raise ValueError(f"k, v, the caches and slots must be on one device, got {k.device}, {k_cache.device}, ...")


def _write_torch(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    block_size = k_cache.shape[1]
    stored = slots >= 0
    if not bool(stored.all()):
        slots, k, v = slots[stored], k[stored], v[stored]
    if slots.numel() and int(slots.max()) >= k_cache.shape[0] * block_size:
        raise ValueError(
            f"slots must be below {k_cache.shape[0] * block_size} (blocks x block_size), got {int(slots.max())}"
        )
    at = (slots // block_size, slots % block_size)
    k_cache[at] = k
    v_cache[at] = v

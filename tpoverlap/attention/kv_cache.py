"""The paged key-value cache of a runner: storage, blocks of each request, slots of tokens.

Slot s of a cache is row s % block_size of block s // block_size (PagedAttention, Kwon et al. 2023). A negative slot
means "not stored".
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from tpoverlap.attention.arguments import check_count
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


def decode_splits(max_keys: int) -> int:
    """``num_splits`` of :func:`~tpoverlap.attention.paged_decode` for requests of up to ``max_keys`` keys.

    16 up to 4096 keys, 64 up to 65536, 128 beyond: few long rows leave most of a GPU idle with fewer (on an H200, 4 of
    32768 keys and 2 KV heads take twice as long with 16 as with 64, one of 131072 keys 1.5 to 1.7 times as long with 64
    as with 128), and many shorter ones take 1.01 to 1.09 times as long with 128 as with 64. A row's bits depend on it,
    so it follows from what a cache can hold, never from a batch. ValueError unless an int from 1.
    """
    check_count("max_keys", max_keys, 1)
    return 16 if max_keys <= 4096 else 64 if max_keys <= 65_536 else 128


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

"""QSA metadata of a batch: whose token is where, what it may see, and where its keys go.

Built on the device from what an engine keeps there, without a host synchronization, in one launch on CUDA, so it can be
captured. Padding is -1 everywhere, except in counts and request indices, where it is 0. Divisions floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpoverlap.attention.qsa import metadata_torch
from tpoverlap.cuda.triton_dispatch import triton_serves


@dataclass(frozen=True)
class QSAMetadata:
    """One entry a token, and the work list of the keys' compression.

    token_to_req: int32, the token's request; padding 0. logical_positions: int64, the token's position in its request;
    padding -1. visible_blocks: int32, complete groups of compress_ratio keys that the token may see; padding 0.
    slot_mapping: int64, where the owner stores the token, -1: nowhere. k_work: int32 [max_k_work, 2], (request, index
    in request) of every group that this batch completes, at least one item a request with tokens; then (-1, -1).
    """

    token_to_req: torch.Tensor
    logical_positions: torch.Tensor
    visible_blocks: torch.Tensor
    slot_mapping: torch.Tensor
    k_work: torch.Tensor

    @classmethod
    def allocate(cls, num_tokens: int, max_k_work: int, device: torch.device | str) -> QSAMetadata:
        """Uninitialized tensors for that many tokens and work items, as the ``buffers`` of :func:`build_metadata`."""
        return cls(
            token_to_req=torch.empty(num_tokens, dtype=torch.int32, device=device),
            logical_positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
            visible_blocks=torch.empty(num_tokens, dtype=torch.int32, device=device),
            slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
            k_work=torch.empty(max_k_work, 2, dtype=torch.int32, device=device),
        )

    def first(self, num_tokens: int, max_k_work: int) -> QSAMetadata:
        """Views of the first entries."""
        return QSAMetadata(
            token_to_req=self.token_to_req[:num_tokens],
            logical_positions=self.logical_positions[:num_tokens],
            visible_blocks=self.visible_blocks[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            k_work=self.k_work[:max_k_work],
        )


def k_work_capacity(num_tokens: int, num_requests: int, compress_ratio: int) -> int:
    """Work items that a batch of that size can need."""
    return (num_tokens + (compress_ratio - 1) * num_requests) // compress_ratio


def build_metadata(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    *,
    num_tokens: int,
    storage_block_size: int,
    compress_ratio: int,
    circular_buffer_size: int = 0,
    max_k_work: int = 0,
    buffers: QSAMetadata | None = None,
) -> QSAMetadata:
    """The metadata of tokens 0 .. num_tokens - 1, those from query_start_loc[-1] on being padding.

    query_start_loc: int32 [requests + 1], ascending from 0. seq_lens: int32 [requests], the new tokens counted in (a
    sequence shorter than its query gives negative positions). slot_mapping: int64 [>= num_tokens], the engine's own
    slots. block_table: int32 [requests, any width], the owner's blocks. storage_block_size: rows of a block.

    Slots of the owner. circular_buffer_size C > 0 (one block a request, column 0 of the table): block * C + pos % C for
    the last C tokens of a query and blocks >= 0. Else compress_ratio r > 1: for tokens that end a group ((pos + 1) % r
    == 0), whose engine slot is >= 0 and whose block exists, block * storage_block_size + row of compressed key pos //
    r. Else the engine's slots.

    buffers: tensors to fill instead of new ones, at least as long. max_k_work: rows of k_work, which may exceed the
    need (:func:`k_work_capacity` bounds it) and cuts the list where it falls short. Raises ValueError for wrong shapes,
    dtypes and sizes.
    """
    _check_sizes(num_tokens, storage_block_size, compress_ratio, circular_buffer_size, max_k_work)
    requests = check_batch(query_start_loc, seq_lens, block_table)
    device = query_start_loc.device
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or slot_mapping.shape[0] < num_tokens:
        raise ValueError(
            f"slot_mapping must be int64 [at least num_tokens = {num_tokens}], "
            f"got {slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    if slot_mapping.device != device:
        raise ValueError(f"slot_mapping must be on the device of query_start_loc, {device}, got {slot_mapping.device}")
    if buffers is None:
        result = QSAMetadata.allocate(num_tokens, max_k_work, device)
    else:
        _check_buffers(buffers, num_tokens, max_k_work, device)
        result = buffers.first(num_tokens, max_k_work)
    sizes = metadata_torch.Sizes(requests, num_tokens, storage_block_size, compress_ratio, circular_buffer_size)
    inputs = (query_start_loc, seq_lens, slot_mapping, block_table)
    outputs = (
        result.token_to_req,
        result.logical_positions,
        result.visible_blocks,
        result.slot_mapping,
        result.k_work,
    )
    if triton_serves(query_start_loc):
        from tpoverlap.attention.qsa import metadata_launch

        metadata_launch.build(*inputs, sizes, outputs)
    else:
        metadata_torch.build(*inputs, sizes, outputs)
    return result


def circular_slot_mapping(
    token_to_req: torch.Tensor,
    logical_positions: torch.Tensor,
    block_table: torch.Tensor,
    circular_buffer_size: int,
    *,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [tokens]: slots in a ring of circular_buffer_size rows a request, as in :func:`build_metadata`.

    token_to_req: int32 [tokens]. logical_positions: int64 [tokens], negative: padding. query_start_loc: int32
    [requests + 1]; with None every token has a slot, not only the last circular_buffer_size ones of each query. out:
    int64, at least one entry a token; what lies behind is filled with -1, and the written part is returned.
    """
    if circular_buffer_size < 1:
        raise ValueError(f"circular_buffer_size must be at least 1, got {circular_buffer_size}")
    _check_tokens(token_to_req, logical_positions, block_table)
    wanted = (block_table.shape[0] + 1,)
    if query_start_loc is not None and (query_start_loc.shape != wanted or query_start_loc.dtype != torch.int32):
        raise ValueError(
            f"query_start_loc must be int32 {list(wanted)}, one entry more than block_table has rows, "
            f"got {query_start_loc.dtype} {list(query_start_loc.shape)}"
        )
    slots = metadata_torch.circular_slots(
        token_to_req.long(), logical_positions, block_table, circular_buffer_size, query_start_loc
    )
    return _written(slots.masked_fill(logical_positions < 0, -1), out)


def compressed_slot_mapping(
    token_to_req: torch.Tensor,
    logical_positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    *,
    storage_block_size: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [tokens]: slots of the groups that tokens complete, as in :func:`build_metadata`.

    slot_mapping: int64 [tokens], the engine's slots; negative: not stored. The rest as :func:`circular_slot_mapping`.
    """
    _check_sizes(0, storage_block_size, compress_ratio, 0, 0)
    _check_tokens(token_to_req, logical_positions, block_table)
    if slot_mapping.shape != token_to_req.shape or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping must be int64 [{token_to_req.shape[0]}], got {slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    slots = metadata_torch.compressed_slots(
        token_to_req.long(), logical_positions, slot_mapping, block_table, storage_block_size, compress_ratio
    )
    return _written(slots, out)


def canonical_rope_positions(positions: torch.Tensor) -> torch.Tensor:
    """[tokens] or [1 or 3, tokens] integer positions -> int64 [tokens, 1, 3], a single axis standing for all three."""
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    if positions.dim() != 2 or positions.shape[0] not in (1, 3):
        raise ValueError(f"positions must be [tokens] or [1 or 3, tokens], got {list(positions.shape)}")
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise ValueError(f"positions must be integers, got {positions.dtype}")
    return positions.long().expand(3, -1).t().unsqueeze(1).contiguous()


def check_batch(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, *, table_name: str = "block_table"
) -> int:
    """How many requests there are; raises ValueError unless the three fit together."""
    if seq_lens.dim() != 1 or query_start_loc.shape != (seq_lens.shape[0] + 1,):
        raise ValueError(
            f"query_start_loc must be [requests + 1] and seq_lens [requests], "
            f"got {list(query_start_loc.shape)} and {list(seq_lens.shape)}"
        )
    requests = seq_lens.shape[0]
    if block_table.dim() != 2 or block_table.shape[0] != requests:
        raise ValueError(f"{table_name} must be [{requests}, any], got {list(block_table.shape)}")
    for name, tensor in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens), (table_name, block_table)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
        if tensor.device != query_start_loc.device:
            raise ValueError(
                f"{name} must be on the device of query_start_loc, {query_start_loc.device}, got {tensor.device}"
            )
    return requests


def _check_sizes(
    num_tokens: int, storage_block_size: int, compress_ratio: int, circular_buffer_size: int, max_k_work: int
) -> None:
    for name, value, low in (
        ("num_tokens", num_tokens, 0),
        ("storage_block_size", storage_block_size, 1),
        ("compress_ratio", compress_ratio, 1),
        ("circular_buffer_size", circular_buffer_size, 0),
        ("max_k_work", max_k_work, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name} must be an int of at least {low}, got {value!r}")


def _check_buffers(buffers: QSAMetadata, num_tokens: int, max_k_work: int, device: torch.device) -> None:
    for name, dtype, rows, tail in (
        ("token_to_req", torch.int32, num_tokens, ()),
        ("logical_positions", torch.int64, num_tokens, ()),
        ("visible_blocks", torch.int32, num_tokens, ()),
        ("slot_mapping", torch.int64, num_tokens, ()),
        ("k_work", torch.int32, max_k_work, (2,)),
    ):
        tensor = getattr(buffers, name)
        fits = tensor.dim() == 1 + len(tail) and tensor.shape[0] >= rows and tensor.shape[1:] == tail
        if not fits or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            shape = f"[at least {', '.join(str(n) for n in (rows, *tail))}]"
            raise ValueError(
                f"buffers.{name} must be contiguous {dtype} {shape} on {device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )


def _check_tokens(token_to_req: torch.Tensor, logical_positions: torch.Tensor, block_table: torch.Tensor) -> None:
    if token_to_req.dim() != 1 or token_to_req.dtype != torch.int32:
        raise ValueError(f"token_to_req must be int32 [tokens], got {token_to_req.dtype} {list(token_to_req.shape)}")
    if logical_positions.shape != token_to_req.shape or logical_positions.dtype != torch.int64:
        raise ValueError(
            f"logical_positions must be int64 [{token_to_req.shape[0]}], "
            f"got {logical_positions.dtype} {list(logical_positions.shape)}"
        )
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise ValueError(
            f"block_table must be int32 [requests, any], got {block_table.dtype} {list(block_table.shape)}"
        )


def _written(slots: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return slots
    tokens = slots.shape[0]
    if out.dim() != 1 or out.shape[0] < tokens or out.dtype != torch.int64 or out.device != slots.device:
        raise ValueError(
            f"out must be int64 [at least {tokens}] on {slots.device}, "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    out[:tokens] = slots
    out[tokens:] = -1
    return out[:tokens]

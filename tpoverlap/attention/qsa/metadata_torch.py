"""QSA metadata in torch operations, on any device and without a host synchronization; arguments have been checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """Host integers of a build, as :func:`tpoverlap.attention.qsa.build_metadata` documents them."""

    requests: int
    num_tokens: int
    storage_block_size: int
    compress_ratio: int
    circular_buffer_size: int


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""token_to_req, logical_positions, visible_blocks, slot_mapping, k_work."""


def build(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    sizes: Sizes,
    outputs: Outputs,
) -> None:
    token_to_req, logical_positions, visible_blocks, slots, k_work = outputs
    ratio = sizes.compress_ratio
    common = slot_mapping[: sizes.num_tokens]
    if not sizes.requests:
        token_to_req.zero_()
        visible_blocks.zero_()
        logical_positions.fill_(-1)
        k_work.fill_(-1)
        if sizes.circular_buffer_size or ratio > 1:
            slots.fill_(-1)
        else:
            slots.copy_(common)
        return
    starts, lens = query_start_loc.long(), seq_lens.long()
    query_lens = starts.diff()
    tokens = torch.arange(sizes.num_tokens, device=starts.device)
    real = tokens < starts[-1]
    # A token's request is the number of requests that end at or before it: empty ones own none.
    request = torch.searchsorted(starts[1:].contiguous(), tokens, right=True).clamp_(max=sizes.requests - 1)
    position = (lens - query_lens - starts[:-1])[request] + tokens
    visible = torch.minimum(_floor_div(position + 1, ratio), _floor_div(lens, ratio)[request]).clamp_(min=0)
    token_to_req.copy_(request.masked_fill(~real, 0))
    logical_positions.copy_(position.masked_fill(~real, -1))
    visible_blocks.copy_(visible.masked_fill(~real, 0))
    if sizes.circular_buffer_size:
        size = sizes.circular_buffer_size
        slots.copy_(circular_slots(request, position, block_table, size, query_start_loc).masked_fill(~real, -1))
    elif ratio > 1:
        own = compressed_slots(request, position, common, block_table, sizes.storage_block_size, ratio)
        slots.copy_(own.masked_fill(~real, -1))
    else:
        slots.copy_(common)
    if k_work.shape[0]:
        _fill_k_work(query_lens, lens, ratio, k_work)


def circular_slots(
    request: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    size: int,
    query_start_loc: torch.Tensor | None,
) -> torch.Tensor:
    if not block_table.numel():
        return torch.full_like(position, -1)
    block = block_table[:, 0].long()[request]
    stored = block >= 0
    if query_start_loc is not None:
        end = query_start_loc.long()[1:][request]
        stored &= end - torch.arange(position.shape[0], device=end.device) <= size
    return (block * size + position.remainder(size)).masked_fill(~stored, -1)


def compressed_slots(
    request: torch.Tensor,
    position: torch.Tensor,
    common: torch.Tensor,
    block_table: torch.Tensor,
    storage_block_size: int,
    ratio: int,
) -> torch.Tensor:
    width = block_table.shape[1]
    if not block_table.numel():
        return torch.full_like(position, -1)
    compressed = _floor_div(position, ratio)
    column = _floor_div(compressed, storage_block_size)
    block = block_table[request, column.clamp(0, width - 1)].long()
    stored = ((position + 1).remainder(ratio) == 0) & (common >= 0) & (column >= 0) & (column < width) & (block >= 0)
    return (block * storage_block_size + compressed.remainder(storage_block_size)).masked_fill(~stored, -1)


def _fill_k_work(query_lens: torch.Tensor, lens: torch.Tensor, ratio: int, k_work: torch.Tensor) -> None:
    completed = _floor_div(lens, ratio) - _floor_div(lens - query_lens, ratio)
    ends = torch.where(query_lens > 0, completed.clamp(min=1), 0).cumsum(0)
    items = torch.arange(k_work.shape[0], device=ends.device)
    request = torch.searchsorted(ends, items, right=True)
    first = torch.nn.functional.pad(ends, (1, 0))[request]
    work = torch.stack([request, items - first], dim=1)
    k_work.copy_(work.masked_fill((items >= ends[-1]).unsqueeze(1), -1))


def _floor_div(a: torch.Tensor, b: int) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")

"""Compressed keys: what they are, and how a layer keeps raw keys and writes the groups that a batch completes."""

from __future__ import annotations

import torch

from tpoverlap.attention.qsa.caches import POSITION_AXES, CompressedKeyCache, KeyStateCache
from tpoverlap.attention.qsa.key_transform import KeyTransform
from tpoverlap.attention.qsa.metadata import check_batch
from tpoverlap.cuda.triton_dispatch import triton_serves

E4M3_MAX = 448.0


def compress_keys(raw_keys: torch.Tensor, first_positions: torch.Tensor, transform: KeyTransform) -> torch.Tensor:
    """BF16 [groups, head_size]: one key for each group of raw keys [groups, compress_ratio, head_size].

    Mean in FP32, summed in order, rounded to BF16; RMSNorm with weight + 1 in FP32, rounded to BF16; NeoX rotary at the
    group's first position in FP32, rounded to BF16. first_positions: integers [groups, 3], the rotary axes, or
    [groups], one for all three; each within cos_sin.
    """
    head_size = transform.norm_weight.shape[0]
    if raw_keys.dim() != 3 or raw_keys.shape[2] != head_size or raw_keys.shape[1] < 1:
        raise ValueError(f"raw_keys must be [groups, compress_ratio, {head_size}], got {list(raw_keys.shape)}")
    groups = raw_keys.shape[0]
    if tuple(first_positions.shape) not in ((groups,), (groups, POSITION_AXES)):
        raise ValueError(
            f"first_positions must be [{groups}] or [{groups}, {POSITION_AXES}], got {list(first_positions.shape)}"
        )
    total = raw_keys[:, 0].float()
    for row in range(1, raw_keys.shape[1]):
        total = total + raw_keys[:, row].float()
    mean = (total / raw_keys.shape[1]).bfloat16().float()
    scale = torch.rsqrt(mean.square().mean(dim=1, keepdim=True) + transform.eps)
    key = (mean * scale * (transform.norm_weight.float() + 1)).bfloat16().float()

    half = transform.cos_sin.shape[1] // 2
    axes = first_positions.long()
    axes = (axes.unsqueeze(1) if axes.dim() == 1 else axes).expand(groups, POSITION_AXES)
    cos_sin = transform.cos_sin.float()[axes]
    sections = transform.mrope_section or (half, 0, 0)
    axis = torch.repeat_interleave(torch.arange(POSITION_AXES), torch.tensor(sections)).to(raw_keys.device)
    cos, sin = (part.gather(1, axis.expand(groups, 1, half)).squeeze(1) for part in cos_sin.split(half, dim=2))
    first, second = key[:, :half], key[:, half : 2 * half]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin, key[:, 2 * half :]], dim=1)
    return rotated.bfloat16()


def update_key_caches(
    keys: torch.Tensor,
    rope_positions: torch.Tensor,
    state: KeyStateCache,
    compressed: CompressedKeyCache,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_block_table: torch.Tensor,
    state_slots: torch.Tensor,
    compressed_slots: torch.Tensor,
    k_work: torch.Tensor,
    transform: KeyTransform,
) -> None:
    """Write the compressed keys of the groups that a batch completes, and keep the last raw keys of each request.

    keys: BF16 [tokens, head_size], raw keys of the batch. rope_positions: int64 [tokens, 1, 3] as
    :func:`canonical_rope_positions` gives them. state, compressed: bound caches of one layer. state_slots,
    compressed_slots: slot_mapping of the two owners' metadata (:func:`build_metadata`), k_work that of the compressed
    owner. state_block_table: int32 [requests, any], column 0 the request's ring.

    A group that began in earlier batches takes its first raw keys, and the rotary axes of its first position, from the
    request's ring; without cached positions that position is the group's index times compress_ratio. The request's
    first work item reads the ring and then overwrites it, which is why every request with tokens has one.
    """
    args = (
        keys,
        rope_positions,
        state,
        compressed,
        query_start_loc,
        seq_lens,
        state_block_table,
        state_slots,
        compressed_slots,
        k_work,
        transform,
    )
    _check_update(*args)
    if triton_serves(keys):
        from tpoverlap.attention.qsa import compression_launch

        compression_launch.update(*args)
    else:
        _update_torch(*args)


def _update_torch(
    keys: torch.Tensor,
    rope_positions: torch.Tensor,
    state: KeyStateCache,
    compressed: CompressedKeyCache,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_block_table: torch.Tensor,
    state_slots: torch.Tensor,
    compressed_slots: torch.Tensor,
    k_work: torch.Tensor,
    transform: KeyTransform,
) -> None:
    """Without Triton: selects the work by a mask, which on a GPU synchronizes."""
    ratio, capacity = compressed.compress_ratio, state.capacity
    request, index = k_work[k_work[:, 0] >= 0].long().unbind(1)
    starts, lengths = query_start_loc.long(), seq_lens.long()
    prefix = (lengths - starts.diff())[request]
    group = torch.div(prefix, ratio, rounding_mode="floor") + index
    last_token = starts[request] + (group + 1) * ratio - 1 - prefix
    complete = (group + 1) * ratio <= lengths[request]
    slot = compressed_slots[last_token.clamp(0, max(0, keys.shape[0] - 1))].masked_fill(~complete, -1)
    request, prefix, group, slot = (t[slot >= 0] for t in (request, prefix, group, slot))

    position = (group * ratio).unsqueeze(1) + torch.arange(ratio, device=keys.device)
    token = starts[request].unsqueeze(1) + position - prefix.unsqueeze(1)
    is_new = position >= prefix.unsqueeze(1)
    ring = state_block_table[:, 0].long()[request].clamp(min=0).unsqueeze(1)
    kept = state.key_cache[ring, position.remainder(capacity)]
    raw = torch.where(is_new.unsqueeze(2), keys[token.clamp(min=0)], kept)
    new_axes = rope_positions[token[:, 0].clamp(min=0), 0]
    if state.rope_position_cache is None:
        old_axes = position[:, :1].expand(-1, POSITION_AXES)
    else:
        old_axes = state.rope_position_cache[ring[:, 0], position[:, 0].remainder(capacity)]
    result = compress_keys(raw, torch.where(is_new[:, :1], new_axes, old_axes), transform)
    if compressed.dtype == torch.float8_e4m3fn:
        codes = result.float().clamp(-E4M3_MAX, E4M3_MAX).to(compressed.dtype)
        compressed.key_cache.view(torch.uint8)[slot // compressed.rows, slot % compressed.rows] = codes.view(
            torch.uint8
        )
    else:
        compressed.key_cache[slot // compressed.rows, slot % compressed.rows] = result

    stored = (state_slots >= 0).nonzero().flatten()
    block, row = state_slots[stored] // capacity, state_slots[stored] % capacity
    state.key_cache[block, row] = keys[stored]
    if state.rope_position_cache is not None:
        state.rope_position_cache[block, row] = rope_positions[stored, 0]


def _check_update(
    keys: torch.Tensor,
    rope_positions: torch.Tensor,
    state: KeyStateCache,
    compressed: CompressedKeyCache,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_block_table: torch.Tensor,
    state_slots: torch.Tensor,
    compressed_slots: torch.Tensor,
    k_work: torch.Tensor,
    transform: KeyTransform,
) -> None:
    head_size = state.head_size
    if (compressed.head_size, compressed.compress_ratio) != (head_size, state.compress_ratio):
        raise ValueError(
            f"the caches belong to different layers: head_size {head_size} and {compressed.head_size}, "
            f"compress_ratio {state.compress_ratio} and {compressed.compress_ratio}"
        )
    if keys.dim() != 2 or keys.shape[1] != head_size or keys.dtype != torch.bfloat16 or keys.stride(1) != 1:
        raise ValueError(
            f"keys must be bfloat16 [tokens, {head_size}] with contiguous rows, got {keys.dtype} {list(keys.shape)}"
        )
    tokens = keys.shape[0]
    if rope_positions.shape != (tokens, 1, POSITION_AXES) or rope_positions.dtype != torch.int64:
        raise ValueError(
            f"rope_positions must be int64 [{tokens}, 1, {POSITION_AXES}], "
            f"got {rope_positions.dtype} {list(rope_positions.shape)}"
        )
    for name, slots in (("state_slots", state_slots), ("compressed_slots", compressed_slots)):
        if slots.shape != (tokens,) or slots.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [{tokens}], got {slots.dtype} {list(slots.shape)}")
    if k_work.dim() != 2 or k_work.shape[1] != 2 or k_work.dtype != torch.int32:
        raise ValueError(f"k_work must be int32 [items, 2], got {k_work.dtype} {list(k_work.shape)}")
    if transform.norm_weight.shape != (head_size,):
        raise ValueError(f"norm_weight must be [{head_size}], got {list(transform.norm_weight.shape)}")
    requests = check_batch(query_start_loc, seq_lens, state_block_table, table_name="state_block_table")
    if requests and not state_block_table.shape[1]:
        raise ValueError(f"state_block_table must be [{requests}, at least 1], got [{requests}, 0]")
    for name, tensor in (
        ("rope_positions", rope_positions),
        ("the storage of state", state.storage),
        ("the storage of compressed", compressed.storage),
        ("query_start_loc", query_start_loc),
        ("state_slots", state_slots),
        ("compressed_slots", compressed_slots),
        ("k_work", k_work),
        ("norm_weight", transform.norm_weight),
        ("cos_sin", transform.cos_sin),
    ):
        if tensor.device != keys.device:
            raise ValueError(f"{name} must be on the device of keys, {keys.device}, got {tensor.device}")

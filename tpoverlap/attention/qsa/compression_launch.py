"""The launch of the kernel that updates a layer's side caches."""

from __future__ import annotations

import torch

from tpoverlap.attention.qsa.caches import CompressedKeyCache, KeyStateCache
from tpoverlap.attention.qsa.compression_kernel import update_caches
from tpoverlap.attention.qsa.key_transform import KeyTransform
from tpoverlap.cuda.triton_dispatch import on_device_of


def update(
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
    if not k_work.shape[0] or not keys.shape[0]:
        return
    cos_sin = transform.cos_sin if transform.cos_sin.stride(1) == 1 else transform.cos_sin.contiguous()
    half = cos_sin.shape[1] // 2
    section = transform.mrope_section or (half, 0, 0)
    state_keys = state.key_cache.view(torch.int16)
    positions = state.rope_position_cache
    e4m3 = compressed.dtype == torch.float8_e4m3fn
    compressed_keys = compressed.key_cache.view(torch.uint8 if e4m3 else torch.int16)
    with on_device_of(keys):
        update_caches[(k_work.shape[0],)](
            keys.view(torch.int16),
            keys.stride(0),
            rope_positions,
            rope_positions.stride(0),
            rope_positions.stride(2),
            state_keys,
            state_keys.stride(0),
            state_keys.stride(1),
            rope_positions if positions is None else positions,
            0 if positions is None else positions.stride(0),
            0 if positions is None else positions.stride(1),
            compressed_keys,
            compressed_keys.stride(0),
            compressed_keys.stride(1),
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            state_block_table,
            state_block_table.stride(0),
            state_slots.contiguous(),
            compressed_slots.contiguous(),
            k_work.contiguous(),
            transform.norm_weight.contiguous(),
            cos_sin,
            cos_sin.stride(0),
            transform.eps,
            HEAD=state.head_size,
            HEAD_PADDED=1 << (state.head_size - 1).bit_length(),
            HALF=half,
            RATIO=state.compress_ratio,
            CAPACITY=state.capacity,
            COMPRESSED_ROWS=compressed.rows,
            SECTION_0=section[0],
            SECTION_1=section[1],
            POSITIONS=positions is not None,
            E4M3=e4m3,
            num_warps=1,
        )

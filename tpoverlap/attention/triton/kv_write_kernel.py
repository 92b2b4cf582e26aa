# mypy: disable-error-code="no-untyped-def"
"""The cache write, with the rotary embedding on the way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy_heads(
    source,
    target,
    source_dim,
    target_dim,
    source_heads,
    target_heads,
    cos,
    sin,
    inside,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Copy the heads that are ``inside``, rotating their first 2 * HALF elements. ``*_heads``: their offsets."""
    if HALF > 0:
        pairs = tl.arange(0, HALF_PAD)
        mask = inside[:, None] & (pairs < HALF)[None, :]
        first_at = source + source_heads[:, None] + pairs.to(tl.int64)[None, :] * source_dim
        first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(first_at + HALF * source_dim, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
        rotated_first = (first * c - second * s).to(target.dtype.element_ty)
        rotated_second = (second * c + first * s).to(target.dtype.element_ty)
        target_at = target + target_heads[:, None] + pairs.to(tl.int64)[None, :] * target_dim
        # In place, a thread's pair may be another thread's to read: all have read before one writes.
        tl.debug_barrier()
        tl.store(target_at, rotated_first, mask=mask)
        tl.store(target_at + HALF * target_dim, rotated_second, mask=mask)
    if 2 * HALF < HEAD_DIM:
        dims = tl.arange(0, DIM)
        rest = inside[:, None] & ((dims >= 2 * HALF) & (dims < HEAD_DIM))[None, :]
        offsets = dims.to(tl.int64)[None, :]
        values = tl.load(source + source_heads[:, None] + offsets * source_dim, mask=rest, other=0.0)
        tl.store(target + target_heads[:, None] + offsets * target_dim, values, mask=rest)


@triton.jit(do_not_specialize=["capacity"])
def write_kv_kernel(
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    capacity,
    block_size,
    q_token,
    q_head,
    q_dim,
    k_token,
    k_head,
    k_dim,
    v_token,
    v_head,
    v_dim,
    k_cache_block,
    k_cache_row,
    k_cache_head,
    k_cache_dim,
    v_cache_block,
    v_cache_row,
    v_cache_head,
    v_cache_dim,
    slots_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Grid (tokens, tiles of HEADS query heads and then of KV heads). Q_HEADS 0: no query is rotated."""
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lanes = tl.arange(0, HEADS)
    if tile < Q_TILES:
        heads = tile * HEADS + lanes
        at = token * q_token + heads.to(tl.int64) * q_head
        _copy_heads(
            q,
            q,
            q_dim,
            q_dim,
            at,
            at,
            cos + token * HALF,
            sin + token * HALF,
            heads < Q_HEADS,
            2 * HALF,
            DIM,
            HALF,
            HALF_PAD,
        )
    else:
        slot = tl.load(slots + token * slots_stride)
        if (slot >= 0) & (slot < capacity):
            heads = (tile - Q_TILES) * HEADS + lanes
            wide = heads.to(tl.int64)
            block = slot // block_size
            row = slot % block_size
            _copy_heads(
                k,
                k_cache,
                k_dim,
                k_cache_dim,
                token * k_token + wide * k_head,
                block * k_cache_block + row * k_cache_row + wide * k_cache_head,
                cos + token * HALF,
                sin + token * HALF,
                heads < KV_HEADS,
                HEAD_DIM,
                DIM,
                HALF,
                HALF_PAD,
            )
            _copy_heads(
                v,
                v_cache,
                v_dim,
                v_cache_dim,
                token * v_token + wide * v_head,
                block * v_cache_block + row * v_cache_row + wide * v_cache_head,
                cos,
                sin,
                heads < KV_HEADS,
                HEAD_DIM,
                DIM,
                0,
                HALF_PAD,
            )

# mypy: disable-error-code="no-untyped-def"
"""Packed paged prefill: one launch for all query tokens of all requests."""

from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.attention.triton.device import (
    find_request,
    finish_rows,
    key_offsets,
    load_block_ids,
    soft_capped,
    softmax_step,
)


@triton.jit
def _attend(
    q,
    k_head,
    v_head,
    ids,
    key,
    first,
    end,
    position,
    acc,
    peak,
    total,
    multiplier,
    tanh_factor,
    window,
    num_blocks,
    k_block,
    k_row,
    k_dim,
    v_block,
    v_row,
    v_dim,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys key .. key + BLOCK_N - 1; unless MASKED all rows see all of them.

    Some row sees the keys first .. end - 1. The others are zeros, not what a block holds or a table entry leads to:
    0 times NaN would reach the accumulator.
    """
    keys = key + tl.arange(0, BLOCK_N)
    seen = keys < end
    if WINDOW:
        seen &= keys >= first
    dims = tl.arange(0, DIM).to(tl.int64)
    k_at = (
        k_head + key_offsets(ids, key, num_blocks, k_block, k_row, BLOCK_SIZE, BLOCK_N)[:, None] + dims[None, :] * k_dim
    )
    v_at = (
        v_head + key_offsets(ids, key, num_blocks, v_block, v_row, BLOCK_SIZE, BLOCK_N)[:, None] + dims[None, :] * v_dim
    )
    if MASKED:
        k = tl.load(k_at, mask=seen[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == DIM:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        scores = soft_capped(scores, tanh_factor, k.dtype == tl.float32)
    if MASKED:
        visible = (keys[None, :] <= position[:, None]) & (keys < end)[None, :]
        if WINDOW:
            visible &= keys[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    weights, decay, peak, total = softmax_step(scores, multiplier, peak, total)
    if MASKED:
        v = tl.load(v_at, mask=seen[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == DIM:
        v = tl.load(v_at)
    else:
        v = tl.load(v_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(do_not_specialize=["window", "requests", "tokens", "columns", "num_blocks", "table_row"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    block_table,
    cu_seqlens_q,
    seq_lens,
    multiplier,
    tanh_factor,
    window,
    requests,
    tokens,
    columns,
    num_blocks,
    q_token,
    q_head,
    q_dim,
    k_block,
    k_row,
    k_head,
    k_dim,
    v_block,
    v_row,
    v_head,
    v_dim,
    out_token,
    out_head,
    out_dim,
    table_row,
    table_column,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """FlashAttention-2's forward loop over a block table, GQA packed.

    Grid (tokens * GROUP // BLOCK_M + requests + 1, kv_heads). A request's rows are its tokens times the GROUP query
    heads of a KV head, token outermost, cut into tiles of BLOCK_M from its first token on; the tokens past the last
    request are one more request without keys. A row meets its keys in blocks of BLOCK_N from 0 (or the first block of
    its window), whatever else is in the tile: its bits depend on nothing but itself and its keys.
    """
    # The last tiles of a causal request see the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    request = find_request(cu_seqlens_q, requests, tile, GROUP, BLOCK_M)
    # Entries are clamped, so wrong ones cannot lead out of the tensors.
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + request), 0), tokens)
    count = tl.minimum(tl.load(cu_seqlens_q + request + 1, mask=request < requests, other=tokens), tokens) - start
    first_row = (tile - start * GROUP // BLOCK_M - request) * BLOCK_M
    if (first_row < 0) | (first_row >= count * GROUP):
        return
    length = tl.load(seq_lens + request, mask=request < requests, other=0)
    length = tl.minimum(tl.maximum(length, 0), columns * BLOCK_SIZE)

    rows = first_row + tl.arange(0, BLOCK_M)
    valid = rows < count * GROUP
    token = (start + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, DIM).to(tl.int64)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + dims[None, :] * q_dim, mask=inside, other=0.0
    )
    position = length - count + rows // GROUP
    first_position = length - count + first_row // GROUP
    last_row = tl.minimum(first_row + BLOCK_M, count * GROUP) - 1
    end = length - count + last_row // GROUP + 1
    first = 0
    begin = 0
    full = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    if WINDOW:
        first = tl.maximum(first_position + 1 - window, 0)
        begin = first // BLOCK_N * BLOCK_N
        full = begin

    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_base = k_cache + kv_head * k_head
    v_base = v_cache + kv_head * v_head
    table = block_table + request.to(tl.int64) * table_row
    next_ids = load_block_ids(table, table_column, begin, end, BLOCK_SIZE, BLOCK_N)
    for key in tl.range(begin, full, BLOCK_N):
        ids = next_ids
        next_ids = load_block_ids(table, table_column, key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        acc, peak, total = _attend(
            q_rows,
            k_base,
            v_base,
            ids,
            key,
            first,
            end,
            position,
            acc,
            peak,
            total,
            multiplier,
            tanh_factor,
            window,
            num_blocks,
            k_block,
            k_row,
            k_dim,
            v_block,
            v_row,
            v_dim,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            SOFTCAP,
            MASKED=False,
        )
    for key in tl.range(full, end, BLOCK_N):
        ids = next_ids
        next_ids = load_block_ids(table, table_column, key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        acc, peak, total = _attend(
            q_rows,
            k_base,
            v_base,
            ids,
            key,
            first,
            end,
            position,
            acc,
            peak,
            total,
            multiplier,
            tanh_factor,
            window,
            num_blocks,
            k_block,
            k_row,
            k_dim,
            v_block,
            v_row,
            v_dim,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            SOFTCAP,
            MASKED=True,
        )

    result, row_lse = finish_rows(acc, peak, total)
    tl.store(
        out + token[:, None] * out_token + head[:, None] * out_head + dims[None, :] * out_dim,
        result.to(out.dtype.element_ty),
        mask=inside,
    )
    if STORE_LSE:
        tl.store(lse + token * (tl.num_programs(1) * GROUP) + head, row_lse, mask=valid)

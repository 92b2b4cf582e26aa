# mypy: disable-error-code="no-untyped-def"
"""Packed paged prefill: one launch for all query tokens of all requests, and the merge of long rows' parts."""

from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.attention.triton.device import finish_rows, soft_capped, softmax_step
from tpoverlap.attention.triton.prefill_tile import find_tile, find_unit


@triton.jit
def _block_ids(table, table_column, key, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache blocks of the keys key .. key + BLOCK_N - 1, a multiple of BLOCK_N: one id where all are in one block, else
    one a key.

    ``table`` points to the request's row of the block table; entries of blocks from ``end`` on are not read. Loops
    carry the ids of the next step: a load whose address hangs on a load of the same step would cost the software
    pipeline half of its depth.
    """
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        column = key // BLOCK_SIZE
        seen = key < end
    elif BLOCK_N % BLOCK_SIZE == 0:
        # Columns that differ by constants, of which the compiler makes one address.
        column = key // BLOCK_SIZE + lanes // BLOCK_SIZE
        seen = column * BLOCK_SIZE < end
    else:
        column = (key + lanes) // BLOCK_SIZE
        seen = key + lanes < end
    return tl.load(table + column.to(tl.int64) * table_column, mask=seen, other=0)


@triton.jit
def _block_rows(key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int64 [BLOCK_N] rows of the keys in their blocks; the same for every step where blocks are no longer than one."""
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        rows = key % BLOCK_SIZE + lanes
    elif BLOCK_N % BLOCK_SIZE == 0:
        rows = lanes % BLOCK_SIZE
    else:
        rows = (key + lanes) % BLOCK_SIZE
    return rows.to(tl.int64)


@triton.jit
def _block_offsets(ids, num_blocks, stride):
    """Offsets of blocks in a cache. Ids are clamped into it: a wrong one reads wrong keys, never foreign memory."""
    last = (num_blocks - 1).to(tl.uint32)
    return tl.minimum(ids.to(tl.uint32, bitcast=True), last).to(tl.int64) * stride


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
    rows = _block_rows(key, BLOCK_SIZE, BLOCK_N)
    # What does not change from step to step comes first: it is computed once.
    k_at = k_head + (rows * k_row)[:, None] + dims[None, :] * k_dim
    v_at = v_head + (rows * v_row)[:, None] + dims[None, :] * v_dim
    if BLOCK_SIZE % BLOCK_N == 0:
        k_at += _block_offsets(ids, num_blocks, k_block)
        v_at += _block_offsets(ids, num_blocks, v_block)
    else:
        k_at += _block_offsets(ids, num_blocks, k_block)[:, None]
        v_at += _block_offsets(ids, num_blocks, v_block)[:, None]
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


@triton.jit(
    do_not_specialize=[
        "window",
        "requests",
        "tokens",
        "columns",
        "num_blocks",
        "table_row",
        "first_tile",
        "tiles",
        "slots",
        "max_parts",
        "neighbours",
    ]
)
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    partial,
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
    first_tile,
    tiles,
    slots,
    max_parts,
    neighbours,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """FlashAttention-2's forward loop over a block table, GQA packed, with key ranges cut at multiples of PART_KEYS.

    Grid (slots * tiles * KV_HEADS), for the tiles from ``first_tile`` on. Slot s serves parts s, s + slots, ... of its
    tile. A tile whose rows see keys of one part only is stored at once. The others leave
    ``partial`` accumulators [tiles, KV_HEADS, max_parts, BLOCK_M, HEAD_DIM] and behind them peaks and sums [tiles,
    KV_HEADS, max_parts, BLOCK_M, 2] to the merge.

    A row meets its keys in blocks of BLOCK_N from 0 (or the first block of its window) and in parts that begin at fixed
    keys, whatever else is in the tile: its bits depend on nothing but itself and its keys. A part of which it sees
    nothing adds nothing, and a merge of one part changes nothing.
    """
    slot, tile, kv_head = find_unit(tl.program_id(0), tiles, neighbours, KV_HEADS)
    request, start, first_row, row_count, origin, first, end, first_part, parts = find_tile(
        first_tile + tile,
        cu_seqlens_q,
        seq_lens,
        window,
        requests,
        tokens,
        columns,
        GROUP,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        PART_KEYS,
        WINDOW,
    )
    if (row_count <= 0) | (slot >= parts):
        return

    lanes = tl.arange(0, BLOCK_M)
    valid = lanes < row_count
    rows = first_row + lanes
    token = (start + rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, DIM).to(tl.int64)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = tl.load(
        q + (token * q_token + head.to(tl.int64) * q_head)[:, None] + dims[None, :] * q_dim, mask=inside, other=0.0
    )
    position = origin + rows // GROUP
    unmasked_to = tl.maximum(origin + first_row // GROUP + 1, 0) // BLOCK_N * BLOCK_N
    k_base = k_cache + kv_head.to(tl.int64) * k_head
    v_base = v_cache + kv_head.to(tl.int64) * v_head
    table = block_table + request.to(tl.int64) * table_row
    for part in tl.range(slot, parts, slots):
        begin = tl.maximum((first_part + part) * PART_KEYS, first // BLOCK_N * BLOCK_N)
        part_end = tl.minimum((first_part + part + 1) * PART_KEYS, end)
        full = begin
        if not WINDOW:
            full = tl.maximum(tl.minimum(unmasked_to, part_end), begin)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        next_ids = _block_ids(table, table_column, begin, part_end, BLOCK_SIZE, BLOCK_N)
        for key in tl.range(begin, full, BLOCK_N):
            ids = next_ids
            next_ids = _block_ids(table, table_column, key + BLOCK_N, part_end, BLOCK_SIZE, BLOCK_N)
            acc, peak, total = _attend(
                q_rows,
                k_base,
                v_base,
                ids,
                key,
                first,
                part_end,
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
        for key in tl.range(full, part_end, BLOCK_N):
            ids = next_ids
            next_ids = _block_ids(table, table_column, key + BLOCK_N, part_end, BLOCK_SIZE, BLOCK_N)
            acc, peak, total = _attend(
                q_rows,
                k_base,
                v_base,
                ids,
                key,
                first,
                part_end,
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
        if parts == 1:
            result, row_lse = finish_rows(acc, peak, total)
            tl.store(
                out + (token * out_token + head.to(tl.int64) * out_head)[:, None] + dims[None, :] * out_dim,
                result.to(out.dtype.element_ty),
                mask=inside,
            )
            if STORE_LSE:
                tl.store(lse + token * (KV_HEADS * GROUP) + head, row_lse, mask=valid)
        else:
            units = tiles.to(tl.int64) * KV_HEADS * max_parts
            at = (tile.to(tl.int64) * KV_HEADS + kv_head) * max_parts + part
            state = partial + units * (BLOCK_M * HEAD_DIM) + at * (BLOCK_M * 2)
            part_rows = partial + at * (BLOCK_M * HEAD_DIM)
            tl.store(part_rows + lanes[:, None] * HEAD_DIM + tl.arange(0, DIM)[None, :], acc, mask=inside)
            tl.store(state + lanes * 2, peak, mask=valid)
            tl.store(state + lanes * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["window", "requests", "tokens", "columns", "first_tile", "tiles", "max_parts"])
def merge_prefill_kernel(
    out,
    lse,
    partial,
    cu_seqlens_q,
    seq_lens,
    window,
    requests,
    tokens,
    columns,
    first_tile,
    tiles,
    max_parts,
    out_token,
    out_head,
    out_dim,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    STORE_LSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the parts of tiles that have several, in the order of their keys and by explicit FMAs.

    Grid (BLOCK_M // ROWS * KV_HEADS * tiles): ROWS rows a program. Arguments as above.
    """
    program = tl.program_id(0)
    first_lane = program % (BLOCK_M // ROWS) * ROWS
    kv_head = program // (BLOCK_M // ROWS) % KV_HEADS
    tile = program // (BLOCK_M // ROWS * KV_HEADS)
    _, start, first_row, row_count, _, _, _, _, parts = find_tile(
        first_tile + tile,
        cu_seqlens_q,
        seq_lens,
        window,
        requests,
        tokens,
        columns,
        GROUP,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        PART_KEYS,
        WINDOW,
    )
    if (first_lane >= row_count) | (parts == 1):
        return
    lanes = first_lane + tl.arange(0, ROWS)
    valid = lanes < row_count
    dims = tl.arange(0, DIM)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    first_unit = (tile.to(tl.int64) * KV_HEADS + kv_head) * max_parts
    states = partial + tiles.to(tl.int64) * KV_HEADS * max_parts * (BLOCK_M * HEAD_DIM) + first_unit * (BLOCK_M * 2)
    accs = partial + first_unit * (BLOCK_M * HEAD_DIM)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.range(0, parts):
        peak = tl.maximum(peak, tl.load(states + part * (BLOCK_M * 2) + lanes * 2, mask=valid, other=float("-inf")))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.range(0, parts):
        state = states + part * (BLOCK_M * 2) + lanes * 2
        weight = tl.exp2(tl.load(state, mask=valid, other=float("-inf")) - shift)
        total = tl.fma(weight, tl.load(state + 1, mask=valid, other=0.0), total)
        at = accs + part * (BLOCK_M * HEAD_DIM) + lanes[:, None] * HEAD_DIM + dims[None, :]
        rows_of_part = tl.load(at, mask=inside, other=0.0)
        acc = tl.fma(tl.broadcast_to(weight[:, None], [ROWS, DIM]), rows_of_part, acc)
    result, row_lse = finish_rows(acc, peak, total)
    rows = first_row + lanes
    token = (start + rows // GROUP).to(tl.int64)
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    tl.store(
        out + (token * out_token + head * out_head)[:, None] + dims.to(tl.int64)[None, :] * out_dim,
        result.to(out.dtype.element_ty),
        mask=inside,
    )
    if STORE_LSE:
        tl.store(lse + token * (KV_HEADS * GROUP) + head, row_lse, mask=valid)

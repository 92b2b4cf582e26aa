# mypy: disable-error-code="no-untyped-def"
"""The Triton scorer: 64 keys by 16 lanes a product, each lane a head of one of the segment's rows.

A program owns one segment of rows and every parts-th tile of 64 keys. SEGMENT 1 is the paged scorer, where only the
lanes of one row hold a query. With more rows in the other lanes the instructions are the same: a lane's product does
not depend on other lanes, and the heads of a row are summed inside its own group of 4 lanes. So every segment length
gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

KEYS = tl.constexpr(64)
DIM = tl.constexpr(128)


@triton.jit
def _decode_e4m3(codes, DTYPE: tl.constexpr):
    """uint8 e4m3 codes -> FP16 or BF16, exactly, by integer operations (fp8e4nv does not compile below sm_89)."""
    bits = codes.to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    half = tl.where((bits & 0x7F) == 0x7F, float("nan"), half)
    return half.to(DTYPE)


@triton.jit
def _key_rows(
    key_cache, block_stride, row_stride, num_blocks, table, table_stride, column, live, STORAGE_BLOCK: tl.constexpr
):
    """Pointers to the keys of the columns, and which of them are live and in a block of the cache."""
    block = tl.load(table + (column // STORAGE_BLOCK).to(tl.int64) * table_stride, mask=live, other=-1)
    inside = live & (block >= 0) & (block < num_blocks)
    rows = key_cache + block.to(tl.int64) * block_stride + (column % STORAGE_BLOCK).to(tl.int64) * row_stride
    return rows, inside


@triton.jit
def _segment_of(row, num_rows, token_to_req, request, SEGMENT: tl.constexpr, WINDOW: tl.constexpr):
    """How many rows the segment that starts at this row has; 0 if no segment starts here."""
    lane = tl.arange(0, WINDOW)
    in_run = row * 0
    searching = 1
    while searching != 0:
        before = row - in_run - 1 - lane
        same = (before >= 0) & (tl.load(token_to_req + before, mask=before >= 0, other=-1) == request)
        ends = tl.min(tl.where(same, WINDOW, lane))
        in_run += ends
        searching = (ends == WINDOW).to(tl.int32)
    ahead = tl.arange(0, SEGMENT)
    inside = row + ahead < num_rows
    follows = inside & (tl.load(token_to_req + row + ahead, mask=inside, other=-1) == request)
    count = tl.min(tl.where(follows, SEGMENT, ahead))
    return tl.where(in_run % SEGMENT == 0, count, 0)


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_blocks", "skip_visible", "scale"])
def score_segments(
    q,
    q_row_stride,
    q_head_stride,
    key_cache,
    block_stride,
    row_stride,
    num_blocks,
    block_table,
    table_row_stride,
    table_stride,
    token_to_req,
    visible_blocks,
    scores,
    score_stride,
    num_rows,
    num_columns,
    skip_visible,
    scale,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    SEGMENT: tl.constexpr,
    STORAGE_BLOCK: tl.constexpr,
    E4M3: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    request = tl.load(token_to_req + row)
    count = 1
    if SEGMENT > 1:
        count = _segment_of(row, num_rows, token_to_req, request, SEGMENT, WINDOW)

    # Lanes are (row of the segment, head); 4 heads give 4 rows, other head counts one row.
    GROUP: tl.constexpr = 4 if HEADS <= 4 else LANES
    member = tl.arange(0, LANES // GROUP)
    visible = tl.load(visible_blocks + row + member, mask=member < count, other=0)
    visible = tl.where(visible > skip_visible, tl.minimum(visible, num_columns), 0).to(tl.int32)
    tiles = tl.cdiv(tl.max(visible), KEYS)
    if part < tiles:
        lane = tl.arange(0, LANES)
        dims = tl.arange(0, DIMS)
        q_rows = q + (row + lane // GROUP).to(tl.int64) * q_row_stride + (lane % GROUP) * q_head_stride
        held = ((lane // GROUP < count) & (lane % GROUP < HEADS))[None, :]
        table = block_table + request.to(tl.int64) * table_row_stride
        score_rows = scores + (row + member).to(tl.int64) * score_stride
        longest = tl.max(visible)
        queries = tl.load(q_rows[None, :] + dims[:, None], mask=held, other=0.0)
        for tile in tl.range(part, tiles, tl.num_programs(1), num_stages=STAGES):
            column = tile * KEYS + tl.arange(0, KEYS)
            rows, inside = _key_rows(
                key_cache,
                block_stride,
                row_stride,
                num_blocks,
                table,
                table_stride,
                column,
                column < longest,
                STORAGE_BLOCK,
            )
            products = tl.zeros([KEYS, LANES], tl.float32)
            for first in tl.static_range(0, DIM, DIMS):
                keys = tl.load(rows[:, None] + (first + dims)[None, :], mask=inside[:, None], other=0)
                if E4M3:
                    keys = _decode_e4m3(keys, q.dtype.element_ty)
                if DIMS < DIM:
                    queries = tl.load(q_rows[None, :] + (first + dims)[:, None], mask=held, other=0.0)
                products = tl.dot(keys, queries, products)
            # max(0, product), which keeps NaN and turns -0 into 0.
            products = tl.where(products <= 0.0, 0.0, products)
            if HEADS != GROUP:
                products = tl.where((lane % GROUP < HEADS)[None, :], products, 0.0)
            sums = tl.sum(tl.reshape(products, [KEYS, LANES // GROUP, GROUP]), 2) * scale
            sums = tl.where(inside[:, None], sums, float("-inf"))
            tl.store(score_rows[None, :] + column.to(tl.int64)[:, None], sums, mask=column[:, None] < visible[None, :])

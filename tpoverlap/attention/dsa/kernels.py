# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the DSA part. Grids are (rows, parts); a row's parts share its live range and the rest return.

Lengths are read on the device, so a launch depends on tensor shapes alone and a captured graph serves every length.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _live_range(row_starts, row_ends, row, row_repeat, HAS_STARTS: tl.constexpr):
    """int64 start (>= 0) and end of a row."""
    entry = row // row_repeat
    start = tl.full([], 0, tl.int64)
    if HAS_STARTS:
        start = tl.maximum(tl.load(row_starts + entry).to(tl.int64), 0)
    return start, tl.load(row_ends + entry).to(tl.int64)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["row_repeat", "width", "num_blocks"])
def score_blocks(
    logits,
    row_stride,
    column_stride,
    row_starts,
    row_ends,
    row_repeat,
    width,
    num_blocks,
    scores,
    lengths,
    BLOCK: tl.constexpr,
    BLOCK_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    FILL: tl.constexpr,
):
    """Maxima of the blocks of one row, tiles part, part + parts, ..., and how many blocks count as ``lengths[row]``.

    FILL: blocks behind those get -inf; without it they are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start, end = _live_range(row_starts, row_ends, row, row_repeat, HAS_STARTS)
    # The newest block ends the row, also where `end` lies past the width; it is pinned if the row has that block.
    covered = tl.where(end > start, (end - start + (BLOCK - 1)) // BLOCK, 0)
    length = tl.minimum(covered, num_blocks).to(tl.int32)
    pinned = tl.where(covered <= num_blocks, length - 1, -1)
    if part == 0:
        tl.store(lengths + row, length)
    logits += row * row_stride
    scores += row * num_blocks
    limit = tl.minimum(end, width)
    whole_blocks = (tl.maximum(limit - start, 0) // BLOCK).to(tl.int32)

    lane = tl.arange(0, TILE)
    inner = tl.arange(0, BLOCK_PADDED)
    wanted = length
    if FILL:
        wanted = num_blocks
    for tile in range(part, tl.cdiv(wanted, TILE), tl.num_programs(1)):
        block = tile * TILE + lane
        column = start + block.to(tl.int64)[:, None] * BLOCK + inner[None, :]
        pointers = logits + column * column_stride
        if (BLOCK == BLOCK_PADDED) & ((tile + 1) * TILE <= whole_blocks):
            values = tl.load(pointers)
        else:
            values = tl.load(pointers, mask=(column < limit) & (inner < BLOCK)[None, :], other=float("-inf"))
        best = tl.reduce(values, 1, _larger_or_nan)
        best = tl.where(block == pinned, float("inf"), best)
        tl.store(scores + block, best, mask=block < wanted)


@triton.jit(do_not_specialize=["row_repeat", "width", "num_candidates", "words_per_part"])
def mask_rows(
    logits,
    row_stride,
    column_stride,
    row_starts,
    row_ends,
    row_repeat,
    width,
    candidates,
    candidate_row_stride,
    candidate_stride,
    num_candidates,
    words,
    words_per_part,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """-inf in the columns of one part of a row's [0, end) that no candidate block keeps.

    A part owns whole tiles that lie side by side, and a bitmap of the blocks in them that no other part touches: it
    clears the bitmap, sets the bits of the candidates that fall into it, and stores by it. Logits are never read.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(1)
    start, end = _live_range(row_starts, row_ends, row, row_repeat, HAS_STARTS)
    if HAS_STARTS:
        start = tl.minimum(start, width)
    limit = tl.minimum(tl.maximum(end, 0), width)
    span = tl.cdiv(tl.cdiv(limit, TILE), parts) * TILE
    first_column = part * span
    last_column = tl.minimum(first_column + span, limit)
    if first_column < last_column:
        first_block = (tl.maximum(first_column - start, 0) // BLOCK).to(tl.int32)
        num_local = tl.cdiv(tl.maximum(last_column - start, 0), BLOCK).to(tl.int32) - first_block
        words += (row * parts + part) * words_per_part
        lane = tl.arange(0, CHUNK)
        for first in range(0, tl.cdiv(num_local, 32), CHUNK):
            tl.store(words + first + lane, 0, mask=first + lane < tl.cdiv(num_local, 32))
        tl.debug_barrier()

        candidates += row * candidate_row_stride
        past_width = tl.cdiv(width - start, BLOCK).to(tl.int32)
        names_past_width = tl.zeros([CHUNK], tl.int32)
        for first in range(0, num_candidates, CHUNK):
            live = first + lane < num_candidates
            candidate = tl.load(candidates + (first + lane).to(tl.int64) * candidate_stride, mask=live, other=-1)
            local = candidate - first_block
            inside = (candidate >= first_block) & (local < num_local)
            tl.atomic_or(words + (local >> 5), 1 << (local & 31), mask=inside, sem="relaxed", scope="cta")
            names_past_width |= (candidate >= past_width).to(tl.int32)
        kept_column = tl.where((tl.max(names_past_width) > 0) & (start < width), width - 1, -1)
        tl.debug_barrier()

        logits += row * row_stride
        tile_lane = tl.arange(0, TILE)
        start_column = start.to(tl.int32)
        for first in range(first_column.to(tl.int32), last_column.to(tl.int32), TILE):
            # Where nothing but the block decides, neighbouring columns have one mask and are stored as vectors.
            whole = (first >= start_column) & (first + TILE <= last_column)
            if whole & ((kept_column < first) | (kept_column >= first + TILE)):
                column = first + tile_lane
                local = (column - start_column) // BLOCK - first_block
                word = tl.load(words + (local >> 5))
                dropped = ((word >> (local & 31)) & 1) == 0
                tl.store(logits + column.to(tl.int64) * column_stride, float("-inf"), mask=dropped)
            else:
                column = first + tile_lane
                inside = column < last_column
                local = (column - start_column) // BLOCK - first_block
                word = tl.load(words + (local >> 5), mask=inside & (column >= start_column), other=0)
                dropped = inside & (((word >> (local & 31)) & 1) == 0) & (column != kept_column)
                tl.store(logits + column.to(tl.int64) * column_stride, float("-inf"), mask=dropped)

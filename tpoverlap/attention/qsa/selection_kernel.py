# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel behind the scores: the best blocks of a row, written as token positions."""

from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.attention.topk_kernels import ascending, row_words, select_row


@triton.jit(do_not_specialize=["num_columns", "top_k", "ratio"])
def select_positions(
    scores,
    score_stride,
    token_to_req,
    logical_positions,
    seq_lens,
    visible_blocks,
    num_columns,
    top_k,
    ratio,
    scratch,
    out,
    out_row_stride,
    out_stride,
    GROUPS: tl.constexpr,
    K_PADDED: tl.constexpr,
    RATIO_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = tl.maximum(tl.load(visible_blocks + row), 0).to(tl.int32)
    position = tl.load(logical_positions + row).to(tl.int64)
    # A padding row's request may be -1.
    length = tl.load(seq_lens + tl.load(token_to_req + row), mask=position >= 0, other=0).to(tl.int64)
    scored = tl.minimum(visible, num_columns)
    place = tl.arange(0, K_PADDED)
    # Where nothing is left out all visible blocks are listed, those past the table's width too.
    count = tl.minimum(visible, top_k)
    blocks = place
    if scored > top_k:
        scratch += row * row_words(GROUPS, K_PADDED)
        _, blocks, count, ordered = select_row(
            scores + row * score_stride, scored, scratch, top_k, GROUPS, K_PADDED, False
        )
        if ordered == 0:
            blocks = ascending(blocks, count, K_PADDED)

    out += row * out_row_stride
    inner = tl.arange(0, RATIO_PADDED)
    token = blocks[:, None] * ratio + inner[None, :]
    at = (place[:, None] * ratio + inner[None, :]).to(tl.int64)
    tl.store(out + at * out_stride, token, mask=(place < count)[:, None] & (inner < ratio)[None, :])
    # Behind the listed blocks, up to `size`: the open tail, then -1.
    size = top_k * ratio + ratio - 1
    tail_start = (position + 1) // ratio * ratio
    for first in range(count * ratio, size, K_PADDED):
        tail = tail_start + first - count * ratio + place
        kept = (position >= 0) & (tail <= position) & (tail < length)
        column = (first + place).to(tl.int64)
        tl.store(out + column * out_stride, tl.where(kept, tail, -1).to(tl.int32), mask=column < size)

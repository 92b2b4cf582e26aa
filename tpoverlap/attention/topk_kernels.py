# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``topk.py``: one program selects the k best of one row.

Selection by bounds: split the row into GROUPS strided groups (element i belongs to group i mod GROUPS). k groups have a
maximum >= the k-th largest maximum b, so at least k elements are >= b, and the k-th largest element is too. Strided
groups keep the bound tight where large scores lie side by side. Elements >= b are compacted in index order (about 1.1k
of them for random scores; where ties or a bad distribution leave more than the list holds, the row itself takes the
list's place), and bisection over their order keys ends at the k-th.

Scratch of a row (int32): scores of the list [GROUPS], their indices [GROUPS], then the keys and the indices of the
selected [K_PADDED] each.
"""

from __future__ import annotations

import triton
import triton.language as tl

ABSENT = tl.constexpr(-0x80000000)
"""Below the key of every score."""
ABSENT_RANKED = tl.constexpr(-0x8000000000000000)
NEG_INF = tl.constexpr(-0x7F800001)
"""The key of -inf."""


@triton.jit
def order_key(score):
    """int32 whose order is that of the FP32 score: NaN largest, -0 as +0 (see ``topk.order_keys``)."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(score == 0, 0, key)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def load_keys(scores, offsets, length):
    """Order keys of scores[offsets], ABSENT at and past the length."""
    live = offsets < length
    return tl.where(live, order_key(tl.load(scores + offsets, mask=live, other=0.0)), ABSENT)


@triton.jit
def count_at_least(scores, length, key, CHUNK: tl.constexpr):
    """How many of scores[:length] have an order key >= key."""
    offsets = tl.arange(0, CHUNK)
    hits = tl.zeros([CHUNK], tl.int32)
    for first in range(0, length, CHUNK):
        hits += (load_keys(scores, first + offsets, length) >= key).to(tl.int32)
    return tl.sum(hits)


@triton.jit
def _middle(low, high):
    return low + ((high - low + 1) >> 1)


@triton.jit
def select_row(
    scores,
    length,
    scratch,
    k,
    GROUPS: tl.constexpr,
    K_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    SKIP_NEG_INF: tl.constexpr,
):
    """Write keys and indices of the k best of scores[:length], or of all of them, to scratch in ascending index order.

    Passes a barrier, after which the program may read them. Returns how many were selected.
    """
    list_scores = scratch.to(tl.pointer_type(tl.float32), bitcast=True)
    list_indices = scratch + GROUPS
    selected_keys = scratch + 2 * GROUPS
    selected_indices = selected_keys + K_PADDED

    source = scores
    source_length = length
    from_list = False
    # Selected are the keys above `low`, and the first `num_equal` of those equal to it.
    low = tl.full([], ABSENT, tl.int64)
    num_equal = k
    if length > k:
        offsets = tl.arange(0, GROUPS)
        maxima = load_keys(scores, offsets, length)
        for first in tl.range(GROUPS, length, GROUPS, loop_unroll_factor=UNROLL):
            maxima = tl.maximum(maxima, load_keys(scores, first + offsets, length))
        highest = tl.max(maxima).to(tl.int64)
        # Both bisections keep count(>= low) = num_low >= k and count(> high) = num_above < k.
        low = tl.min(tl.where(maxima > ABSENT, maxima, 0x7FFFFFFF)).to(tl.int64)
        high = highest
        num_low = tl.sum((maxima > ABSENT).to(tl.int32))
        num_above = 0
        enough = k
        if length > GROUPS:
            enough += k // 8
        while (low < high) & (num_low > enough):
            middle = _middle(low, high)
            count = tl.sum((maxima >= middle.to(tl.int32)).to(tl.int32))
            if count >= k:
                low = middle
                num_low = count
            else:
                high = middle - 1
                num_above = count

        if length > GROUPS:
            bound = low.to(tl.int32)
            num_low = 0
            lanes = tl.arange(0, TILE)
            for first in tl.range(0, length, TILE, num_stages=STAGES):
                at = first + lanes
                live = at < length
                score = tl.load(scores + at, mask=live, other=0.0)
                hit = (live & (order_key(score) >= bound)).to(tl.int32)
                rank = num_low + tl.cumsum(hit, 0) - 1
                fits = (hit > 0) & (rank < GROUPS)
                tl.store(list_scores + rank, score, mask=fits)
                tl.store(list_indices + rank, at, mask=fits)
                num_low += tl.sum(hit)
            tl.debug_barrier()
            from_list = num_low <= GROUPS
            if from_list:
                source = list_scores
                source_length = num_low
            high = highest
            num_above = 0
            while (low < high) & (num_low > k):
                middle = _middle(low, high)
                count = count_at_least(source, source_length, middle.to(tl.int32), 2 * K_PADDED)
                if count >= k:
                    low = middle
                    num_low = count
                else:
                    high = middle - 1
                    num_above = count
        if num_low > k:
            num_equal = k - num_above

    threshold = low.to(tl.int32)
    if SKIP_NEG_INF and threshold <= NEG_INF:
        threshold = tl.full([], NEG_INF, tl.int32)
        num_equal = 0
    num_above = 0
    equal_before = 0
    lane = tl.arange(0, 2 * K_PADDED)
    for first in range(0, source_length, 2 * K_PADDED):
        at = first + lane
        live = at < source_length
        key = load_keys(source, at, source_length)
        above = (live & (key > threshold)).to(tl.int32)
        equal = (live & (key == threshold)).to(tl.int32)
        packed = above | (equal << 16)
        before = tl.cumsum(packed, 0) - packed
        equal_rank = equal_before + (before >> 16)
        rank = num_above + (before & 0xFFFF) + tl.minimum(equal_rank, num_equal)
        chosen = (above > 0) | ((equal > 0) & (equal_rank < num_equal))
        index = at
        if from_list:
            index = tl.load(list_indices + at, mask=live, other=0)
        tl.store(selected_keys + rank, key, mask=chosen)
        tl.store(selected_indices + rank, index, mask=chosen)
        total = tl.sum(packed)
        num_above += total & 0xFFFF
        equal_before += total >> 16
    tl.debug_barrier()
    return num_above + tl.minimum(equal_before, num_equal)


@triton.jit
def load_selected(scratch, count, GROUPS: tl.constexpr, K_PADDED: tl.constexpr):
    """Keys and indices [K_PADDED] that :func:`select_row` left; ABSENT and -1 behind the first ``count``."""
    lane = tl.arange(0, K_PADDED)
    selected = scratch + 2 * GROUPS + lane
    keys = tl.load(selected, mask=lane < count, other=ABSENT)
    return keys, tl.load(selected + K_PADDED, mask=lane < count, other=-1)


@triton.jit
def _best_first(keys, indices, live):
    """Sort (key descending, index ascending), the live entries first; returns the sorted keys and indices."""
    ranked = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - indices).to(tl.int64)
    ranked = tl.sort(tl.where(live, ranked, ABSENT_RANKED), descending=True)
    return (ranked >> 32).to(tl.int32), 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _sort_short(
    scores, length, out, out_stride, k, SHORT: tl.constexpr, K_PADDED: tl.constexpr, SKIP_NEG_INF: tl.constexpr
):
    """Best first, of a row of up to SHORT scores: sorted whole, without selection."""
    lane = tl.arange(0, SHORT)
    keys, indices = _best_first(load_keys(scores, lane, length), lane, lane < length)
    kept = lane < length
    if SKIP_NEG_INF:
        kept &= keys > NEG_INF
    tl.store(out + lane.to(tl.int64) * out_stride, tl.where(kept, indices, -1), mask=lane < k)
    behind = tl.arange(0, K_PADDED)
    tl.store(out + behind.to(tl.int64) * out_stride, -1, mask=(behind >= SHORT) & (behind < k))


@triton.jit(do_not_specialize=["width", "k"])
def topk_rows(
    scores,
    row_stride,
    lengths,
    width,
    scratch,
    out,
    out_row_stride,
    out_stride,
    k,
    GROUPS: tl.constexpr,
    K_PADDED: tl.constexpr,
    SHORT: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    BY_SCORE: tl.constexpr,
    SKIP_NEG_INF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    scratch += row * (2 * GROUPS + 2 * K_PADDED)
    out += row * out_row_stride
    length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), width)
    if BY_SCORE and length <= SHORT:
        _sort_short(scores, length, out, out_stride, k, SHORT, K_PADDED, SKIP_NEG_INF)
    else:
        count = select_row(scores, length, scratch, k, GROUPS, K_PADDED, TILE, UNROLL, STAGES, SKIP_NEG_INF)
        keys, indices = load_selected(scratch, count, GROUPS, K_PADDED)
        place = tl.arange(0, K_PADDED)
        if BY_SCORE:
            keys, indices = _best_first(keys, indices, place < count)
            indices = tl.where(place < count, indices, -1)
        tl.store(out + place.to(tl.int64) * out_stride, indices, mask=place < k)

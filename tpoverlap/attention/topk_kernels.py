# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``topk.py``: bound the k-th score of a row from below, list what reaches the bound, finish there.

The bound: split the row into GROUPS strided groups (element i belongs to group i mod GROUPS). k groups have a maximum
>= the k-th largest maximum b, so at least k elements are >= b, and the k-th largest element is too. Strided groups
keep the bound tight where large scores lie side by side. Any b' <= b serves as well.

``group_maxima`` and ``list_hits`` share a row among several programs; the list's order is then a matter of chance, its
content is not, and ``select_row``, one program a row, chooses by score and index alone. Rows of up to 2 * K_PADDED
scores need neither list nor bound: the first two kernels return, and ``select_row`` reads the row itself.

Scratch of a row, int32: HEADER words (hits, bound, largest key), group maxima [GROUPS], keys and indices of the list
[2 * K_PADDED] each, keys and indices of the selected [K_PADDED] each.
"""

from __future__ import annotations

import triton
import triton.language as tl

ABSENT = tl.constexpr(-0x80000000)
"""Below the key of every score."""
ABSENT_RANKED = tl.constexpr(-0x8000000000000000)
NEG_INF = tl.constexpr(-0x7F800001)
"""The key of -inf."""
POS_INF = tl.constexpr(0x7F800000)
LAST = tl.constexpr(0x7FFFFFFF)
HEADER = tl.constexpr(32)
"""A cache line, so that the counters of different rows lie apart."""


@triton.jit
def order_key(score):
    """int32 whose order is that of the FP32 score: NaN largest, -0 as +0 (see ``topk.order_keys``)."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(score == 0, 0, key)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def _score_of(key):
    """The score with an order key up to POS_INF."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def load_keys(scores, offsets, length):
    """Order keys of scores[offsets], ABSENT at and past the length."""
    live = offsets < length
    return tl.where(live, order_key(tl.load(scores + offsets, mask=live, other=0.0)), ABSENT)


@triton.jit
def _row_length(lengths, row, width):
    return tl.minimum(tl.maximum(tl.load(lengths + row), 0), width).to(tl.int32)


@triton.jit
def row_words(GROUPS: tl.constexpr, K_PADDED: tl.constexpr):
    """Words of a row's scratch."""
    return HEADER + GROUPS + 6 * K_PADDED


@triton.jit
def _middle(low, high):
    return low + ((high - low + 1) >> 1)


@triton.jit
def _narrow(keys, k, enough):
    """Bisect the k-th largest of the keys above ABSENT: (low, count of keys >= low, count of keys above it).

    Stops where that count is at most ``enough``, or at the k-th key itself; all keys where they are no more.
    """
    present = keys > ABSENT
    low = tl.min(tl.where(present, keys, LAST)).to(tl.int64)
    high = tl.max(keys).to(tl.int64)
    # count(>= low) = num_low, count(> high) = num_above < k.
    num_low = tl.sum(present.to(tl.int32))
    num_above = 0
    while (low < high) & (num_low > enough):
        middle = _middle(low, high)
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        if count >= k:
            low = middle
            num_low = count
        else:
            high = middle - 1
            num_above = count
    return low.to(tl.int32), num_low, num_above


@triton.jit(do_not_specialize=["width"])
def group_maxima(
    scores,
    row_stride,
    lengths,
    width,
    scratch,
    GROUPS: tl.constexpr,
    K_PADDED: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Order keys of the groups' maxima; a program owns LANES groups at a time. Clears the row's count of hits."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    length = _row_length(lengths, row, width)
    if length > 2 * K_PADDED:
        scores += row * row_stride
        scratch += row * row_words(GROUPS, K_PADDED)
        if part == 0:
            tl.store(scratch, 0)
        lanes = tl.arange(0, LANES)
        for chunk in range(part * LANES, GROUPS, tl.num_programs(1) * LANES):
            # The last step of a chunk is masked; unmasked loads are as wide as the row's alignment allows.
            whole = tl.maximum(length - chunk - LANES + GROUPS, 0) // GROUPS
            best = tl.full([LANES], float("-inf"), tl.float32)
            for step in tl.range(0, whole, loop_unroll_factor=UNROLL):
                score = tl.load(scores + (chunk + step * GROUPS + lanes))
                best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
            at = chunk + whole * GROUPS + lanes
            score = tl.load(scores + at, mask=at < length, other=float("-inf"))
            best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
            key = tl.where(chunk + lanes < length, order_key(best), ABSENT)
            tl.store(scratch + HEADER + chunk + lanes, key)


@triton.jit
def _append(scores, at, live, threshold, scratch, GROUPS: tl.constexpr, K_PADDED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        score = tl.load(scores + at, mask=live, other=float("-inf"))
    else:
        score = tl.load(scores + at)
    hit = (score >= threshold) | (score != score)
    if MASKED:
        hit &= live
    rank = tl.atomic_add(scratch + tl.zeros_like(at), 1, mask=hit, sem="relaxed")
    fits = hit & (rank < 2 * K_PADDED)
    entries = scratch + HEADER + GROUPS + rank
    tl.store(entries, order_key(score), mask=fits)
    tl.store(entries + 2 * K_PADDED, at, mask=fits)


@triton.jit(do_not_specialize=["width", "k"])
def list_hits(
    scores,
    row_stride,
    lengths,
    width,
    scratch,
    k,
    GROUPS: tl.constexpr,
    K_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SKIP_NEG_INF: tl.constexpr,
):
    """List the scores that reach the bound, tiles part, part + parts, ..., and count them even if the list is full."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    length = _row_length(lengths, row, width)
    if (length > 2 * K_PADDED) & (part * TILE < length):
        scores += row * row_stride
        scratch += row * row_words(GROUPS, K_PADDED)
        maxima = tl.load(scratch + HEADER + tl.arange(0, GROUPS))
        bound, _, _ = _narrow(maxima, k, k + k // 8)
        if SKIP_NEG_INF:
            bound = tl.maximum(bound, NEG_INF + 1)
        if part == 0:
            tl.store(scratch + 1, bound)
            tl.store(scratch + 2, tl.max(maxima))
        threshold = _score_of(tl.minimum(bound, POS_INF))
        lanes = tl.arange(0, TILE)
        whole = length // TILE
        for tile in tl.range(part, whole, tl.num_programs(1), num_stages=STAGES):
            at = tile * TILE + lanes
            _append(scores, at, at < length, threshold, scratch, GROUPS, K_PADDED, False)
        if whole % tl.num_programs(1) == part:
            at = whole * TILE + lanes
            _append(scores, at, at < length, threshold, scratch, GROUPS, K_PADDED, True)


@triton.jit
def _choose(keys, indices, k):
    """Which of the (key, index) pairs with keys above ABSENT are the k best; all of them where they are no more."""
    low, num_low, num_above = _narrow(keys, k, k)
    equal = keys == low
    last = tl.max(tl.where(equal, indices, 0))
    if num_low > k:
        # Ties at the k-th key: the lowest indices that make k.
        first = last * 0
        while first < last:
            middle = first + ((last - first) >> 1)
            if num_above + tl.sum((equal & (indices <= middle)).to(tl.int32)) >= k:
                last = middle
            else:
                first = middle + 1
    return (keys > ABSENT) & ((keys > low) | (equal & (indices <= last)))


@triton.jit
def _count_at_least(scores, length, key, CHUNK: tl.constexpr):
    """How many of scores[:length] have an order key >= key."""
    offsets = tl.arange(0, CHUNK)
    hits = tl.zeros([CHUNK], tl.int32)
    for first in range(0, length, CHUNK):
        hits += (load_keys(scores, first + offsets, length) >= key).to(tl.int32)
    return tl.sum(hits)


@triton.jit
def _choose_from_row(scores, length, scratch, selected, k, K_PADDED: tl.constexpr):
    """Store the k best of a row in which more scores reach the bound than the list holds; returns k."""
    num_low = tl.load(scratch)
    low = tl.load(scratch + 1).to(tl.int64)
    high = tl.load(scratch + 2).to(tl.int64)
    num_above = 0
    while (low < high) & (num_low > k):
        middle = _middle(low, high)
        count = _count_at_least(scores, length, middle.to(tl.int32), 2 * K_PADDED)
        if count >= k:
            low = middle
            num_low = count
        else:
            high = middle - 1
            num_above = count
    threshold = low.to(tl.int32)
    # Selected are the keys above the threshold, and the first `num_equal` of those equal to it.
    num_equal = k
    if num_low > k:
        num_equal = k - num_above
    above_before = 0
    equal_before = 0
    lane = tl.arange(0, 2 * K_PADDED)
    for first in range(0, length, 2 * K_PADDED):
        at = first + lane
        key = load_keys(scores, at, length)
        above = (key > threshold).to(tl.int32)
        equal = (key == threshold).to(tl.int32)
        packed = above | (equal << 16)
        before = tl.cumsum(packed, 0) - packed
        equal_rank = equal_before + (before >> 16)
        rank = above_before + (before & 0xFFFF) + tl.minimum(equal_rank, num_equal)
        chosen = (above > 0) | ((equal > 0) & (equal_rank < num_equal))
        tl.store(selected + rank, key, mask=chosen)
        tl.store(selected + K_PADDED + rank, at, mask=chosen)
        total = tl.sum(packed)
        above_before += total & 0xFFFF
        equal_before += total >> 16
    return above_before + tl.minimum(equal_before, num_equal)


@triton.jit
def select_row(scores, length, scratch, k, GROUPS: tl.constexpr, K_PADDED: tl.constexpr, SKIP_NEG_INF: tl.constexpr):
    """The k best of scores[:length], or all of them: keys [K_PADDED], indices [K_PADDED], how many, and whether their
    indices ascend; ABSENT and -1 behind them. ``scratch`` is the row's, as the other kernels left it.
    """
    LANES: tl.constexpr = 2 * K_PADDED
    entries = scratch + HEADER + GROUPS
    selected = entries + 2 * LANES
    listed = length > LANES
    hits = length
    if listed:
        hits = tl.load(scratch)
    if hits <= LANES:
        lane = tl.arange(0, LANES)
        if listed:
            keys = tl.load(entries + lane, mask=lane < hits, other=ABSENT)
            indices = tl.load(entries + LANES + lane, mask=lane < hits, other=0)
        else:
            keys = load_keys(scores, lane, length)
            indices = lane
        if SKIP_NEG_INF:
            keys = tl.where(keys > NEG_INF, keys, ABSENT)
        chosen = _choose(keys, indices, k)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(selected + place, keys, mask=chosen)
        tl.store(selected + K_PADDED + place, indices, mask=chosen)
        count = tl.sum(chosen.to(tl.int32))
    else:
        count = _choose_from_row(scores, length, scratch, selected, k, K_PADDED)
    tl.debug_barrier()
    place = tl.arange(0, K_PADDED)
    keys = tl.load(selected + place, mask=place < count, other=ABSENT)
    indices = tl.load(selected + K_PADDED + place, mask=place < count, other=-1)
    return keys, indices, count, (listed == 0) | (hits > LANES)


@triton.jit
def ascending(indices, count, K_PADDED: tl.constexpr):
    """The first ``count`` indices sorted, -1 behind them."""
    place = tl.arange(0, K_PADDED)
    ordered = tl.sort(tl.where(place < count, indices, LAST))
    return tl.where(place < count, ordered, -1)


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
    BY_SCORE: tl.constexpr,
    SKIP_NEG_INF: tl.constexpr,
):
    """Indices of a row's k best, from the row or its list."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    scratch += row * row_words(GROUPS, K_PADDED)
    out += row * out_row_stride
    length = _row_length(lengths, row, width)
    if BY_SCORE and length <= SHORT:
        _sort_short(scores, length, out, out_stride, k, SHORT, K_PADDED, SKIP_NEG_INF)
    else:
        keys, indices, count, ordered = select_row(scores, length, scratch, k, GROUPS, K_PADDED, SKIP_NEG_INF)
        place = tl.arange(0, K_PADDED)
        if BY_SCORE:
            keys, indices = _best_first(keys, indices, place < count)
            indices = tl.where(place < count, indices, -1)
        elif ordered == 0:
            indices = ascending(indices, count, K_PADDED)
        tl.store(out + place.to(tl.int64) * out_stride, indices, mask=place < k)

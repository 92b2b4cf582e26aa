# mypy: disable-error-code="no-untyped-def"
"""Device functions that the attention kernels share: paging, one step of the online softmax, the end of a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_request(starts, requests, index, SCALE: tl.constexpr, DIVISOR: tl.constexpr):
    """The last request r with starts[r] * SCALE // DIVISOR + r * (DIVISOR > 1) <= index, by bisection.

    With SCALE = DIVISOR = 1 the request that owns token ``index``. With SCALE rows a token and tiles of DIVISOR rows
    the one that owns tile ``index``: a request's tiles are numbered from that bound on, which leaves room for all of
    them (the numbering of vLLM's unified Triton attention), so that the grid is known without reading the starts.
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(starts + middle) * SCALE // DIVISOR
        if DIVISOR > 1:
            first += middle
        if first <= index:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def load_block_ids(table, table_column, key, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache blocks of the keys key .. key + BLOCK_N - 1: one id where all are in one block, else one a key.

    ``table`` points to the request's row of the block table; entries of keys from ``end`` on are not read. Loops
    carry the ids of the next step: a load whose address hangs on a load of the same step would cost the software
    pipeline half of its depth.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        keys = key
    else:
        keys = key + tl.arange(0, BLOCK_N)
    return tl.load(table + (keys // BLOCK_SIZE).to(tl.int64) * table_column, mask=keys < end, other=0)


@triton.jit
def key_offsets(ids, key, num_blocks, block_stride, row_stride, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int64 [BLOCK_N] offsets in a cache of the keys key .. key + BLOCK_N - 1, whose ``load_block_ids`` are ``ids``.

    Ids are clamped into the cache: a wrong one reads wrong keys, never foreign memory.
    """
    block = tl.minimum(tl.maximum(ids, 0), num_blocks - 1).to(tl.int64)
    if BLOCK_SIZE % BLOCK_N == 0:
        row = key % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        row = (key + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    return block * block_stride + row.to(tl.int64) * row_stride


@triton.jit
def soft_capped(scores, tanh_factor, EXACT: tl.constexpr):
    """tanh(scores * tanh_factor / (2 log2 e)), exact at both ends.

    The difference of 1 and nearly 1 has an absolute error of 2^-24, which a large cap magnifies. EXACT: near 0 the
    Taylor series up to its ninth power serves instead, whose next term is below 2e-8 there.
    """
    HALF_LN_2: tl.constexpr = 0.34657359027997264
    exponents = scores * tanh_factor
    capped = tl.fma(1.0 / (tl.exp2(exponents) + 1.0), -2.0, 1.0)
    if EXACT:
        x = exponents * HALF_LN_2
        square = x * x
        series = tl.fma(square, 62.0 / 2835.0, -17.0 / 315.0)
        series = tl.fma(tl.fma(tl.fma(series, square, 2.0 / 15.0), square, -1.0 / 3.0), square, 1.0)
        capped = tl.where(tl.abs(x) < 0.3, x * series, capped)
    return capped


@triton.jit
def softmax_step(scores, multiplier, peak, total):
    """One block of the online softmax (Milakov and Gimelshein) in base 2.

    scores [M, N] with -inf where hidden; multiplier > 0 takes them to base-2 exponents. Every product that feeds a
    sum is an explicit FMA: the compiler then has no choice of contraction, and a row has the same bits in the masked
    and in the unmasked loop. Blocks in which a row sees nothing leave its state as it was.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * multiplier)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(tl.fma(scores, multiplier, -shift[:, None]))
    decay = tl.exp2(peak - shift)
    return weights, decay, new_peak, tl.fma(total, decay, tl.sum(weights, 1))


@triton.jit
def finish_rows(acc, peak, total):
    """Output and natural log-sum-exp; rows that saw nothing give 0 and -inf."""
    LN_2: tl.constexpr = 0.6931471805599453
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], (peak + tl.log2(total)) * LN_2

# mypy: disable-error-code="no-untyped-def"
"""Which rows and keys a program of the packed prefill serves: shared by its kernels and their merge."""

from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.attention.triton.device import find_request


@triton.jit
def find_unit(program, tiles, neighbours, KV_HEADS: tl.constexpr):
    """Slot, tile and KV head of a program, which start in this order.

    The last tiles of a causal request see the most keys, and parts that are not the last are the longest: they start
    first. ``neighbours`` KV heads of a tile, 1 or all, follow each other: all of them balance best, one alone leaves
    its keys in the L2 cache.
    """
    slot = program // (KV_HEADS * tiles)
    rest = program % (KV_HEADS * tiles)
    outer = rest // (tiles * neighbours)
    inner = rest % neighbours
    return slot, tiles - 1 - rest // neighbours % tiles, outer * neighbours + inner


@triton.jit
def find_tile(
    tile,
    cu_seqlens_q,
    seq_lens,
    window,
    requests,
    tokens,
    columns,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Request of a tile, its first token, the tile's first row in it, its rows, position of its first token, first key
    and past-the-last key that any row sees, the part in which the first lies, parts in use (at least one).

    A request's rows are its tokens times the GROUP query heads of a KV head, token outermost, cut into tiles of BLOCK_M
    from its first token on; the tokens past the last request are one more request without keys. Entries of the tensors
    are clamped, so that wrong ones cannot lead out of others.
    """
    request = find_request(cu_seqlens_q, requests, tile, GROUP, BLOCK_M)
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + request), 0), tokens)
    count = tl.minimum(tl.load(cu_seqlens_q + request + 1, mask=request < requests, other=tokens), tokens) - start
    first_row = (tile - start * GROUP // BLOCK_M - request) * BLOCK_M
    rows = tl.minimum(count * GROUP - first_row, BLOCK_M)
    rows = tl.where(first_row < 0, 0, rows)
    length = tl.load(seq_lens + request, mask=request < requests, other=0)
    length = tl.minimum(tl.maximum(length, 0), columns * BLOCK_SIZE)
    origin = length - count
    end = origin + (first_row + rows - 1) // GROUP + 1
    first = 0
    if WINDOW:
        first = tl.maximum(origin + first_row // GROUP + 1 - window, 0)
    # The first block that is read, which begins before a window.
    first_part = first // BLOCK_N * BLOCK_N // PART_KEYS
    parts = tl.maximum((tl.maximum(end, 0) + PART_KEYS - 1) // PART_KEYS - first_part, 1)
    return request, start, first_row, rows, origin, first, end, first_part, parts

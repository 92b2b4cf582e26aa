"""Triton kernels that dequantize NVFP4. Imported only where Triton is wanted.

Codes and scales are decoded by integer operations, so that every GPU and the interpreter give the bits of the torch
path: the exponent and mantissa of a small float are moved to their places in an FP32 whose exponent is then too small
by a constant, and one exact multiplication by a power of two restores it, subnormals included.

The words of a program are one dimension in the order of the output, and their loads are said to be contiguous by one
(``max_contiguous``): only so do the threads of a warp take words side by side and, for 16-bit outputs, keep them, in
every Triton. (The 32 bytes of a word in FP32 are stored by two threads.) Of several equally contiguous dimensions 3.6
deals out the first one first and 3.9 the last, and a contiguous load is made by threads that take more at once and hand
them on through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TWO_TO_120 = tl.constexpr(2.0**120)
_TWO_TO_126 = tl.constexpr(2.0**126)
QPN2_ROWS = tl.constexpr(8)
"""Rows of a QPN2 tile that one program takes: their codes of a group are two 32-byte sectors."""
_SIGN_AND_E2M1 = tl.constexpr(0x81C00000 - (1 << 32))
"""Bits 31 and 24 to 22 of an int32."""


@triton.jit
def _e4m3_to_fp32(byte):  # type: ignore[no-untyped-def]
    bits = byte.to(tl.int32)
    bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * _TWO_TO_120
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _e2m1_to_fp32(word, nibble):  # type: ignore[no-untyped-def]
    """Value of the code at nibble 0 to 7 of an int32 word."""
    # The arithmetic shift copies the sign bit down as far as the mask's gap, which removes the copies.
    bits = ((word << (28 - 4 * nibble)) >> 6) & _SIGN_AND_E2M1
    return bits.to(tl.float32, bitcast=True) * _TWO_TO_126


@triton.jit
def _store(pointers, values, mask):  # type: ignore[no-untyped-def]
    """Round FP32 values once to the pointers' type and store them; int16 pointers take the bits of BF16."""
    if pointers.dtype.element_ty == tl.int16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointers, tl.where(values != values, 0x7FC0, rounded).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_groups"])
def dequantize_row_major(  # type: ignore[no-untyped-def]
    words, scales, global_scale, out, num_groups, groups_per_row, PER_ROW: tl.constexpr, GROUPS: tl.constexpr
):
    """Program i takes groups [i * GROUPS, (i + 1) * GROUPS) of 16 weights, counted through the rows.

    words: int32 [num_groups, 2]. scales: uint8 [num_groups]. out: [num_groups, 16]. num_groups is an int32 wherever it
    fits, which keeps the division by groups_per_row short; offsets into the tensors are 64-bit.
    """
    index = tl.program_id(0).to(num_groups.dtype) * GROUPS
    first = index.to(tl.int64)
    word = tl.arange(0, GROUPS * 2)
    group = word // 2
    inside = group < num_groups - index
    codes = tl.load(tl.max_contiguous(words + first * 2 + word, [1]), mask=inside, other=0)
    scale = _e4m3_to_fp32(tl.load(tl.max_contiguous(scales + first + group, [1]), mask=inside, other=0))
    if PER_ROW:
        scale = scale * tl.load(global_scale + (index + group) // groups_per_row, mask=inside, other=0.0)
    else:
        scale = scale * tl.load(global_scale)
    k = tl.arange(0, 8)
    value = _e2m1_to_fp32(codes[:, None], k[None, :]) * scale[:, None]
    _store(out + first * 16 + ((word * 8)[:, None] + k[None, :]), value, inside[:, None])


@triton.jit
def dequantize_qpn2(  # type: ignore[no-untyped-def]
    words, scales, global_scale, out, groups_per_row, PER_ROW: tl.constexpr, GROUPS: tl.constexpr
):
    """Program (i, j) takes GROUPS consecutive groups of 16 k of QPN2_ROWS of tile j's 32 rows; as many programs in a
    row as take all of these share their groups.

    words: int32 [N / 32, groups_per_row, 32 lanes, 2]. scales: uint8 [N / 32, groups_per_row, 32]. out: [N, K]. Words
    are numbered in the order of the output, [QPN2_ROWS, GROUPS, 2 halves], and loaded in it: of 16-bit outputs nothing
    moves between threads, and 16 groups of a row are a run of 512 bytes that a warp writes.
    """
    parts: tl.constexpr = 32 // QPN2_ROWS
    first = tl.program_id(0) // parts * GROUPS
    tile = tl.program_id(1).to(tl.int64)
    word = tl.arange(0, QPN2_ROWS * GROUPS * 2)
    half = word % 2
    group = word // 2 % GROUPS
    lane = tl.program_id(0) % parts * QPN2_ROWS + word // (2 * GROUPS)
    inside = group < groups_per_row - first
    base = tile * groups_per_row + first
    in_tile = group * 32 + lane
    codes = tl.load(tl.max_contiguous(words + base * 64 + (in_tile * 2 + half), [1]), mask=inside, other=0)
    scale = _e4m3_to_fp32(tl.load(tl.max_contiguous(scales + base * 32 + in_tile, [1]), mask=inside, other=0))
    row = ((lane >> 2) & 3) * 8 + (lane & 3) + 4 * (lane >> 4)
    if PER_ROW:
        scale = scale * tl.load(global_scale + tile * 32 + row)
    else:
        scale = scale * tl.load(global_scale)
    k = tl.arange(0, 8)
    value = _e2m1_to_fp32(codes[:, None], ((k >> 1) + 4 * (k & 1))[None, :]) * scale[:, None]
    offset = (row * (groups_per_row * 16) + group * 16 + half * 8)[:, None] + k[None, :]
    _store(out + (tile * 32 * groups_per_row + first) * 16 + offset, value, inside[:, None])

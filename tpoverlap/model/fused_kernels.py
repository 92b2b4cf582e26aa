# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels of :mod:`tpoverlap.model.fused`. Rows are contiguous; offsets between them are 64-bit."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts. The first has 15 bits, so that its product with an exponent is exact.
_LN_2_HIGH = tl.constexpr(0.693145751953125)
_LN_2_LOW = tl.constexpr(1.4286068203094172e-06)


@triton.jit
def _exp(x):
    """exp(x) to about an ulp for any x: exp2 of the rounded x / ln 2 alone is off by |x| / 2 ulp."""
    # Beyond these it is 0 or inf all the same, and n would be infinite.
    x = tl.minimum(tl.maximum(x, -126.0, tl.PropagateNan.ALL), 126.0, tl.PropagateNan.ALL)
    n = tl.floor(x * _LOG2_E + 0.5)
    rest = (x - n * _LN_2_HIGH) - n * _LN_2_LOW
    # In two steps, for powers of two that an FP32 does not hold.
    half = tl.floor(n * 0.5)
    return tl.exp2(rest * _LOG2_E) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, update, weight, total, out, rows, eps, x_token, x_head, update_token, update_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Program i takes ROWS rows of SIZE, counted through tokens and heads. ADDS: total = x + update is what is normed;
    else ``update`` and ``total`` are never touched. weight [SIZE]; total, out: contiguous."""
    # Numbers of rows past the last one may need 64 bits.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < SIZE)
    token, head = (row // HEADS)[:, None], (row % HEADS)[:, None]
    at = row[:, None] * SIZE + column
    dtype = out.dtype.element_ty
    value = tl.load(x + token * x_token + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(update + token * update_token + head * update_head + column, mask=inside, other=0.0)
        rounded = (value + added.to(tl.float32)).to(dtype)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, axis=1), SIZE * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = (value * rstd[:, None]).to(dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * factor).to(dtype), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, row_stride, columns, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of columns). gate_up [tokens, 2 * columns]; out [tokens, columns], contiguous."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gates = gate_up + token * row_stride
    gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + columns + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    opened = tl.div_rn(gate, 1.0 + _exp(-gate)).to(dtype).to(tl.float32)
    tl.store(out + token * columns + column, (opened * up).to(dtype), mask=inside)


@triton.jit
def sigmoid_mul_kernel(
    x, gate, out, x_token, x_head, gate_token, gate_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of a token's elements). out [tokens, HEADS, HEAD_DIM], contiguous."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < HEADS * HEAD_DIM
    head, dim = (element // HEAD_DIM).to(tl.int64), element % HEAD_DIM
    value = tl.load(x + token * x_token + head * x_head + dim, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + token * gate_token + head * gate_head + dim, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    factor = tl.div_rn(1.0, 1.0 + _exp(-opening)).to(dtype).to(tl.float32)
    tl.store(out + token * (HEADS * HEAD_DIM) + element, (value * factor).to(dtype), mask=inside)

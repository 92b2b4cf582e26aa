"""A Triton matrix product with one tile shape for all sizes, so that a row's bits do not depend on the other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 32, 64, 32


@triton.jit
def _kernel(
    x, w, out, rows, depth: tl.constexpr, columns: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, depth, BK):
        a = tl.load(x + row[:, None] * depth + first + k[None, :], mask=row[:, None] < rows, other=0.0)
        b = tl.load(w + (first + k)[:, None] * columns + column[None, :])
        total = tl.dot(a, b, total)
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=row[:, None] < rows)


def fixed_tile_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, depth] times weight [depth, columns], both in whole tiles of depth and columns, summed in float32."""
    (rows, depth), columns = x.shape, weight.shape[1]
    assert depth % TILE_DEPTH == 0
    assert columns % TILE_COLUMNS == 0
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, TILE_ROWS), columns // TILE_COLUMNS)
    _kernel[grid](x.contiguous(), weight, out, rows, depth, columns, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH)
    return out

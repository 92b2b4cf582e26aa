"""What the live-range kernels replace: DSA masks and scores on a grid over the whole width, for comparison only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit
def _mask_tiles(logits, row_stride, flags, num_blocks, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    kept = tl.load(flags + row * num_blocks + column // BLOCK)
    tl.store(logits + row * row_stride + column, float("-inf"), mask=kept == 0)


@triton.jit
def _score_tiles(logits, row_stride, row_ends, scores, num_blocks, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(row_ends + row)
    block = tl.program_id(1) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * row_stride + column)
    best = tl.max(tl.where(column < end, values, float("-inf")), 1)
    best = tl.where((block == (end - 1) // BLOCK) & (end > 0), float("inf"), best)
    tl.store(scores + row * num_blocks + block, best)


def full_width_mask(
    logits: torch.Tensor, row_starts: None, row_ends: torch.Tensor, candidates: torch.Tensor, block_size: int
) -> None:
    """Every column outside the candidate blocks becomes -inf, past a row's end too; width a multiple of 1024."""
    rows, width = logits.shape
    blocks = width // block_size
    flags = torch.zeros(rows, blocks + 1, dtype=torch.uint8, device=logits.device)
    flags.scatter_(1, torch.where(candidates < 0, blocks, candidates).long(), 1)
    _mask_tiles[(rows, width // TILE)](
        logits, logits.stride(0), flags, flags.stride(0), BLOCK=block_size, TILE=TILE, num_warps=4
    )


def full_width_scores(logits: torch.Tensor, row_ends: torch.Tensor, block_size: int) -> torch.Tensor:
    """Block maxima of the whole width; width a multiple of 1024, NaN not looked after."""
    rows, width = logits.shape
    scores = torch.empty(rows, width // block_size, device=logits.device)
    _score_tiles[(rows, width // TILE)](
        logits, logits.stride(0), row_ends, scores, scores.stride(0), BLOCK=block_size, TILE=TILE, num_warps=4
    )
    return scores

"""Launches of the DSA kernels: grids and scratch, from tensor shapes alone."""

from __future__ import annotations

import torch

from tpoverlap.attention.dsa.kernels import mask_rows, score_blocks
from tpoverlap.cuda.triton_dispatch import multiprocessors, on_device_of

MASK_TILE = 1024
"""Columns a program masks at a time."""
SCORE_TILE = 128
"""Blocks a program scores at a time, fewer where blocks are large."""
SCORE_TILE_COLUMNS = 4096
PROGRAMS = 8
"""Programs a multiprocessor; with twice as many, starting those without a share shows in the time of short rows."""
MIN_PARTS = 2


def _unit_stride(row_starts: torch.Tensor | None, row_ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and ends as the kernels read them; the ends stand in for starts that are not there."""
    ends = row_ends.contiguous()
    return (ends if row_starts is None else row_starts.contiguous()), ends


def row_parts(rows: int, tiles: int, programs: int) -> int:
    """Programs a row: together at least ``programs`` where the width has work for them, and 2 for many rows."""
    return max(1, min(tiles, max(MIN_PARTS, -(-programs // rows))))


def block_scores(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor,
    block_size: int,
    row_repeat: int,
    *,
    fill: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores FP32 [rows, num_blocks] and how many of a row's blocks count, int32 [rows].

    Without ``fill`` only those blocks are written.
    """
    rows, width = logits.shape
    num_blocks = -(-width // block_size)
    scores = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows or not width:
        return scores, lengths.zero_()
    block_padded = 1 << (block_size - 1).bit_length()
    tile = max(1, min(SCORE_TILE, SCORE_TILE_COLUMNS // block_padded))
    grid = (rows, row_parts(rows, -(-num_blocks // tile), PROGRAMS * multiprocessors(logits)))
    with on_device_of(logits):
        score_blocks[grid](
            logits,
            *logits.stride(),
            *_unit_stride(row_starts, row_ends),
            row_repeat,
            width,
            num_blocks,
            scores,
            lengths,
            BLOCK=block_size,
            BLOCK_PADDED=block_padded,
            TILE=tile,
            HAS_STARTS=row_starts is not None,
            FILL=fill,
            num_warps=4,
        )
    return scores, lengths


def apply_candidate_mask(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor,
    candidates: torch.Tensor,
    block_size: int,
    row_repeat: int,
) -> None:
    rows, width = logits.shape
    if not rows or not width:
        return
    tiles = -(-width // MASK_TILE)
    parts = row_parts(rows, tiles, PROGRAMS * multiprocessors(logits))
    blocks_per_part = -(-(-(-tiles // parts) * MASK_TILE) // block_size) + 1
    words_per_part = -(-blocks_per_part // 32)
    words = torch.empty(rows * parts * words_per_part, dtype=torch.int32, device=logits.device)
    with on_device_of(logits):
        mask_rows[(rows, parts)](
            logits,
            *logits.stride(),
            *_unit_stride(row_starts, row_ends),
            row_repeat,
            width,
            candidates,
            *candidates.stride(),
            candidates.shape[1],
            words,
            words_per_part,
            BLOCK=block_size,
            TILE=MASK_TILE,
            CHUNK=1024,
            HAS_STARTS=row_starts is not None,
            num_warps=4,
        )

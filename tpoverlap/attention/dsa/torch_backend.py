"""The DSA functions in torch operations, on any device; the arguments have been checked."""

from __future__ import annotations

import torch


def _bounds(
    row_starts: torch.Tensor | None, row_ends: torch.Tensor, rows: int, row_repeat: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, 1] starts and ends of every row."""
    entry = torch.arange(rows, device=row_ends.device) // row_repeat
    ends = row_ends.long()[entry].unsqueeze(1)
    starts = torch.zeros_like(ends) if row_starts is None else row_starts.long()[entry].unsqueeze(1)
    return starts.clamp(min=0), ends


def block_scores(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor,
    block_size: int,
    row_repeat: int,
) -> torch.Tensor:
    rows, width = logits.shape
    num_blocks = -(-width // block_size)
    if not rows or not width:
        return logits.new_empty(rows, num_blocks)
    starts, ends = _bounds(row_starts, row_ends, rows, row_repeat)
    # Shift each row so that its start is column 0, then every block is an aligned group.
    columns = starts + torch.arange(num_blocks * block_size, device=logits.device)
    live = (columns < width) & (columns < ends)
    shifted = logits.gather(1, columns.clamp(max=width - 1)).masked_fill(~live, float("-inf"))
    scores = shifted.view(rows, num_blocks, block_size).amax(dim=2)
    newest = torch.div(ends - starts - 1, block_size, rounding_mode="floor")
    pinned = (torch.arange(num_blocks, device=logits.device) == newest) & (ends > starts)
    return scores.masked_fill(pinned, float("inf"))


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
    starts, ends = _bounds(row_starts, row_ends, rows, row_repeat)
    columns = torch.arange(width, device=logits.device)
    num_blocks = -(-width // block_size)
    first_columns = starts + candidates.long() * block_size
    inside = (candidates >= 0) & (first_columns < width)
    # One block more than a row has takes the candidates that do not name a block.
    is_candidate = torch.zeros(rows, num_blocks + 1, dtype=torch.bool, device=logits.device)
    is_candidate.scatter_(1, torch.where(inside, candidates.long().clamp(max=num_blocks), num_blocks), True)
    is_candidate[:, num_blocks] = False
    block = torch.div(columns - starts, block_size, rounding_mode="floor").clamp(min=-1)
    keep = is_candidate.gather(1, torch.where(block < 0, num_blocks, block))
    past_width = ((candidates >= 0) & (first_columns >= width)).any(dim=1, keepdim=True)
    keep |= past_width & (columns == width - 1) & (columns >= starts)
    logits.masked_fill_((columns < ends) & ~keep, float("-inf"))

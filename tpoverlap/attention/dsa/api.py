"""The public functions of the DSA part: argument checks, and the choice between Triton kernels and torch.

Common arguments. logits: FP32 [rows, width], any strides. row_starts, row_ends: int32 or int64, one entry for
row_repeat consecutive rows: row i is live in columns [row_starts[i // row_repeat], row_ends[i // row_repeat]), starts
of None being 0 and negative ones counting as 0. Ends may pass the width. Blocks of block_size columns are counted from
a row's start: block b covers start + b * block_size .. start + (b + 1) * block_size - 1, of which the columns in the
live range and in the width count; a row has ceil(width / block_size) of them. Wrong shapes, dtypes and sizes raise
ValueError.

Source: the candidate-block step of DeepSeek Sparse Attention's lightning indexer (DeepSeek-V3.2), with work that
follows the live range.
"""

from __future__ import annotations

import torch

from tpoverlap.attention.dsa import torch_backend
from tpoverlap.attention.topk import check_topk_output, topk_indices
from tpoverlap.cuda.triton_dispatch import triton_serves


def block_scores(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor,
    block_size: int,
    *,
    row_repeat: int = 1,
) -> torch.Tensor:
    """FP32 [rows, ceil(width / block_size)]: each block's largest live logit, NaN if one is NaN, -inf without any.

    A row's newest block, (end - start - 1) // block_size, has +inf where the row is not empty and has that block.
    Writing -inf behind the live blocks makes the cost follow the width (4 bytes a block); the selection does without.
    """
    _check(logits, row_starts, row_ends, block_size, row_repeat)
    if not triton_serves(logits):
        return torch_backend.block_scores(logits, row_starts, row_ends, block_size, row_repeat)
    from tpoverlap.attention.dsa import launches

    return launches.block_scores(logits, row_starts, row_ends, block_size, row_repeat, fill=True)[0]


def select_candidate_blocks(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor,
    num_blocks: int,
    block_size: int,
    *,
    row_repeat: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [rows, num_blocks]: each row's best blocks by :func:`block_scores`, the best first.

    NaN ranks above +inf, ties go to the lower block, -1 stands where only -inf is left. Exact and deterministic.
    """
    _check(logits, row_starts, row_ends, block_size, row_repeat)
    _check_size("num_blocks", num_blocks, 0)
    out = check_topk_output(out, logits.shape[0], num_blocks, logits.device)
    if triton_serves(logits):
        from tpoverlap.attention.dsa import launches

        scores, lengths = launches.block_scores(logits, row_starts, row_ends, block_size, row_repeat, fill=False)
    else:
        scores = torch_backend.block_scores(logits, row_starts, row_ends, block_size, row_repeat)
        lengths = torch.full(scores.shape[:1], scores.shape[1], dtype=torch.int32, device=scores.device)
    return topk_indices(scores, lengths, num_blocks, order="score", skip_neg_inf=True, out=out)


def apply_candidate_mask(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor,
    candidates: torch.Tensor,
    block_size: int,
    *,
    row_repeat: int = 1,
) -> None:
    """Set to -inf, in place, every column of [0, end) that is in none of the row's candidate blocks.

    candidates: int32 [rows, any number], in any order; negative entries are ignored. Columns below the start become
    -inf; columns at and past the end keep their bytes. A candidate block that begins at or past the width keeps column
    width - 1, where that column is live.
    """
    _check(logits, row_starts, row_ends, block_size, row_repeat)
    if candidates.dim() != 2 or candidates.shape[0] != logits.shape[0] or candidates.dtype != torch.int32:
        raise ValueError(
            f"candidates must be int32 [{logits.shape[0]}, any], got {candidates.dtype} {list(candidates.shape)}"
        )
    if candidates.device != logits.device:
        raise ValueError(f"candidates must be on the device of logits, {logits.device}, got {candidates.device}")
    if not triton_serves(logits):
        torch_backend.apply_candidate_mask(logits, row_starts, row_ends, candidates, block_size, row_repeat)
        return
    from tpoverlap.attention.dsa import launches

    launches.apply_candidate_mask(logits, row_starts, row_ends, candidates, block_size, row_repeat)


def _check(
    logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor, block_size: int, row_repeat: int
) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32 [rows, width], got {logits.dtype} {list(logits.shape)}")
    _check_size("block_size", block_size, 1)
    _check_size("row_repeat", row_repeat, 1)
    entries = -(-logits.shape[0] // row_repeat)
    for name, bounds in (("row_starts", row_starts), ("row_ends", row_ends)):
        if bounds is None:
            continue
        if bounds.shape != (entries,) or bounds.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be int32 or int64 [{entries}] for {logits.shape[0]} rows and row_repeat {row_repeat}, "
                f"got {bounds.dtype} {list(bounds.shape)}"
            )
        if bounds.device != logits.device:
            raise ValueError(f"{name} must be on the device of logits, {logits.device}, got {bounds.device}")


def _check_size(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
        raise ValueError(f"{name} must be an int from {low} to 2**31 - 1, got {value!r}")

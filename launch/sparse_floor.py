"""The least that a DSA mask or the block scores can cost: the live columns moved, their number known on the host.

No row length is read, no candidate is looked up and no program is idle, so the floor's time in a wide buffer over that
in a narrow one is what the memory system charges for the addresses, and the rest of a kernel's ratio is its own. For
comparison only: a graph captured with it serves one length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
"""Columns a program takes, fewer in shorter rows."""
WORD = 32
"""Blocks of which a word of :func:`kept_words` holds one bit each."""


@triton.jit
def _read_tiles(logits, row_stride, scores, score_stride, live, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    inside = block < live // BLOCK
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * row_stride + column, mask=inside[:, None], other=float("-inf"))
    tl.store(scores + row * score_stride + block, tl.max(values, 1), mask=inside)


@triton.jit
def _write_tiles(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    candidates,
    num_candidates,
    words,
    live,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SHARE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    candidate = tl.load(candidates + row * num_candidates + place, mask=place < num_candidates, other=-1)
    block = tl.program_id(1) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    inside = block < live // BLOCK
    word = tl.load(words + row * tl.cdiv(live // BLOCK, 32) + block // 32, mask=inside, other=-1)
    # Never so, which only the candidates can tell: no column is stored before they are there.
    word = tl.where(tl.max(candidate) == 0x7FFFFFFF, -1, word)
    dropped = inside & (((word >> (block % 32)) & 1) == 0)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(logits + row * row_stride + column, float("-inf"), mask=dropped[:, None])


def kept_words(candidates: torch.Tensor, live: int, block_size: int) -> torch.Tensor:
    """int32 [rows, ceil(live / block_size / 32)]: bit i % 32 of word i // 32 says that block i is a candidate."""
    rows, blocks = candidates.shape[0], live // block_size
    words = -(-blocks // WORD)
    kept = torch.zeros(rows, words * WORD + 1, dtype=torch.bool, device=candidates.device)
    kept.scatter_(1, torch.where(candidates < 0, words * WORD, candidates).long(), True)
    bits = kept[:, :-1].view(rows, words, WORD)
    packed = torch.zeros(rows, words, dtype=torch.int64, device=candidates.device)
    for bit in range(WORD):
        packed |= bits[:, :, bit].long() << bit
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def floor_mask(logits: torch.Tensor, candidates: torch.Tensor, words: torch.Tensor, live: int, block_size: int) -> None:
    """Reads every candidate once, and stores -inf in the first ``live`` columns that :func:`kept_words` does not keep.

    live: a multiple of block_size, a power of two. candidates: int32, contiguous, below ``live // block_size``.
    """
    rows = logits.shape[0]
    tile = min(TILE, triton.next_power_of_2(live))
    parts = -(-live // tile)
    _write_tiles[(rows, parts)](
        logits,
        logits.stride(0),
        candidates,
        candidates.shape[1],
        words,
        live,
        BLOCK=block_size,
        TILE=tile,
        SHARE=triton.next_power_of_2(-(-candidates.shape[1] // parts)),
        num_warps=4,
    )


def floor_scores(logits: torch.Tensor, live: int, block_size: int, scores: torch.Tensor) -> None:
    """Maxima of the first ``live`` columns' blocks into ``scores`` [rows, any]; NaN and the newest block as they come.

    live: a multiple of block_size, a power of two.
    """
    tile = min(TILE, triton.next_power_of_2(live))
    _read_tiles[(logits.shape[0], -(-live // tile))](
        logits, logits.stride(0), scores, scores.stride(0), live, BLOCK=block_size, TILE=tile, num_warps=4
    )

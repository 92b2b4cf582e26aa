"""The launch of the scoring kernel: its grid follows from tensor shapes alone."""

from __future__ import annotations

import torch

from tpoverlap.attention.qsa.scoring_kernel import score_segments
from tpoverlap.cuda.triton_dispatch import capability_of, multiprocessors, on_device_of

TILE_KEYS = 64
PROGRAMS = {1: 16, 2: 8, 4: 8}
"""Programs with work a multiprocessor, by longest segment; rows that share keys only through the cache need more."""
RUN_WINDOW = 64
"""Rows looked back at a time for the start of a request's run."""


def score(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    visible_blocks: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    max_segment: int,
    skip_visible: int,
) -> None:
    rows, heads, _ = q.shape
    columns = out.shape[1]
    tiles = -(-columns // TILE_KEYS)
    # One program in max_segment starts a segment, the others return.
    programs = PROGRAMS[max_segment] * max_segment * multiprocessors(q)
    parts = max(1, min(tiles, -(-programs // rows), 65535))
    e4m3 = key_cache.dtype == torch.float8_e4m3fn
    with on_device_of(q):
        score_segments[(rows, parts)](
            q,
            q.stride(0),
            q.stride(1),
            key_cache.view(torch.uint8) if e4m3 else key_cache,
            key_cache.stride(0),
            key_cache.stride(1),
            key_cache.shape[0],
            block_table,
            *block_table.stride(),
            token_to_req.contiguous(),
            visible_blocks.contiguous(),
            out,
            out.stride(0),
            rows,
            columns,
            skip_visible,
            scale,
            HEADS=heads,
            LANES=max(16, 1 << (heads - 1).bit_length()),
            SEGMENT=max_segment,
            STORAGE_BLOCK=key_cache.shape[1],
            E4M3=e4m3,
            DIMS=16 if q.is_cuda and capability_of(q) < (8, 0) else 128,
            WINDOW=RUN_WINDOW,
            STAGES=2,
            num_warps=2,
        )

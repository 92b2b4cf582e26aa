"""Prefill as one decode a prompt row: slow, and bit for bit what decode gives."""

from __future__ import annotations

import torch

from tpoverlap.attention.arguments import MAX_DECODE_SPLITS, check_count
from tpoverlap.attention.backend import PACKED_MATCHES_DECODE, PrefillRequest, prefill_prepared_by
from tpoverlap.attention.triton.common import common_rejections
from tpoverlap.attention.triton.decode import decode_rows

name = "triton_rows"
capabilities = frozenset({PACKED_MATCHES_DECODE})

# Those of paged_decode's default: rows have its bits.
_NUM_SPLITS = 16
# Rows of one launch; bounds the partial buffer (17 MB at 16 heads of 128).
_ROWS = 128


def rejection_reasons(request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
    return common_rejections(request)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int | None,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    check_count("num_splits", num_splits or 0, 0, MAX_DECODE_SPLITS)
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    for first_row in range(0, q.shape[0], _ROWS):
        decode_rows(
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            num_splits=num_splits or _NUM_SPLITS,
            out=out,
            lse=lse,
            workspace=None,
            merge_in_launch=not capturing,
            first_row=first_row,
            rows=min(_ROWS, q.shape[0] - first_row),
        )


prepare_prefill = prefill_prepared_by(paged_prefill)

"""Token selection: score a query's visible blocks, keep the best, list their tokens and the open tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tpoverlap.attention.qsa import scoring, selection_torch
from tpoverlap.attention.topk import MAX_KERNEL_K, check_topk_output, select_plan
from tpoverlap.cuda.triton_dispatch import triton_serves
from tpoverlap.errors import UnsupportedError

MAX_SEGMENT_ROWS = 256
"""Rows of a score chunk up to which request segments serve."""
WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True)
class SelectionReport:
    """scorer: "request_segments", "paged", "request_segments + paged" where decode and prefill rows differ, or "none".

    "none": there are no rows, or the block table holds at most top_k blocks, so there is nothing to rank. reason: why
    that scorer. chunks: how many parts the rows ran in. visible_blocks: int32 [tokens], the blocks that each row saw.
    """

    scorer: str
    reason: str
    chunks: int
    visible_blocks: torch.Tensor


def select_tokens(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    logical_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    compress_ratio: int,
    top_k: int = 512,
    scale: float | None = None,
    visible_blocks: torch.Tensor | None = None,
    request_segments: bool | Literal["auto"] = "auto",
    max_segment: int = 4,
    num_decodes: int | None = None,
    num_decode_tokens: int | None = None,
    num_padding_tokens: int = 0,
    workspace_bytes: int = WORKSPACE_BYTES,
    out: torch.Tensor | None = None,
    return_report: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, SelectionReport]:
    """int32 [tokens, top_k * r + r - 1], r = compress_ratio: the positions each query attends to, ascending, then -1.

    The top_k best visible blocks by (score descending, block ascending; -0 equal to +0, NaN first, blocks outside the
    cache last), or all of them where no more are visible; block b stands for positions b * r .. b * r + r - 1. Behind
    them the open tail, ((pos + 1) // r) * r .. pos. Positions from the sequence's end on never appear.

    q, key_cache, block_table, token_to_req, scale: as :func:`score_paged`. logical_positions: [tokens], int32 or int64,
    -1 for padding, whose request may be -1 too. seq_lens: [requests]. visible_blocks: [tokens], from the batch's
    metadata; computed for None.

    request_segments: "auto" scores several rows of a request at once where that serves and pays; False never does; True
    raises UnsupportedError with the condition that fails, where there is anything to score. It serves two or more
    requests, at most 256 rows a score chunk, at least two unpadded rows a request on average, 4 heads, and int32
    block_table, token_to_req, seq_lens and visible_blocks. num_decodes, num_decode_tokens: what the host knows of a
    batch whose first requests are decodes; the decode rows are then judged and scored apart from the others.
    num_padding_tokens: rows at the end that are padding. The result depends on none of these, nor on workspace_bytes,
    which bounds scores and scratch of a chunk (one row is the least).
    """
    scale = _check(
        q,
        key_cache,
        block_table,
        token_to_req,
        logical_positions,
        seq_lens,
        visible_blocks,
        compress_ratio,
        top_k,
        scale,
    )
    tokens, requests = q.shape[0], block_table.shape[0]
    if (num_decodes is None) != (num_decode_tokens is None):
        raise ValueError("give num_decodes and num_decode_tokens together, or neither")
    if not isinstance(request_segments, bool) and request_segments != "auto":
        raise ValueError(f"request_segments must be 'auto', True or False, got {request_segments!r}")
    if max_segment not in scoring.SEGMENT_LIMITS or isinstance(max_segment, bool):
        raise ValueError(f"max_segment must be one of {scoring.SEGMENT_LIMITS}, got {max_segment!r}")
    for name, value, high in (
        ("num_padding_tokens", num_padding_tokens, tokens),
        ("num_decodes", num_decodes, requests),
        ("num_decode_tokens", num_decode_tokens, tokens - num_padding_tokens),
    ):
        if value is not None and not 0 <= value <= high:
            raise ValueError(f"{name} must be from 0 to {high}, got {value}")
    out = check_topk_output(out, tokens, top_k * compress_ratio + compress_ratio - 1, q.device)
    if visible_blocks is None:
        visible_blocks = selection_torch.visible_blocks(token_to_req, logical_positions, seq_lens, compress_ratio)

    columns = block_table.shape[1] * key_cache.shape[1]
    rows_per_chunk = _rows_per_chunk(workspace_bytes, columns, top_k)
    decode_rows = tokens if num_decode_tokens is None else num_decode_tokens
    decode_requests = requests if num_decodes is None else num_decodes
    unpadded = decode_rows - (num_padding_tokens if num_decode_tokens is None else 0)
    int32 = all(t.dtype == torch.int32 for t in (block_table, token_to_req, seq_lens, visible_blocks))
    refusal = _segment_refusal(q.shape[1], min(decode_rows, rows_per_chunk), decode_requests, unpadded, all_int32=int32)
    ranked = tokens > 0 and columns > top_k
    if ranked and request_segments is True and refusal:
        raise UnsupportedError(f"request_segments=True is not supported here: {refusal}; use 'auto' or False")
    segments = ranked and request_segments is not False and refusal is None
    if not tokens:
        scorer, reason = "none", "there are no rows"
    elif not ranked:
        scorer, reason = "none", f"the block table holds {columns} blocks and top_k is {top_k}: all are listed"
    elif segments:
        scorer, reason = "request_segments", "several rows of a request share each tile of keys"
        if decode_rows < tokens:
            scorer = "request_segments + paged"
    else:
        scorer, reason = "paged", refusal if request_segments == "auto" and refusal else "request_segments=False"

    chunks = 0
    ranges = [(0, decode_rows, max_segment if segments else 1), (decode_rows, tokens, 1)]
    for first, last, segment in ranges:
        for start in range(first, last, rows_per_chunk):
            rows = slice(start, min(start + rows_per_chunk, last))
            _select_chunk(
                q[rows],
                key_cache,
                block_table,
                token_to_req[rows],
                logical_positions[rows],
                seq_lens,
                visible_blocks[rows],
                compress_ratio,
                top_k,
                scale,
                segment,
                out[rows],
            )
            chunks += 1
    if not return_report:
        return out
    return out, SelectionReport(scorer, reason, chunks, visible_blocks)


def _segment_refusal(heads: int, chunk_rows: int, requests: int, unpadded: int, *, all_int32: bool) -> str | None:
    """Why request segments do not serve these rows; None: they do."""
    if heads != scoring.SEGMENT_HEADS:
        return f"it needs {scoring.SEGMENT_HEADS} heads of {scoring.HEAD_DIM}, q has {heads}"
    if not all_int32:
        return "it needs int32 block_table, token_to_req, seq_lens and visible_blocks"
    if requests < 2:
        return f"it needs two requests or more, the rows have {requests}"
    if chunk_rows > MAX_SEGMENT_ROWS:
        return f"it needs at most {MAX_SEGMENT_ROWS} rows a score chunk, there are {chunk_rows}"
    if unpadded < 2 * requests:
        return f"it needs two unpadded rows a request on average, there are {unpadded} for {requests}"
    return None


def _rows_per_chunk(workspace_bytes: int, columns: int, top_k: int) -> int:
    return max(1, workspace_bytes // (4 * (columns + select_plan(max(1, top_k)).scratch_ints)))


def _select_chunk(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    logical_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    visible_blocks: torch.Tensor,
    compress_ratio: int,
    top_k: int,
    scale: float,
    max_segment: int,
    out: torch.Tensor,
) -> None:
    scores = torch.empty(q.shape[0], block_table.shape[1] * key_cache.shape[1], dtype=torch.float32, device=q.device)
    if scores.shape[1] > top_k:
        scoring.score(
            q,
            key_cache,
            block_table,
            token_to_req,
            visible_blocks,
            scale,
            scores,
            max_segment=max_segment,
            skip_visible=top_k,
        )
    where = (token_to_req, logical_positions, seq_lens, visible_blocks, compress_ratio, top_k)
    if triton_serves(q) and top_k <= MAX_KERNEL_K:
        from tpoverlap.attention.qsa import selection_launch

        selection_launch.select(scores, *where, out)
    else:
        selection_torch.select(scores, *where, out)


def _check(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    logical_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    visible_blocks: torch.Tensor | None,
    compress_ratio: int,
    top_k: int,
    scale: float | None,
) -> float:
    for name, value in (("compress_ratio", compress_ratio), ("top_k", top_k)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    if visible_blocks is None:
        visible_blocks = token_to_req  # which counts made here will be like
    scale = scoring.check_scorer(q, key_cache, block_table, token_to_req, visible_blocks, scale)
    for name, tensor, size in (
        ("logical_positions", logical_positions, q.shape[0]),
        ("seq_lens", seq_lens, block_table.shape[0]),
    ):
        if tensor.shape != (size,) or tensor.dtype not in scoring.INDEX_DTYPES:
            raise ValueError(f"{name} must be int32 or int64 [{size}], got {tensor.dtype} {list(tensor.shape)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    scoring.check_requests(token_to_req, block_table.shape[0], logical_positions, 0)
    return scale

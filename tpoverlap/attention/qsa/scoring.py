"""Scores of queries against the paged cache of compressed keys: by the row, or several rows of a request at once."""

from __future__ import annotations

import math

import torch

from tpoverlap.attention.qsa import scoring_torch
from tpoverlap.cuda.triton_dispatch import capability_of, triton_serves
from tpoverlap.errors import UnsupportedError

HEAD_DIM = 128
SEGMENT_HEADS = 4
SEGMENT_LIMITS = (1, 2, 4)
DTYPE_PAIRS = {
    torch.float16: (torch.float16, torch.float8_e4m3fn),
    torch.bfloat16: (torch.bfloat16, torch.float8_e4m3fn),
}
"""Query dtype -> key dtypes that are scored with it."""

INDEX_DTYPES = (torch.int32, torch.int64)


def score_paged(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    visible_blocks: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """FP32 [tokens, columns]: score[t, c] = scale * sum over heads of max(0, q[t, h] . k[c]), summed in FP32.

    q: [tokens, heads, 128], FP16 with FP16 or e4m3 keys, BF16 with BF16 or e4m3 keys. key_cache: [blocks, S, 128], any
    strides but the last. block_table: [requests, width]; column c of request i is row c % S of block
    block_table[i, c // S], and -inf where that block is not in the cache. token_to_req, visible_blocks: [tokens]; a row
    that sees no block may name no request. Columns from visible_blocks[t] on are not written, and hold anything in a
    result that was not given. Integers are int32 or int64. scale: 1 / sqrt(128) for None. out: FP32 [tokens, width *
    S], unit stride along the columns.

    Offsets are 64-bit. Raises ValueError for wrong shapes, dtypes and devices, UnsupportedError for BF16 below compute
    capability 8.0. Source: the lightning indexer's ReLU scores (DeepSeek-V3.2), over compressed keys.
    """
    scale = check_scorer(q, key_cache, block_table, token_to_req, visible_blocks, scale)
    check_requests(token_to_req, block_table.shape[0], visible_blocks, 1)
    out = _score_output(out, q, key_cache, block_table)
    score(q, key_cache, block_table, token_to_req, visible_blocks, scale, out, max_segment=1, skip_visible=0)
    return out


def score_request_segments(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    visible_blocks: torch.Tensor,
    *,
    max_segment: int = 4,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scores of :func:`score_paged`, bit for bit, reading keys once for up to ``max_segment`` rows of a request.

    max_segment: 1, 2 or 4. A segment is that many consecutive rows of one request, counted from the first row of its
    run; runs may be ragged and padding rows may follow. 4 heads of 128; anything else raises UnsupportedError, the
    rest as :func:`score_paged`. Segments are found on the device, so a captured call follows new inputs.
    """
    if max_segment not in SEGMENT_LIMITS or isinstance(max_segment, bool):
        raise ValueError(f"max_segment must be one of {SEGMENT_LIMITS}, got {max_segment!r}")
    scale = check_scorer(q, key_cache, block_table, token_to_req, visible_blocks, scale)
    if q.shape[1] != SEGMENT_HEADS:
        raise UnsupportedError(
            f"request segments serve {SEGMENT_HEADS} heads of {HEAD_DIM}, q has {q.shape[1]}: use score_paged"
        )
    check_requests(token_to_req, block_table.shape[0], visible_blocks, 1)
    out = _score_output(out, q, key_cache, block_table)
    score(q, key_cache, block_table, token_to_req, visible_blocks, scale, out, max_segment=max_segment, skip_visible=0)
    return out


def score(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    visible_blocks: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    max_segment: int,
    skip_visible: int,
) -> None:
    """Both scorers behind their checks; rows that see at most ``skip_visible`` blocks need not be written."""
    if not out.numel():
        return
    # The interpreter computes BF16 wrongly.
    if triton_serves(q) and (q.is_cuda or q.dtype == torch.float16):
        from tpoverlap.attention.qsa import scoring_launch

        scoring_launch.score(
            q, key_cache, block_table, token_to_req, visible_blocks, scale, out, max_segment, skip_visible
        )
    else:
        scoring_torch.score(q, key_cache, block_table, token_to_req, visible_blocks, scale, out)


def check_scorer(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    visible_blocks: torch.Tensor,
    scale: float | None,
) -> float:
    """The scale to use; raises as :func:`score_paged` documents."""
    if q.dim() != 3 or q.shape[1] < 1 or q.shape[2] != HEAD_DIM or q.stride(2) != 1:
        raise ValueError(
            f"q must be [tokens, heads, {HEAD_DIM}] with unit stride along the last dimension, "
            f"got {list(q.shape)}, strides {q.stride()}"
        )
    if key_cache.dim() != 3 or key_cache.shape[1] < 1 or key_cache.shape[2] != HEAD_DIM or key_cache.stride(2) != 1:
        raise ValueError(
            f"key_cache must be [blocks, rows, {HEAD_DIM}] with unit stride along the last dimension, "
            f"got {list(key_cache.shape)}, strides {key_cache.stride()}"
        )
    if key_cache.dtype not in DTYPE_PAIRS.get(q.dtype, ()):
        pairs = "; ".join(f"{a} with {' or '.join(map(str, b))}" for a, b in DTYPE_PAIRS.items())
        raise ValueError(f"q and key_cache of dtypes {q.dtype} and {key_cache.dtype}: supported are {pairs}")
    if block_table.dim() != 2:
        raise ValueError(f"block_table must be [requests, width], got {list(block_table.shape)}")
    integers = {"block_table": block_table, "token_to_req": token_to_req, "visible_blocks": visible_blocks}
    for name in ("token_to_req", "visible_blocks"):
        if integers[name].shape != q.shape[:1]:
            raise ValueError(f"{name} must be [{q.shape[0]}], a row of q each, got {list(integers[name].shape)}")
    for name, tensor in integers.items():
        if tensor.dtype not in INDEX_DTYPES:
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
    for name, tensor in {"key_cache": key_cache, **integers}.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    if q.dtype == torch.bfloat16 and q.is_cuda and capability_of(q) < (8, 0):
        raise UnsupportedError("BF16 queries need compute capability 8.0: use FP16 queries and keys on this GPU")
    if scale is None:
        return HEAD_DIM**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale must be None (1 / sqrt({HEAD_DIM})) or a finite number, got {scale!r}")
    return float(scale)


def check_requests(token_to_req: torch.Tensor, requests: int, amounts: torch.Tensor, least: int) -> None:
    """Raise ValueError if a row of at least that amount names no request. Not on a GPU, where it would have to wait."""
    if token_to_req.is_cuda:
        return
    wrong = ((amounts >= least) & ((token_to_req < 0) | (token_to_req >= requests))).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"token_to_req must be from 0 to {requests - 1}, got {int(token_to_req[row])} for row {row}")


def _score_output(
    out: torch.Tensor | None, q: torch.Tensor, key_cache: torch.Tensor, block_table: torch.Tensor
) -> torch.Tensor:
    shape = (q.shape[0], block_table.shape[1] * key_cache.shape[1])
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=q.device)
    fits = out.shape == shape and (shape[1] < 2 or out.stride(1) == 1)
    if not fits or out.dtype != torch.float32 or out.device != q.device:
        raise ValueError(
            f"out must be float32 {list(shape)} with unit stride along the columns on {q.device}, "
            f"got {out.dtype} {list(out.shape)}, strides {out.stride()}, on {out.device}"
        )
    return out

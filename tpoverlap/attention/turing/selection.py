"""When the kernel of prefill.cu serves a request, and when it is preferred."""

from __future__ import annotations

import torch

from tpoverlap.attention.backend import PACKED_PREFILL, PrefillRequest
from tpoverlap.attention.shared_reasons import dotted, missing_features

name = "turing"
capabilities = frozenset({PACKED_PREFILL})

HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64)
CAPABILITY = (7, 5)
# A block of threads holds 128 packed rows whether they are filled or not. Measured on a Quadro RTX 8000 without splits:
# 64 query tokens after 150k took 19.9 ms against FlashAttention-2's 5.3, 96 tokens 19.8 against 24.6.
MIN_QUERY_LEN = 65


def rejection_reasons(
    request: PrefillRequest, *, forced: bool = False, min_query_len: int = MIN_QUERY_LEN
) -> tuple[str, ...]:
    """min_query_len: some request must bring at least so many query tokens; 0: any number will do."""
    reasons = []
    if request.capability is None:
        reasons.append("it needs a CUDA device")
    elif request.capability < CAPABILITY:
        reasons.append(f"it needs compute capability 7.5 or newer, not {dotted(request.capability)}")
    elif request.capability != CAPABILITY and not forced:
        reasons.append(f"it is meant for compute capability 7.5, not {dotted(request.capability)}")
    if request.head_dim != HEAD_DIM:
        reasons.append(f"its head_dim is {HEAD_DIM}, not {request.head_dim}")
    if request.dtype != torch.float16:
        reasons.append(f"its query is float16, not {_short(request.dtype)}")
    if request.paged_dtype != torch.float16:
        reasons.append(f"its cache is float16, not {_short(request.paged_dtype)}")
    if request.block_size not in BLOCK_SIZES:
        reasons.append(f"its block sizes are 16, 32 and 64, not {request.block_size}")
    if not request.vector_rows:
        reasons.append(
            "it loads the cache by 16 bytes: each token's head must be contiguous and 16-byte aligned, blocks and "
            "tokens less than 4 GiB apart"
        )
    if request.sliding_window is not None:
        reasons.append("it has no sliding window")
    if request.softcap is not None:
        reasons.append("it has no softcap")
    reasons += missing_features(request)
    if request.batch_invariant:
        reasons.append("it is not batch invariant: the number of splits depends on the whole batch")
    if request.max_query_len < min_query_len and not forced:
        reasons.append(f"no request brings {min_query_len} query tokens, {request.max_query_len} at most")
    return tuple(reasons)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Adapter of an installed FlashAttention-2 (package flash-attn): its varlen kernels over a block table."""

from __future__ import annotations

import torch

from tpoverlap.attention.backend import PACKED_PREFILL, PrefillRequest, prefill_prepared_by, prepared_by
from tpoverlap.attention.library import clear_unseen_rows, decode_by, library_rejections

name = "flash_attn"
capabilities = frozenset({PACKED_PREFILL})

_BLOCK_MULTIPLE = 256
_MAX_HEAD_DIM = 256


def rejection_reasons(request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
    reasons = library_rejections(request, "flash_attn", "flash-attn")
    if request.block_size % _BLOCK_MULTIPLE:
        reasons.append(f"its block sizes are multiples of {_BLOCK_MULTIPLE}, not {request.block_size}")
    if request.head_dim > _MAX_HEAD_DIM or request.head_dim % 8:
        reasons.append(f"its head dims are multiples of 8 up to {_MAX_HEAD_DIM}, not {request.head_dim}")
    if request.batch_invariant and not forced:
        reasons.append("a row's bits depend on the batch; choose it by name")
    return tuple(reasons)


@torch.no_grad()
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
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    cu_seqlens_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    result, row_lse, _ = flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cu_seqlens_k,
        max_query_len,
        block_table.shape[1] * k_cache.shape[1],
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        softcap=0.0 if softcap is None else softcap,
        return_attn_probs=True,
        block_table=block_table,
    )
    out.copy_(result)
    if lse is not None:
        lse.copy_(row_lse.t())
    clear_unseen_rows(out, lse, cu_seqlens_q, seq_lens)


prepare_prefill = prefill_prepared_by(paged_prefill)
prepare_decode = prepared_by(decode_by(paged_prefill))

"""Adapter of an installed FlashInfer: its paged prefill wrapper, planned at every call."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tpoverlap.attention.backend import PACKED_PREFILL, PrefillRequest, prefill_prepared_by, prepared_by
from tpoverlap.attention.library import clear_unseen_rows, decode_by, library_rejections

name = "flashinfer"
capabilities = frozenset({PACKED_PREFILL})

_HEAD_DIMS = (64, 128, 256)
# What its documentation recommends, in bytes.
_WORKSPACE_BYTES = 128 << 20
_workspaces: dict[torch.device, torch.Tensor] = {}


def rejection_reasons(request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
    reasons = library_rejections(request, "flashinfer", "flashinfer-python")
    if request.head_dim not in _HEAD_DIMS:
        reasons.append(f"its head dims are {', '.join(map(str, _HEAD_DIMS))}, not {request.head_dim}")
    if not forced:
        reasons.append("it reads the lengths on the host at every call; choose it by name")
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
    tokens = int(cu_seqlens_q[-1])
    if tokens and k_cache.shape[0]:
        run = planned(
            q[:tokens],
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        result, row_lse = run()
        out[:tokens] = result
        if lse is not None:
            # Its log-sum-exp is in base 2.
            lse[:tokens] = row_lse * math.log(2.0)
    clear_unseen_rows(out, lse, cu_seqlens_q, seq_lens)


def planned(
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
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Plan for these lengths; the callable runs the kernels on these tensors: output and log-sum-exp in base 2."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    block_size, kv_heads, head_dim = k_cache.shape[1:]
    lengths = seq_lens.cpu()
    blocks = (lengths + block_size - 1) // block_size
    used = torch.arange(block_table.shape[1])[None] < blocks[:, None]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
    wrapper.plan(
        cu_seqlens_q,
        torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0)).to(q.device),
        # A tile of keys that begins before a window looks blocks up that need not be mapped any more.
        block_table[used.to(q.device)].clamp(0, k_cache.shape[0] - 1),
        (lengths - (blocks - 1) * block_size).to(torch.int32).to(q.device),
        q.shape[1],
        kv_heads,
        head_dim,
        block_size,
        causal=True,
        sm_scale=scale,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=softcap,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    rows = q.contiguous()
    return lambda: wrapper.run(rows, (k_cache, v_cache), return_lse=True)


prepare_prefill = prefill_prepared_by(paged_prefill)
prepare_decode = prepared_by(decode_by(paged_prefill))


def _workspace(device: torch.device) -> torch.Tensor:
    if device not in _workspaces:
        _workspaces[device] = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device]

"""Host side of the packed prefill."""

from __future__ import annotations

import torch

from tpoverlap.attention.backend import PACKED_PREFILL, PrefillRequest
from tpoverlap.attention.triton.common import common_rejections, padded_dim, score_factors, window_of
from tpoverlap.attention.triton.configs import PrefillTiles, prefill_tiles
from tpoverlap.cuda.triton_dispatch import capability_of, on_device_of

name = "triton"
capabilities = frozenset({PACKED_PREFILL})


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
    """num_splits is of no effect: one program walks all keys of its rows, whose bits then depend on nothing else."""
    tiles = prefill_tiles(capability_of(q) if q.is_cuda else None, q.dtype, q.shape[2])
    launch_prefill(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        out=out,
        lse=lse,
        tiles=tiles,
    )


def launch_prefill(
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
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tiles: PrefillTiles,
) -> None:
    """The launch, with given tiles. Its grid follows from shapes alone: nothing is read back, a graph can hold it."""
    from tpoverlap.attention.triton.prefill_kernel import prefill_kernel

    tokens, q_heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    requests, columns = block_table.shape
    group = q_heads // kv_heads
    with on_device_of(q):
        prefill_kernel[(tokens * group // tiles.block_m + requests + 1, kv_heads)](
            q,
            k_cache,
            v_cache,
            out,
            out if lse is None else lse,
            block_table,
            cu_seqlens_q.contiguous(),
            seq_lens.contiguous(),
            *score_factors(scale, softcap),
            window_of(sliding_window),
            requests,
            tokens,
            columns if num_blocks else 0,
            num_blocks,
            *q.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            *out.stride(),
            *block_table.stride(),
            GROUP=group,
            HEAD_DIM=head_dim,
            DIM=padded_dim(head_dim),
            BLOCK_SIZE=block_size,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            WINDOW=sliding_window is not None,
            SOFTCAP=softcap is not None,
            STORE_LSE=lse is not None,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

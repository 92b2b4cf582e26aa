"""Host side of the cache write."""

from __future__ import annotations

import torch

from tpoverlap.cuda.triton_dispatch import on_device_of

# Elements of a program's tile of heads: 8 a thread.
_TILE_ELEMENTS = 1024
_NUM_WARPS = 4


def write_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """One launch; the arguments have been checked."""
    from tpoverlap.attention.triton.kv_write_kernel import write_kv_kernel

    tokens, kv_heads, head_dim = k.shape
    half = 0 if cos is None else cos.shape[1]
    q_heads = 0 if q is None else q.shape[1]
    dim = 1 << (head_dim - 1).bit_length()
    heads = min(max(1, _TILE_ELEMENTS // dim), 1 << (max(q_heads, kv_heads) - 1).bit_length())
    tiles = -(-q_heads // heads) + -(-kv_heads // heads)
    # Absent tensors are never touched; what stands in for them only has to be a pointer.
    rotated = k if q is None else q
    with on_device_of(k):
        write_kv_kernel[(tokens, tiles)](
            rotated,
            k,
            v,
            k if cos is None else cos,
            k if sin is None else sin,
            k_cache,
            v_cache,
            slots,
            k_cache.shape[0] * k_cache.shape[1],
            k_cache.shape[1],
            *rotated.stride(),
            *k.stride(),
            *v.stride(),
            *k_cache.stride(),
            *v_cache.stride(),
            slots.stride(0),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEADS=heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            HALF=half,
            HALF_PAD=1 << max(half - 1, 0).bit_length(),
            num_warps=_NUM_WARPS,
        )

"""Host side of the cache write: the launch of a signature."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tpoverlap.cuda.triton_dispatch import on_device_of
from tpoverlap.cuda.triton_launch import FastLaunch

# Elements of a program's tile of heads: 8 a thread.
_TILE_ELEMENTS = 1024
_NUM_WARPS = 4


def prepare_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> Write:
    """The launch for tensors of these shapes, strides, dtypes and device; the arguments have been checked."""
    tokens, kv_heads, head_dim = k.shape
    half = 0 if cos is None else cos.shape[1]
    q_heads = 0 if q is None else q.shape[1]
    dim = 1 << (head_dim - 1).bit_length()
    heads = min(max(1, _TILE_ELEMENTS // dim), 1 << (max(q_heads, kv_heads) - 1).bit_length())
    rotated = k if q is None else q
    capacity = k_cache.shape[0] * k_cache.shape[1]
    sizes = (
        k_cache.shape[1],
        *rotated.stride(),
        *k.stride(),
        *v.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        slots.stride(0),
    )
    constants = (q_heads, kv_heads, heads, head_dim, dim, half, 1 << max(half - 1, 0).bit_length())
    dtypes = (k.dtype, None if cos is None else cos.dtype)
    return Write(
        _launch(k.device, dtypes, sizes, capacity >= 2**31, constants),
        tokens,
        -(-q_heads // heads) + -(-kv_heads // heads),
        (capacity, *sizes),
    )


@dataclass(frozen=True, slots=True)
class Write:
    """The launch of one signature. values: the arguments that are not tensors."""

    launch: FastLaunch
    tokens: int
    tiles: int
    values: tuple[int, ...]

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        q: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> None:
        if not self.tokens:
            return
        # Absent tensors are never touched; what stands in for them only has to be a pointer.
        rotated = k if q is None else q
        angles = (k, k) if cos is None or sin is None else (cos, sin)
        with on_device_of(k):
            self.launch(self.tokens, (rotated, k, v, *angles, k_cache, v_cache, slots), self.values, y=self.tiles)


@functools.lru_cache(1024)
def _launch(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    sizes: tuple[int, ...],
    wide: bool,
    constants: tuple[int, ...],
) -> FastLaunch:
    """sizes: the ints that Triton looks at. wide: whether the capacity, which it does not look at, is an int64."""
    from tpoverlap.attention.triton.kv_write_kernel import write_kv_kernel

    names = ("Q_HEADS", "KV_HEADS", "HEADS", "HEAD_DIM", "DIM", "HALF", "HALF_PAD")
    return FastLaunch(write_kv_kernel, dict(zip(names, constants, strict=True)), num_warps=_NUM_WARPS)

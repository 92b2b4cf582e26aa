"""Checks of the arguments that prefill and decode share: shapes, dtypes and devices, never values on a device."""

from __future__ import annotations

import math
import numbers
from typing import TypeGuard

import torch

WORKING_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_DECODE_SPLITS = 128
# Kernels number a request's keys in int32, and add to such numbers.
MAX_KEYS = 2**30


def check_tensors(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the tensors fit together as the public functions document."""
    if q.dim() != 3:
        raise ValueError(f"q must be [tokens, q_heads, head_dim], got shape {tuple(q.shape)}")
    if q.dtype not in WORKING_DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    _, q_heads, head_dim = q.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4:
            raise ValueError(f"{name} must be [blocks, block_size, kv_heads, head_dim], got shape {tuple(cache.shape)}")
        if cache.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {cache.dtype}")
        if cache.shape[3] != head_dim:
            raise ValueError(f"{name} must have the head_dim of q, {head_dim}, got shape {tuple(cache.shape)}")
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache and v_cache must have one shape, got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    _, block_size, kv_heads, _ = k_cache.shape
    if min(q_heads, head_dim, block_size, kv_heads) < 1:
        raise ValueError(
            f"heads, head_dim and block_size must be positive, got q {tuple(q.shape)}, cache {tuple(k_cache.shape)}"
        )
    if q_heads % kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads, got {q_heads} and {kv_heads}")
    if block_table.dim() != 2:
        raise ValueError(f"block_table must be [requests, max_blocks], got shape {tuple(block_table.shape)}")
    requests = block_table.shape[0]
    integers = {"block_table": block_table, "seq_lens": seq_lens}
    shapes = {"seq_lens": (requests,)}
    if cu_seqlens_q is not None:
        integers["cu_seqlens_q"] = cu_seqlens_q
        shapes["cu_seqlens_q"] = (requests + 1,)
    elif q.shape[0] != requests:
        raise ValueError(f"decode takes one row of q a request, got {q.shape[0]} rows for {requests} requests")
    for name, shape in shapes.items():
        if tuple(integers[name].shape) != shape:
            got = tuple(integers[name].shape)
            raise ValueError(f"{name} must have shape {shape} for {requests} rows of block_table, got {got}")
    for name, tensor in integers.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
    for name, tensor in {"k_cache": k_cache, "v_cache": v_cache, **integers}.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def check_options(scale: float | None, sliding_window: int | None, softcap: float | None, head_dim: int) -> float:
    """The softmax scale to use; raises ValueError for an option out of its range."""
    if sliding_window is not None and (not _is_int(sliding_window) or sliding_window < 1):
        raise ValueError(f"sliding_window must be None or a positive number of keys, got {sliding_window!r}")
    if softcap is not None and not _is_positive(softcap):
        raise ValueError(f"softcap must be None or a positive number, got {softcap!r}")
    if scale is None:
        return head_dim**-0.5
    if not _is_positive(scale):
        raise ValueError(f"scale must be None (1 / sqrt(head_dim)) or a positive number, got {scale!r}")
    return float(scale)


def check_count(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ValueError unless value is an int in the closed range."""
    if not _is_int(value) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an int {limits}, got {value!r}")


def readable_columns(k_cache: torch.Tensor, block_table: torch.Tensor) -> int:
    """Columns of a block table that kernels read: those of a request's first MAX_KEYS keys, none of an empty cache."""
    return min(block_table.shape[1], MAX_KEYS // k_cache.shape[1]) if k_cache.shape[0] else 0


def aligned_rows(x: torch.Tensor, alignment: int) -> bool:
    """Whether each row of the last dimension is contiguous and starts at a multiple of ``alignment`` bytes."""
    return x.data_ptr() % alignment == 0 and aligned_strides(x, alignment)


def aligned_strides(x: torch.Tensor, alignment: int) -> bool:
    """The same of a tensor that starts at a multiple of ``alignment`` bytes."""
    strides = (
        stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1
    )
    return x.stride(-1) == 1 and all(stride % alignment == 0 for stride in strides)


def vector_rows(cache: torch.Tensor) -> bool:
    """Whether 16-byte loads serve the rows of a cache: aligned ones, whose blocks and tokens are < 4 GiB apart."""
    blocks_and_tokens = zip(cache.shape[:2], cache.stride()[:2], strict=True)
    near = all(stride * cache.element_size() < 2**32 for size, stride in blocks_and_tokens if size > 1)
    return near and aligned_rows(cache, 16)


def output_like(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """``out`` where it fits q, else a new tensor; raises ValueError where it does not fit."""
    if out is None:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out must have the shape, dtype and device of q, {tuple(q.shape)} {q.dtype} on {q.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"out must have memory for each of its elements, got strides {out.stride()} for shape {tuple(out.shape)}: "
            f"give a tensor that is not expanded"
        )
    return out


def _is_positive(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value) and float(value) > 0


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)

"""Writing new keys and values into the paged cache, with the rotary embedding applied on the way."""

from __future__ import annotations

from typing import Protocol

import torch

from tpoverlap.attention.prepared import keep, kind
from tpoverlap.cuda.triton_dispatch import triton_serves


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> None:
    """Store the keys and values of tokens in their slots; with ``cos`` and ``sin``, rotate keys (and q in place) first.

    k, v [tokens, kv_heads, head_dim] in the dtype of the caches [blocks, block_size, kv_heads, head_dim]; any
    strides. slots int64 [tokens], distinct where not negative; negative: the token is not stored. q [tokens, q_heads,
    head_dim] of that dtype is rotated whether its token is stored or not; k itself is left as it was.

    cos, sin floating point [tokens, rotary_dim / 2], contiguous: the rotary embedding (RoFormer, Su et al. 2021) in
    its NeoX form, elements i and i + rotary_dim / 2 of a head being one pair; elements from rotary_dim on pass
    through. It is computed in FP32 and rounded once. On a GPU it is one launch, which may be captured.

    Raises ValueError where shapes, dtypes or devices do not fit and, on CPU, for a slot past the cache (a GPU does not
    store it).
    """
    signature = (
        kind(k),
        kind(v),
        kind(k_cache),
        kind(v_cache),
        kind(slots),
        None if q is None else kind(q),
        None if cos is None else kind(cos),
        None if sin is None else kind(sin),
    )
    write = _prepared.get(signature)
    if write is None:
        write = _prepare(k, v, k_cache, v_cache, slots, q, cos, sin)
        keep(_prepared, signature, write)
    write(k, v, k_cache, v_cache, slots, q, cos, sin)


class PreparedWrite(Protocol):
    """A write of one signature, which has been checked."""

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
    ) -> None: ...


_prepared: dict[tuple[object, ...], PreparedWrite] = {}


def _prepare(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> PreparedWrite:
    _check(k, v, k_cache, v_cache, slots)
    _check_rotary(k, q, cos, sin)
    if triton_serves(k):
        from tpoverlap.attention.triton.kv_write import prepare_write

        return prepare_write(k, v, k_cache, v_cache, slots, q, cos, sin)
    return _write_torch


def _check(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache and v_cache must be [blocks, block_size, kv_heads, head_dim] alike, got {tuple(k_cache.shape)} "
            f"{k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [tokens], got {slots.dtype} {tuple(slots.shape)}")
    for name, x in (("k", k), ("v", v)):
        expected = (slots.shape[0], *k_cache.shape[2:])
        if tuple(x.shape) != expected or x.dtype != k_cache.dtype:
            raise ValueError(f"{name} must be {k_cache.dtype} {expected}, got {x.dtype} {tuple(x.shape)}")
    for name, x in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("slots", slots)):
        if x.device != k.device:
            raise ValueError(f"{name} must be on the device of k, {k.device}, got {x.device}")


def _check_rotary(k: torch.Tensor, q: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    if cos is None or sin is None:
        if cos is not None or sin is not None or q is not None:
            raise ValueError("the rotary embedding takes cos and sin together, and q only with them")
        return
    tokens, _, head_dim = k.shape
    for name, x in (("cos", cos), ("sin", sin)):
        fits = x.dim() == 2 and x.shape[0] == tokens and 1 <= x.shape[1] <= head_dim // 2 and x.shape == cos.shape
        if not fits or not x.is_floating_point() or not x.is_contiguous() or x.device != k.device:
            raise ValueError(
                f"{name} must be contiguous floating point [{tokens}, 1 to {head_dim // 2}] on {k.device}, "
                f"got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    if cos.dtype != sin.dtype:
        raise ValueError(f"cos and sin must have one dtype, got {cos.dtype} and {sin.dtype}")
    if q is not None and (
        q.dim() != 3 or (q.shape[0], q.shape[2]) != (tokens, head_dim) or q.dtype != k.dtype or q.device != k.device
    ):
        raise ValueError(
            f"q must be {k.dtype} [{tokens}, q_heads, {head_dim}] on {k.device}, got {q.dtype} {tuple(q.shape)} on "
            f"{q.device}"
        )


def _write_torch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    if not slots.shape[0]:
        return
    block_size = k_cache.shape[1]
    capacity = k_cache.shape[0] * block_size
    if int(slots.max()) >= capacity:
        raise ValueError(f"slots must be below {capacity} (blocks x block_size), got {int(slots.max())}")
    if cos is not None and sin is not None:
        k = _rotate(k, cos, sin)
        if q is not None:
            q.copy_(_rotate(q, cos, sin))
    stored = slots >= 0
    if not bool(stored.all()):
        slots, k, v = slots[stored], k[stored], v[stored]
    at = (slots // block_size, slots % block_size)
    k_cache[at] = k
    v_cache[at] = v


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([rotated, x[..., 2 * half :]], -1)

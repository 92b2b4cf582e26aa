"""What the Triton backends share on the host: what they cannot serve, and the factors of their scores."""

from __future__ import annotations

import math

import torch

from tpoverlap.attention.arguments import MAX_KEYS
from tpoverlap.attention.backend import PrefillRequest
from tpoverlap.attention.shared_reasons import dotted, missing_features, mixed_dtypes
from tpoverlap.cuda.triton_available import triton_installed, triton_interpreted

MAX_HEAD_DIM = 256
_FIRST_CAPABILITY = (7, 0)
_FIRST_BF16_CAPABILITY = (8, 0)


def common_rejections(request: PrefillRequest) -> tuple[str, ...]:
    """Why no Triton kernel here serves the request; empty: they do."""
    reasons = []
    if not triton_installed():
        reasons.append("Triton is not installed")
    if request.capability is None:
        if not triton_interpreted():
            reasons.append("it runs on CUDA tensors, and on CPU tensors only under TRITON_INTERPRET=1")
        elif request.dtype == torch.bfloat16:
            reasons.append("Triton's interpreter computes BF16 wrongly")
    elif request.capability < _FIRST_CAPABILITY:
        needed, has = dotted(_FIRST_CAPABILITY), dotted(request.capability)
        reasons.append(f"it needs compute capability {needed}, the device has {has}")
    elif request.dtype == torch.bfloat16 and request.capability < _FIRST_BF16_CAPABILITY:
        needed, has = dotted(_FIRST_BF16_CAPABILITY), dotted(request.capability)
        reasons.append(f"BF16 needs compute capability {needed}, the device has {has}")
    if request.head_dim > MAX_HEAD_DIM:
        reasons.append(f"it serves head_dim up to {MAX_HEAD_DIM}, not {request.head_dim}")
    return (*reasons, *missing_features(request), *mixed_dtypes(request))


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(multiplier, tanh_factor) of the kernels: base-2 exponents are multiplier x the product of q and k, or with a
    softcap multiplier x tanh, whose argument is tanh_factor / (2 log2 e) x the product."""
    log2_e = math.log2(math.e)
    if softcap is None:
        return scale * log2_e, 0.0
    return softcap * log2_e, 2 * log2_e * scale / softcap


def window_of(sliding_window: int | None) -> int:
    """The kernels' window: 0 for none.

    No request has more than MAX_KEYS keys, so what is cut off a wider one hides none, while any position, also one
    before the first key, less the window is an int32.
    """
    return 0 if sliding_window is None else min(sliding_window, MAX_KEYS)


def padded_dim(head_dim: int) -> int:
    """Width of the kernels' head tiles: a power of two that tensor cores take."""
    return max(16, 1 << (head_dim - 1).bit_length())

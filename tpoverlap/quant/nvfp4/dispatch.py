"""Dequantization: argument checks and the choice of backend."""

from __future__ import annotations

from typing import Literal

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.quant.nvfp4.format import NVFP4Tensor
from tpoverlap.quant.nvfp4.qpn2 import QPN2Tensor, from_qpn2
from tpoverlap.quant.nvfp4.torch_backend import dequantize_into

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dequantize(
    t: NVFP4Tensor | QPN2Tensor,
    dtype: torch.dtype = torch.float16,
    *,
    out: torch.Tensor | None = None,
    backend: Literal["auto", "torch"] = "auto",
) -> torch.Tensor:
    """The weight's values [N, K] in FP16, BF16 or FP32, row-major for both layouts.

    Value = code * (scale * global_scale), computed in FP32 in exactly that order and rounded once to ``dtype``; every
    backend gives the same bits. NaN scales give NaN. ``out``: contiguous [N, K] of that dtype, on the weight's device.

    Raises ValueError for another dtype or an ``out`` that does not fit, ConfigError for an unknown backend.
    """
    if dtype not in DTYPES:
        raise ValueError(f"cannot dequantize to {dtype}: give one of {', '.join(map(str, DTYPES))}")
    if backend not in ("auto", "torch"):
        raise ConfigError(f"backend={backend!r} is not supported: give 'auto' or 'torch'")
    if out is None:
        out = torch.empty(t.shape, dtype=dtype, device=t.device)
    elif (tuple(out.shape), out.dtype, out.device) != (t.shape, dtype, t.device) or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {list(out.stride())} on {out.device}; "
            f"it must be contiguous {dtype} {list(t.shape)} on {t.device}"
        )
    dequantize_into(t if isinstance(t, NVFP4Tensor) else from_qpn2(t), out)
    return out

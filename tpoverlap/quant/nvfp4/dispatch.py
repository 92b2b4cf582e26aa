"""Dequantization: argument checks and the choice of backend."""

from __future__ import annotations

from typing import Literal

import torch

from tpoverlap.errors import ConfigError, UnsupportedError
from tpoverlap.quant.nvfp4 import torch_backend, triton_backend
from tpoverlap.quant.nvfp4.format import NVFP4Tensor
from tpoverlap.quant.nvfp4.qpn2 import QPN2Tensor, from_qpn2
from tpoverlap.quant.nvfp4.tiles import Tile

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dequantize(
    t: NVFP4Tensor | QPN2Tensor,
    dtype: torch.dtype = torch.float16,
    *,
    out: torch.Tensor | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
    tile: Tile | None = None,
) -> torch.Tensor:
    """The weight's values [N, K] in FP16, BF16 or FP32, row-major for both layouts.

    Value = code * (scale * global_scale), computed in FP32 in exactly that order and rounded once to ``dtype``; every
    backend gives the same bits. NaN scales give NaN. ``out``: contiguous [N, K] of that dtype, on the weight's device.
    ``backend``: ``"auto"`` takes Triton on CUDA where it is installed, and torch otherwise. ``tile``: what one program
    of the Triton kernels takes; None: what the device's table entry says.

    Raises ValueError for another dtype or an ``out`` that does not fit, ConfigError for an unknown backend,
    UnsupportedError where Triton was asked and cannot run.
    """
    if dtype not in DTYPES:
        raise ValueError(f"cannot dequantize to {dtype}: give one of {', '.join(map(str, DTYPES))}")
    if backend not in ("auto", "torch", "triton"):
        raise ConfigError(f"backend={backend!r} is not supported: give 'auto', 'torch' or 'triton'")
    use_triton = backend == "triton" or (backend == "auto" and t.device.type == "cuda")
    if use_triton and (reason := triton_backend.rejection(t)) is not None:
        if backend == "triton":
            raise UnsupportedError(f"backend='triton': {reason}")
        use_triton = False
    if out is None:
        out = torch.empty(t.shape, dtype=dtype, device=t.device)
    elif (tuple(out.shape), out.dtype, out.device) != (t.shape, dtype, t.device) or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {list(out.stride())} on {out.device}; "
            f"it must be contiguous {dtype} {list(t.shape)} on {t.device}"
        )
    if use_triton:
        triton_backend.dequantize_into(t, out, tile)
    else:
        torch_backend.dequantize_into(t if isinstance(t, NVFP4Tensor) else from_qpn2(t), out)
    return out

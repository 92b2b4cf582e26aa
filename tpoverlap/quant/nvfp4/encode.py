"""Quantization of a weight to NVFP4."""

from __future__ import annotations

import torch

from tpoverlap.quant.nvfp4.format import GROUP, NVFP4Tensor

_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_BLOCK_WEIGHTS = 1 << 20


def quantize(w: torch.Tensor) -> NVFP4Tensor:
    """Quantize a floating-point weight [N, K], K a multiple of 16, to NVFP4 with two-level scaling.

    global_scale = amax / (6 * 448); scale = E4M3(group amax / 6 / global_scale); codes are the nearest E2M1 values of
    w / (scale * global_scale), ties to the even code, saturating. A global scale below FP32's smallest normal number
    (a weight of zeros, for one) is raised to it, so that no quotient is 0 / 0. Groups whose scale rounds to zero get
    zero codes.

    Raises ValueError for other shapes and dtypes, and for NaN or infinite weights, naming the first such index.
    """
    if w.ndim != 2 or w.shape[1] % GROUP or not w.is_floating_point():
        raise ValueError(
            f"cannot quantize {w.dtype} {list(w.shape)}: give a floating-point weight [N, K], K a multiple of {GROUP}"
        )
    n, k = w.shape
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(n, k // GROUP, dtype=torch.float8_e4m3fn, device=w.device)
    rows = max(1, _BLOCK_WEIGHTS // max(k, 1))
    starts = range(0, n, rows)
    amax = torch.zeros((), dtype=torch.float32, device=w.device)
    for start in starts if k else ():
        block = w[start : start + rows].float()
        if not bool(torch.isfinite(block).all()):
            row, column = (int(i) for i in torch.isfinite(block).logical_not().nonzero()[0])
            value = float(w[start + row, column])
            raise ValueError(
                f"weight[{start + row}, {column}] is {value}: only values that are finite in FP32 can be coded"
            )
        amax = torch.maximum(amax, block.abs().amax())
    global_scale = (amax / (_E2M1_MAX * _E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    for start in starts if k else ():
        block = w[start : start + rows].float().unflatten(1, (-1, GROUP))
        scale = (block.abs().amax(dim=2) / _E2M1_MAX / global_scale).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
        scales[start : start + rows] = scale
        codes[start : start + rows] = _encode(block, scale.float() * global_scale)
    return NVFP4Tensor(codes, scales, global_scale, (n, k))


def _encode(block: torch.Tensor, group_scale: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, K // 2] of FP32 weights [rows, K // 16, 16] under FP32 group scales [rows, K // 16]."""
    quotient = torch.where(group_scale.unsqueeze(2) > 0, block.abs() / group_scale.unsqueeze(2), 0.0)
    code = torch.zeros_like(quotient, dtype=torch.uint8)
    for below, midpoint in enumerate(_MIDPOINTS):
        # A tie goes up exactly where the code below the midpoint is odd.
        code += quotient >= midpoint if below % 2 else quotient > midpoint
    code |= (block < 0).to(torch.uint8) << 3
    code = code.flatten(1)
    return code[:, 0::2] | (code[:, 1::2] << 4)

"""How checkpoints store NVFP4: nvidia-modelopt's and compressed-tensors' conventions, and what is refused at load."""

from __future__ import annotations

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.quant.nvfp4.format import E2M1_VALUES, NVFP4Tensor
from tpoverlap.quant.nvfp4.torch_backend import BLOCK_WEIGHTS, dequantize_into, group_scales


def from_modelopt(weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor) -> NVFP4Tensor:
    """A weight as nvidia-modelopt stores it: value = code * (weight_scale * weight_scale_2).

    weight: uint8 [N, K // 2]. weight_scale: float8_e4m3fn [N, K // 16]. weight_scale_2: float32, one number or one per
    row. Raises ValueError for other shapes and dtypes.
    """
    return _row_major(weight, weight_scale, weight_scale_2)


def from_compressed_tensors(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_global_scale: torch.Tensor
) -> NVFP4Tensor:
    """A weight as compressed-tensors (llm-compressor) stores it: value = code * weight_scale / weight_global_scale.

    weight_packed: uint8 [N, K // 2]. weight_scale: float8_e4m3fn [N, K // 16]. weight_global_scale: float32, one number
    or one per row; our global_scale is its reciprocal in FP32, so products may differ from the division in the last
    FP32 bit. Raises ValueError for other shapes and dtypes.
    """
    return _row_major(weight_packed, weight_scale, weight_global_scale.reciprocal())


def _row_major(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> NVFP4Tensor:
    if codes.ndim != 2:
        raise ValueError(f"packed codes are {codes.dtype} {list(codes.shape)}; they must be torch.uint8 [N, K // 2]")
    global_scale = global_scale.reshape(()) if global_scale.numel() == 1 else global_scale.reshape(-1)
    return NVFP4Tensor(codes, scales, global_scale, (codes.shape[0], 2 * codes.shape[1]))


def check_fits(t: NVFP4Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise ConfigError naming the tensor if a finite scale gives values that overflow ``dtype``.

    For loaders: an overflow would run as infinity. BF16 and FP32 hold whatever FP32 holds, so only FP16 can fail.
    NaN values are no overflow and pass.
    """
    if dtype != torch.float16:
        return
    k = t.shape[1]
    largest_code = max(E2M1_VALUES)
    # Most weights are settled by their scales alone; only rows that might overflow are decoded.
    suspects = (group_scales(t).abs() * largest_code > torch.finfo(torch.float16).max).any(dim=1).nonzero().flatten()
    per_row = t.global_scale.ndim == 1
    for chosen in suspects.split(max(1, BLOCK_WEIGHTS // max(k, 1))):
        part = NVFP4Tensor(
            t.codes[chosen],
            t.scales.view(torch.uint8)[chosen].view(torch.float8_e4m3fn),
            t.global_scale[chosen] if per_row else t.global_scale,
            (len(chosen), k),
        )
        values = torch.empty(part.shape, dtype=torch.float32, device=t.device)
        dequantize_into(part, values)
        overflows = values.to(torch.float16).isinf()
        if bool(overflows.any()):
            row, column = (int(i) for i in overflows.nonzero()[0])
            raise ConfigError(
                f"{name}[{int(chosen[row])}, {column}] is {float(values[row, column])}, which overflows FP16 "
                f"(largest {torch.finfo(torch.float16).max}): compute in torch.bfloat16 or torch.float32"
            )

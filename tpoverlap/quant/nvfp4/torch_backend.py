"""Dequantization in torch operations: runs on every device, and the bits that other backends must match."""

from __future__ import annotations

import functools

import torch

from tpoverlap.quant.nvfp4.format import E2M1_VALUES, GROUP, NVFP4Tensor

BLOCK_WEIGHTS = 1 << 19
"""Weights decoded at a time: bounds the temporary memory to 6 bytes each, and keeps it in the CPU's cache."""
_BLOCKS_AT_A_TIME_ON_A_DEVICE = 32  # launches cost more than cached temporaries gain


@functools.cache
def _pair_table(device: torch.device) -> torch.Tensor:
    """int64 [256]: the FP32 values of a byte's two codes, low nibble first in memory.

    One 8-byte gather then decodes two weights; torch gathers single 8-byte elements about four times as fast as rows
    of two floats.
    """
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).view(torch.int64).flatten().to(device)


@functools.cache
def _scale_table(device: torch.device) -> torch.Tensor:
    """float32 [256]: the value of each E4M3 byte. A gather decodes three times as fast as torch's conversion on CPU."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def group_scales(t: NVFP4Tensor) -> torch.Tensor:
    """scale * global_scale, float32 [N, K // 16]: the inner product of the value, rounded once."""
    index = t.scales.view(torch.uint8).view(-1).to(torch.int32)
    scales = _scale_table(t.device).index_select(0, index).view(t.scales.shape)
    return scales.mul_(t.global_scale.unsqueeze(1) if t.global_scale.ndim else t.global_scale)


def dequantize_into(t: NVFP4Tensor, out: torch.Tensor) -> None:
    """Write the values of ``t`` into the contiguous FP32, FP16 or BF16 ``out`` [N, K], block of rows by block."""
    n, k = t.shape
    if not n * k:
        return
    table = _pair_table(t.device)
    scales = group_scales(t)
    block_weights = BLOCK_WEIGHTS * (1 if t.device.type == "cpu" else _BLOCKS_AT_A_TIME_ON_A_DEVICE)
    rows = max(1, min(n, block_weights // k))
    index = torch.empty(rows * k // 2, dtype=torch.int32, device=t.device)
    decoded = None if out.dtype == torch.float32 else torch.empty(rows, k, dtype=torch.float32, device=t.device)
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        count = stop - start
        block_index = index[: count * k // 2].copy_(t.codes[start:stop].view(-1))
        block = out[start:stop] if decoded is None else decoded[:count]
        torch.index_select(table, 0, block_index, out=block.view(-1).view(torch.int64))
        block.view(count, k // GROUP, GROUP).mul_(scales[start:stop].unsqueeze(2))
        if decoded is not None:
            out[start:stop].copy_(block)

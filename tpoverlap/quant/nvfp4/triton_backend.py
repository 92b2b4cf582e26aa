"""Dequantization by Triton kernels, on CUDA and under Triton's interpreter."""

from __future__ import annotations

import functools

import torch

from tpoverlap.cuda.triton_available import triton_installed, triton_interpreted
from tpoverlap.cuda.triton_dispatch import capability_of, on_device_of
from tpoverlap.cuda.triton_launch import FastLaunch
from tpoverlap.quant.nvfp4.format import GROUP, NVFP4Tensor
from tpoverlap.quant.nvfp4.qpn2 import TILE_ROWS, QPN2Tensor
from tpoverlap.quant.nvfp4.tiles import Tile, tile_for

# Of QPN2 weights: tiles are the grid's second dimension, and offsets within one are int32.
_QPN2_LIMITS = (TILE_ROWS * 65_535, 2**26)


def rejection(t: NVFP4Tensor | QPN2Tensor) -> str | None:
    """Why these kernels cannot dequantize ``t``; None if they can."""
    device = t.device
    if not triton_installed():
        return "Triton is not installed: pip install 'tpoverlap[cuda]'"
    if device.type != "cuda" and not triton_interpreted():
        return f"Triton needs a CUDA tensor, got one on {device} (TRITON_INTERPRET=1 runs the kernels on CPU)"
    if isinstance(t, QPN2Tensor) and (t.shape[0] > _QPN2_LIMITS[0] or t.shape[1] > _QPN2_LIMITS[1]):
        return f"the weight is {list(t.shape)}, the kernel for QPN2 takes up to {list(_QPN2_LIMITS)}"
    return None


def dequantize_into(t: NVFP4Tensor | QPN2Tensor, out: torch.Tensor, tile: Tile | None = None) -> None:
    """Write the values of ``t`` into the contiguous FP32, FP16 or BF16 ``out`` [N, K].

    ``tile``: what one program takes; by default what the device's table entry says.
    """
    n, k = t.shape
    if not n * k:
        return
    from tpoverlap.quant.nvfp4 import triton_kernels as kernels

    # The interpreter has no instructions of any.
    capability = capability_of(t.codes) if t.codes.is_cuda else (0, 0)
    if out.dtype == torch.bfloat16 and capability < (8, 0):
        out = out.view(torch.int16)  # no BF16 conversion instruction: the kernel rounds by integer operations
    groups_per_row = k // GROUP
    words = _as_words(t.codes)
    scales = t.scales.view(torch.uint8)
    per_row = t.global_scale.ndim == 1
    with on_device_of(t.codes):
        if isinstance(t, QPN2Tensor):
            tile = tile or tile_for("qpn2", capability)
            parts = TILE_ROWS // kernels.QPN2_ROWS.value
            grid: tuple[int, ...] = (-(-groups_per_row // tile.groups) * parts, n // TILE_ROWS)
            kernels.dequantize_qpn2[grid](
                words,
                scales,
                t.global_scale,
                out,
                groups_per_row,
                PER_ROW=per_row,
                GROUPS=tile.groups,
                num_warps=tile.num_warps,
            )
        else:
            tile = tile or tile_for("row_major", capability)
            num_groups = n * groups_per_row
            launch = _row_major(t.device, out.dtype, num_groups >= 2**31, groups_per_row, per_row, tile)
            launch(-(-num_groups // tile.groups), (words, scales, t.global_scale, out), (num_groups, groups_per_row))


@functools.cache
def _row_major(
    device: torch.device, dtype: torch.dtype, wide: bool, groups_per_row: int, per_row: bool, tile: Tile
) -> FastLaunch:
    """wide: whether the number of groups is an int64."""
    from tpoverlap.quant.nvfp4.triton_kernels import dequantize_row_major

    return FastLaunch(dequantize_row_major, {"PER_ROW": per_row, "GROUPS": tile.groups}, num_warps=tile.num_warps)


def _as_words(codes: torch.Tensor) -> torch.Tensor:
    """The code bytes as int32 words; copied where they do not start on a word."""
    return (codes.clone() if codes.data_ptr() % 4 else codes).view(torch.int32)

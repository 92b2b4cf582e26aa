"""Dequantization by Triton kernels, on CUDA and under Triton's interpreter."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from weakref import WeakKeyDictionary

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
    if not t.shape[0] * t.shape[1]:
        return
    if isinstance(t, QPN2Tensor):
        _dequantize_qpn2(t, _as_stored(out), tile)
    else:
        prepared = _prepared.get(t)
        key = (out.dtype, tile, t.codes.data_ptr(), t.scales.data_ptr(), t.global_scale.data_ptr())
        if prepared is None or prepared.key != key:
            prepared = _RowMajor.make(t, out.dtype, tile, key)
            if not prepared.copied:
                _prepared[t] = prepared
        prepared(out)


@dataclass(frozen=True, slots=True)
class _RowMajor:
    """The launch that dequantizes a weight to one dtype, as long as its tensors lie where they lay.

    tensors: views of the weight's, the codes ``copied`` where they do not start on a word.
    """

    key: tuple[object, ...]
    launch: FastLaunch
    programs: int
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    values: tuple[int, int]
    by_integers: bool
    copied: bool

    @classmethod
    def make(cls, t: NVFP4Tensor, dtype: torch.dtype, tile: Tile | None, key: tuple[object, ...]) -> _RowMajor:
        capability = _capability(t.codes)
        by_integers = _by_integers(dtype, capability)
        tile = tile or tile_for("row_major", capability)
        n, k = t.shape
        num_groups, groups_per_row = n * (k // GROUP), k // GROUP
        per_row = t.global_scale.ndim == 1
        stored = torch.int16 if by_integers else dtype
        return cls(
            key,
            _row_major(t.device, stored, num_groups >= 2**31, groups_per_row, per_row, tile),
            -(-num_groups // tile.groups),
            (_as_words(t.codes), t.scales.view(torch.uint8), t.global_scale),
            (num_groups, groups_per_row),
            by_integers,
            t.codes.data_ptr() % 4 != 0,
        )

    def __call__(self, out: torch.Tensor) -> None:
        with on_device_of(out):
            stored = out.view(torch.int16) if self.by_integers else out
            self.launch(self.programs, (*self.tensors, stored), self.values)


# A layer keeps its weight, so what the launch needs is worked out once a layer.
_prepared: WeakKeyDictionary[NVFP4Tensor, _RowMajor] = WeakKeyDictionary()


def _dequantize_qpn2(t: QPN2Tensor, out: torch.Tensor, tile: Tile | None) -> None:
    from tpoverlap.quant.nvfp4 import triton_kernels as kernels

    n, k = t.shape
    groups_per_row = k // GROUP
    tile = tile or tile_for("qpn2", _capability(t.codes))
    parts = TILE_ROWS // kernels.QPN2_ROWS.value
    with on_device_of(t.codes):
        kernels.dequantize_qpn2[(-(-groups_per_row // tile.groups) * parts, n // TILE_ROWS)](
            _as_words(t.codes),
            t.scales.view(torch.uint8),
            t.global_scale,
            out,
            groups_per_row,
            PER_ROW=t.global_scale.ndim == 1,
            GROUPS=tile.groups,
            num_warps=tile.num_warps,
        )


def _capability(codes: torch.Tensor) -> tuple[int, int]:
    """The interpreter has no instructions of any."""
    return capability_of(codes) if codes.is_cuda else (0, 0)


def _by_integers(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether the kernels round by integer operations and store int16: no instruction converts to BF16."""
    return dtype == torch.bfloat16 and capability < (8, 0)


def _as_stored(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16) if _by_integers(out.dtype, _capability(out)) else out


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

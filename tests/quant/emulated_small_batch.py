"""The product of few rows on the CPU, from the kernel's own source: see emulated_small_batch.h."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from emulated_build import build

from tpoverlap.quant.nvfp4 import NVFP4Tensor, small_batch
from tpoverlap.quant.nvfp4.small_batch import SOME_ROWS, Blocks

KERNEL = Path(small_batch.__file__).with_name("small_batch.cu")
SOURCE = small_batch.source()
_GAP = 1024
# Where a tensor lies within 256 bytes: no better aligned than the kernel demands.
_OFFSETS = {"codes": 16, "scales": 2, "global_scale": 4, "x": 16, "bias": 2, "y": 2}
_UNWRITTEN = 0x5A


@functools.cache
def library(dtype: torch.dtype, source: str = SOURCE, blocks: Blocks = SOME_ROWS) -> ctypes.CDLL:
    """The emulation for x in this dtype, compiled once a process."""
    entry = Path(__file__).with_name("emulated_small_batch.cpp")
    loaded = build(entry, KERNEL.name, source, "-O1", *small_batch.compile_options(dtype, blocks))
    assert loaded.arguments_size() == ctypes.sizeof(small_batch._Arguments)
    return loaded


def linear(
    x: torch.Tensor,
    weight: NVFP4Tensor,
    bias: torch.Tensor | None = None,
    *,
    seed: int = 0,
    emulation: ctypes.CDLL | None = None,
    blocks: Blocks = SOME_ROWS,
) -> torch.Tensor:
    """:func:`small_batch.linear` for tensors on the CPU; a fault of the kernel raises AssertionError.

    seed: of the order of warps.
    """
    kernel = _EmulatedKernel(emulation or library(x.dtype, blocks=blocks), seed)
    with (
        patch.object(small_batch, "rejection", lambda x, weight: None),
        patch.object(small_batch, "_blocks", lambda n, ordinal: blocks),
        patch.object(small_batch, "_kernel", lambda ordinal, dtype, blocks: kernel),
    ):
        return small_batch.linear(x, weight, bias)


class _EmulatedKernel:
    """In place of :class:`tpoverlap.cuda.kernel.Kernel`.

    Every tensor is moved to where it is surrounded by bytes of ones, NaN in all formats. They and the inputs must be
    as before when the kernel has ended, and what it loads must be part of an input.
    """

    def __init__(self, emulation: ctypes.CDLL, seed: int) -> None:
        self._emulation = emulation
        self._seed = seed

    def launch(self, grid: Sequence[int], arguments: ctypes.Structure) -> None:
        moved = small_batch._Arguments.from_buffer_copy(arguments)
        n, k, m = moved.n, moved.k, moved.m
        sizes = {
            "codes": n * k // 2,
            "scales": n * k // 16,
            "global_scale": 4 * (n if moved.global_scale_stride else 1),
            "x": 2 * m * k,
            "bias": 2 * n if moved.bias else 0,
            "y": 2 * m * n,
        }
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = (end + _GAP) // 256 * 256 + _OFFSETS[name]
            end = starts[name] + size
        memory = torch.full((end + _GAP,), 0xFF, dtype=torch.uint8)
        assert memory.data_ptr() % 16 == 0
        ranges = []
        for name, size in sizes.items():
            address = memory.data_ptr() + starts[name]
            if name == "y":
                memory[starts[name] : starts[name] + size] = _UNWRITTEN
            elif size:
                ctypes.memmove(address, getattr(moved, name), size)
                ranges += [address, address + size]
            if size:
                setattr(moved, name, address)
        before = memory.clone()

        message = ctypes.create_string_buffer(400)
        failed = self._emulation.run_small_batch(
            ctypes.byref(moved),
            grid[0],
            (ctypes.c_uint64 * len(ranges))(*ranges),
            len(ranges) // 2,
            ctypes.c_uint64(self._seed),
            message,
            len(message),
        )
        assert not failed, message.value.decode()
        result = slice(starts["y"], starts["y"] + sizes["y"])
        ctypes.memmove(arguments.y, memory.data_ptr() + result.start, sizes["y"])  # type: ignore[attr-defined]
        memory[result] = _UNWRITTEN
        stray = (memory != before).nonzero()
        assert not len(stray), f"written outside y, which begins at byte {result.start}: byte {int(stray[0])}"

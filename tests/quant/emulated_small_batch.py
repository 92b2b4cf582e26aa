"""The product of few rows on the CPU, from the kernels' own sources: see emulated_small_batch.h and ..._bulk.h."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from emulated_build import build

from tpoverlap.cuda.tensor_map import TensorMap
from tpoverlap.quant.nvfp4 import NVFP4Tensor, small_batch, small_batch_bulk
from tpoverlap.quant.nvfp4.small_batch import SOME_ROWS, Blocks
from tpoverlap.quant.nvfp4.small_batch_bulk import Plan

_GAP = 4096
# Where a tensor lies within 256 bytes: no better aligned than the kernel demands.
_OFFSETS = {"codes": 16, "scales": 2, "global_scale": 4, "x": 16, "bias": 2, "y": 2}
_OFFSETS_BULK = _OFFSETS | {"scales": small_batch_bulk.SCALES_ALIGNMENT}
_UNWRITTEN = 0x5A


def kernel_name(layout: Blocks | Plan) -> str:
    return "small_batch_bulk" if isinstance(layout, Plan) else "small_batch"


def library(dtype: torch.dtype, layout: Blocks | Plan = SOME_ROWS, source: str | None = None) -> ctypes.CDLL:
    """The emulation for x in this dtype, compiled once a process. source: the kernel's own, where it is None."""
    name = kernel_name(layout)
    return _library(name, small_batch.compile_options(dtype, layout), source or small_batch.source(name))


@functools.cache
def _library(name: str, options: tuple[str, ...], source: str) -> ctypes.CDLL:
    entry = Path(__file__).with_name(f"emulated_{name}.cpp")
    loaded = build(entry, f"{name}.cu", source, "-O1", "-Wno-psabi", *options)
    arguments = small_batch_bulk.Arguments if name == "small_batch_bulk" else small_batch._Arguments
    assert loaded.arguments_size() == ctypes.sizeof(arguments)
    return loaded


def linear(
    x: torch.Tensor,
    weight: NVFP4Tensor,
    bias: torch.Tensor | None = None,
    *,
    seed: int = 0,
    emulation: ctypes.CDLL | None = None,
    layout: Blocks | Plan = SOME_ROWS,
) -> torch.Tensor:
    """:func:`small_batch.linear` for tensors on the CPU; a fault of the kernel raises AssertionError.

    seed: of the order of warps.
    """
    kernel = _EmulatedKernel(emulation or library(x.dtype, layout), layout, seed)
    with (
        patch.object(small_batch_bulk, "tensor_map", _tensor_map),
        patch.object(small_batch_bulk, "tensor_maps", small_batch_bulk.tensor_maps.__wrapped__),
        patch.object(small_batch, "rejection", lambda x, weight: None),
        patch.object(small_batch, "_layout", lambda weight, ordinal, dtype: layout),
        patch.object(small_batch, "_kernel", lambda ordinal, dtype, layout: kernel),
    ):
        return small_batch.linear(x, weight, bias)


def _tensor_map(
    ordinal: int | None,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle_128: bool = False,
) -> ctypes.Array[ctypes.c_uint64]:
    """In place of :func:`tpoverlap.cuda.tensor_map.tensor_map`: see emulated_small_batch_bulk.h."""
    assert address % 16 == 0
    assert all(stride % 16 == 0 for stride in strides)
    assert all(0 < size <= 256 for size in box)
    assert box[0] % 16 == 0
    return TensorMap(address, len(sizes) + 256 * swizzle_128, *sizes, *strides, *box)


Mistake = tuple[Sequence[torch.dtype], str, str, str]
"""The dtypes, an expression of the source, what stands in its place, and how it is seen."""


def with_mistakes(mistakes: Sequence[Mistake], dtype: torch.dtype, layout: Blocks | Plan = SOME_ROWS) -> ctypes.CDLL:
    """One build with all of the dtype's mistakes, of which the library's plant(i) chooses one, plant(-1) none."""
    own = source = small_batch.source(kernel_name(layout))
    for i, (dtypes, right, wrong, _) in enumerate(mistakes):
        if dtype not in dtypes:
            continue
        # Once, or once behind the primitives, of which the emulation has its own.
        assert 1 in (own.count(right), own.partition("// As decode_word.")[2].count(right)), right
        at = source.rindex(right)  # it stands again in an earlier mistake of the same place
        source = f"{source[:at]}(planted == {i} ? {wrong} : ({right})){source[at + len(right) :]}"
    return library(dtype, layout, f'static int planted; extern "C" void plant(int i) {{ planted = i; }}\n{source}')


class _EmulatedKernel:
    """In place of :class:`tpoverlap.cuda.kernel.Kernel`.

    Every tensor is moved to where it is surrounded by bytes of ones, NaN in all formats. They and the inputs must be
    as before when the kernel has ended, and what it loads must be part of an input.
    """

    def __init__(self, emulation: ctypes.CDLL, layout: Blocks | Plan, seed: int) -> None:
        self._emulation = emulation
        self._shared_bytes = layout.shared_bytes if isinstance(layout, Plan) else 0
        self._offsets = _OFFSETS_BULK if isinstance(layout, Plan) else _OFFSETS
        self._seed = seed

    def launch(self, grid: Sequence[int], arguments: ctypes.Structure) -> None:
        moved = type(arguments).from_buffer_copy(arguments)
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
            starts[name] = (end + _GAP) // 256 * 256 + self._offsets[name]
            end = starts[name] + size
        memory = torch.full((end + _GAP,), 0xFF, dtype=torch.uint8)
        assert memory.data_ptr() % 16 == 0
        ranges = []
        for name, size in sizes.items():
            address = memory.data_ptr() + starts[name]
            if name == "y":
                memory[starts[name] : starts[name] + size] = _UNWRITTEN
            elif size:
                place = getattr(moved, name)
                ctypes.memmove(address, place[0] if isinstance(place, ctypes.Array) else place, size)
                ranges += [address, address + size]
            if isinstance(place := getattr(moved, name), ctypes.Array):
                place[0] = address  # of a tensor map
            elif size:
                setattr(moved, name, address)
        before = memory.clone()

        message = ctypes.create_string_buffer(400)
        failed = self._emulation.run_small_batch(
            ctypes.byref(moved),
            grid[0],
            self._shared_bytes,
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

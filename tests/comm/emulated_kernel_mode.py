"""Kernel mode's kernel on the CPU, from its own source: see emulated_kernel_mode.h."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from emulated_build import build_in
from simulated_gpu import SimulatedGpu

from tpoverlap.comm import kernel_mode

HERE = Path(__file__).parent
SOURCE = Path(kernel_mode.__file__).with_name("kernel_mode.cu").read_text()
# Of a block; the kernel takes any number from the ranks' on.
_THREADS = 16
_ITEMS = {"float32": 4, "float16": 2, "bfloat16": 3}


@functools.cache
def build(source: str = SOURCE) -> Path:
    """The emulation of a source text, compiled once; ranks load the file that their test has made."""
    folder = Path(tempfile.mkdtemp(prefix="tpoverlap-emulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build_in(folder, HERE / "emulated_kernel_mode.cpp", "kernel_mode.cu", source, "-O1", "-pthread")


class EmulatedKernel:
    """In place of :class:`tpoverlap.cuda.kernel.Kernel`: a launch joins the queue of the current stream."""

    def __init__(self, gpu: SimulatedGpu, library: Path, dtype: str) -> None:
        self._gpu = gpu
        self._run: Callable[..., Any] = ctypes.CDLL(str(library)).run_all_reduce
        self._item = _ITEMS[dtype]
        self._seeds = itertools.count(1000)

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        given = type(arguments).from_buffer_copy(arguments)
        seed = next(self._seeds)
        self._gpu.current.put(lambda: self._run(self._item, ctypes.byref(given), grid[0], _THREADS, seed))


def emulate_kernel_mode(gpu: SimulatedGpu, library: Path) -> None:
    """From here on groups of this process have kernel mode. library: of :func:`build`."""
    assert ctypes.CDLL(str(library)).arguments_size() == ctypes.sizeof(kernel_mode._Arguments)
    kernel_mode._kernel = lambda dtype, ordinal: EmulatedKernel(gpu, library, dtype)  # type: ignore[assignment]
    gpu.has_nvrtc()
    zeros = torch.zeros
    kernel_mode.torch = _WithZerosOnCpu(zeros)  # type: ignore[assignment]


class _WithZerosOnCpu:
    """torch, whose zeros lie where the simulated device has its memory."""

    def __init__(self, zeros: Callable[..., torch.Tensor]) -> None:
        self._zeros = zeros

    def zeros(self, *size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        return self._zeros(*size, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

"""Whether a tensor's work goes to a Triton kernel, and on which device it is launched."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch

from tpoverlap.cuda.triton_available import triton_installed, triton_interpreted


def triton_serves(tensor: torch.Tensor) -> bool:
    """True for CUDA tensors where Triton is installed, and for CPU tensors under Triton's interpreter."""
    return triton_installed() and (tensor.is_cuda or _interpreted_on(tensor.device.type))


@functools.cache
def _interpreted_on(device_type: str) -> bool:
    # The environment takes as long to ask as an operator, and kernels that are imported no longer follow it.
    return device_type == "cpu" and triton_interpreted()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which Triton launches on the tensor's device, which need not be the current one."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _HERE


_HERE = contextlib.nullcontext()


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def capability_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of a CUDA tensor's device."""
    return _capability(tensor.get_device())


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def multiprocessors(tensor: torch.Tensor) -> int:
    """Multiprocessors of the tensor's GPU; 1 for a CPU tensor, whose programs run in turn."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 1


def dependent_launch(tensor: torch.Tensor) -> bool:
    """Whether the tensor's GPU has programmatic dependent launch (compute capability 9.0 and up)."""
    return tensor.is_cuda and capability_of(tensor) >= (9, 0)

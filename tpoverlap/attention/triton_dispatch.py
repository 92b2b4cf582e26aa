"""Whether a tensor's work goes to a Triton kernel, and on which device it is launched."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from contextlib import AbstractContextManager

import torch

from tpoverlap.attention.triton.common import interpreted


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_serves(tensor: torch.Tensor) -> bool:
    """True for CUDA tensors where Triton is installed, and for CPU tensors under Triton's interpreter.

    The interpreter is chosen as Triton chooses it: ``TRITON_INTERPRET=1`` when the kernels are first imported.
    """
    if not _triton_installed():
        return False
    return tensor.is_cuda or (tensor.device.type == "cpu" and interpreted())


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which Triton launches on the tensor's device, which need not be the current one."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def capability_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of a CUDA tensor's device."""
    return _capability(tensor.get_device())


def dependent_launch(tensor: torch.Tensor) -> bool:
    """Whether the tensor's GPU has programmatic dependent launch (compute capability 9.0 and up)."""
    return tensor.is_cuda and capability_of(tensor) >= (9, 0)

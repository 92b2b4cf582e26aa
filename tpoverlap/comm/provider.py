"""What serves a collective, and why it would not."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class Reason(StrEnum):
    """Why a provider does not serve a call. The words are stable: tests, logs and tools may rely on them."""

    WORLD_SIZE_1 = "world_size_1"
    WORLD_SIZE_UNSUPPORTED = "world_size_unsupported"
    DISABLED = "disabled"
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    DEVICE_UNSUPPORTED = "device_unsupported"
    OPERATION_UNSUPPORTED = "operation_unsupported"
    ABOVE_MAX_BYTES = "above_max_bytes"
    BELOW_MIN_BYTES = "below_min_bytes"
    NOT_CAPTURABLE = "not_capturable"
    NOT_CAPTURING = "not_capturing"
    NO_CUDA_PYTHON = "no_cuda_python"
    NO_STREAM_MEM_OPS = "no_stream_mem_ops"
    NO_NVRTC = "no_nvrtc"
    PEER_ACCESS_AVAILABLE = "peer_access_available"
    RANKS_ON_DIFFERENT_HOSTS = "ranks_on_different_hosts"
    CHANNEL_FAILED = "channel_failed"


class Call(NamedTuple):
    """The facts that choose a provider: only such as all ranks share, so that all choose the same.

    operation: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``; num_bytes: of this rank's input.
    """

    operation: str
    dtype: torch.dtype
    num_bytes: int
    device_type: str
    capturing: bool = False


Completion = Callable[[], object]
"""What is left of a collective for the caller's stream to do, once that has waited for the collective's own."""


@runtime_checkable
class Provider(Protocol):
    """Serves collectives of the current stream (CPU: at once). Inputs are never written, unless ``out`` is the input.

    ``out`` is made by the caller, before an executor changes streams. reduce_scatter's ``shards`` and all_gather's
    ``out`` are [world_size, ...] and contiguous.
    """

    name: str

    def rejection_reason(self, call: Call) -> Reason | None:
        """None if this provider serves the call."""
        ...

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> Completion | None:
        """None: nothing is left to do."""
        ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> Completion | None: ...

    def reduce_scatter(self, shards: torch.Tensor, out: torch.Tensor) -> Completion | None: ...

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """In place: ``x`` of every rank becomes that of group rank ``src``."""
        ...


def describe(operation: str, x: torch.Tensor, provider: str) -> str:
    """A call as its descriptor and error messages show it."""
    return f"{operation} {str(x.dtype)[6:]} {x.numel() * x.element_size()} B, {provider}"

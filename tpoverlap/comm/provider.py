"""What serves a collective, and why it would not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch


class Reason(StrEnum):
    """Why a provider does not serve a call. The words are stable: tests, logs and tools may rely on them."""

    WORLD_SIZE_1 = "world_size_1"
    DISABLED = "disabled"
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    DEVICE_UNSUPPORTED = "device_unsupported"
    OPERATION_UNSUPPORTED = "operation_unsupported"
    ABOVE_MAX_BYTES = "above_max_bytes"
    BELOW_MIN_BYTES = "below_min_bytes"
    NOT_CAPTURABLE = "not_capturable"
    NO_STREAM_MEM_OPS = "no_stream_mem_ops"
    NO_NVRTC = "no_nvrtc"
    PEER_ACCESS_AVAILABLE = "peer_access_available"
    RANKS_ON_DIFFERENT_HOSTS = "ranks_on_different_hosts"
    CHANNEL_FAILED = "channel_failed"


@dataclass(frozen=True)
class Call:
    """The facts that choose a provider: only such as all ranks share, so that all choose the same.

    operation: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``; num_bytes: of this rank's input.
    """

    operation: str
    dtype: torch.dtype
    num_bytes: int
    device_type: str
    capturing: bool = False


class Provider(Protocol):
    """Serves collectives. Inputs are never written; results are new tensors, or ``out`` where it is given.

    ``shards`` of reduce_scatter and the result of all_gather are [world_size, ...] contiguous.
    """

    name: str

    def rejection_reason(self, call: Call) -> Reason | None:
        """None if this provider serves the call."""
        ...

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def reduce_scatter(self, shards: torch.Tensor) -> torch.Tensor: ...

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """In place: ``x`` of every rank becomes that of group rank ``src``."""
        ...


def describe(operation: str, x: torch.Tensor, provider: str) -> str:
    """A call as its descriptor and error messages show it."""
    return f"{operation} {str(x.dtype)[6:]} {x.numel() * x.element_size()} B, {provider}"

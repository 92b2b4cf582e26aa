"""What a coordinator's calls take: checks of their arguments, and the facts that choose a provider."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tpoverlap.comm.provider import Call
from tpoverlap.errors import ConfigError, UnsupportedError


def padded_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``rows`` with rows of zeros behind, up to ``count``."""
    if rows.shape[0] == count:
        return rows
    return torch.cat([rows, rows.new_zeros((count - rows.shape[0], *rows.shape[1:]))])


def call_of(operation: str, x: torch.Tensor) -> Call:
    # Many times faster than to ask for the device's type, or to make the same call again.
    if x.is_cpu:
        return _call(operation, x.dtype, x.nbytes, "cpu", False)
    if x.is_cuda:
        return _call(operation, x.dtype, x.nbytes, "cuda", torch.cuda.is_current_stream_capturing())
    return _call(operation, x.dtype, x.nbytes, x.device.type, False)


_call = functools.lru_cache(maxsize=1024)(Call)


def indexed_device(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def checked_ranks(ranks: Sequence[int]) -> list[int]:
    if not dist.is_initialized():
        raise ConfigError("GroupCoordinator needs torch.distributed: call torch.distributed.init_process_group first")
    world = dist.get_world_size()
    checked = sorted(set(ranks))
    if list(ranks) != checked or not checked or checked[0] < 0 or checked[-1] >= world:
        raise ConfigError(f"ranks={list(ranks)} is not supported: give distinct ascending ranks below {world}")
    if dist.get_rank() not in checked:
        raise ConfigError(f"rank {dist.get_rank()} is not in ranks={checked}: only members make the coordinator")
    return checked


def check_input(x: torch.Tensor, device: torch.device) -> None:
    """device: the group's. Providers read a tensor's memory as it is."""
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "collectives carry no gradient: run under torch.no_grad() or torch.inference_mode(), or detach the tensor"
        )
    if x.is_neg() or x.is_conj():
        raise UnsupportedError(
            "collectives take no lazily negated or conjugated view: give x.resolve_neg() or x.resolve_conj()"
        )
    if x.is_cuda and device.type == "cuda" and x.get_device() != device.index:
        raise ValueError(f"the tensor is on {x.device}, this group's is {device}: move it there")


def check_out(x: torch.Tensor, out: torch.Tensor | None) -> None:
    if out is None:
        return
    dense = out.is_contiguous()
    if not dense and any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("the output is expanded, so that several of its elements are one: give one of its own memory")
    if out is x:
        return
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(f"out must be like the input: {alike(x)}, got {alike(out)}")
    if dense and x.is_contiguous() and abs(out.data_ptr() - x.data_ptr()) >= x.nbytes:
        return
    same_view = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    if not same_view and _spans_overlap(x, out):
        raise ValueError("out overlaps the input: give a separate tensor, or the input itself")


def _spans_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory spans of two tensors meet; interleaved views count, an exact answer is not worth its cost."""
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    spans = []
    for t in (a, b):
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        spans.append((t.storage_offset(), t.storage_offset() + last))
    return spans[0][0] <= spans[1][1] and spans[1][0] <= spans[0][1]


def checked_dimension(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is out of range for a tensor of {x.dim()} dimensions")
    return dim % x.dim()


def alike(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"

"""What engines send between ranks besides the tensors of a forward pass: objects, dictionaries, single tensors.

Rare and small: objects are pickled into byte tensors, which travel like any other tensor of their device, so that the
group's failure rules hold here too. Peers are trusted as much as by torch.distributed: unpickling runs their code.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tpoverlap.comm.scheduler import current_scheduler
from tpoverlap.comm.torch_fallback import TorchProvider


@dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor in a dictionary that travels ahead of its tensors."""

    device_type: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class GraphCaptureContext:
    """What engines capture their graphs in. stream: the stream to capture on; None on CPU."""

    stream: Any


class Messages(ABC):
    """The methods; a coordinator has what they need. ``src`` and ``dst`` are ranks of the group."""

    world_size: int
    rank_in_group: int
    device: torch.device
    _torch: TorchProvider

    @abstractmethod
    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor: ...

    @abstractmethod
    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor: ...

    def gather(self, x: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """All ranks' ``x``, concatenated along ``dim`` in rank order, on rank ``dst``; None elsewhere."""
        self._check_rank(dst, "gather to")
        if self.world_size == 1:
            return x

        def launch() -> torch.Tensor | None:
            here = self.rank_in_group == dst
            parts = [torch.empty_like(x) for _ in range(self.world_size)] if here else None
            self._torch.gather(x, parts, dst)
            return torch.cat(parts, dim) if parts is not None else None

        return current_scheduler().run("gather", (x,), launch)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Any picklable object of rank ``src``, on every rank."""
        self._check_rank(src, "broadcast from")
        if self.world_size == 1:
            return obj
        mine = _pickled(obj) if self.rank_in_group == src else torch.empty(0, dtype=torch.uint8)
        size = self.broadcast(torch.tensor([mine.numel()]), src)
        data = mine if self.rank_in_group == src else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(data, src)
        return obj if self.rank_in_group == src else _unpickled(data)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0, group: Any = None) -> list[Any]:
        """``obj_list`` becomes that of rank ``src`` (same length), in place. group: ignored; the group is this one."""
        received = self.broadcast_object(obj_list, src)
        if len(received) != len(obj_list):
            raise ValueError(f"rank {src} sends {len(received)} objects, this rank expects {len(obj_list)}")
        obj_list[:] = received
        return obj_list

    def send_object(self, obj: Any, dst: int) -> None:
        """Sends a picklable object to rank ``dst``, which calls :meth:`recv_object`."""
        self._check_peer(dst, "send to")
        data = _pickled(obj)
        self._torch.send(torch.tensor([data.numel()]), dst)
        self._torch.send(data, dst)

    def recv_object(self, src: int) -> Any:
        """The object that rank ``src`` sends."""
        self._check_peer(src, "receive from")
        size = torch.empty(1, dtype=torch.int64)
        self._torch.recv(size, src)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._torch.recv(data, src)
        return _unpickled(data)

    def broadcast_tensor_dict(
        self, tensor_dict: dict[str, Any] | None = None, src: int = 0, group: Any = None, metadata_group: Any = None
    ) -> dict[str, Any] | None:
        """A dictionary of tensors and picklable values of rank ``src``, on every rank.

        Tensors arrive on the same kind of device (this rank's own). group, metadata_group: ignored.
        """
        if self.world_size == 1:
            return tensor_dict
        here = self.rank_in_group == src
        outline = self.broadcast_object(_outline(tensor_dict) if here else None, src)
        values = tensor_dict if here else {k: self._made(v) for k, v in outline.items()}
        assert values is not None
        for key, spec in outline.items():
            if isinstance(spec, _TensorSpec) and values[key].numel():
                tensor = values[key]
                self.broadcast(tensor if tensor.is_contiguous() else tensor.contiguous(), src)
        return values

    def send_tensor_dict(
        self, tensor_dict: dict[str, Any], dst: int | None = None, all_gather_group: Messages | None = None
    ) -> dict[str, Any] | None:
        """Sends a dictionary of tensors and picklable values to rank ``dst`` (default: the next).

        all_gather_group: ranks that all hold the same dictionary, and whose counterparts receive it: each then sends
        its part of every tensor that divides by their number.
        """
        if self.world_size == 1:
            return tensor_dict
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self.send_object(_outline(tensor_dict), dst)
        for value in tensor_dict.values():
            if isinstance(value, torch.Tensor) and value.numel():
                part = value
                if all_gather_group is not None and value.numel() % all_gather_group.world_size == 0:
                    part = value.reshape(all_gather_group.world_size, -1)[all_gather_group.rank_in_group]
                self._torch.send(part, dst)
        return None

    def recv_tensor_dict(
        self, src: int | None = None, all_gather_group: Messages | None = None
    ) -> dict[str, Any] | None:
        """The dictionary that rank ``src`` (default: the previous) sends; all_gather_group as the sender has it."""
        if self.world_size == 1:
            return None
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        values: dict[str, Any] = {k: self._made(v) for k, v in self.recv_object(src).items()}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel():
                if all_gather_group is not None and value.numel() % all_gather_group.world_size == 0:
                    part = value.new_empty(value.numel() // all_gather_group.world_size)
                    self._torch.recv(part, src)
                    values[key] = all_gather_group.all_gather(part, 0).view(value.shape)
                else:
                    self._torch.recv(value, src)
        return values

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Sends a tensor to rank ``dst`` (default: the next), which calls :meth:`recv` with its size and dtype."""
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._check_peer(dst, "send to")
        self._torch.send(tensor, dst)

    def recv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """The tensor of that size and dtype that rank ``src`` (default: the previous) sends, on this rank's device."""
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_peer(src, "receive from")
        tensor = torch.empty(tuple(size), dtype=dtype, device=self.device)
        self._torch.recv(tensor, src)
        return tensor

    @contextmanager
    def graph_capture(self, graph_capture_context: GraphCaptureContext | None = None) -> Iterator[GraphCaptureContext]:
        """The context in which an engine captures its graphs: a side stream that has waited for the current one."""
        if self.device.type != "cuda":
            yield graph_capture_context or GraphCaptureContext(None)
            return
        context = graph_capture_context or GraphCaptureContext(torch.cuda.Stream(self.device))
        current = torch.cuda.current_stream(self.device)
        if context.stream != current:
            context.stream.wait_stream(current)
        with torch.cuda.stream(context.stream):
            yield context

    def _made(self, value: Any) -> Any:
        if not isinstance(value, _TensorSpec):
            return value
        device = self.device if value.device_type == self.device.type else torch.device(value.device_type)
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{what} group rank {rank}: this group has ranks 0 to {self.world_size - 1}")

    def _check_peer(self, rank: int, what: str) -> None:
        self._check_rank(rank, what)
        if rank == self.rank_in_group:
            raise ValueError(f"{what} group rank {rank}: that is this rank itself")


def _outline(tensor_dict: dict[str, Any] | None) -> dict[str, Any]:
    if not isinstance(tensor_dict, dict):
        raise ValueError(f"a dictionary is needed, got {type(tensor_dict).__name__}")
    return {
        k: _TensorSpec(v.device.type, v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else v
        for k, v in tensor_dict.items()
    }


def _pickled(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())

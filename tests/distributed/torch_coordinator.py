"""A group coordinator of the shape that engines have, on torch.distributed alone: what ours is compared with."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class GroupCoordinator:
    def __init__(self, ranks: list[int], local_rank: int, device: torch.device, *, unique_name: str) -> None:
        self.ranks, self.local_rank, self.device, self.unique_name = ranks, local_rank, device, unique_name
        self.cpu_group = self.device_group = dist.new_group(ranks, backend="gloo")
        self.rank = dist.get_rank()
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(self.rank)
        self.first_rank, self.last_rank = ranks[0], ranks[-1]
        self.next_rank = ranks[(self.rank_in_group + 1) % self.world_size]
        self.prev_rank = ranks[(self.rank_in_group - 1) % self.world_size]
        self.is_first_rank, self.is_last_rank = self.rank == self.first_rank, self.rank == self.last_rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self.device_group)
        return total

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in self.ranks]
        dist.all_gather(parts, x, group=self.device_group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.world_size, dim)[self.rank_in_group]

    def all_gatherv(self, x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, x, group=self.cpu_group)
        return torch.cat(objects, dim)

    def reduce_scatterv(self, x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        return self.all_reduce(x).split(sizes, dim)[self.rank_in_group]

    def gather(self, x: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        parts = [torch.empty_like(x) for _ in self.ranks] if self.rank_in_group == dst else None
        dist.gather(x, parts, dst=self.ranks[dst], group=self.device_group)
        return torch.cat(parts, dim) if parts is not None else None

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        dist.broadcast(x, self.ranks[src], group=self.device_group)
        return x

    def broadcast_object_list(self, objects: list[Any], src: int = 0) -> list[Any]:
        dist.broadcast_object_list(objects, self.ranks[src], group=self.cpu_group)
        return objects

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        return self.broadcast_object_list([obj], src)[0]

    def broadcast_tensor_dict(self, tensors: dict[str, Any] | None = None, src: int = 0) -> Any:
        return self.broadcast_object(tensors, src)

    def send_object(self, obj: Any, dst: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        dist.send(torch.tensor([data.numel()]), self.ranks[dst], group=self.cpu_group)
        dist.send(data, self.ranks[dst], group=self.cpu_group)

    def recv_object(self, src: int) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, self.ranks[src], group=self.cpu_group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, self.ranks[src], group=self.cpu_group)
        return pickle.loads(data.numpy().tobytes())

    def send_tensor_dict(self, tensors: dict[str, Any], dst: int) -> None:
        self.send_object(tensors, dst)

    def recv_tensor_dict(self, src: int) -> Any:
        return self.recv_object(src)

    def send(self, x: torch.Tensor, dst: int) -> None:
        dist.send(x, self.ranks[dst], group=self.device_group)

    def recv(self, size: tuple[int, ...], dtype: torch.dtype, src: int) -> torch.Tensor:
        x = torch.empty(size, dtype=dtype)
        dist.recv(x, self.ranks[src], group=self.device_group)
        return x

    def barrier(self) -> None:
        dist.barrier(group=self.cpu_group)

    @contextmanager
    def graph_capture(self) -> Iterator[Any]:
        yield SimpleNamespace(stream=None)

    def destroy(self) -> None:
        dist.destroy_process_group(self.cpu_group)

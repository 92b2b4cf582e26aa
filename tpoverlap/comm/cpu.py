"""Collectives of CPU tensors through the shared segment, by plain memory copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tpoverlap.comm.channel import Channel
from tpoverlap.comm.cpu_plan import Operation, Planner, sum_in_rank_order
from tpoverlap.comm.protocol import Kind
from tpoverlap.comm.provider import Call, Reason, describe

__all__ = ["REDUCED_DTYPES", "CpuProvider", "sum_in_rank_order"]

T = TypeVar("T")
REDUCED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Operations = tuple[Operation, ...]
_Plan = tuple[str, Operations]  # the call's description, and what it does
_MAX_PLANS = 256
_WAIT_CONSUMED, _PUBLISH, _WAIT_PUBLISHED = Kind.WAIT_CONSUMED, Kind.PUBLISH, Kind.WAIT_PUBLISHED


class CpuProvider:
    """All-reduce, all-gather, reduce-scatter and broadcast of CPU tensors, for ranks of one host.

    Sums are in rank order: one addition in the tensor's dtype for two ranks, FP32 rounded once for more, the same
    bits on every rank. Payloads above the slot size run as consecutive operations. emulate_link_gbps: slows every
    transfer to that many GB/s in each direction, so that overlap can be seen without the link itself.
    """

    name = "cpu"

    def __init__(self, channel: Channel, emulate_link_gbps: float | None = None) -> None:
        self._channel = channel
        self._region = channel.region
        self._world_size = channel.layout.world_size
        self._emulate_link_gbps = emulate_link_gbps
        self._planner = Planner(channel.layout, channel.rank, channel.segment.tensor)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._meeting = self._planner.meet()

    def rejection_reason(self, call: Call) -> Reason | None:
        if call.device_type != "cpu":
            return Reason.DEVICE_UNSUPPORTED
        if call.operation in ("all_reduce", "reduce_scatter") and call.dtype not in REDUCED_DTYPES:
            return Reason.DTYPE_UNSUPPORTED
        return None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source = x.reshape(-1)
        target = out.view(-1) if out.is_contiguous() else torch.empty_like(source)
        plan = self._plan("all_reduce", x, self._planner.all_reduce, x.dtype, x.numel())
        self._call(plan, source, target)
        if target.data_ptr() != out.data_ptr():
            out.copy_(target.view(out.shape))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source, rows = _as_bytes(x.reshape(-1)), _as_bytes(out.view(self._world_size, -1))
        self._call(self._plan("all_gather", x, self._planner.all_gather, source.numel()), source, rows)

    def reduce_scatter(self, shards: torch.Tensor, out: torch.Tensor) -> None:
        source, target = shards.view(self._world_size, -1), out.view(-1)
        plan = self._plan("reduce_scatter", shards, self._planner.reduce_scatter, shards.dtype, target.numel())
        self._call(plan, source, target)

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        staged = x if x.is_contiguous() else x.contiguous()
        data = _as_bytes(staged.view(-1))
        plan = self._plan(f"broadcast from rank {src}", x, self._planner.broadcast, data.numel(), src)
        self._call(plan, data, data)
        if staged is not x:
            x.copy_(staged)

    def meet(self, description: str, then: Callable[[], T]) -> T:
        """Makes sure that every rank is in the call of that description, then runs ``then`` as part of it.

        So a collective of another library gets the channel's descriptors, timeouts and liveness.
        """
        result: list[T] = []
        nothing = torch.empty(0)
        self._call((description, self._meeting), nothing, nothing, lambda: result.append(then()))
        return result[0]

    # Parts

    def _plan(self, operation: str, x: torch.Tensor, make: Callable[..., Operations], *arguments: Any) -> _Plan:
        key = (operation, x.dtype, *arguments)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            # Made in inference mode, the views could not be written outside of it.
            with torch.inference_mode(False):
                plan = self._plans[key] = describe(operation, x, self.name), make(*arguments)
        return plan

    def _call(
        self, plan: _Plan, source: torch.Tensor, target: torch.Tensor, then: Callable[[], object] | None = None
    ) -> None:
        description, operations = plan
        first = True
        with self._channel.call(description):
            for operation in operations:
                self._execute(operation, source, target, first)
                first = False
            if then is not None:
                then()

    def _execute(self, operation: Operation, source: torch.Tensor, target: torch.Tensor, first: bool) -> None:
        """Executes the steps in their order. first: of its call, when the peers' descriptors are compared."""
        region = self._region
        slot = region.begin_operation()
        started_s = 0.0
        for step, action in operation.steps:
            kind = step.kind
            if action is not None:
                action(slot, source, target)
            elif kind is _WAIT_PUBLISHED:
                region.wait_published(step.rank, step.count)
                if first and step.count == 1:
                    self._channel.compare_descriptor(step.rank)
            elif kind is _PUBLISH:
                if self._emulate_link_gbps:
                    started_s = self._emulate(started_s, operation.link_bytes[step.count - 1])
                self._channel.published()
                region.publish(step.count)
            elif kind is _WAIT_CONSUMED:
                region.wait_consumed(step.rank)
                started_s = time.perf_counter()
            else:
                region.consume()
        region.end_operation(operation.pieces)

    def _emulate(self, started_s: float, num_bytes: int) -> float:
        """Sleeps until the link would have moved that many bytes; returns when it is free again."""
        assert self._emulate_link_gbps is not None
        free_s = started_s + num_bytes / (self._emulate_link_gbps * 1e9)
        time.sleep(max(0.0, free_s - time.perf_counter()))
        return free_s


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)

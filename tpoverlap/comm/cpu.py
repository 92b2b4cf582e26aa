"""Collectives of CPU tensors through the shared segment, by plain memory copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from tpoverlap.comm.channel import Channel
from tpoverlap.comm.layout import NUM_SLOTS
from tpoverlap.comm.protocol import Kind, Step, one_shot, pieces_published, two_shot
from tpoverlap.comm.provider import Call, Reason, describe

T = TypeVar("T")
REDUCED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# From here on two shots, which move 2 (n - 1) / n payloads a rank instead of n - 1, pay for their second wait.
_TWO_SHOT_MIN_BYTES = 65_536
_Action = Callable[[int], None]


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
        self._rank = channel.rank
        self._world_size = channel.layout.world_size
        self._slot_bytes = channel.layout.cpu_slot_bytes
        self._emulate_link_gbps = emulate_link_gbps
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    def rejection_reason(self, call: Call) -> Reason | None:
        if call.device_type != "cpu":
            return Reason.DEVICE_UNSUPPORTED
        if call.operation in ("all_reduce", "reduce_scatter") and call.dtype not in REDUCED_DTYPES:
            return Reason.DTYPE_UNSUPPORTED
        return None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source = x.reshape(-1)
        target = out.view(-1) if out.is_contiguous() else torch.empty_like(source)
        step = self._slot_bytes // x.element_size()

        def transfer() -> None:
            for i in range(0, max(1, source.numel()), step):
                self._sum_chunk(source[i : i + step], target[i : i + step], first=i == 0)

        self._call(describe("all_reduce", x, self.name), transfer)
        if target.data_ptr() != out.data_ptr():
            out.copy_(target.view(out.shape))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source, rows = _as_bytes(x.reshape(-1)), _as_bytes(out.view(self._world_size, -1))

        def transfer() -> None:
            for i in range(0, max(1, source.numel()), self._slot_bytes):
                mine = source[i : i + self._slot_bytes]
                n = mine.numel()

                def upload(slot: int, mine: torch.Tensor = mine, n: int = n) -> None:
                    self._slot(torch.uint8, self._rank, slot)[:n].copy_(mine)

                def collect(slot: int, i: int = i, n: int = n, mine: torch.Tensor = mine) -> None:
                    for q in range(self._world_size):
                        part = mine if q == self._rank else self._slot(torch.uint8, q, slot)[:n]
                        rows[q, i : i + n].copy_(part)

                self._operate(
                    one_shot(self._rank, self._world_size, 1),
                    {Kind.UPLOAD: upload, Kind.COLLECT: collect},
                    link_bytes=[(self._world_size - 1) * n],
                    first=i == 0,
                )

        self._call(describe("all_gather", x, self.name), transfer)

    def reduce_scatter(self, shards: torch.Tensor, out: torch.Tensor) -> None:
        source, target = shards.view(self._world_size, -1), out.view(-1)
        step = self._slot_bytes // (shards.element_size() * self._world_size)

        def transfer() -> None:
            for i in range(0, max(1, source.shape[1]), step):
                columns = source[:, i : i + step]
                n = columns.shape[1]

                def upload(slot: int, columns: torch.Tensor = columns, n: int = n) -> None:
                    mine = self._slot(shards.dtype, self._rank, slot)
                    for q in self._peers():
                        mine[q * n : (q + 1) * n].copy_(columns[q])

                def reduce(slot: int, columns: torch.Tensor = columns, n: int = n, i: int = i) -> None:
                    own = slice(self._rank * n, (self._rank + 1) * n)
                    parts = self._in_rank_order(columns[self._rank], shards.dtype, slot, own)
                    sum_in_rank_order(parts, target[i : i + n])

                self._operate(
                    two_shot(self._rank, self._world_size, 1, gather=False),
                    {Kind.UPLOAD: upload, Kind.REDUCE: reduce},
                    link_bytes=[(self._world_size - 1) * n * shards.element_size()],
                    first=i == 0,
                )

        self._call(describe("reduce_scatter", shards, self.name), transfer)

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        staged = x if x.is_contiguous() else x.contiguous()
        data = _as_bytes(staged.view(-1))

        def transfer() -> None:
            for i in range(0, max(1, data.numel()), self._slot_bytes):
                part = data[i : i + self._slot_bytes]
                n = part.numel()

                def upload(slot: int, part: torch.Tensor = part, n: int = n) -> None:
                    if self._rank == src:
                        self._slot(torch.uint8, src, slot)[:n].copy_(part)

                def collect(slot: int, part: torch.Tensor = part, n: int = n) -> None:
                    if self._rank != src:
                        part.copy_(self._slot(torch.uint8, src, slot)[:n])

                self._operate(
                    one_shot(self._rank, self._world_size, 1),
                    {Kind.UPLOAD: upload, Kind.COLLECT: collect},
                    link_bytes=[n],
                    first=i == 0,
                )

        self._call(f"{describe('broadcast', x, self.name)}, from rank {src}", transfer)
        if staged is not x and self._rank != src:
            x.copy_(staged)

    def meet(self, description: str, then: Callable[[], T]) -> T:
        """Makes sure that every rank is in the call of that description, then runs ``then`` as part of it.

        So a collective of another library gets the channel's descriptors, timeouts and liveness.
        """
        result: list[T] = []

        def transfer() -> None:
            self._operate(one_shot(self._rank, self._world_size, 1), {}, link_bytes=[0], first=True)
            result.append(then())

        self._call(description, transfer)
        return result[0]

    # Parts

    def _call(self, description: str, transfer: Callable[[], None]) -> None:
        channel = self._channel
        channel.begin(description)
        completed = False
        try:
            transfer()
            completed = True
        finally:
            channel.finish(completed)

    def _operate(
        self, steps: tuple[Step, ...], actions: dict[Kind, _Action], link_bytes: list[int], first: bool
    ) -> None:
        """Executes one operation's steps in their order. first: of its call, when the peers' descriptors are compared.

        link_bytes: what goes over the link before each publish, in its busier direction.
        """
        region = self._region
        slot = region.begin_operation()
        for step in steps:
            match step.kind:
                case Kind.WAIT_CONSUMED:
                    region.wait_consumed(step.rank)
                    started_s = time.perf_counter()
                case Kind.PUBLISH:
                    if self._emulate_link_gbps:
                        started_s = self._emulate(started_s, link_bytes[step.count - 1])
                    self._channel.published()
                    region.publish(step.count)
                case Kind.WAIT_PUBLISHED:
                    region.wait_published(step.rank, step.count)
                    if first and step.count == 1:
                        self._channel.compare_descriptor(step.rank)
                case Kind.CONSUME:
                    region.consume()
                case kind:
                    action = actions.get(kind)
                    if action is not None:
                        action(slot)
        region.end_operation(pieces_published(steps))

    def _sum_chunk(self, x: torch.Tensor, out: torch.Tensor, first: bool) -> None:
        n, dtype, size = x.numel(), x.dtype, x.numel() * x.element_size()
        peers = self._world_size - 1

        def upload(slot: int) -> None:
            self._slot(dtype, self._rank, slot)[:n].copy_(x)

        def collect(slot: int) -> None:
            sum_in_rank_order(self._in_rank_order(x, dtype, slot, slice(0, n)), out)

        if self._world_size == 2 or size < _TWO_SHOT_MIN_BYTES:
            self._operate(
                one_shot(self._rank, self._world_size, 1),
                {Kind.UPLOAD: upload, Kind.COLLECT: collect},
                link_bytes=[peers * size],
                first=first,
            )
            return

        shards = [slice(q * n // self._world_size, (q + 1) * n // self._world_size) for q in range(self._world_size)]
        own = shards[self._rank]

        def upload_others(slot: int) -> None:
            mine = self._slot(dtype, self._rank, slot)
            mine[: own.start].copy_(x[: own.start])
            mine[own.stop : n].copy_(x[own.stop :])

        def reduce(slot: int) -> None:
            sum_in_rank_order(self._in_rank_order(x[own], dtype, slot, own), out[own])

        def upload_result(slot: int) -> None:
            self._slot(dtype, self._rank, slot)[own].copy_(out[own])

        def collect_result(slot: int) -> None:
            for q in self._peers():
                out[shards[q]].copy_(self._slot(dtype, q, slot)[shards[q]])

        self._operate(
            two_shot(self._rank, self._world_size, 1),
            {
                Kind.UPLOAD: upload_others,
                Kind.REDUCE: reduce,
                Kind.UPLOAD_RESULT: upload_result,
                Kind.COLLECT_RESULT: collect_result,
            },
            link_bytes=[size * peers // self._world_size] * 2,
            first=first,
        )

    def _in_rank_order(self, own: torch.Tensor, dtype: torch.dtype, slot: int, where: slice) -> list[torch.Tensor]:
        return [own if q == self._rank else self._slot(dtype, q, slot)[where] for q in range(self._world_size)]

    def _peers(self) -> list[int]:
        return [q for q in range(self._world_size) if q != self._rank]

    def _slot(self, dtype: torch.dtype, rank: int, slot: int) -> torch.Tensor:
        slots = self._slots.get(dtype)
        if slots is None:
            layout, memory = self._channel.layout, self._channel.segment.tensor
            # Made in inference mode, the views could not be written outside of it.
            with torch.inference_mode(False):
                slots = self._slots[dtype] = [
                    [
                        memory[layout.cpu_slot(q, k) : layout.cpu_slot(q, k) + layout.cpu_slot_bytes].view(dtype)
                        for k in range(NUM_SLOTS)
                    ]
                    for q in range(layout.world_size)
                ]
        return slots[rank][slot]

    def _emulate(self, started_s: float, num_bytes: int) -> float:
        """Sleeps until the link would have moved that many bytes; returns when it is free again."""
        assert self._emulate_link_gbps is not None
        free_s = started_s + num_bytes / (self._emulate_link_gbps * 1e9)
        time.sleep(max(0.0, free_s - time.perf_counter()))
        return free_s


def sum_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """out = parts[0] + parts[1] + ... in that order: two in their dtype, more in FP32 and rounded once."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)

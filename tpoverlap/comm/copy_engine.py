"""Collectives of CUDA tensors by the GPU's copy engines, through pinned host memory.

Data goes up and down in pieces on two streams, ordered by stream memory operations; one addition follows. No
multiprocessor moves data, so that compute beside it keeps its speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tpoverlap.comm.channel import CallContext
from tpoverlap.comm.cpu import REDUCED_DTYPES, sum_in_rank_order
from tpoverlap.comm.device_region import CopyRegion
from tpoverlap.comm.gpu import GpuSegment
from tpoverlap.comm.layout import NUM_SLOTS
from tpoverlap.comm.protocol import Kind, Step, one_shot, pieces_published, two_shot
from tpoverlap.comm.provider import Call, Completion, Reason, describe
from tpoverlap.comm.words import MASK

_ALIGNMENT = 256
_MAX_PLANS = 256
Action = Callable[[Any, int, int], None]
"""Does a step's work: (stream of the down lane, slot, piece)."""


def piece_count(num_bytes: int) -> int:
    """Pieces of a payload: more hide the first upload better, and each costs host time."""
    for limit, count in _PIECES:
        if num_bytes <= limit:
            return count
    return _MOST_PIECES


# Measured on two H200 behind PCIe 5 x16 (docs/benchmarks.md); of counts within 3 % of each other, the smallest.
_PIECES = ((768 << 10, 1), (3 << 20, 2), (9 << 20, 3))
_MOST_PIECES = 4


@dataclass(frozen=True, slots=True)
class _Chunk:
    """An operation's share of a payload. begin: its first byte. pieces: (begin, size) in bytes behind that; none is
    empty."""

    elements: slice
    begin: int
    pieces: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an all-reduce of one size runs."""

    call: CallContext
    chunks: list[_Chunk]


class CopyEngineProvider:
    """Eager all-reduce, all-gather and reduce-scatter of CUDA tensors on the current stream, for ranks of one host.

    Sums are in rank order: one addition in the tensor's dtype for two ranks, FP32 rounded once for more. Payloads
    above the slot size run as consecutive operations. Work that the caller puts on the stream after the call, also
    writes to the input, runs after this rank's own uploads.

    The addition of two ranks, and the copy of the own rows, are left to the caller's stream where they can be: they
    need multiprocessors, and while the kernels beside them hold all of those, the next transfer would wait behind them.
    """

    name = "copy_engine"

    def __init__(self, segment: GpuSegment, peer_access: bool, num_pieces: int | Literal["auto"] = "auto") -> None:
        self._segment = segment
        self._calls = segment.calls
        self._rank = segment.rank
        self._world_size = segment.world_size
        self._slot_bytes = segment.layout.copy_slot_bytes
        self._peer_access = peer_access
        self._num_pieces = num_pieces
        self._plans: dict[tuple[torch.dtype, int], _Plan] = {}
        self._slots = [
            [segment.host_address + segment.layout.copy_slot(q, k) for k in range(NUM_SLOTS)]
            for q in range(self._world_size)
        ]
        self.region = CopyRegion(segment)

    def rejection_reason(self, call: Call) -> Reason | None:
        if call.device_type != "cuda":
            return Reason.DEVICE_UNSUPPORTED
        if call.operation == "broadcast":
            return Reason.OPERATION_UNSUPPORTED
        if call.operation != "all_gather" and call.dtype not in REDUCED_DTYPES:
            return Reason.DTYPE_UNSUPPORTED
        if call.capturing:
            return Reason.NOT_CAPTURABLE
        if self._peer_access:
            return Reason.PEER_ACCESS_AVAILABLE
        return None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> Completion | None:
        self._segment.require_current()
        source = x if x.is_contiguous() else x.contiguous()
        plan = self._plans.get((x.dtype, x.numel())) or self._plan(x.dtype, x.numel())
        if self._world_size == 2 and out.is_contiguous() and (target_address := out.data_ptr()) != x.data_ptr():
            with plan.call:
                self._exchange(source.data_ptr(), target_address, plan.chunks)
            return functools.partial(torch.add, *self._by_rank(x, out), out=out)
        target = out if out.is_contiguous() else torch.empty_like(source)
        with plan.call:
            if self._world_size == 2:
                received = torch.empty_like(source)
                self._exchange(source.data_ptr(), received.data_ptr(), plan.chunks)
                torch.add(*self._by_rank(source, received), out=target)
            else:
                flat, flat_target = source.view(-1), target.view(-1)
                for chunk in plan.chunks:
                    self._two_shots(flat[chunk.elements], flat_target[chunk.elements])
        if target is not out:
            out.copy_(target)
        return None

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> Completion | None:
        source, row_bytes = x.contiguous(), x.numel() * x.element_size()
        with self._segment.call(describe("all_gather", x, self.name)):
            for begin, size in self._chunks(row_bytes, 1):
                pieces = self._pieces(size)
                at = source.data_ptr() + begin

                def upload(stream: Any, slot: int, p: int, at: int = at, pieces: list[range] = pieces) -> None:
                    self._up(slot, pieces[p], at)

                def collect(stream: Any, slot: int, p: int, begin: int = begin, pieces: list[range] = pieces) -> None:
                    for q in self._peers():
                        self._down(stream, q, slot, pieces[p], out.data_ptr() + q * row_bytes + begin)

                steps = one_shot(self._rank, self._world_size, len(pieces))
                self._operate(steps, {Kind.UPLOAD: upload, Kind.COLLECT: collect})
        return functools.partial(out[self._rank].copy_, x)

    def reduce_scatter(self, shards: torch.Tensor, out: torch.Tensor) -> Completion | None:
        source, target = shards.view(self._world_size, -1), out.view(-1)
        n, item = self._world_size, shards.element_size()
        with self._segment.call(describe("reduce_scatter", shards, self.name)):
            for begin, size in self._chunks(target.numel() * item, n):
                columns = slice(begin // item, (begin + size) // item)
                own = source[self._rank, columns]
                # By rank. Of two, the peer's comes straight into the result.
                received: Sequence[torch.Tensor] = (
                    [target[columns]] * 2
                    if n == 2
                    else list(torch.empty((n, size // item), dtype=shards.dtype, device=shards.device))
                )
                pieces = self._pieces(size)

                def upload(
                    stream: Any, slot: int, p: int, begin: int = begin, size: int = size, pieces: list[range] = pieces
                ) -> None:
                    for q in self._peers():
                        start = source[q].data_ptr() + begin
                        self._up(slot, pieces[p], start, offset=q * size)

                def reduce(
                    stream: Any,
                    slot: int,
                    p: int,
                    size: int = size,
                    pieces: list[range] = pieces,
                    received: Sequence[torch.Tensor] = received,
                ) -> None:
                    for q in self._peers():
                        self._down(stream, q, slot, pieces[p], received[q].data_ptr(), offset=self._rank * size)

                steps = two_shot(self._rank, n, len(pieces), gather=False)
                self._operate(steps, {Kind.UPLOAD: upload, Kind.REDUCE: reduce})
                if n > 2:
                    sum_in_rank_order(self._in_rank_order(own, received), target[columns])
        return functools.partial(torch.add, *self._by_rank(source[self._rank], target), out=target) if n == 2 else None

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        raise AssertionError("rejected")

    # Parts

    def _plan(self, dtype: torch.dtype, num_elements: int) -> _Plan:
        """Makes and keeps what an all-reduce of that size does: making it costs as much host time as its copies. No
        chunks: the payload is empty."""
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        item = dtype.itemsize
        chunks = [
            _Chunk(slice(b // item, (b + size) // item), b, [(r.start, len(r)) for r in self._pieces(size) if r])
            for b, size in self._chunks(num_elements * item, 1)
            if size
        ]
        description = describe("all_reduce", torch.empty(num_elements, dtype=dtype, device="meta"), self.name)
        plan = self._plans[dtype, num_elements] = _Plan(self._segment.prepared_call(description), chunks)
        return plan

    def _exchange(self, source: int, target: int, chunks: list[_Chunk]) -> None:
        """Two ranks: each reads the other's payload, from the address ``source`` to ``target``. The steps of
        ``one_shot``, with no detour: every microsecond of host time here is one by which the next layer's compute
        starts later. The uploads of a chunk do not wait for the downloads of the one before, but for the peer to have
        read its slot; nor do those of a call that another stream makes meanwhile, since both lanes are the group's."""
        if not chunks:
            return  # nothing to publish, and a peer that waits for nothing cannot be missed
        segment, calls, region, rank = self._segment, self._calls, self.region, self._rank
        current, up, down, event = segment.begin_aside(), segment.up, segment.down, segment.event
        own_slots, peer_slots = self._slots[rank], self._slots[1 - rank]
        published, theirs = region.published_address[rank], region.published_address[1 - rank]
        consumed, theirs_consumed = region.consumed_address[rank], region.consumed_address[1 - rank]
        try:
            for chunk in chunks:
                number, base, slot = region.next_operation(len(chunk.pieces), NUM_SLOTS)
                calls.wait_at_least(up, theirs_consumed, (number - NUM_SLOTS) & MASK)
                calls.upload(up, source + chunk.begin, own_slots[slot], chunk.pieces, published, base)
                calls.download(down, target + chunk.begin, peer_slots[slot], chunk.pieces, theirs, base)
                calls.write(down, consumed, number)
        finally:
            # Where a call failed, too: the target's memory may get another use on the current stream.
            calls.order(current, event, down)
            calls.order(current, event, up)

    def _two_shots(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """More ranks: each adds its own shard of all, then reads the others' sums."""
        n, item = self._world_size, x.element_size()
        shard = -(-x.numel() // n)
        shard = -(-shard * item // _ALIGNMENT) * _ALIGNMENT // item
        bounds = [range(min(q * shard, x.numel()), min((q + 1) * shard, x.numel())) for q in range(n)]
        own = bounds[self._rank]
        received = torch.empty((n, max(1, len(own))), dtype=x.dtype, device=x.device)
        own_sum = out[own.start : own.stop]

        def others(q: int) -> range:
            return range(bounds[q].start * item, bounds[q].stop * item)

        def upload(stream: Any, slot: int, p: int) -> None:
            for q in self._peers():
                self._up(slot, others(q), x.data_ptr())

        def reduce(stream: Any, slot: int, p: int) -> None:
            for q in self._peers():
                self._down(stream, q, slot, others(self._rank), received[q].data_ptr() - own.start * item)
            sum_in_rank_order(self._in_rank_order(x[own.start : own.stop], list(received)), own_sum)

        def upload_result(stream: Any, slot: int, p: int) -> None:
            self._up(slot, others(self._rank), out.data_ptr())

        def collect_result(stream: Any, slot: int, p: int) -> None:
            for q in self._peers():
                self._down(stream, q, slot, others(q), out.data_ptr())

        self._operate(
            two_shot(self._rank, n, 1),
            {
                Kind.UPLOAD: upload,
                Kind.REDUCE: reduce,
                Kind.UPLOAD_RESULT: upload_result,
                Kind.COLLECT_RESULT: collect_result,
            },
        )

    def _operate(self, steps: tuple[Step, ...], actions: dict[Kind, Action]) -> None:
        """Issues one operation's steps in their order: lane ``up`` on the provider's stream, ``down`` on the caller's.

        The caller's stream ends behind both lanes.
        """
        segment, calls, region = self._segment, self._calls, self.region
        down, up, event = segment.begin(), segment.up, segment.event
        number, base, slot = region.next_operation(pieces_published(steps), NUM_SLOTS)
        slot_free = (number - NUM_SLOTS) & MASK
        calls.order(up, event, down)
        for step in steps:
            kind = step.kind
            if kind is Kind.WAIT_PUBLISHED:
                calls.wait_at_least(down, region.published_address[step.rank], (base + step.count) & MASK)
            elif kind is Kind.PUBLISH:
                calls.write(up, region.published_address[self._rank], (base + step.count) & MASK)
            elif kind is Kind.WAIT_CONSUMED:
                calls.wait_at_least(up, region.consumed_address[step.rank], slot_free)
            elif kind is Kind.CONSUME:
                calls.write(down, region.consumed_address[self._rank], number)
            else:
                if step.after:
                    calls.order(up, event, down)
                actions[kind](down, slot, step.piece)
        calls.order(down, event, up)

    def _up(self, slot: int, part: range, source: int, offset: int = 0) -> None:
        """Bytes ``part`` behind ``source`` into this rank's slot, where they lie ``offset`` further."""
        if part:
            host = self._slots[self._rank][slot]
            self._calls.to_host(host + offset + part.start, source + part.start, len(part), self._segment.up)

    def _down(self, stream: Any, rank: int, slot: int, part: range, target: int, offset: int = 0) -> None:
        """Bytes ``part`` of rank's slot (``offset`` further) to behind ``target``."""
        if part:
            host = self._slots[rank][slot]
            self._calls.to_device(target + part.start, host + offset + part.start, len(part), stream)

    def _chunks(self, num_bytes: int, per_slot: int) -> list[tuple[int, int]]:
        """(begin, size) of the operations that a payload takes, of nearly equal size; a slot holds ``per_slot``."""
        largest = self._slot_bytes // per_slot // _ALIGNMENT * _ALIGNMENT
        count = max(1, -(-num_bytes // largest))
        size = min(largest, -(-num_bytes // count // _ALIGNMENT) * _ALIGNMENT or _ALIGNMENT)
        return [(b, min(size, num_bytes - b)) for b in range(0, max(num_bytes, 1), size)]

    def _pieces(self, num_bytes: int) -> list[range]:
        count = piece_count(num_bytes) if self._num_pieces == "auto" else self._num_pieces
        size = max(_ALIGNMENT, -(-num_bytes // count // _ALIGNMENT) * _ALIGNMENT)
        return [range(b, min(b + size, num_bytes)) for b in range(0, max(num_bytes, 1), size)]

    def _peers(self) -> list[int]:
        return [q for q in range(self._world_size) if q != self._rank]

    def _by_rank(self, own: torch.Tensor, peers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of two ranks: the order decides which of two NaNs a sum is."""
        return (own, peers) if self._rank == 0 else (peers, own)

    def _in_rank_order(self, own: torch.Tensor, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [own if q == self._rank else received[q][: own.numel()] for q in range(self._world_size)]

"""Copy-engine collectives inside CUDA graphs: constant words in place of counters.

A graph bakes in the values that its stream memory operations write and wait for, so each (writer, reader, piece) has a
mailbox word that is EMPTY or FULL. Piece p always lies at the same place of the slot, whatever the payload: a writer
that finds word p empty then knows that all of that place has been read.
"""

from __future__ import annotations

import torch

from tpoverlap.comm.cpu import REDUCED_DTYPES, sum_in_rank_order
from tpoverlap.comm.device_region import StuckClock
from tpoverlap.comm.gpu import GpuSegment
from tpoverlap.comm.layout import CAPTURED_BUSY, MAX_PIECES
from tpoverlap.comm.protocol import EMPTY, FULL, POISON, Kind, mailbox
from tpoverlap.comm.provider import Call, Reason, describe


class CapturedCopyEngineProvider:
    """All-reduce and all-gather of CUDA tensors by copy engines while their stream is being captured.

    Sums as in eager mode: rank order, one addition in the dtype for two ranks, FP32 rounded once for more. Replays of
    one group's graphs, and its eager calls between them, must be ordered by the caller.
    """

    name = "captured_copy_engine"

    def __init__(self, segment: GpuSegment, peer_access: bool) -> None:
        self._segment = segment
        self._peer_access = peer_access
        self._rank = segment.rank
        self._world_size = segment.world_size
        self._piece_bytes = segment.layout.captured_slot_bytes // MAX_PIECES
        self.region = MailboxRegion(segment)

    def rejection_reason(self, call: Call) -> Reason | None:
        if call.device_type != "cuda":
            return Reason.DEVICE_UNSUPPORTED
        if call.operation not in ("all_reduce", "all_gather"):
            return Reason.OPERATION_UNSUPPORTED
        if call.operation == "all_reduce" and call.dtype not in REDUCED_DTYPES:
            return Reason.DTYPE_UNSUPPORTED
        if not call.capturing:
            return Reason.NOT_CAPTURING
        return Reason.PEER_ACCESS_AVAILABLE if self._peer_access else None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source = x.contiguous().view(-1)
        target = out.view(-1) if out.is_contiguous() else torch.empty_like(source)
        received = torch.empty((self._world_size, source.numel()), dtype=x.dtype, device=x.device)
        self._transfer(describe("all_reduce", x, self.name), source, received)
        sum_in_rank_order([source if q == self._rank else received[q] for q in range(self._world_size)], target)
        if target.data_ptr() != out.data_ptr():
            out.copy_(target.view(out.shape))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        source = x.contiguous()
        out[self._rank].copy_(source)
        self._transfer(describe("all_gather", x, self.name), source.view(-1), out.view(self._world_size, -1))

    def reduce_scatter(self, shards: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("rejected")

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        raise AssertionError("rejected")

    def _transfer(self, description: str, source: torch.Tensor, rows: torch.Tensor) -> None:
        calls, region = self._segment.calls, self.region
        with self._segment.call(description):
            down, up, event = self._segment.begin(capturing=True), self._segment.up, self._segment.event
            calls.order(up, event, down)
            calls.write(up, region.busy_address, 1)
            num_bytes = source.numel() * source.element_size()
            slot_bytes = self._piece_bytes * MAX_PIECES
            for begin in range(0, num_bytes, slot_bytes):
                self._operate(down, source.data_ptr(), rows, begin, min(slot_bytes, num_bytes - begin))
            calls.order(down, event, up)
            calls.write(down, region.busy_address, 0)

    def _operate(self, down: object, source: int, rows: torch.Tensor, begin: int, num_bytes: int) -> None:
        segment, calls, region = self._segment, self._segment.calls, self.region
        up, layout, host = segment.up, segment.layout, segment.host_address
        size = self._piece_bytes
        for step in mailbox(self._rank, self._world_size, -(-num_bytes // size)):
            at = step.piece * size
            length = min(size, num_bytes - at)
            if step.kind is Kind.WAIT_EMPTY:
                calls.wait_any_bit(up, region.address(self._rank, step.rank, step.piece), EMPTY)
            elif step.kind is Kind.UPLOAD:
                calls.to_host(host + layout.captured_slot(self._rank) + at, source + begin + at, length, up)
            elif step.kind is Kind.FILL:
                calls.write(up, region.address(self._rank, step.rank, step.piece), FULL)
            elif step.kind is Kind.WAIT_FULL:
                calls.wait_any_bit(down, region.address(step.rank, self._rank, step.piece), FULL)
            elif step.kind is Kind.COLLECT:
                for q in range(self._world_size):
                    if q != self._rank:
                        slot = host + layout.captured_slot(q) + at
                        calls.to_device(rows[q].data_ptr() + begin + at, slot, length, down)
            elif step.kind is Kind.DRAIN:
                calls.write(down, region.address(step.rank, self._rank, step.piece), EMPTY)


class MailboxRegion:
    """The mailbox words of a group, and a word that says whether this rank's replay is under way."""

    def __init__(self, segment: GpuSegment) -> None:
        layout = segment.layout
        self._segment = segment
        self._words = segment.channel.segment.words
        self._busy = layout.word(segment.rank, CAPTURED_BUSY) // 4
        self.busy_address = segment.device_address + 4 * self._busy
        # The words that this rank's streams wait for or write.
        self._own = [
            self._index(writer, reader, piece)
            for writer in range(segment.world_size)
            for reader in range(segment.world_size)
            for piece in range(MAX_PIECES)
            if (writer == segment.rank) != (reader == segment.rank)
        ]
        self._clock = StuckClock(self._signature)
        self.restore()

    def address(self, writer: int, reader: int, piece: int) -> int:
        return self._segment.device_address + self._segment.layout.mailbox(writer, reader, piece)

    def release(self) -> None:
        for index in self._own:
            self._words[index] = POISON

    def waiting_s(self) -> float:
        return self._clock.waiting_s()

    def restore(self) -> None:
        self._words[self._busy] = 0
        rank = self._segment.rank
        for reader in range(self._segment.world_size):
            for piece in range(MAX_PIECES):
                self._words[self._index(rank, reader, piece)] = EMPTY
        self._clock.restart()

    def _signature(self) -> tuple[int, ...] | None:
        if not self._words[self._busy]:
            return None
        return tuple(self._words[index] for index in self._own)

    def _index(self, writer: int, reader: int, piece: int) -> int:
        return self._segment.layout.mailbox(writer, reader, piece) // 4

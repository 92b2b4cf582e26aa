"""What a rank copies and adds in a collective of CPU tensors: planned once for a kind of call, executed many times.

An operation is a list of protocol steps. Those that touch data come with an action, a function of (slot, source,
target): the slot that the operation uses, and the call's flat input and output. All views of the shared slots are
made here, so that a call makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tpoverlap.comm.layout import NUM_SLOTS, Layout
from tpoverlap.comm.protocol import Kind, Step, one_shot, pieces_published, two_shot

Action = Callable[[int, torch.Tensor, torch.Tensor], object]
# From here on two shots, which move 2 (n - 1) / n payloads a rank instead of n - 1, pay for their second wait.
_TWO_SHOT_MIN_BYTES = 65_536
_PROTOCOL = frozenset({Kind.WAIT_CONSUMED, Kind.PUBLISH, Kind.WAIT_PUBLISHED, Kind.CONSUME})


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of the protocol over a part of the payload. link_bytes: what goes over the link before each publish."""

    steps: tuple[tuple[Step, Action | None], ...]
    link_bytes: tuple[int, ...]
    pieces: int

    @classmethod
    def of(cls, steps: tuple[Step, ...], actions: Mapping[Kind, Action], link_bytes: tuple[int, ...]) -> Operation:
        """Steps on data without an action are left out."""
        kept = tuple((s, actions.get(s.kind)) for s in steps if s.kind in _PROTOCOL or s.kind in actions)
        return cls(kept, link_bytes, pieces_published(steps))


class Planner:
    """Plans the calls of rank ``rank``. memory: the group's segment as bytes."""

    def __init__(self, layout: Layout, rank: int, memory: torch.Tensor) -> None:
        self._layout = layout
        self._rank = rank
        self._size = layout.world_size
        self._memory = memory

    def meet(self) -> tuple[Operation, ...]:
        """Every rank waits for all others; no data moves."""
        return (Operation.of(one_shot(self._rank, self._size, 1), {}, (0,)),)

    def all_reduce(self, dtype: torch.dtype, numel: int) -> tuple[Operation, ...]:
        """source, target: [numel] of that dtype."""
        two_shots = self._size > 2
        return tuple(
            self._sum_in_two_shots(dtype, part)
            if two_shots and (part.stop - part.start) * dtype.itemsize >= _TWO_SHOT_MIN_BYTES
            else self._sum_in_one_shot(dtype, part, whole=part.stop - part.start == numel)
            for part in _parts(numel, self._layout.cpu_slot_bytes // dtype.itemsize)
        )

    def all_gather(self, num_bytes: int) -> tuple[Operation, ...]:
        """source: [num_bytes], target: [ranks, num_bytes], both uint8."""
        return tuple(self._gather(part) for part in _parts(num_bytes, self._layout.cpu_slot_bytes))

    def reduce_scatter(self, dtype: torch.dtype, numel: int) -> tuple[Operation, ...]:
        """source: [ranks, numel], target: [numel] of that dtype."""
        step = self._layout.cpu_slot_bytes // (dtype.itemsize * self._size)
        return tuple(self._scatter(dtype, part) for part in _parts(numel, step))

    def broadcast(self, num_bytes: int, src: int) -> tuple[Operation, ...]:
        """source and target: the same [num_bytes], uint8."""
        return tuple(self._broadcast(part, src) for part in _parts(num_bytes, self._layout.cpu_slot_bytes))

    def _sum_in_one_shot(self, dtype: torch.dtype, part: slice, whole: bool) -> Operation:
        n = part.stop - part.start
        by_rank = [self._views(dtype, q, slice(0, n)) for q in range(self._size)]
        own, by_slot = by_rank[self._rank], list(zip(*by_rank, strict=True))

        def upload(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            own[slot].copy_(source if whole else source[part])

        def collect(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            # The own part from its slot, too: from a tensor with other strides torch may make another NaN of it.
            sum_in_rank_order(by_slot[slot], target if whole else target[part])

        actions: dict[Kind, Action] = {Kind.UPLOAD: upload, Kind.COLLECT: collect}
        return Operation.of(one_shot(self._rank, self._size, 1), actions, ((self._size - 1) * n * dtype.itemsize,))

    def _sum_in_two_shots(self, dtype: torch.dtype, part: slice) -> Operation:
        n = part.stop - part.start
        shards = [slice(q * n // self._size, (q + 1) * n // self._size) for q in range(self._size)]
        own = shards[self._rank]
        before, behind = slice(0, own.start), slice(own.stop, n)
        mine = [self._views(dtype, self._rank, where) for where in (before, own, behind)]
        parts = self._parts_of_peers(dtype, own)
        sums = [(_moved(shards[q], part.start), self._views(dtype, q, shards[q])) for q in self._peers()]
        own_here, before_here, behind_here = (_moved(where, part.start) for where in (own, before, behind))

        def upload(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            mine[0][slot].copy_(source[before_here])
            mine[2][slot].copy_(source[behind_here])

        def reduce(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            added = source[own_here]
            sum_in_rank_order([added if peer is None else peer for peer in parts[slot]], target[own_here])

        def upload_result(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            mine[1][slot].copy_(target[own_here])

        def collect_result(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            for here, views in sums:
                target[here].copy_(views[slot])

        actions: dict[Kind, Action] = {
            Kind.UPLOAD: upload,
            Kind.REDUCE: reduce,
            Kind.UPLOAD_RESULT: upload_result,
            Kind.COLLECT_RESULT: collect_result,
        }
        moved = (self._size - 1) * n * dtype.itemsize // self._size
        return Operation.of(two_shot(self._rank, self._size, 1), actions, (moved, moved))

    def _gather(self, part: slice) -> Operation:
        n, rank = part.stop - part.start, self._rank
        views = [self._views(torch.uint8, q, slice(0, n)) for q in range(self._size)]

        def upload(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            views[rank][slot].copy_(source[part])

        def collect(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            for q, view in enumerate(views):
                target[q, part].copy_(source[part] if q == rank else view[slot])

        actions: dict[Kind, Action] = {Kind.UPLOAD: upload, Kind.COLLECT: collect}
        return Operation.of(one_shot(self._rank, self._size, 1), actions, ((self._size - 1) * n,))

    def _scatter(self, dtype: torch.dtype, part: slice) -> Operation:
        n, rank = part.stop - part.start, self._rank
        mine = [(q, self._views(dtype, rank, slice(q * n, (q + 1) * n))) for q in self._peers()]
        parts = self._parts_of_peers(dtype, slice(rank * n, (rank + 1) * n))

        def upload(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            for q, views in mine:
                views[slot].copy_(source[q, part])

        def reduce(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            added = source[rank, part]
            sum_in_rank_order([added if peer is None else peer for peer in parts[slot]], target[part])

        actions: dict[Kind, Action] = {Kind.UPLOAD: upload, Kind.REDUCE: reduce}
        steps = two_shot(rank, self._size, 1, gather=False)
        return Operation.of(steps, actions, ((self._size - 1) * n * dtype.itemsize,))

    def _broadcast(self, part: slice, src: int) -> Operation:
        n = part.stop - part.start
        views = self._views(torch.uint8, src, slice(0, n))

        def upload(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            views[slot].copy_(source[part])

        def collect(slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
            target[part].copy_(views[slot])

        actions: dict[Kind, Action] = {Kind.UPLOAD: upload} if self._rank == src else {Kind.COLLECT: collect}
        return Operation.of(one_shot(self._rank, self._size, 1), actions, (n,))

    def _peers(self) -> Iterator[int]:
        return (q for q in range(self._size) if q != self._rank)

    def _views(self, dtype: torch.dtype, rank: int, where: slice) -> list[torch.Tensor]:
        """Elements ``where`` of each of the rank's slots."""
        size, begin = dtype.itemsize, [self._layout.cpu_slot(rank, slot) for slot in range(NUM_SLOTS)]
        return [self._memory[at + where.start * size : at + where.stop * size].view(dtype) for at in begin]

    def _parts_of_peers(self, dtype: torch.dtype, where: slice) -> list[list[torch.Tensor | None]]:
        """For each slot, the elements ``where`` of all ranks in rank order; None stands for the own ones."""
        by_rank = [None if q == self._rank else self._views(dtype, q, where) for q in range(self._size)]
        return [[None if views is None else views[slot] for views in by_rank] for slot in range(NUM_SLOTS)]


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """out = parts[0] + parts[1] + ... in that order: two in their dtype, more in FP32 and rounded once."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
        return
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)


def _parts(count: int, step: int) -> Iterator[slice]:
    """``count`` elements in parts of at most ``step``; one empty part for none, so that the ranks still meet."""
    return (slice(i, min(i + step, count)) for i in range(0, max(1, count), step))


def _moved(where: slice, by: int) -> slice:
    return slice(where.start + by, where.stop + by)

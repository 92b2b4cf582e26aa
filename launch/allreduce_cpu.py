"""The arms of bench_allreduce.py on CPU tensors: the shared-memory channel, gloo, and what the memory itself takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from allreduce_contest import Contest, Extra, Ratio, WrongResultError
from bench_common import Arm
from job_world import World

from tpoverlap.comm import GroupCoordinator

OURS, PEER, FLOOR = "tpoverlap", "gloo", "copy + add"
# A turn makes calls back to back until their payloads add up to this, at most so many: one short call alone would
# measure how evenly the ranks leave the barrier.
_TURN_BYTES = 32 << 20
_MAX_CALLS = 32
# No value of a payload is larger.
_LARGEST = 8.0


class CpuContests:
    """Each transport on a group of its own, in the same processes."""

    what: ClassVar[str] = "allreduce-cpu"
    subject: ClassVar[str] = "CPU tensors"
    notes: ClassVar[tuple[str, ...]] = (
        "Every result was checked on every rank before it was timed: ours bit for bit against the sum in rank order, "
        "gloo's within rounding.",
        "A turn begins at a barrier with an input that has just been written. Outputs are reused: ours writes out=, "
        "gloo works in place.",
        "copy + add: every rank copies its payload once and adds it once, all at the same time, with no waiting.",
    )

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world = world
        self._dtype = dtype
        self._group = GroupCoordinator(range(world.size), world.local_rank, "cpu", unique_name="bench_allreduce")
        self._gloo = dist.new_group(backend="gloo")

    def contest(self, num_bytes: int) -> Contest:
        payload = Payload(self._world, self._dtype, num_bytes)
        group, gloo = self._group, self._gloo
        x, out, slot = payload.x, payload.out, torch.empty_like(payload.x)

        def ours() -> None:
            group.all_reduce(x, out=out)

        def peer() -> None:
            dist.all_reduce(x, group=gloo)

        def floor() -> None:
            slot.copy_(x)
            torch.add(x, slot, out=out)

        def check_ours() -> None:
            refused = group.rejection_reasons(x)["cpu"]
            if refused is not None:
                raise WrongResultError(f"the channel does not serve {num_bytes} B: {refused}")
            out.fill_(torch.nan)
            ours()
            payload.check_bits(out)

        def check_peer() -> None:
            peer()
            payload.check_close(x)

        def check_floor() -> None:
            floor()
            if not torch.equal(out, x + x):
                raise WrongResultError(f"copy and add of {num_bytes} B gave a wrong sum")

        arms = [
            self._arm(name, call, check, payload)
            for name, call, check in (
                (OURS, ours, check_ours),
                (PEER, peer, check_peer),
                (FLOOR, floor, check_floor),
            )
        ]
        ratios = (Ratio(OURS, PEER, goal(self._world.size, num_bytes)), Ratio(OURS, FLOOR))
        return Contest(arms, ratios, floors=(FLOOR,))

    def extras(self) -> Iterator[Extra]:
        yield from ()

    def close(self) -> None:
        self._group.destroy()

    def _arm(self, name: str, call: Callable[[], None], check: Callable[[], None], payload: Payload) -> Arm:
        calls = calls_of_turn(payload.num_bytes, self._dtype, self._world.size)

        def checked() -> None:
            payload.refill()
            self._world.on_each(check)

        def turn() -> float:
            payload.refill()
            dist.barrier(group=self._gloo)
            started_s = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - started_s) / calls

        return Arm(name, checked, turn)


def goal(ranks: int, num_bytes: int) -> float | None:
    """What our time over gloo's should not exceed on two ranks: 0.1 up to 64 KiB, 0.2 at 1 MiB, 0.3 at 8 MiB."""
    if ranks != 2:
        return None
    return 0.1 if num_bytes <= 64 << 10 else {1 << 20: 0.2, 8 << 20: 0.3}.get(num_bytes)


def calls_of_turn(num_bytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Calls back to back in a turn. In place, each may multiply the values by ``ranks``: the dtype must hold them."""
    in_range = int(math.log(torch.finfo(dtype).max / _LARGEST) / math.log(ranks))
    return max(1, min(_MAX_CALLS, _TURN_BYTES // num_bytes, in_range))


class Payload:
    """Random values that every rank can make for every rank. x: this rank's, to be reduced; out: for the result."""

    def __init__(self, world: World, dtype: torch.dtype, num_bytes: int, device: torch.device | str = "cpu") -> None:
        self.num_bytes = num_bytes
        self._world = world
        self._dtype = dtype
        self._count = num_bytes // dtype.itemsize
        self._values = self._of_rank(world.rank).to(device)
        self.x = self._values.clone()
        self.out = torch.empty_like(self.x)

    def refill(self) -> None:
        """Every arm begins its turn with an input that has just been written."""
        self.x.copy_(self._values)

    def check_bits(self, got: torch.Tensor) -> None:
        """The sum in rank order: two in their dtype, more in FP32 and rounded once."""
        working = self._dtype if self._world.size == 2 else torch.float32
        total = self._of_rank(0).to(working)
        for rank in range(1, self._world.size):
            total += self._of_rank(rank).to(working)
        self._require(torch.equal(got.cpu(), total.to(self._dtype)), "differs from the sum in rank order")

    def check_close(self, got: torch.Tensor) -> None:
        """Within the rounding of one addition a rank, whatever their order."""
        total = torch.zeros(self._count, dtype=torch.float64)
        magnitude = torch.zeros_like(total)
        for rank in range(self._world.size):
            part = self._of_rank(rank)
            total += part
            magnitude += part.abs()
        allowed = magnitude * (self._world.size * torch.finfo(self._dtype).eps)
        self._require(
            bool(((got.cpu() - total).abs() <= allowed).all()), "is further from the sum than rounding explains"
        )

    def _of_rank(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * rank + self._count)
        return torch.randn(self._count, generator=generator).clamp_(-_LARGEST, _LARGEST).to(self._dtype)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise WrongResultError(f"the result of {self.num_bytes} B on rank {self._world.rank} {what}")

"""What a copy-engine all-reduce is made of: its time by the number of pieces, and what a call costs the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from allreduce_contest import Contest, Extra, Ratio, WrongResultError
from allreduce_cpu import Payload, calls_of_turn
from allreduce_report import size_name
from bench_common import Arm, on_gpu
from job_world import World

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig

PIECES: tuple[int | Literal["auto"], ...] = ("auto", 1, 2, 3, 4, 6, 8, 12, 16)
PIECE_SIZES = (512 << 10, 1 << 20, 2 << 20, 4 << 20, 8_192_000, 16_384_000, 32 << 20, 64 << 20)
HOST_SIZES = (1 << 20, 8_192_000, 16_384_000)
HOST_PIECES = (1, 2, 4, 8)
# Calls whose host time is taken before the device is waited for: as in a forward pass, it lags behind.
_CALLS = 8


def by_pieces(world: World, device: torch.device, dtype: torch.dtype) -> Iterator[Extra]:
    """For each payload: every number of pieces over the library's own choice."""
    groups = {
        n: GroupCoordinator(range(world.size), world.local_rank, device, HostReduceConfig(copy_engine_pieces=n))
        for n in PIECES
    }
    for num_bytes in PIECE_SIZES:
        payload = Payload(world, dtype, num_bytes, device)
        arms = [_timed_arm(world, _name(n), group, payload) for n, group in groups.items()]
        ratios = [Ratio(_name(n), _name("auto")) for n in PIECES if n != "auto"]
        yield Extra(f"copy engines by pieces, {size_name(num_bytes)}", Contest(arms, ratios))
    for group in groups.values():
        group.destroy()


def host_times(world: World, group: GroupCoordinator, device: torch.device, dtype: torch.dtype) -> Iterator[Extra]:
    """Host time of one eager call, ours over NCCL's where each rank has a GPU of its own."""
    has_nccl = torch.cuda.device_count() >= world.local_size
    for num_bytes in HOST_SIZES:
        payload = Payload(world, dtype, num_bytes, device)
        arms = [_host_arm(world, group, payload)]
        arms += [_nccl_host_arm(world, group, payload)] if has_nccl else []
        ratios = [Ratio("tpoverlap", "NCCL")] if has_nccl else []
        yield Extra(f"host time of an eager call, {size_name(num_bytes)}", Contest(arms, ratios))


def host_times_alone(
    world: World, group: GroupCoordinator, device: torch.device, dtype: torch.dtype
) -> Iterator[Extra]:
    """Host time of one eager call by payload, and by its number of pieces. All of a table is timed in turn, since a
    CPU that others share may run at half its speed for seconds."""
    arms = []
    for num_bytes in (*HOST_SIZES, 32 << 20):
        arms.append(_host_arm(world, group, Payload(world, dtype, num_bytes, device), size_name(num_bytes)))
    ratios = [Ratio(arm.name, arms[0].name) for arm in arms[1:]]
    yield Extra("host time of an eager call by payload", Contest(arms, ratios))
    groups = {
        n: GroupCoordinator(range(world.size), world.local_rank, device, HostReduceConfig(copy_engine_pieces=n))
        for n in HOST_PIECES
    }
    payload = Payload(world, dtype, 16_384_000, device)
    arms = [_host_arm(world, group, payload, _name(n)) for n, group in groups.items()]
    ratios = [Ratio(_name(n), _name(HOST_PIECES[0])) for n in HOST_PIECES[1:]]
    yield Extra(f"host time of an eager call by pieces, {size_name(payload.num_bytes)}", Contest(arms, ratios))
    for group in groups.values():
        group.destroy()


def _timed_arm(world: World, name: str, group: GroupCoordinator, payload: Payload) -> Arm:
    call, check = _ours(group, payload)
    meeting = torch.zeros(8, device=payload.x.device)
    calls = calls_of_turn(payload.num_bytes, payload.x.dtype, world.size)
    timed = on_gpu(call, calls, first=lambda: group.all_reduce(meeting))

    def turn() -> float:
        torch.cuda.synchronize()
        dist.barrier()
        return timed()

    return Arm(name, lambda: world.on_each(check), turn)


def _host_arm(world: World, group: GroupCoordinator, payload: Payload, name: str = "tpoverlap") -> Arm:
    call, check = _ours(group, payload)
    return Arm(name, lambda: world.on_each(check), _host_turn(call, payload))


def _nccl_host_arm(world: World, group: GroupCoordinator, payload: Payload) -> Arm:
    def call() -> None:
        dist.all_reduce(payload.x, group=group.device_group)

    def check() -> None:
        payload.refill()
        call()
        payload.check_close(payload.x)

    return Arm("NCCL", lambda: world.on_each(check), _host_turn(call, payload))


def _ours(group: GroupCoordinator, payload: Payload) -> tuple[Callable[[], None], Callable[[], None]]:
    """A call, and its check."""

    def call() -> None:
        group.all_reduce(payload.x, out=payload.out)

    def check() -> None:
        refused = group.rejection_reasons(payload.x)["copy_engine"]
        if refused is not None:
            raise WrongResultError(f"the copy engines do not serve {payload.num_bytes} B: {refused}")
        payload.refill()
        payload.out.fill_(torch.nan)
        call()
        payload.check_bits(payload.out)

    return call, check


def _host_turn(call: Callable[[], None], payload: Payload) -> Callable[[], list[float]]:
    def turn() -> list[float]:
        payload.refill()
        torch.cuda.synchronize()
        dist.barrier()
        samples = []
        for _ in range(_CALLS):
            started_s = time.perf_counter()
            call()
            samples.append(time.perf_counter() - started_s)
        return samples

    return turn


def _name(pieces: int | str) -> str:
    return "as chosen" if pieces == "auto" else f"{pieces} piece{'s' if pieces != 1 else ''}"

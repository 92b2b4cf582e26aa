"""Ranks that share GPUs but not NCCL's settings, and take turns on them.

NCCL reads NCCL_P2P_DISABLE once in a process. So that arms without peer access and the arm that has it can alternate
in one launch, each setting has ranks of its own, a team, on the same GPUs; while one team works the other one waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from bench_common import on_gpu, on_host
from job_machine import set_threads
from job_world import World

from tpoverlap.errors import PeerLostError

HOST, PEER = "host", "peer"
"""The teams: transfers through host memory only, and NCCL with peer access."""
# Ranks begin a turn together so long after the last one has come to it.
_START_DELAY_S = 500e-6


@dataclass(frozen=True)
class Team:
    """The team of this process. world: all ranks of all teams. rank, size: in the team. ranks: its global ranks."""

    name: str
    world: World
    rank: int
    size: int
    ranks: range
    device: torch.device

    @classmethod
    def join(cls, size: int, device: str) -> Team:
        """Meets all ranks; those of the first ``size`` are the host team. device: ``cpu`` or ``cuda``."""
        index = int(os.environ["RANK"]) // size
        if index == 0:
            os.environ["NCCL_P2P_DISABLE"] = "1"
        else:
            os.environ.pop("NCCL_P2P_DISABLE", None)
        world = World.join()
        set_threads(None, world)
        rank = world.rank % size
        if device == "cuda":
            torch.cuda.set_device(rank)
        place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
        ranks = range(index * size, (index + 1) * size)
        return cls((HOST, PEER)[index], world, rank, size, ranks, place)

    def timed(self, function: Callable[[], object], calls: int = 1) -> Callable[[], float]:
        """Seconds of one call, by the device's events or, on CPU, by the clock."""
        if self.device.type == "cuda":
            return on_gpu(function, calls)
        once = on_host(lambda: [function() for _ in range(calls)])
        return lambda: once() / calls

    def turn(self, owner: str, function: Callable[[], object], calls: int = 1) -> Callable[[], float]:
        """A turn of team ``owner``: its ranks begin together; every rank gets the slowest one's seconds of a call.

        Other teams give the same ``owner`` and any function, which they do not call.
        """
        timed = self.timed(function, calls)

        def run() -> float:
            self.meet()
            return self.largest(timed() if self.name == owner else 0.0)

        return run

    def meet(self) -> None:
        """Returns at the same moment on all ranks, whose devices are idle then."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start_s = self.largest(time.perf_counter()) + _START_DELAY_S
        while time.perf_counter() < start_s:
            pass

    def largest(self, value: float) -> float:
        """The largest value of all ranks."""
        shared = torch.tensor(value, dtype=torch.float64)
        try:
            dist.all_reduce(shared, dist.ReduceOp.MAX)
        except RuntimeError:  # gloo has no type of its own for a connection that a peer's end closed
            raise PeerLostError("another rank ended, or does not answer") from None
        return float(shared)


def peer_access(gpus: int) -> bool:
    """Whether the first ``gpus`` GPUs all reach each other's memory."""
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    return torch.cuda.device_count() >= gpus and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)

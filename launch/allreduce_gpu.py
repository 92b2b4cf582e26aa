"""The arms of bench_allreduce.py on CUDA tensors: ours and NCCL, eager and in graphs, and what the links take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from allreduce_beside import beside
from allreduce_contest import Contest, Extra, Ratio, WrongResultError
from allreduce_copy_engine import by_pieces, host_times, host_times_alone
from allreduce_cpu import Payload, calls_of_turn
from bench_common import Arm, on_gpu
from job_world import World

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig

OURS, OURS_IN_GRAPH = "tpoverlap", "tpoverlap, graph"
NCCL, NCCL_IN_GRAPH = "NCCL", "NCCL, graph"
DUPLEX = "full-duplex copy"
# Time over another arm's that is to be reached on two ranks with a GPU each and no peer access, from a payload on.
_GOALS: dict[tuple[str, str], list[tuple[int, float]]] = {
    (OURS, DUPLEX): [(8_000_000, 1.08), (16_000_000, 1.0)],
    (OURS, NCCL): [(8_000_000, 0.88), (16_000_000, 0.84), (32_000_000, 0.76)],
    (OURS_IN_GRAPH, NCCL_IN_GRAPH): [(2 << 10, 0.60), (8 << 10, 0.55), ((256 << 10) + 1, float("inf"))],
}


class GpuContests:
    """Both transports in the same processes. Ranks that share a GPU have no NCCL to be compared with."""

    what: ClassVar[str] = "allreduce-gpu"
    subject: ClassVar[str] = "CUDA tensors"
    notes: ClassVar[tuple[str, ...]] = (
        "Every result was checked on every rank before it was timed: ours bit for bit against the sum in rank order, "
        "NCCL's within rounding.",
        "A turn begins with an input that has just been written and a small all-reduce, which brings the devices "
        "together and is not timed; calls follow each other on one stream. "
        "Outputs are reused: ours writes out=, NCCL works in place.",
        "full-duplex copy: every rank copies the payload from its GPU to pinned memory and another one back, as single "
        "large copies, all at the same time.",
        "Loops: GEMMs of 2048 x 5120 x 8704 in FP16; additions of 256 MiB. All-reduces are under way on another stream "
        "from a loop's first kernel to its last.",
    )

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        gpus = torch.cuda.device_count()
        self._device = torch.device("cuda", world.local_rank % gpus)
        torch.cuda.set_device(self._device)
        self._world = world
        self._dtype = dtype
        self._config = HostReduceConfig()
        self._group = GroupCoordinator(
            range(world.size), world.local_rank, self._device, self._config, unique_name="bench_allreduce"
        )
        self._has_nccl = gpus >= world.local_size
        self._up, self._down = torch.cuda.Stream(), torch.cuda.Stream()
        self._meeting = torch.zeros(8, device=self._device)
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def contest(self, num_bytes: int) -> Contest:
        self._drop_graphs()
        payload = Payload(self._world, self._dtype, num_bytes, self._device)
        x, out = payload.x, payload.out

        def ours() -> None:
            self._group.all_reduce(x, out=out)

        def nccl() -> None:
            dist.all_reduce(x, group=self._group.device_group)

        def check_ours(run: Callable[[], None]) -> Callable[[], None]:
            def check() -> None:
                out.fill_(torch.nan)
                run()
                payload.check_bits(out)

            return check

        def check_nccl(run: Callable[[], None], calls: int) -> Callable[[], None]:
            def check() -> None:
                run()
                x.div_(self._world.size ** (calls - 1))
                payload.check_close(x)

            return check

        calls = calls_of_turn(num_bytes, self._dtype, self._world.size)
        arms = [self._arm(OURS, ours, check_ours(ours), payload, calls)]
        graph = self._captured(ours, calls)
        arms.append(self._arm(OURS_IN_GRAPH, graph, check_ours(graph), payload, 1, calls))
        if self._has_nccl:
            arms.append(self._arm(NCCL, nccl, check_nccl(nccl, 1), payload, calls))
            graph = self._captured(nccl, calls)
            arms.append(self._arm(NCCL_IN_GRAPH, graph, check_nccl(graph, calls), payload, 1, calls))
        floors = []
        if num_bytes > self._config.max_bytes:
            arms.append(self._duplex(payload, calls))
            floors.append(DUPLEX)
        names = {arm.name for arm in arms}
        ratios = [Ratio(a, b, self._goal(a, b, num_bytes)) for a, b in _GOALS if a in names and b in names]
        return Contest(arms, ratios, floors)

    def extras(self) -> Iterator[Extra]:
        self._drop_graphs()
        yield from by_pieces(self._world, self._device, self._dtype)
        yield from host_times(self._world, self._group, self._device, self._dtype)
        yield from beside(self._world, self._group, self._device)

    def close(self) -> None:
        self._drop_graphs()
        self._group.destroy()

    def _drop_graphs(self) -> None:
        """NCCL's communicator cannot end while a graph holds calls of it."""
        torch.cuda.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _goal(self, ours: str, against: str, num_bytes: int) -> float | None:
        if self._world.size != 2 or not self._has_nccl:
            return None
        reached = [goal for least, goal in _GOALS[ours, against] if num_bytes >= least]
        return reached[-1] if reached and reached[-1] != float("inf") else None

    def _meet(self) -> None:
        """Brings the devices together: the host's barrier leaves them further apart than a small call takes."""
        self._group.all_reduce(self._meeting)

    def _captured(self, call: Callable[[], None], calls: int) -> Callable[[], None]:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return graph.replay

    def _duplex(self, payload: Payload, calls: int) -> Arm:
        source = payload.x
        sent = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        held = torch.randn(source.shape).to(source.dtype).pin_memory()
        received = torch.empty_like(source)

        def copy() -> None:
            current = torch.cuda.current_stream()
            for stream, target, origin in ((self._up, sent, source), (self._down, received, held)):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    target.copy_(origin, non_blocking=True)
            current.wait_stream(self._up)
            current.wait_stream(self._down)

        def check() -> None:
            copy()
            torch.cuda.synchronize()
            if not (torch.equal(received.cpu(), held) and torch.equal(sent, source.cpu())):
                raise WrongResultError(f"a full-duplex copy of {payload.num_bytes} B gave other bytes")

        return self._arm(DUPLEX, copy, check, payload, calls)

    def _arm(
        self,
        name: str,
        call: Callable[[], None],
        check: Callable[[], None],
        payload: Payload,
        calls: int,
        per_call: int = 1,
    ) -> Arm:
        """calls: of ``call`` in a turn; per_call: all-reduces that one of them makes."""
        timed = on_gpu(call, calls, first=self._meet)

        def checked() -> None:
            payload.refill()
            self._world.on_each(check)

        def turn() -> float:
            payload.refill()
            torch.cuda.synchronize()
            dist.barrier()
            return timed() / per_call

        return Arm(name, checked, turn)


class HostContests:
    """What an eager call costs the host, and nothing else: ranks may share a GPU, whose own times mean nothing then."""

    what: ClassVar[str] = "allreduce-host"
    subject: ClassVar[str] = "CUDA tensors"
    notes: ClassVar[tuple[str, ...]] = (
        "Host time alone, from a call to its return: 8 calls in a row behind a barrier, of which a turn's time is the "
        "median. Where there are fewer GPUs than ranks, ranks share one and NCCL, which does not, is left out. What an "
        "all-reduce takes the GPU and the link is in the records of allreduce-gpu.",
        "Every result was checked on every rank, bit for bit against the sum in rank order, before it was timed.",
    )

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(self._device)
        self._world = world
        self._dtype = dtype
        self._group = GroupCoordinator(range(world.size), world.local_rank, self._device, unique_name="bench_allreduce")

    def contest(self, num_bytes: int) -> Contest:
        raise AssertionError("host times are all extras")

    def extras(self) -> Iterator[Extra]:
        yield from host_times_alone(self._world, self._group, self._device, self._dtype)

    def close(self) -> None:
        self._group.destroy()

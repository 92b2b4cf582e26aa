"""What all-reduces do to the compute beside them: loops of GEMMs and of memory-bound kernels, alone and beside each
transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from allreduce_contest import Contest, Extra, Ratio, WrongResultError
from allreduce_cpu import Payload
from bench_common import Arm
from job_world import World

from tpoverlap.comm import GroupCoordinator

PAYLOAD = 16_384_000
# BF16 holds the values of as many sums in place as a turn can make.
_DTYPE = torch.bfloat16
_GEMM = (2048, 5120, 8704)
_GEMMS, _WEIGHTS = 32, 4
_ADD_ELEMENTS = 256 << 20 >> 1
_ADDS = 32
# Holds the streams back until a turn's work is queued, in the device's clocks: about 12 ms.
_GATE_CLOCKS = 20_000_000
_ALONE, _OURS, _NCCL = "alone", "beside tpoverlap", "beside NCCL"

Loop = Callable[[], torch.Tensor]


def beside(world: World, group: GroupCoordinator, device: torch.device) -> Iterator[Extra]:
    """Both loops. All-reduces of 16.384 MB follow each other for as long as the loop runs, or the turn is an error."""
    has_nccl = torch.cuda.device_count() >= world.local_size
    payload = Payload(world, _DTYPE, PAYLOAD, device)
    transports: dict[str, Callable[[], object]] = {
        _OURS: lambda: group.all_reduce(payload.x, out=payload.out),
        _NCCL: lambda: dist.all_reduce(payload.x, group=group.device_group),
    }
    if not has_nccl:
        del transports[_NCCL]
    for title, loop, goal in (("GEMM loop", _gemms(device), 1.02), ("memory-bound loop", _adds(device), 1.03)):
        timed = _Beside(world, payload, loop, transports, device)
        arms = [timed.arm(name) for name in (_ALONE, *transports)]
        ratios = [Ratio(name, _ALONE, goal if name == _OURS and has_nccl else None) for name in transports]
        yield Extra(f"{title} and all-reduces of 16.384 MB", Contest(arms, ratios))


class _Beside:
    """Times a loop on the current stream while a transport is at work on another one."""

    def __init__(
        self,
        world: World,
        payload: Payload,
        loop: Loop,
        transports: Mapping[str, Callable[[], object]],
        device: torch.device,
    ) -> None:
        self._world = world
        self._payload = payload
        self._loop = loop
        self._transports = transports
        self._comm = torch.cuda.Stream(device, priority=-1)
        self._calls = dict.fromkeys(transports, 0)
        self._expected = loop().clone()
        alone_s = min(self.run(_ALONE) for _ in range(3))
        for name, call in transports.items():
            # Twice as many as the loop lasts, on the rank where that is most: beside it they may be faster than alone.
            longest = torch.tensor([2 * alone_s / min(self._seconds(call) for _ in range(3))])
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            self._calls[name] = int(longest.item()) + 2

    def arm(self, name: str) -> Arm:
        def check() -> None:
            self._payload.out.fill_(torch.nan)
            self.run(name)
            if not torch.equal(self._result, self._expected):
                raise WrongResultError(f"the loop's result {name} is not that of the loop alone")
            if name == _OURS:
                self._payload.check_bits(self._payload.out)

        return Arm(name, lambda: self._world.on_each(check), lambda: self.run(name))

    def run(self, name: str) -> float:
        self._payload.refill()
        torch.cuda.synchronize()
        dist.barrier()
        start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(_GATE_CLOCKS)
        self._comm.wait_stream(torch.cuda.current_stream())
        start.record()
        self._result = self._loop()
        end.record()
        if name != _ALONE:
            with torch.cuda.stream(self._comm):
                for _ in range(self._calls[name]):
                    self._transports[name]()
                last.record()
        torch.cuda.synchronize()
        if name != _ALONE and start.elapsed_time(last) < start.elapsed_time(end):
            raise WrongResultError(f"all-reduces ended before the loop did: nothing is known of it {name}")
        return start.elapsed_time(end) * 1e-3

    def _seconds(self, call: Callable[[], object], calls: int = 10) -> float:
        self._payload.refill()
        torch.cuda.synchronize()
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_GATE_CLOCKS)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls


def _gemms(device: torch.device) -> Loop:
    m, k, n = _GEMM
    x = torch.randn(m, k, device=device, dtype=torch.float16)
    weights = [torch.randn(k, n, device=device, dtype=torch.float16) for _ in range(_WEIGHTS)]
    out = torch.empty(m, n, device=device, dtype=torch.float16)

    def loop() -> torch.Tensor:
        for i in range(_GEMMS):
            torch.mm(x, weights[i % _WEIGHTS], out=out)
        return out

    return loop


def _adds(device: torch.device) -> Loop:
    a, b = (torch.randn(_ADD_ELEMENTS, device=device).to(torch.float16) for _ in range(2))
    out = torch.empty_like(a)

    def loop() -> torch.Tensor:
        for _ in range(_ADDS):
            torch.add(a, b, out=out)
        return out

    return loop

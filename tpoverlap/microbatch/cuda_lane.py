"""The lane of CUDA tensors: a stream of high priority, ordered with the compute stream by events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class CudaPending:
    """A collective that has been issued. What it reads and writes is referenced until compute has waited for it."""

    def __init__(self, launch: Callable[[], Any], result: Any, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._held: tuple[Any, ...] = (launch, result)
        self.start = start
        self.end = end

    def result(self) -> Any:
        # What the allocator hands out again after this line is used behind the wait.
        torch.cuda.current_stream().wait_event(self.end)
        _, result = self._held
        self._held = ()
        return result


class CudaCommLane:
    """The stream. Collectives are issued at once, in the calling thread, and run behind what it has computed so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        torch.cuda.synchronize(device)
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin_s = time.perf_counter()

    def submit(self, launch: Callable[[], Any], cancelled: Callable[[], bool]) -> CudaPending:
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            start = self._stamp(self._stream)
            result = launch()
            end = self._stamp(self._stream)
        return CudaPending(launch, result, start, end)

    def now(self) -> torch.cuda.Event:
        return self._stamp(torch.cuda.current_stream(self._device))

    def seconds(self, stamp: torch.cuda.Event | float) -> float:
        if isinstance(stamp, float):
            return stamp
        stamp.synchronize()
        return self._origin_s + self._origin.elapsed_time(stamp) * 1e-3

    def settle(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.settle()

    @staticmethod
    def _stamp(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

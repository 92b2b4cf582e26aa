"""The lane of CUDA tensors: two streams of high priority, ordered with the compute stream by events.

A layer has two collectives a piece, so every microsecond here is paid a hundred times in a forward pass: a moment is
recorded once and serves as order and as measurement, and events are used again in the next run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Stamp = torch.cuda.Event | tuple[torch.cuda.Event, ...] | float
"""An event; several, for the moment when all of them have come to pass; or seconds on the host's clock."""


class CudaPending:
    """A collective that has been issued. What it reads and writes is referenced until compute has waited for it."""

    def __init__(
        self,
        lane: CudaCommLane,
        launch: Callable[[], Any],
        result: Any,
        start: Stamp,
        ends: tuple[torch.cuda.Event, ...],
    ) -> None:
        """ends: of this collective, behind that of the one before where there is one."""
        self._lane = lane
        self._held: tuple[Any, ...] = (launch, result)
        self._event = ends[-1]
        self.start = start
        self.end: Stamp = ends

    def result(self) -> Any:
        # What the allocator hands out again after this line is used behind the wait.
        self._lane.compute_stream().wait_event(self._event)
        _, result = self._held
        self._held = ()
        return result


class CudaCommLane:
    """Two streams in turn. Collectives are issued at once, in the calling thread, and run behind what it has computed.

    So the copy engines begin one while the last piece of the one before is still on its way down; providers that cannot
    do that keep their calls in order themselves.
    """

    idle_between_stamps = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda._get_device_index(device, optional=True)
        self._streams = tuple(torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._compute: torch.cuda.Stream | None = None
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []
        # Of the last two collectives: the last ones of both streams.
        self._ends: tuple[torch.cuda.Event, ...] = ()
        torch.cuda.synchronize(device)
        # An event with its moment on the host's clock, and the present run's first one, whose moment is not known yet.
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin_s = time.perf_counter()
        self._first: torch.cuda.Event | None = None
        self._has_first = False

    def begin_run(self) -> None:
        self._free += self._used
        self._used = []
        self._ends = ()
        self._first = None
        self._has_first = False

    def submit(self, launch: Callable[[], Any], ready: torch.cuda.Event, cancelled: Callable[[], bool]) -> CudaPending:
        compute = self.compute_stream()
        stream, other = self._streams
        self._streams = other, stream
        stream.wait_event(ready)
        torch.cuda.set_stream(stream)
        try:
            result = launch()
        finally:
            torch.cuda.set_stream(compute)
        # Nothing else runs on the streams, and collectives end in their order: what one takes begins when it is ready
        # and the one before has ended. Of short ones the events may pass each other: an end is that of both streams.
        start = (ready, *self._ends)
        self._ends = (*self._ends[-1:], self._record(stream))
        return CudaPending(self, launch, result, start, self._ends)

    def now(self) -> torch.cuda.Event:
        return self._record(self.compute_stream())

    def compute_stream(self) -> torch.cuda.Stream:
        """The calling thread's current stream. Asking torch for the object costs ten times what its handle does."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if self._compute is None or self._compute.cuda_stream != handle:
            self._compute = torch.cuda.current_stream(self._device)
        return self._compute

    def seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp
        if isinstance(stamp, tuple):
            return max(self.seconds(event) for event in stamp)
        if self._first is not None:
            # CUDA tells times as FP32 milliseconds: between two events of a run they are exact enough, after a day not.
            self._first.synchronize()
            self._origin_s += self._origin.elapsed_time(self._first) * 1e-3
            self._origin, self._first = self._first, None
        stamp.synchronize()
        return self._origin_s + self._origin.elapsed_time(stamp) * 1e-3

    def settle(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        self.settle()

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._free.pop() if self._free and self._has_first else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        if self._has_first:
            self._used.append(event)
        else:
            # Never used again: later runs' moments may be told from it.
            self._first, self._has_first = event, True
        return event

"""What the GPU modes of a group share, and how its ranks agree on the modes that exist."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

from tpoverlap.comm.channel import CallContext, Channel
from tpoverlap.comm.layout import Layout
from tpoverlap.comm.provider import Reason
from tpoverlap.comm.rendezvous import StoreExchange
from tpoverlap.config import HostReduceConfig
from tpoverlap.cuda.driver import call, import_bindings
from tpoverlap.cuda.pinned import PinnedMapping
from tpoverlap.cuda.stream_memory_ops import stream_memory_ops_work
from tpoverlap.cuda.streams import new_event, new_stream, stream_calls
from tpoverlap.errors import ChannelError, UnsupportedError


class GpuSegment:
    """A group's segment as one GPU reaches it, and the order of the group's operations on that GPU.

    All modes of a group share one, since its calls are ordered whatever stream and mode they use.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.channel = channel
        self.layout: Layout = channel.layout
        self.rank = channel.rank
        self.world_size = channel.layout.world_size
        self.device = device
        with torch.cuda.device(device), ExitStack() as held:
            torch.cuda.current_stream().synchronize()  # makes the primary context current in this thread
            mapping = PinnedMapping(channel.segment.address, channel.segment.size)
            held.callback(mapping.close)
            self.calls = stream_calls()
            self.up = new_stream()
            held.callback(call, "cuStreamDestroy", self.up)
            self.down = new_stream()
            held.callback(call, "cuStreamDestroy", self.down)
            self.event = new_event()
            held.callback(call, "cuEventDestroy", self.event)
            self._last_event = new_event()
            held.callback(call, "cuEventDestroy", self._last_event)
            held.callback(self.drain)
            self._held = held.pop_all()
        self.host_address = mapping.address
        self.device_address = mapping.device_address
        self._ordinal = torch.cuda._get_device_index(device, optional=True)
        self._last: Any = None

    def call(self, operation: str) -> CallContext:
        """A call of the channel (:meth:`Channel.call`) that queues its operation on this device.

        Raises UnsupportedError as :meth:`require_current` does.
        """
        self.require_current()
        return self.prepared_call(operation)

    def prepared_call(self, operation: str) -> CallContext:
        """As :meth:`call`, to be entered again and again; before each time ask :meth:`require_current`."""
        return self.channel.call(operation, on_device=True)

    def require_current(self) -> None:
        """Raises UnsupportedError unless the device is the calling thread's current one: streams are of one context."""
        current = torch.cuda.current_device()
        if current != self._ordinal:
            raise UnsupportedError(
                f"the current device is cuda:{current}, this group's is cuda:{self._ordinal}: call "
                f"torch.cuda.set_device({self._ordinal}), or use torch.cuda.device around the call"
            )

    def begin(self, capturing: bool = False) -> Any:
        """The driver's handle of the current stream, ordered behind the group's last eager call.

        capturing: that stream is; then there is no such order: replays against eager calls are the caller's to order.
        """
        current = self.calls.current(self._ordinal)
        if capturing:
            return current
        self._follow(current)
        return current

    def begin_aside(self) -> Any:
        """As :meth:`begin`, for an operation that runs on ``up`` and ``down`` alone: both go on behind the current
        stream, ``down`` also behind the group's last call, and the current stream waits for no call on another one. The
        caller lets it wait for both in the end.
        """
        current = self.calls.current(self._ordinal)
        self.calls.fork(current, self.event, (self.up, self.down))
        self._follow(self.down)
        return current

    def _follow(self, stream: Any) -> None:
        """``stream`` goes on behind the group's last eager call, and is that of the next one to be followed."""
        if self._last is not None and self._last is not stream:
            self.calls.order(stream, self._last_event, self._last)
        self._last = stream

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Waits for the device and unpins, all of it even where a part fails. The segment itself is the channel's."""
        self._held.close()


def missing_parts(device: torch.device) -> dict[str, Reason]:
    """The modes that this rank's device, driver or installation cannot have, by provider name, with why."""
    try:
        import_bindings("driver")
    except UnsupportedError:
        return dict.fromkeys(("kernel", "copy_engine", "captured_copy_engine"), Reason.NO_CUDA_PYTHON)
    missing: dict[str, Reason] = {}
    try:
        import_bindings("nvrtc")
    except UnsupportedError:
        missing["kernel"] = Reason.NO_NVRTC
    if not stream_memory_ops_work(torch.cuda._get_device_index(device, optional=True)):
        missing |= dict.fromkeys(("copy_engine", "captured_copy_engine"), Reason.NO_STREAM_MEM_OPS)
    return missing


def agree(exchange: StoreExchange, missing: dict[str, Reason]) -> dict[str, Reason]:
    """What is missing on any rank is missing for all: the choice of a provider must be the same everywhere."""
    agreed: dict[str, Reason] = {}
    for theirs in exchange.all_gather("missing", missing):
        for name, reason in theirs.items():
            agreed.setdefault(name, Reason(reason))
    return agreed


def peer_access(exchange: StoreExchange, device: torch.device, config: HostReduceConfig) -> bool:
    """Whether every pair of the group's GPUs really reaches each other's memory and nothing has turned that off."""
    mine = {
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
        "off": config.peer_access == "ignore" or os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"),
    }
    everyone = exchange.all_gather("device", mine)
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    own = torch.cuda._get_device_index(device, optional=True)
    reach = [
        theirs["uuid"] in visible and torch.cuda.can_device_access_peer(own, visible[theirs["uuid"]])
        for theirs in everyone
        if theirs["uuid"] != mine["uuid"]
    ]
    all_reach = exchange.all_gather("reach", bool(reach) and all(reach))
    return all(all_reach) and not any(theirs["off"] for theirs in everyone)


def open_on_device(channel: Channel, exchange: StoreExchange, device: torch.device) -> GpuSegment:
    """Pins the segment on every rank, for the channel to close, or on none: ChannelError on all of them then."""
    segment: GpuSegment | None = None
    problem = ""
    try:
        segment = GpuSegment(channel, device)
    except RuntimeError as e:  # torch's own errors, too: the other ranks wait for this one's word
        problem = str(e)
    problems = [f"rank {q}: {why}" for q, why in enumerate(exchange.all_gather("pinned", problem)) if why]
    if problems:
        if segment is not None:
            segment.close()
        raise ChannelError("; ".join(problems))
    assert segment is not None
    channel.devices.append(segment)
    return segment

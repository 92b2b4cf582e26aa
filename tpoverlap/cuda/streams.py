"""Streams, events, copies and stream memory operations, called straight through the driver.

An all-reduce issues some twenty of these calls, so each goes to the binding with one check and no more. Streams are
``CUstream`` objects (see :meth:`StreamCalls.stream`), addresses are ints or ``CUdeviceptr`` objects.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpoverlap.cuda.driver import call, driver, failed_call

_WAIT_AT_LEAST, _WAIT_ANY_BIT = 0, 2  # CU_STREAM_WAIT_VALUE_GEQ (cyclic), CU_STREAM_WAIT_VALUE_AND
_NON_BLOCKING = 1
_NO_TIMING = 2


class StreamCalls:
    """The calls. Use :func:`stream_calls`; a device's primary context must be current (torch has used the device)."""

    def __init__(self) -> None:
        bindings = driver()
        self._wait_value = bindings.cuStreamWaitValue32
        self._write_value = bindings.cuStreamWriteValue32
        self._to_host = bindings.cuMemcpyDtoHAsync
        self._to_device = bindings.cuMemcpyHtoDAsync
        self._record = bindings.cuEventRecord
        self._wait_event = bindings.cuStreamWaitEvent
        self._streams: dict[int, Any] = {}

    def stream(self, stream: torch.cuda.Stream) -> Any:
        """torch's stream as the driver's handle."""
        handle = stream.cuda_stream
        known = self._streams.get(handle)
        if known is None:
            known = self._streams[handle] = driver().CUstream(handle)
        return known

    def wait_at_least(self, stream: Any, address: Any, value: int) -> None:
        """The stream goes on once the cyclic 32-bit counter at ``address`` has come to ``value``."""
        if error := self._wait_value(stream, address, value, _WAIT_AT_LEAST)[0]:
            raise failed_call("cuStreamWaitValue32", error)

    def wait_any_bit(self, stream: Any, address: Any, bits: int) -> None:
        """The stream goes on once the 32-bit word at ``address`` has one of ``bits`` set."""
        if error := self._wait_value(stream, address, bits, _WAIT_ANY_BIT)[0]:
            raise failed_call("cuStreamWaitValue32", error)

    def write(self, stream: Any, address: Any, value: int) -> None:
        """The stream writes the 32-bit word at ``address``, after all its earlier work is visible to the system."""
        if error := self._write_value(stream, address, value, 0)[0]:
            raise failed_call("cuStreamWriteValue32", error)

    def to_host(self, host: int, device: int, num_bytes: int, stream: Any) -> None:
        if error := self._to_host(host, device, num_bytes, stream)[0]:
            raise failed_call("cuMemcpyDtoHAsync", error)

    def to_device(self, device: int, host: int, num_bytes: int, stream: Any) -> None:
        if error := self._to_device(device, host, num_bytes, stream)[0]:
            raise failed_call("cuMemcpyHtoDAsync", error)

    def order(self, after: Any, event: Any, before: Any) -> None:
        """Later work of stream ``after`` waits for the earlier work of stream ``before``, through ``event``."""
        if error := self._record(event, before)[0]:
            raise failed_call("cuEventRecord", error)
        if error := self._wait_event(after, event, 0)[0]:
            raise failed_call("cuStreamWaitEvent", error)


@functools.cache
def stream_calls() -> StreamCalls:
    return StreamCalls()


def new_stream() -> Any:
    """A stream of the current device that does not wait for the default stream, at the highest priority."""
    _, greatest = call("cuCtxGetStreamPriorityRange")
    return call("cuStreamCreateWithPriority", _NON_BLOCKING, greatest)


def new_event() -> Any:
    """An event without timing."""
    return call("cuEventCreate", _NO_TIMING)

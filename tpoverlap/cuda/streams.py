"""Streams, events, copies and stream memory operations, called straight through the driver.

An all-reduce issues some twenty of these calls, so each goes to the binding with one check and no more, and what
repeats is a loop here. Streams are ``CUstream`` objects (see :meth:`StreamCalls.current`), addresses are ints.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tpoverlap.cuda.driver import call, driver, failed_call

_WAIT_AT_LEAST, _WAIT_ANY_BIT = 0, 2  # CU_STREAM_WAIT_VALUE_GEQ (cyclic), CU_STREAM_WAIT_VALUE_AND
_MASK = 0xFFFFFFFF
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

    def current(self, ordinal: int) -> Any:
        """The device's current stream in the calling thread; the same object for the same stream."""
        handle = torch._C._cuda_getCurrentRawStream(ordinal)
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

    def upload(
        self, stream: Any, device: int, host: int, pieces: Sequence[tuple[int, int]], counter: int, count: int
    ) -> None:
        """Copies each piece (offset, bytes) to the host and then advances the cyclic counter by one, from ``count``."""
        to_host, write = self._to_host, self._write_value
        for offset, num_bytes in pieces:
            if error := to_host(host + offset, device + offset, num_bytes, stream)[0]:
                raise failed_call("cuMemcpyDtoHAsync", error)
            count = (count + 1) & _MASK
            if error := write(stream, counter, count, 0)[0]:
                raise failed_call("cuStreamWriteValue32", error)

    def download(
        self, stream: Any, device: int, host: int, pieces: Sequence[tuple[int, int]], counter: int, count: int
    ) -> None:
        """The other side of :meth:`upload`: waits until the counter has advanced, then copies the piece."""
        to_device, wait = self._to_device, self._wait_value
        for offset, num_bytes in pieces:
            count = (count + 1) & _MASK
            if error := wait(stream, counter, count, _WAIT_AT_LEAST)[0]:
                raise failed_call("cuStreamWaitValue32", error)
            if error := to_device(device + offset, host + offset, num_bytes, stream)[0]:
                raise failed_call("cuMemcpyHtoDAsync", error)

    def order(self, after: Any, event: Any, before: Any) -> None:
        """Later work of stream ``after`` waits for the earlier work of stream ``before``, through ``event``."""
        if error := self._record(event, before)[0]:
            raise failed_call("cuEventRecord", error)
        if error := self._wait_event(after, event, 0)[0]:
            raise failed_call("cuStreamWaitEvent", error)

    def fork(self, before: Any, event: Any, after: Sequence[Any]) -> None:
        """As :meth:`order`, for several streams that go on behind one."""
        if error := self._record(event, before)[0]:
            raise failed_call("cuEventRecord", error)
        for stream in after:
            if error := self._wait_event(stream, event, 0)[0]:
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

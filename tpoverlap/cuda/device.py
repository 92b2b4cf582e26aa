"""Facts of a CUDA device, read from the driver without creating a context, and a thread's context."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tpoverlap.cuda.driver import CudaDriverError, call, driver
from tpoverlap.errors import UnsupportedError


@dataclass(frozen=True)
class DeviceFacts:
    """ordinal: among the visible devices, as torch counts them. shared_memory_per_block: in bytes, the opt-in limit."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory_per_block: int
    l2_bytes: int


def device_count() -> int:
    """How many CUDA devices are visible; 0 without a driver, without cuda-python and without a device."""
    try:
        call("cuInit", 0)
        return int(call("cuDeviceGetCount"))
    except (CudaDriverError, UnsupportedError):
        return 0


def bind_context(ordinal: int) -> None:
    """Gives the calling thread the primary context of torch's current device, ``ordinal``, where it has none: torch
    binds one at the thread's first call of the runtime, which may be still to come."""
    if not int(call("cuCtxGetCurrent")):
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal)))


@functools.cache
def device_facts(ordinal: int) -> DeviceFacts:
    """Facts of one device. Raises UnsupportedError without a driver, CudaDriverError if there is no such device."""
    call("cuInit", 0)
    device = call("cuDeviceGet", ordinal)
    attribute = driver().CUdevice_attribute

    def read(suffix: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{suffix}"), device))

    name = call("cuDeviceGetName", 256, device)
    return DeviceFacts(
        ordinal=ordinal,
        name=name.split(b"\0", 1)[0].decode(),
        capability=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        num_sms=read("MULTIPROCESSOR_COUNT"),
        shared_memory_per_block=read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=read("L2_CACHE_SIZE"),
    )

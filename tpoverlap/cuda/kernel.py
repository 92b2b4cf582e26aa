"""Loading a compiled kernel and launching it on torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tpoverlap.cuda.device import DeviceFacts, bind_context, device_facts
from tpoverlap.cuda.driver import CudaDriverError, call, driver
from tpoverlap.errors import UnsupportedError

# Of a kernel, kept; streams and grids come and go.
_MAX_CONFIGS = 4096


class Kernel:
    """One kernel of a cubin or PTX image, ready on one device.

    block: threads of a block. shared_bytes: dynamic shared memory of a block. programmatic: its blocks may start before
    the kernel ahead on the stream has ended (programmatic dependent launch, compute capability 9.0): its code waits by
    griddepcontrol.wait before it takes values of global memory or writes them. A library is loaded once and stays until
    the process ends. Loading is allowed while a stream is being captured.
    """

    def __init__(
        self,
        image: bytes,
        name: str,
        ordinal: int,
        *,
        block: int,
        shared_bytes: int = 0,
        programmatic: bool = False,
    ) -> None:
        facts = device_facts(ordinal)
        if shared_bytes > facts.shared_memory_per_block:
            raise UnsupportedError(
                f"kernel {name} needs {shared_bytes} bytes of shared memory a block; {facts.name} has "
                f"{facts.shared_memory_per_block}"
            )
        self.name = name
        self._ordinal = ordinal
        self._block = block
        self._shared_bytes = shared_bytes
        self._programmatic = programmatic
        self._configs: dict[tuple[tuple[int, int, int], int], Any] = {}
        with torch.cuda.device(ordinal), _capture_tolerated():
            bind_context(self._ordinal)
            library = _load_library(image, name, facts)
            kernel = call("cuLibraryGetKernel", library, name.encode())
            if shared_bytes:
                limit = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuKernelSetAttribute", limit, shared_bytes, kernel, call("cuDeviceGet", ordinal))
            self._function = driver().CUfunction(int(kernel))
            occupancy = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self._function, block, shared_bytes)
        if occupancy < 1:
            raise UnsupportedError(
                f"kernel {name} ({block} threads, {shared_bytes} bytes of shared memory) does not fit {facts.name}"
            )
        self.slots = facts.num_sms * int(occupancy)
        """Blocks that the device runs at a time."""

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """Launch on the device's current torch stream. arguments: the kernel's one parameter, passed by value."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        # To change to the device that is current already would take longer than the launch.
        if torch.cuda.current_device() == self._ordinal:
            self._start(grid, ctypes.addressof(parameters))
        else:
            with torch.cuda.device(self._ordinal):
                self._start(grid, ctypes.addressof(parameters))

    def _start(self, grid: tuple[int, int, int], parameters: int) -> None:
        """Launch on the device, which is the current one."""
        bind_context(self._ordinal)
        stream = torch._C._cuda_getCurrentRawStream(self._ordinal)
        if self._programmatic:
            call("cuLaunchKernelEx", self._config(grid, stream), self._function, parameters, 0)
        else:
            shared = self._shared_bytes
            call("cuLaunchKernel", self._function, *grid, self._block, 1, 1, shared, stream, parameters, 0)

    def _config(self, grid: tuple[int, int, int], stream: int) -> Any:
        """A programmatic launch's configuration, never changed once made: to build one takes 4 us."""
        if (known := self._configs.get((grid, stream))) is not None:
            return known
        config, attribute = driver().CUlaunchConfig(), driver().CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self._block, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = driver().CUstream(stream)
        attribute.id = driver().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        self._configs[grid, stream] = config
        return config


def _load_library(image: bytes, name: str, facts: DeviceFacts) -> Any:
    codes = driver().CUresult
    try:
        return call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
    except CudaDriverError as error:
        if error.code == int(codes.CUDA_ERROR_UNSUPPORTED_PTX_VERSION):
            version = call("cuDriverGetVersion")
            raise UnsupportedError(
                f"the driver of {facts.name} (CUDA {version // 1000}.{version % 1000 // 10}) cannot read the PTX of "
                f"kernel {name}: NVRTC is newer than the driver. Update the driver, or install its version of NVRTC"
            ) from error
        if error.code == int(codes.CUDA_ERROR_NO_BINARY_FOR_GPU):
            raise UnsupportedError(f"kernel {name} was compiled for another GPU than {facts.name}") from error
        raise


@contextmanager
def _capture_tolerated() -> Iterator[None]:
    """Let this thread load code while one of its streams is being captured: nothing here depends on a stream."""
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)

"""Host memory that copy engines and kernels reach: registration of an existing mapping."""

from __future__ import annotations

from tpoverlap.cuda.driver import CudaDriverError, call
from tpoverlap.errors import ChannelError

_PORTABLE, _DEVICE_MAPPED = 1, 2


class PinnedMapping:
    """A registered range. address: on the host; device_address: for the current device. Unregister with :meth:`close`.

    Raises ChannelError with the limit that stands in the way and what to do about it.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        try:
            call("cuMemHostRegister", address, num_bytes, _PORTABLE | _DEVICE_MAPPED)
        except CudaDriverError as e:
            raise ChannelError(
                f"cannot pin {num_bytes / 2**20:.0f} MiB of host memory ({e.name}): raise the limit of locked memory "
                "(ulimit -l, docker: --ulimit memlock=-1) or use a smaller copy_engine_max_bytes (HostReduceConfig)"
            ) from e
        self._registered = True
        try:
            self.device_address = int(call("cuMemHostGetDevicePointer", address, 0))
        except CudaDriverError:
            self.close()
            raise

    def close(self) -> None:
        if self._registered:
            self._registered = False
            call("cuMemHostUnregister", self.address)

"""Whether a device's streams can wait for and write words in host memory: found out by doing it, once a device.

The attribute that told so is gone from newer drivers, and containers, WSL, vGPU and MIG differ.
"""

from __future__ import annotations

import functools
import mmap
import time

import torch

from tpoverlap.cuda.driver import CudaDriverError, call, driver
from tpoverlap.cuda.pinned import PinnedMapping
from tpoverlap.cuda.streams import new_stream, stream_calls
from tpoverlap.errors import ChannelError, UnsupportedError

_PATIENCE_S = 2.0
# What a probe that failed half-way may still write to must not be freed.
_abandoned: list[object] = []


@functools.cache
def stream_memory_ops_work(ordinal: int) -> bool:
    """A stream of the device waits for a word that the host writes, writes one itself, and is seen to have done so."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = memoryview(memory).cast("I")
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    with torch.cuda.device(ordinal):
        torch.cuda.current_stream().synchronize()  # makes the primary context current in this thread
        try:
            mapping = PinnedMapping(tensor.data_ptr(), mmap.PAGESIZE)
            stream, calls = new_stream(), stream_calls()
            at, answer = mapping.device_address, mapping.device_address + 64
            calls.wait_at_least(stream, at, 7)
            calls.write(stream, answer, 9)
        except (CudaDriverError, ChannelError, UnsupportedError):
            words[0] = 7
            _abandoned.extend((memory, tensor))
            return False
        time.sleep(0.002)
        too_early = words[16] == 9
        words[0] = 7
        give_up = time.monotonic() + _PATIENCE_S
        ready = driver().CUresult.CUDA_SUCCESS
        while driver().cuStreamQuery(stream)[0] != ready:
            if time.monotonic() > give_up:
                _abandoned.extend((memory, tensor, mapping, stream))
                return False
            time.sleep(0.0005)
        works = words[16] == 9 and not too_early
        call("cuStreamDestroy", stream)
        mapping.close()
        return works

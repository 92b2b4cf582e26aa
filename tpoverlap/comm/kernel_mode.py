"""All-reduce of small CUDA tensors by one kernel through host memory; it may be captured in CUDA graphs."""

from __future__ import annotations

import ctypes
import functools
from array import array
from importlib import resources

import torch

from tpoverlap.comm.cpu import REDUCED_DTYPES
from tpoverlap.comm.device_region import StuckClock
from tpoverlap.comm.gpu import GpuSegment
from tpoverlap.comm.layout import KERNEL_CONSUMED, KERNEL_LINES_BYTES, LINE, MAX_WORLD_SIZE, NUM_SLOTS
from tpoverlap.comm.protocol import POISON_OFFSET
from tpoverlap.comm.provider import Call, Reason, describe
from tpoverlap.comm.words import MASK
from tpoverlap.cuda.device import device_facts
from tpoverlap.cuda.kernel import Kernel
from tpoverlap.cuda.nvrtc import compile_cuda

# More blocks have more stores in flight; each costs a flag.
NUM_BLOCKS = 16
_THREADS = 512
# Largest payload that travels in lines, which take twice its bytes and save a trip over the bus.
_LINES_MAX_BYTES = KERNEL_LINES_BYTES // 2


class _Arguments(ctypes.Structure):
    """As ``Arguments`` in kernel_mode.cu."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("slots", ctypes.c_uint64 * MAX_WORLD_SIZE),
        ("lines", ctypes.c_uint64 * MAX_WORLD_SIZE),
        ("flags", ctypes.c_uint64 * MAX_WORLD_SIZE),
        ("consumed", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("lines_bytes", ctypes.c_uint64),
        ("lines_max_bytes", ctypes.c_uint64),
        ("flag_stride", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
    )


class KernelProvider:
    """All-reduce of CUDA tensors up to ``max_bytes``, eager and captured, for 2 to 8 ranks of one host.

    Sums are in rank order: one addition in the tensor's dtype for two ranks, FP32 rounded once for more. The output of
    an operation that a failure has released is NaN. Replays and eager calls of one group must not overlap: ordering
    them is the caller's duty.
    """

    name = "kernel"

    def __init__(self, segment: GpuSegment, max_bytes: int) -> None:
        self._segment = segment
        self._max_bytes = max_bytes
        self.region = KernelRegion(segment)
        self._arguments = self._fixed_arguments()
        ordinal = segment.device.index
        self._kernels = {dtype: _kernel(str(dtype)[6:], ordinal) for dtype in REDUCED_DTYPES}

    def rejection_reason(self, call: Call) -> Reason | None:
        if call.device_type != "cuda":
            return Reason.DEVICE_UNSUPPORTED
        if call.operation != "all_reduce":
            return Reason.OPERATION_UNSUPPORTED
        if call.dtype not in REDUCED_DTYPES:
            return Reason.DTYPE_UNSUPPORTED
        if call.num_bytes > self._max_bytes:
            return Reason.ABOVE_MAX_BYTES
        return None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        with self._segment.call(describe("all_reduce", x, self.name)):
            self._segment.begin(torch.cuda.is_current_stream_capturing())
            source = x.contiguous()
            target = out if out.is_contiguous() else torch.empty_like(source)
            arguments = self._arguments
            arguments.x, arguments.out = source.data_ptr(), target.data_ptr()
            arguments.num_bytes = source.numel() * source.element_size()
            self._kernels[x.dtype].launch((NUM_BLOCKS, 1, 1), arguments)
            if target is not out:
                out.copy_(target)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("rejected")

    def reduce_scatter(self, shards: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("rejected")

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        raise AssertionError("rejected")

    def _fixed_arguments(self) -> _Arguments:
        segment, layout = self._segment, self._segment.layout
        arguments = _Arguments(
            consumed=segment.device_address + layout.word(segment.rank, KERNEL_CONSUMED),
            state=self.region.state.data_ptr(),
            slot_bytes=layout.kernel_slot_bytes,
            lines_bytes=KERNEL_LINES_BYTES,
            lines_max_bytes=_LINES_MAX_BYTES,
            flag_stride=LINE // 4,
            rank=segment.rank,
            world_size=segment.world_size,
        )
        for q in range(segment.world_size):
            arguments.slots[q] = segment.device_address + layout.kernel_slot(q, 0)
            arguments.lines[q] = segment.device_address + layout.kernel_lines(q, 0)
            arguments.flags[q] = segment.device_address + layout.kernel_flag(q, 0)
        return arguments


class KernelRegion:
    """The words of kernel mode. Operation numbers live in device memory, since captured launches advance them too."""

    def __init__(self, segment: GpuSegment, first_number: int = 0) -> None:
        layout = segment.layout
        self._segment = segment
        self._words = segment.channel.segment.words
        self._first_number = first_number & MASK
        self._flags = [[layout.kernel_flag(q, b) // 4 for b in range(NUM_BLOCKS)] for q in range(segment.world_size)]
        self._consumed = layout.word(segment.rank, KERNEL_CONSUMED) // 4
        begin, end = (layout.kernel_lines(segment.rank, slot) // 4 for slot in (0, NUM_SLOTS))
        self._lines = slice(begin, end)
        self._clock = StuckClock(self._signature)
        with torch.inference_mode(False):  # a reset outside of it could not write an inference tensor
            self.state = torch.zeros(2, dtype=torch.int32, device=segment.device)
        self.restore()

    def release(self) -> None:
        # What a stuck kernel waits for is one ahead of what this rank has completed.
        poison = (self._words[self._consumed] + POISON_OFFSET) & MASK
        for flags in self._flags:
            for index in flags:
                self._words[index] = poison

    def waiting_s(self) -> float:
        return self._clock.waiting_s()

    def restore(self) -> None:
        number = self._first_number
        signed = number - (1 << 32) if number >= 1 << 31 else number
        self.state.copy_(torch.tensor([signed, 0], dtype=torch.int32))
        torch.cuda.synchronize(self._segment.device)
        for index in (*self._flags[self._segment.rank], self._consumed):
            self._words[index] = number
        # No line may hold the number of an operation that is to come.
        self._words[self._lines] = memoryview(array("I", [number]) * (self._lines.stop - self._lines.start))
        self._clock.restart()

    def _signature(self) -> tuple[int, ...] | None:
        consumed = self._words[self._consumed]
        published = tuple(self._words[index] for index in self._flags[self._segment.rank])
        return (consumed, *published) if any(flag != consumed for flag in published) else None


@functools.cache
def _kernel(dtype: str, ordinal: int) -> Kernel:
    major, minor = device_facts(ordinal).capability
    source = resources.files(__package__).joinpath("kernel_mode.cu").read_text()
    image = compile_cuda(source, name="kernel_mode.cu", arch=f"sm_{major}{minor}", options=("--std=c++17",))
    return Kernel(image, f"all_reduce_{dtype}", ordinal, block=_THREADS)

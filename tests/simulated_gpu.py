"""A GPU made of threads, on which the GPU transports and the executor's CUDA lane run where there is none.

A stream is a thread that works off its queue in order and pauses at random; copies proceed in parts. Memory of the
device is that of CPU tensors, and torch operations inside :meth:`SimulatedGpu.computing` join the queue of the calling
thread's current stream. So what depends on an order that streams, events and words do not force comes out wrong.

It stands in for ``cuda.bindings.driver`` and for what tpoverlap uses of ``torch.cuda``, in the calling process and for
good: make one in a rank's process. Kernels of our own are not simulated.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpoverlap.comm import GroupCoordinator, coordinator
from tpoverlap.comm.provider import Call
from tpoverlap.config import HostReduceConfig

_POLL_S = 20e-6
_WAIT_AT_LEAST = 0


class _Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_UNKNOWN = 999


class _Mark(threading.Event):
    """A place in a stream's queue; at_s: when the stream came there."""

    at_s = 0.0

    def reach(self) -> None:
        self.at_s = time.perf_counter()
        self.set()


class Graph:
    """What streams were given during a capture. Each replay is one operation of the stream that launches it."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.held: list[torch.Tensor] = []
        self._gpu = gpu
        self._of_streams: dict[int, list[Callable[[dict[int, _Mark]], object]]] = {}
        self._marks = 0

    def add(self, stream: _Stream, work: Callable[[], object]) -> None:
        self._add(stream, lambda marks: work())

    def mark(self, stream: _Stream) -> _GraphMark:
        number, self._marks = self._marks, self._marks + 1
        self._add(stream, lambda marks: marks[number].reach())
        return _GraphMark(self, number)

    def wait(self, stream: _Stream, mark: _GraphMark) -> None:
        self._add(stream, lambda marks: marks[mark.number].wait())

    def replay(self) -> None:
        self._gpu.current.put(self._run)

    def _add(self, stream: _Stream, work: Callable[[dict[int, _Mark]], object]) -> None:
        self._of_streams.setdefault(stream.handle, []).append(work)

    def _run(self) -> None:
        marks = {number: _Mark() for number in range(self._marks)}
        branches = [_Stream(self._gpu, handle) for handle in self._of_streams]
        for branch, works in zip(branches, self._of_streams.values(), strict=True):
            for work in works:
                branch.put(lambda work=work: work(marks))  # type: ignore[misc]
        for branch in branches:
            branch.mark().wait()
            branch.end()
            if branch.error is not None:
                raise branch.error


class _GraphMark:
    def __init__(self, graph: Graph, number: int) -> None:
        self.graph = graph
        self.number = number


class _Stream:
    def __init__(self, gpu: SimulatedGpu, handle: int) -> None:
        self.handle = handle
        self.error: BaseException | None = None
        self._gpu = gpu
        self._pauses = random.Random(gpu.pauses.random())
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=f"stream {handle}", daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        if graph := self._gpu.capturing:
            graph.add(self, work)
        else:
            self._queue.put(work)

    def mark(self) -> Any:
        """A :class:`_Mark`, or what stands for one in the graph that is being captured."""
        if graph := self._gpu.capturing:
            return graph.mark(self)
        mark = _Mark()
        self._queue.put(mark.reach)
        return mark

    def wait(self, mark: Any) -> None:
        """Later work waits for the mark, which is of the same capture, or of none as this wait."""
        graph = self._gpu.capturing
        assert (mark.graph if isinstance(mark, _GraphMark) else None) is graph, "an event of another capture"
        if graph:
            graph.wait(self, mark)
        else:
            self._queue.put(mark.wait)

    def end(self) -> None:
        """Its thread ends behind what it has been given."""
        self._queue.put(None)

    def pause(self) -> None:
        if self._pauses.random() < 0.3:
            time.sleep(self._pauses.random() * self._gpu.pause_s)

    def _work(self) -> None:
        with torch.inference_mode():  # where tensors of either kind may be written
            while (work := self._queue.get()) is not None:
                try:
                    self.pause()
                    work()
                except BaseException as error:
                    self.error = self.error or error
                del work


class SimulatedGpu:
    """One device, the only one of its process. pause_s: how long a stream may dawdle before each operation."""

    def __init__(self, seed: int, pause_s: float = 200e-6) -> None:
        self.pauses = random.Random(seed)
        self.pause_s = pause_s
        self._handles = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._marks: dict[int, _Mark | None] = {}
        self._pinned: dict[int, int] = {}
        self._held: list[torch.Tensor] = []
        self._thread = threading.local()
        self.default = self.new_stream(0)
        self.calls: dict[str, int] = {}
        """How often each function of the driver has been called."""
        self.operations: dict[int, int] = {}
        """How many torch operations each stream has been given, by its handle."""
        self.fails: Callable[[str], bool] = lambda name: False
        """Whether the call of that function that is made now does nothing and returns an error."""
        self._stand_in_for_driver()
        self._stand_in_for_torch()

    # For tests

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Torch operations of this thread run on its current stream, later."""
        with _OnCurrentStream(self):
            yield

    def synchronize(self) -> None:
        """Returns once all streams have nothing left to do; raises what went wrong in them."""
        assert not self.capturing
        for stream in list(self._streams.values()):
            stream.mark().wait()
        for stream in self._streams.values():
            if stream.error is not None:
                raise stream.error
        self._held.clear()

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """What streams are given by this thread meanwhile goes into a graph."""
        graph = self._thread.graph = Graph(self)
        try:
            yield graph
        finally:
            self._thread.graph = None

    @property
    def capturing(self) -> Graph | None:
        return getattr(self._thread, "graph", None)

    def group(self, **config: Any) -> GroupCoordinator:
        """A coordinator of all ranks on simulated GPUs, with the copy engines' modes alone unless ``max_bytes`` says
        otherwise."""
        options = {"max_bytes": 0, "timeout_s": 20.0, "peer_access": "ignore", **config}
        coordinator.call_of = lambda operation, x: Call(  # type: ignore[assignment]
            operation, x.dtype, x.nbytes, "cuda", self.capturing is not None
        )
        ranks = range(dist.get_world_size())
        return GroupCoordinator(ranks, 0, "cuda:0", HostReduceConfig(**options), dist.group.WORLD)

    def has_nvrtc(self) -> None:
        """Makes the compiler importable, for who stands in for what it compiles."""
        sys.modules["cuda.bindings.nvrtc"] = ModuleType("cuda.bindings.nvrtc")

    # For the stand-ins

    def new_stream(self, handle: int | None = None) -> _Stream:
        handle = next(self._handles) if handle is None else handle
        stream = self._streams[handle] = _Stream(self, handle)
        return stream

    @property
    def current(self) -> _Stream:
        return getattr(self._thread, "stream", self.default)

    @current.setter
    def current(self, stream: _Stream) -> None:
        self._thread.stream = stream

    def hold(self, x: torch.Tensor) -> torch.Tensor:
        """The caching allocator hands memory out again in stream order; here it stays until the next synchronize, and
        what a graph uses with the graph."""
        (self.capturing.held if self.capturing else self._held).append(x)
        return x

    # cuda.bindings.driver

    def _stand_in_for_driver(self) -> None:
        module = ModuleType("cuda.bindings.driver")
        functions = {
            "cuCtxGetStreamPriorityRange": lambda: (0, -5),
            "cuStreamCreateWithPriority": lambda flags, priority: (self.new_stream().handle,),
            "cuStreamDestroy": self._destroy_stream,
            "cuStreamQuery": self._query_stream,
            "cuStreamWaitValue32": self._wait_value,
            "cuStreamWriteValue32": self._write_value,
            "cuStreamWaitEvent": self._wait_event,
            "cuMemcpyDtoHAsync": self._to_host,
            "cuMemcpyHtoDAsync": self._to_device,
            "cuMemHostRegister": self._register,
            "cuMemHostGetDevicePointer": lambda address, flags: (address,),
            "cuMemHostUnregister": self._unregister,
            "cuEventCreate": self._create_event,
            "cuEventRecord": self._record_event,
            "cuEventDestroy": lambda event: self._marks.pop(int(event)) and None,
            "cuGetErrorName": lambda result: (result.name.encode(),),
            "cuGetErrorString": lambda result: (b"simulated",),
        }
        for name, function in functions.items():
            setattr(module, name, self._driver_function(name, function))
        module.CUresult = _Result  # type: ignore[attr-defined]
        module.CUstream = lambda handle: handle  # type: ignore[attr-defined]
        sys.modules["cuda.bindings.driver"] = module
        sys.modules["cuda.bindings.nvrtc"] = None  # type: ignore[assignment]  # cannot be imported: no kernel mode

    def _driver_function(self, name: str, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.fails(name):
                return (_Result.CUDA_ERROR_UNKNOWN,)
            try:
                return (_Result.CUDA_SUCCESS, *(function(*arguments) or ()))
            except KeyError:  # a stream or an event that is not, or no longer
                return (_Result.CUDA_ERROR_INVALID_HANDLE,)
            except ValueError:
                return (_Result.CUDA_ERROR_INVALID_VALUE,)
            except BlockingIOError:
                return (_Result.CUDA_ERROR_NOT_READY,)

        return call

    def _destroy_stream(self, stream: int) -> None:
        self._streams.pop(stream)  # its thread works off what is left, as a driver does

    def _query_stream(self, stream: int) -> None:
        if not self._streams[stream].mark().wait(0.01):
            raise BlockingIOError

    def _wait_value(self, stream: int, address: int, value: int, flags: int) -> None:
        word = ctypes.c_uint32.from_address(self._pinned_range(address, 4))

        def passes() -> bool:
            if flags == _WAIT_AT_LEAST:
                return (word.value - value) & 0xFFFFFFFF < 1 << 31
            return bool(word.value & value)

        def wait() -> None:
            while not passes():
                time.sleep(_POLL_S)

        self._streams[stream].put(wait)

    def _write_value(self, stream: int, address: int, value: int, flags: int) -> None:
        word = ctypes.c_uint32.from_address(self._pinned_range(address, 4))
        self._streams[stream].put(lambda: setattr(word, "value", value))

    def _create_event(self, flags: int) -> tuple[int]:
        event = next(self._handles)
        self._marks[event] = None
        return (event,)

    def _record_event(self, event: int, stream: int) -> None:
        _ = self._marks[event]
        self._marks[event] = self._streams[stream].mark()

    def _wait_event(self, stream: int, event: int, flags: int) -> None:
        mark = self._marks[event]
        if mark is not None:
            self._streams[stream].wait(mark)

    def _to_host(self, host: int, device: int, num_bytes: int, stream: int) -> None:
        self._copy(self._pinned_range(host, num_bytes), device, num_bytes, stream)

    def _to_device(self, device: int, host: int, num_bytes: int, stream: int) -> None:
        self._copy(device, self._pinned_range(host, num_bytes), num_bytes, stream)

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        queue = self._streams[stream]

        def copy() -> None:
            middle = num_bytes // 2
            ctypes.memmove(target, source, middle)
            queue.pause()
            ctypes.memmove(target + middle, source + middle, num_bytes - middle)

        queue.put(copy)

    def _register(self, address: int, num_bytes: int, flags: int) -> None:
        self._pinned[address] = num_bytes

    def _unregister(self, address: int) -> None:
        del self._pinned[address]

    def _pinned_range(self, address: int, num_bytes: int) -> int:
        if not any(start <= address and address + num_bytes <= start + size for start, size in self._pinned.items()):
            raise ValueError(f"{num_bytes} bytes at {address:#x} are not pinned")
        return address

    # torch.cuda

    def _stand_in_for_torch(self) -> None:
        cuda: Any = torch.cuda
        gpu = self

        class Stream:
            """Of torch: a new one, or that of a given queue."""

            def __init__(self, device: Any = None, priority: int = 0, queue: _Stream | None = None) -> None:
                self.queue = queue or gpu.new_stream()
                self.cuda_stream = self.queue.handle

            def wait_event(self, event: Event) -> None:
                event.wait(self)

            def wait_stream(self, other: Stream) -> None:
                self.queue.wait(other.queue.mark())

            def synchronize(self) -> None:
                self.queue.mark().wait()

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self._mark: _Mark | None = None

            def record(self, stream: Stream | None = None) -> None:
                self._mark = (stream.queue if stream else gpu.current).mark()

            def wait(self, stream: Stream | None = None) -> None:
                if self._mark is not None:
                    (stream.queue if stream else gpu.current).wait(self._mark)

            def synchronize(self) -> None:
                if self._mark is not None:
                    self._mark.wait()

            def elapsed_time(self, end: Event) -> float:
                assert self._mark is not None
                assert end._mark is not None
                assert self._mark.is_set()
                assert end._mark.is_set()
                return (end._mark.at_s - self._mark.at_s) * 1e3

        @contextmanager
        def on_stream(stream: Stream) -> Iterator[None]:
            before, gpu.current = gpu.current, stream.queue
            try:
                yield
            finally:
                gpu.current = before

        cuda.Stream, cuda.Event, cuda.stream = Stream, Event, on_stream
        cuda.current_stream = lambda device=None: Stream(queue=gpu.current)
        cuda.set_stream = lambda stream: setattr(gpu, "current", stream.queue)
        cuda.device = lambda device: nullcontext()
        cuda.synchronize = lambda device=None: gpu.synchronize()
        cuda.current_device = lambda: 0
        cuda.device_count = lambda: 1
        cuda.is_initialized = lambda: True
        cuda.is_current_stream_capturing = lambda: gpu.capturing is not None
        cuda.get_device_properties = lambda device: SimpleNamespace(uuid="simulated")
        cuda._get_device_index = lambda device, optional=False: 0
        torch._C._cuda_getCurrentRawStream = lambda ordinal: gpu.current.handle


class _OnCurrentStream(TorchDispatchMode):
    """Queues what an operation does; views, and memory without content, come at once."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first use imports the whole compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema, stream = func._schema, self._gpu.current
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            self._count(stream)
            stream.put(lambda: func(*args, **kwargs))
            results = [named[name] for name in written]
            return results[0] if len(schema.returns) == 1 else tuple(results)
        if "nonzero" in schema.name or any("Tensor" not in str(r.type) for r in schema.returns):
            stream.mark().wait()  # the host needs values
            return func(*args, **kwargs)
        # For shapes and views; what it computes is worth nothing, since inputs may not be there yet.
        result = func(*args, **kwargs)
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in _tensors(result) if x.untyped_storage().data_ptr() not in inputs]
        for x in made:
            self._gpu.hold(x)
            if x.is_floating_point():
                x.fill_(float("nan"))
        if made and "empty" not in schema.name:

            def compute() -> None:
                for target, value in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                    target.copy_(value)

            self._count(stream)
            stream.put(compute)
        return result

    def _count(self, stream: _Stream) -> None:
        self._gpu.operations[stream.handle] = self._gpu.operations.get(stream.handle, 0) + 1


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)

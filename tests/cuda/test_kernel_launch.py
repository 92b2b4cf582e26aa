"""What a launch is given: a programmatic one's configuration, which is kept, is that of its own grid and stream."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tpoverlap.cuda import kernel as kernels
from tpoverlap.cuda.device import DeviceFacts

bindings = pytest.importorskip("cuda.bindings.driver")


class _Arguments(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int),)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Current device, function, grid, block, shared bytes, stream, programmatic or not and argument of each launch."""
    found: list[tuple[Any, ...]] = []

    def value(parameters: int) -> int:
        return _Arguments.from_address(ctypes.c_void_p.from_address(parameters).value or 0).value

    def call(name: str, *arguments: Any) -> Any:
        if name == "cuLibraryGetKernel":
            return arguments[0]
        if name == "cuLibraryLoadData":
            return int(arguments[0])
        if name == "cuLaunchKernelEx":
            config, function, parameters, extra = arguments
            assert extra == 0
            assert config.numAttrs == len(config.attrs) == 1
            (attribute,) = config.attrs
            assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
            grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
            block = (config.blockDimX, config.blockDimY, config.blockDimZ)
            allowed = attribute.value.programmaticStreamSerializationAllowed
            shared, stream = config.sharedMemBytes, int(config.hStream)
            found.append((_current_device[0], int(function), grid, block, shared, stream, allowed, value(parameters)))
        if name == "cuLaunchKernel":
            function, *sizes, shared, stream, parameters, extra = arguments
            assert extra == 0
            grid, block = tuple(sizes[:3]), tuple(sizes[3:])
            found.append((_current_device[0], int(function), grid, block, shared, stream, 0, value(parameters)))
        return 1

    monkeypatch.setattr(kernels, "call", call)
    monkeypatch.setattr(kernels, "bind_context", lambda ordinal: None)
    monkeypatch.setattr(kernels, "device_facts", lambda ordinal: DeviceFacts(ordinal, "", (9, 0), 132, 232_448, 0))
    monkeypatch.setattr(torch.cuda, "device", _on_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: _current_device[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", _current_streams.__getitem__, raising=False)
    return found


_current_streams: dict[int, int] = {}
_current_device = [0]


@contextmanager
def _on_device(ordinal: int) -> Iterator[None]:
    before, _current_device[0] = _current_device[0], ordinal
    yield
    _current_device[0] = before


@pytest.mark.parametrize("seed", range(3))
def test_launches_in_any_order_have_their_own_grid_stream_and_arguments(
    seed: int, launches: list[tuple[Any, ...]]
) -> None:
    rng = random.Random(seed)
    sizes = [(0, 512, 151_424), (0, 512, 77_600), (1, 128, 0)]  # device, block, shared bytes
    made = {
        (function, programmatic): kernels.Kernel(
            b"%d" % (2 * function + programmatic),
            "a kernel",
            ordinal,
            block=block,
            shared_bytes=shared,
            programmatic=programmatic,
        )
        for function, (ordinal, block, shared) in enumerate(sizes)
        for programmatic in (False, True)
    }
    for i in range(200):
        (function, programmatic), kernel = rng.choice(list(made.items()))
        ordinal, block, shared = sizes[function]
        _current_streams.update({0: rng.choice([0, 7, 8]), 1: rng.choice([0, 7, 0x7F00_0000_0010])})
        grid = rng.choice([(132, 1, 1), (13, 1, 1), (13, 2, 3)])
        _current_device[0] = current = rng.choice([0, 1])
        kernel.launch(grid, _Arguments(i))
        assert _current_device == [current]
        if rng.random() < 0.1:
            gc.collect()
        stream = _current_streams[ordinal]
        number = 2 * function + programmatic
        assert launches[-1] == (ordinal, number, grid, (block, 1, 1), shared, stream, programmatic, i)
    assert len(launches) == 200

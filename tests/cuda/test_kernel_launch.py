"""What a launch is given: a programmatic one's configuration, which is kept, is that of its own grid and stream."""

from __future__ import annotations

import ctypes
import gc
import random
from contextlib import nullcontext
from types import SimpleNamespace
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
    """What the driver was given: function, grid, block, shared bytes, stream, programmatic or not, argument."""
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
            found.append((int(function), grid, block, shared, stream, allowed, value(parameters)))
        if name == "cuLaunchKernel":
            function, *sizes, shared, stream, parameters, extra = arguments
            assert extra == 0
            grid, block = tuple(sizes[:3]), tuple(sizes[3:])
            found.append((int(function), grid, block, shared, stream, 0, value(parameters)))
        return 1

    monkeypatch.setattr(kernels, "call", call)
    monkeypatch.setattr(kernels, "device_facts", lambda ordinal: DeviceFacts(ordinal, "", (9, 0), 132, 232_448, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda ordinal: SimpleNamespace(cuda_stream=_current_streams[ordinal])
    )
    return found


_current_streams: dict[int, int] = {}


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
        kernel.launch(grid, _Arguments(i))
        if rng.random() < 0.1:
            gc.collect()
        wanted = (2 * function + programmatic, grid, (block, 1, 1), shared, _current_streams[ordinal], programmatic, i)
        assert launches[-1] == wanted
    assert len(launches) == 200

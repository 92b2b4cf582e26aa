"""What a FastLaunch starts, against the launcher of the Triton that is installed, without a GPU."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpoverlap.cuda.triton_launch import FastLaunch

pytest.importorskip("triton")

from triton import knobs
from triton.compiler import compiler

STREAM, FUNCTION, METADATA = 1234, 99, (4, 1, 2048)


class Compiled(compiler.CompiledKernel):
    """A kernel that is loaded; ``starts`` holds what its launcher is called with."""

    def __init__(self) -> None:
        self.module, self._module_pid, self.function, self.packed_metadata = "loaded", None, FUNCTION, METADATA
        self.name, self.src = "kernel", None
        self.starts: list[tuple[Any, ...]] = []
        self._run = lambda *arguments: self.starts.append(arguments)


class Kernel:
    """A JITFunction: compiles at its first call; ``calls`` holds the grids, arguments and options."""

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def run(*arguments: Any, **options: Any) -> Compiled:
            self.calls.append((grid, arguments, options))
            return self.compiled

        return run


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    active = types.SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(compiler, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr("tpoverlap.cuda.triton_launch.triton_interpreted", lambda: False)


def test_a_start_is_that_of_the_compiled_kernel_but_for_hooks() -> None:
    kernel = Kernel()
    launch = FastLaunch(kernel, {"A": 3, "B": True}, num_warps=2)
    tensors = (torch.zeros(4), torch.zeros(0), torch.zeros(2, dtype=torch.int32))
    launch(5, tensors, (7, 0.5), y=2)
    assert kernel.calls == [((5, 2, 1), (*tensors, 7, 0.5), {"A": 3, "B": True, "num_warps": 2})]
    launch(6, tensors, (8, 0.25), z=3)
    arguments = (*(tensor.data_ptr() for tensor in tensors), 8, 0.25, 3, True)
    kernel.compiled[(6, 1, 3)](*arguments)
    fast, full = kernel.compiled.starts
    assert len(kernel.calls) == 1
    assert fast[:6] == full[:6] == (6, 1, 3, STREAM, FUNCTION, METADATA)
    assert fast[6:9] == (None, None, None)
    assert fast[9:] == full[9:] == arguments


def test_an_unaligned_call_is_specialized_anew_and_leaves_the_aligned_one() -> None:
    kernel = Kernel()
    launch = FastLaunch(kernel, {})
    storage = torch.zeros(16)
    for first, calls, starts in ((1, 1, 0), (0, 2, 0), (4, 2, 1), (1, 3, 1), (8, 3, 2)):
        launch(1, (storage, storage[first:]), ())
        assert (len(kernel.calls), len(kernel.compiled.starts)) == (calls, starts)


def test_the_interpreter_and_a_compilation_that_failed_leave_nothing_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for interpreted in (True, False):
        monkeypatch.setattr("tpoverlap.cuda.triton_launch.triton_interpreted", lambda value=interpreted: value)
        kernel = Kernel()
        kernel.compiled = kernel.compiled if interpreted else None  # type: ignore[assignment]
        launch = FastLaunch(kernel, {})
        launch(1, (torch.zeros(4),), ())
        launch(1, (torch.zeros(4),), ())
        assert len(kernel.calls) == 2


@pytest.mark.parametrize("as_chain", [True, False], ids=["chain", "function"])
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_while_they_are_set(monkeypatch: pytest.MonkeyPatch, name: str, as_chain: bool) -> None:
    def hook(metadata: object) -> None: ...

    kernel = Kernel()
    launch = FastLaunch(kernel, {})
    tensors = (torch.zeros(4),)
    for each in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, each, knobs.HookChain() if as_chain else None)
    launch(1, tensors, ())

    def told() -> bool:
        launch(1, tensors, ())
        return kernel.compiled.starts[-1][7 if name == "launch_enter_hook" else 8] is not None

    assert not told()
    if as_chain:
        chain = getattr(knobs.runtime, name)
        chain.add(hook)
        assert told()
        chain.remove(hook)
    else:
        monkeypatch.setattr(knobs.runtime, name, hook)
        assert told()
        monkeypatch.setattr(knobs.runtime, name, None)
    assert not told()

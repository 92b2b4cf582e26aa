"""Checked driver calls: with a stand-in for the bindings, and on a GPU the facts that torch reports."""

from __future__ import annotations

import enum
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tpoverlap.cuda import device, driver
from tpoverlap.errors import UnsupportedError


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    def missing(*args: object) -> Any:
        raise RuntimeError("Function cuFuture is not found")

    stand_in = SimpleNamespace(
        CUresult=Result,
        cuNothing=lambda: (Result.CUDA_SUCCESS,),
        cuOne=lambda x: (Result.CUDA_SUCCESS, x),
        cuTwo=lambda x, y: (Result.CUDA_SUCCESS, y, x),
        cuFails=lambda: (Result.CUDA_ERROR_INVALID_VALUE, 17),
        cuFuture=missing,
        cuGetErrorName=lambda result: (Result.CUDA_SUCCESS, result.name.encode()),
        cuGetErrorString=lambda result: (Result.CUDA_SUCCESS, b"invalid argument"),
    )
    monkeypatch.setattr(driver, "driver", lambda: stand_in)
    return stand_in


@pytest.mark.usefixtures("bindings")
def test_values_come_back_without_the_result() -> None:
    assert driver.call("cuNothing") is None
    assert driver.call("cuOne", 5) == 5
    assert driver.call("cuTwo", 5, 6) == (6, 5)


@pytest.mark.usefixtures("bindings")
def test_a_failure_names_the_function_and_the_code() -> None:
    with pytest.raises(
        driver.CudaDriverError, match=r"cuFails failed: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"
    ) as e:
        driver.call("cuFails")
    assert (e.value.function, e.value.code, e.value.name) == ("cuFails", 1, "CUDA_ERROR_INVALID_VALUE")


@pytest.mark.usefixtures("bindings")
def test_a_function_that_the_driver_lacks_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="cuFuture cannot be called"):
        driver.call("cuFuture")


def test_missing_bindings_say_what_to_install() -> None:
    with pytest.raises(UnsupportedError, match="pip install"):
        driver.import_bindings("no_such_module")


def test_everything_imports_without_cuda_python() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None; import tpoverlap.cuda.kernel, tpoverlap.cuda.nvrtc; "
        "from tpoverlap.cuda.device import device_count; assert device_count() == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_no_driver_means_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: str, *args: object) -> None:
        raise UnsupportedError(function)

    monkeypatch.setattr(device, "call", fail)
    assert device.device_count() == 0


@pytest.mark.gpu
def test_facts_are_those_of_torch_and_need_no_context() -> None:
    code = """
from tpoverlap.cuda.device import device_count, device_facts
from tpoverlap.cuda.driver import call
facts = [device_facts(i) for i in range(device_count())]
assert facts and not int(call("cuCtxGetCurrent"))
for i in range(len(facts)):
    flags, active = call("cuDevicePrimaryCtxGetState", call("cuDeviceGet", i))
    assert not active
import torch
for i, f in enumerate(facts):
    p = torch.cuda.get_device_properties(i)
    assert (f.name, f.capability, f.num_sms) == (p.name, (p.major, p.minor), p.multi_processor_count), f
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

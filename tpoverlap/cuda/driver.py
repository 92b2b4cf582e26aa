"""The one checked way to call the CUDA driver API (cuda-python's low-level bindings, 12.9 or 13)."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from tpoverlap.errors import TpOverlapError, UnsupportedError


class CudaDriverError(TpOverlapError):
    """A driver call failed.

    function: name of the driver function. code: its CUresult as an int. name: the code's name, such as
    ``CUDA_ERROR_INVALID_VALUE``.
    """

    def __init__(self, function: str, code: int, name: str, description: str) -> None:
        super().__init__(f"{function} failed: {name} ({code}): {description}")
        self.function = function
        self.code = code
        self.name = name


def call(function: str, *args: Any) -> Any:
    """Call a driver function by name and check its result.

    Returns what the function returns beside its CUresult: None, one value, or a tuple of several. Raises
    CudaDriverError if it fails and UnsupportedError if there is no driver or no cuda-python.
    """
    bindings = driver()
    try:
        result, *values = getattr(bindings, function)(*args)
    except RuntimeError as error:  # The bindings look the library and the function up at the first call.
        raise UnsupportedError(
            f"{function} cannot be called: {error}. Install an NVIDIA driver that has it."
        ) from error
    if result != bindings.CUresult.CUDA_SUCCESS:
        raise failed_call(function, result)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def failed_call(function: str, result: Any) -> CudaDriverError:
    """The error of a driver function that returned ``result``, for callers that check it themselves."""
    bindings = driver()
    return CudaDriverError(function, int(result), _name(bindings, result), _description(bindings, result))


@functools.cache
def driver() -> ModuleType:
    """The module ``cuda.bindings.driver``, for its types and constants."""
    return import_bindings("driver")


def import_bindings(name: str) -> ModuleType:
    """``cuda.bindings.<name>``; raises UnsupportedError that says how to get it."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"cuda.bindings.{name} cannot be imported ({error}). GPU kernels and the copy-engine path need "
            "cuda-python 12.9 or newer: pip install 'tpoverlap[cuda]'"
        ) from error


def _name(bindings: ModuleType, result: Any) -> str:
    _, text = bindings.cuGetErrorName(result)
    return text.decode() if text else "unknown CUresult"


def _description(bindings: ModuleType, result: Any) -> str:
    _, text = bindings.cuGetErrorString(result)
    return text.decode() if text else "no description"

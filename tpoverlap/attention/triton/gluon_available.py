"""Whether this Triton has the Gluon that the Hopper kernels are written in."""

from __future__ import annotations

import functools
import importlib

# Gluon is experimental: names and signatures change between versions. Tests compile the kernels with the first and the
# last of these; with any other the plain kernel serves.
_FIRST_TRITON, _LAST_TRITON = (3, 6), (3, 9)


@functools.cache
def hopper_prefill_available() -> bool:
    return _available("tpoverlap.attention.triton.prefill_hopper")


@functools.cache
def hopper_decode_available() -> bool:
    return _available("tpoverlap.attention.triton.decode_hopper")


def _available(module: str) -> bool:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    if not _FIRST_TRITON <= (int(major), int(minor)) <= _LAST_TRITON:
        return False
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError):
        return False
    return True

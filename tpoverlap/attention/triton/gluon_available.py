"""Whether this Triton has the Gluon that the Hopper kernels are written in."""

from __future__ import annotations

import functools
import importlib


@functools.cache
def hopper_prefill_available() -> bool:
    """Gluon is experimental: another version's names may be others, and the plain kernel then serves."""
    try:
        importlib.import_module("tpoverlap.attention.triton.prefill_hopper")
    except (ImportError, AttributeError):
        return False
    return True

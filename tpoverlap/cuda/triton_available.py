"""Whether Triton kernels can run: asked without importing Triton, so that asking starts nothing."""

from __future__ import annotations

import functools
import importlib.util
import os


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter (on CPU tensors), chosen as Triton chooses it.

    What counts is ``TRITON_INTERPRET=1`` when the kernels are first imported.
    """
    return os.environ.get("TRITON_INTERPRET", "0") == "1"

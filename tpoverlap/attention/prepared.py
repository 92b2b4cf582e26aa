"""What public functions keep of a signature: the shapes, dtypes, devices, strides and options of a call.

Checks and choices take as long as a small kernel, so they are made once a signature.
"""

from __future__ import annotations

from typing import TypeVar

import torch

MAX_PREPARED = 4096
P = TypeVar("P")


def keep(prepared: dict[tuple[object, ...], P], signature: tuple[object, ...], one: P) -> None:
    """Add ``one``; a full dictionary starts anew."""
    if len(prepared) >= MAX_PREPARED:
        prepared.clear()
    prepared[signature] = one


def kind(x: torch.Tensor) -> tuple[object, ...]:
    """What a signature holds of a tensor."""
    return x.shape, x.stride(), x.dtype, x.device

"""What stands for a FastLaunch and keeps what it was called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """values: the arguments that are not tensors, by name. kinds: what Triton specializes of all arguments."""

    programs: int
    values: dict[str, Any]
    kinds: tuple[object, ...]


class RecordedLaunch:
    """``calls`` of each launch, by launch: a test sets it to an empty dict."""

    calls: dict[RecordedLaunch, list[Call]]

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: int | bool) -> None:
        self.kernel = kernel
        self.constants = constants
        self.free = set(kernel.do_not_specialize)
        self.names = [parameter.name for parameter in kernel.params]
        # In any order: a launcher drops the values of constants, which only have to be as many.
        assert set(self.names[-len(constants) :]) == set(constants)

    def __call__(
        self, programs: int, tensors: Sequence[torch.Tensor], values: tuple[Any, ...], *, y: int = 1, z: int = 1
    ) -> None:
        assert len(tensors) + len(values) + len(self.constants) == len(self.names)
        named = dict(zip(self.names[len(tensors) :], values, strict=False))
        kinds: list[object] = [tensor.dtype for tensor in tensors]
        for name, value in named.items():
            width = (-(2**31) <= value < 2**31) if isinstance(value, int) else None
            kinds.append((type(value), width, None if name in self.free or isinstance(value, float) else value))
        self.calls.setdefault(self, []).append(Call(programs * y * z, named, tuple(kinds)))

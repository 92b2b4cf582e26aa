"""What ranks give to a sum, what it should be, and whether a group still makes one or has failed."""

from __future__ import annotations

import time

import torch

from tpoverlap.comm import GroupCoordinator

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(seed: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's input, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def expected_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """In rank order: two in their dtype, more in FP32 and rounded once."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, but for the payload of a NaN."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.contiguous().view(integers) == b.contiguous().view(integers)
    return bool((equal | (a.isnan() & b.isnan())).all())


def check_until_it_fails(group: GroupCoordinator) -> None:
    while True:
        time.sleep(0.01)
        group.check()

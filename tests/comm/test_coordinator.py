"""Collectives of the coordinator on CPU ranks: values, bits, layouts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _group(world_size: int, **config: object) -> GroupCoordinator:
    return GroupCoordinator(range(world_size), dist.get_rank(), "cpu", HostReduceConfig(timeout_s=20, **config))  # type: ignore[arg-type]


def _inputs(seed: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for _ in range(world_size)]


def _expected_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part.float()
    return total.to(parts[0].dtype)


def _sums(rank: int, sizes: list[int]) -> None:
    world_size = dist.get_world_size()
    group = _group(world_size)
    for dtype in DTYPES:
        for i, n in enumerate(sizes):
            parts = _inputs(i, world_size, (n,), dtype)
            kept = parts[rank].clone()
            got = group.all_reduce(parts[rank])
            assert torch.equal(got, _expected_sum(parts)), (dtype, n)
            assert torch.equal(parts[rank], kept), "the input was written"
            out = torch.full_like(kept, float("nan"))
            assert group.all_reduce(parts[rank], out=out) is out
            assert torch.equal(out, got)
            assert group.all_reduce(kept, out=kept) is kept
            assert torch.equal(kept, got)
    assert group.served == {"cpu": 3 * 3 * len(sizes)}
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_sums_are_in_rank_order_and_rounded_once(world_size: int) -> None:
    sizes = [0, 1, 7, 1023, 40_000, 300_001] + ([3_000_000] if world_size <= 4 else [])
    run_ranks(_sums, world_size, sizes)

"""Kernel mode and copy engines while their operation numbers pass 2^31 and 2^32."""

from __future__ import annotations

from array import array

import pytest
import torch
import torch.distributed as dist
from gpu_group import make_group
from rank_harness import run_ranks

from tpoverlap.comm.kernel_mode import KernelProvider
from tpoverlap.comm.words import MASK

pytestmark = pytest.mark.gpu


def _across(rank: int, first_number: int) -> None:
    group = make_group()
    providers = {p.name: p for p in group._providers}
    torch.cuda.synchronize()
    dist.barrier()
    for name in ("kernel", "copy_engine"):
        region = providers[name].region  # type: ignore[attr-defined]
        region._first_number = first_number
        region.restore()
    kernel = providers["kernel"]
    assert isinstance(kernel, KernelProvider)
    # As if no line had been written for long: only a refresh makes them all young again.
    words, lines_at = kernel.region._words, kernel.region._lines
    words[lines_at] = memoryview(array("I", [(first_number - 1000) & MASK]) * (lines_at.stop - lines_at.start))
    dist.barrier()
    n = dist.get_world_size()
    # Lines (few and all of them), the slots behind flags, several operations of the copy engines.
    sizes = [16, 65536, 200_000, 2_000_000, 40 << 20]
    for i in range(24):
        count = sizes[i % 3 if i < 12 else i % 5] // 4
        parts = [
            torch.full((count,), float(q + 1) * (i + 1), device="cuda") + torch.arange(count, device="cuda") % 7
            for q in range(n)
        ]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        assert torch.equal(group.all_reduce(parts[rank]), expected), (first_number, i)
    torch.cuda.synchronize()
    done = words[kernel.region._consumed]
    assert (done - first_number) & MASK >= 12, "the numbers have not passed the point"
    # Every line was written a moment ago: none can be taken for one that is 2^32 operations younger.
    lines = torch.tensor(words[lines_at].tolist(), dtype=torch.int64)[1::2]
    assert bool((((done - lines) & MASK) < 64).all())
    dist.barrier()
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("first_number", [2**31 - 6, 2**32 - 6])
def test_numbers_may_wrap(world_size: int, first_number: int) -> None:
    run_ranks(_across, world_size, first_number, timeout_s=60)

"""Kernel mode's kernel, from its own source, on simulated GPUs: sums, memory, wrap, failures, planted mistakes."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import time
from array import array
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from emulated_build import COMPILER
from emulated_kernel_mode import SOURCE, build, emulate_kernel_mode
from rank_harness import run_ranks, say, start_ranks
from simulated_gpu import SimulatedGpu
from sums import DTYPES, check_until_it_fails, expected_sum, inputs, same_bits

from tpoverlap.comm import GroupCoordinator
from tpoverlap.comm.kernel_mode import KernelProvider
from tpoverlap.comm.words import MASK
from tpoverlap.errors import CollectiveAbortedError, CollectiveTimeoutError, PeerLostError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

MAX_BYTES = 256 << 10


def make_group(library: Path, seed: int, **config: object) -> tuple[SimulatedGpu, GroupCoordinator]:
    gpu = SimulatedGpu(seed)
    emulate_kernel_mode(gpu, library)
    return gpu, gpu.group(max_bytes=MAX_BYTES, **config)


def with_special_values(parts: list[torch.Tensor], rng: random.Random) -> list[torch.Tensor]:
    tiny = torch.finfo(parts[0].dtype).smallest_normal / 4
    for part in parts:
        for value in (float("nan"), float("inf"), float("-inf"), tiny, -0.0):
            part.view(-1)[rng.randrange(part.numel())] = value
    return parts


def _calls(rank: int, library: Path, seed: int, count: int) -> dict[str, int]:
    """Small and large payloads in turn, on two streams, from memory that begins anywhere."""
    gpu, group = make_group(library, seed + 1000 * rank)
    n, rng = dist.get_world_size(), random.Random(seed)
    streams = [gpu.default, gpu.new_stream()]
    results = []
    for k in range(count):
        dtype = rng.choice(DTYPES)
        # Lines up to 64 KiB, slots behind flags up to MAX_BYTES, copy engines above.
        size = int(2 ** rng.uniform(0, 16.5)) if rng.random() < 0.7 else rng.randrange(64 << 10, MAX_BYTES + (60 << 10))
        elements = max(1, size // dtype.itemsize)
        parts = with_special_values(inputs(seed + k, n, (elements,), dtype), rng)
        offset, way = rng.randrange(9), rng.choice(["new", "in place", "out", "strided"])
        gpu.current = rng.choice(streams)
        with gpu.computing():
            x = torch.empty(offset + elements, dtype=dtype)[offset:]
            x.copy_(parts[rank])
            if way == "strided":
                spread = torch.empty(2 * elements, dtype=dtype)[::2]
                spread.copy_(x)
                x = spread
            out = {"new": None, "in place": x, "out": torch.empty(elements + 3, dtype=dtype)[3:], "strided": None}[way]
            result = group.all_reduce(x, out=out).clone()
            if way != "in place":
                x.zero_()
        results.append((result, expected_sum(parts)))
    torch.cuda.synchronize()
    for k, (got, expected) in enumerate(results):
        assert same_bits(got, expected), f"call {k} of seed {seed}"
    served = group.served
    group.destroy()
    return served


@pytest.mark.parametrize(("n", "count"), [(2, 150), (3, 80), (4, 60)])
def test_sums_have_the_bits_of_a_sum_in_rank_order(n: int, count: int) -> None:
    for served in run_ranks(_calls, n, build(), n, count, timeout_s=100):
        assert set(served) == {"kernel", "copy_engine"}
        assert served["kernel"] > count // 2


def _at_the_end_of_memory(rank: int, library: Path) -> None:
    """Tensors end where a page begins that may not be touched."""
    gpu, group = make_group(library, rank)
    for k, num_bytes in enumerate([2, 6, 8, 10, 4096, 4094, 65536, 65534, 65538, 100_002]):
        count = num_bytes // 2
        parts = inputs(k, 2, (count,), torch.float16)
        tensors = []
        for _ in range(2):
            pages = -(-num_bytes // mmap.PAGESIZE)
            memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
            whole = torch.frombuffer(memory, dtype=torch.float16)
            end = pages * mmap.PAGESIZE // 2
            tensors.append(whole[end - count : end])
            _forbid(whole[end:].data_ptr())
        x, out = tensors
        x.copy_(parts[rank])
        with gpu.computing():
            group.all_reduce(x, out=out)
        torch.cuda.synchronize()
        assert torch.equal(out, expected_sum(parts)), num_bytes
    group.destroy()


def _forbid(address: int) -> None:
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0) == 0


def test_nothing_is_read_or_written_behind_a_tensor() -> None:
    run_ranks(_at_the_end_of_memory, 2, build())


def _across(rank: int, library: Path, first_number: int) -> None:
    gpu, group = make_group(library, rank)
    kernel = next(p for p in group._providers if isinstance(p, KernelProvider))
    dist.barrier()
    kernel.region._first_number = first_number
    kernel.region.restore()
    # As if no line had been written for long: only a refresh makes them all young again.
    words, lines_at = kernel.region._words, kernel.region._lines
    words[lines_at] = memoryview(array("I", [(first_number - 1000) & MASK]) * (lines_at.stop - lines_at.start))
    dist.barrier()
    for i in range(14):
        parts = inputs(i, dist.get_world_size(), ([4, 16384, 50_000][i % 3],), torch.float32)
        with gpu.computing():
            result = group.all_reduce(parts[rank].clone())
        torch.cuda.synchronize()
        assert torch.equal(result, expected_sum(parts)), i
    done = words[kernel.region._consumed]
    assert (done - first_number) & MASK == 14
    lines = torch.tensor(words[lines_at].tolist(), dtype=torch.int64)[1::2]
    assert bool((((done - lines) & MASK) < 64).all())
    dist.barrier()
    group.destroy()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("first_number", [2**31 - 6, 2**32 - 6])
def test_numbers_may_wrap(n: int, first_number: int) -> None:
    run_ranks(_across, n, build(), first_number)


# Failures


def _works(gpu: SimulatedGpu, group: GroupCoordinator, size: int) -> None:
    parts = inputs(size, 2, (size,), torch.float32)
    with gpu.computing():
        result = group.all_reduce(parts[group.rank_in_group].clone())
    torch.cuda.synchronize()
    group.check()
    assert torch.equal(result, expected_sum(parts))


def _waits_for_a_dead_peer(rank: int, library: Path, size: int) -> None:
    gpu, group = make_group(library, rank)
    _works(gpu, group, size)
    say()
    if rank == 1:
        time.sleep(60)
    with gpu.computing():
        for _ in range(50):
            result = group.all_reduce(torch.ones(size))
    with pytest.raises(PeerLostError, match="rank 1 died"):
        check_until_it_fails(group)
    torch.cuda.synchronize()  # nothing waits any more
    assert bool(result.isnan().all())  # a released operation's output is marked
    group.destroy()


@pytest.mark.parametrize("size", [100, 40_000], ids=["lines", "slots"])
def test_a_dead_peer_releases_the_kernels(size: int) -> None:
    ranks = start_ranks(_waits_for_a_dead_peer, 2, build(), size)
    ranks.wait_for(0)
    ranks.wait_for(1)
    time.sleep(0.3)
    os.kill(ranks.pid(1), signal.SIGKILL)
    results = ranks.join()
    assert results[0].exit_code == 0, results[0].trace


def _aborted_and_late(rank: int, library: Path) -> None:
    gpu, group = make_group(library, rank, timeout_s=2.0)
    for fault, size in enumerate([100, 100, 40_000, 40_000]):
        _works(gpu, group, size)
        dist.barrier()
        expected = CollectiveTimeoutError if fault % 2 else CollectiveAbortedError
        if rank == 0:
            with gpu.computing():
                for _ in range(10):
                    group.all_reduce(torch.ones(size))
        elif fault % 2 == 0:
            time.sleep(0.2)
            group.abort("on purpose")
        with pytest.raises(expected):
            check_until_it_fails(group)
        torch.cuda.synchronize()
        group.reset()
        _works(gpu, group, size)
    group.destroy()


def test_abort_and_timeout_release_the_kernels_and_reset_mends_them() -> None:
    run_ranks(_aborted_and_late, 2, build())


# What the emulation would show

PLANTED = {
    "a line counts as arrived with its first half": (
        "(seen.y != operation || seen.w != operation)",
        "(seen.y != operation)",
    ),
    "one slot of lines for all operations": ("slot = (operation & 1) * a.lines_bytes", "slot = 0 * a.lines_bytes"),
    "a flag rises before the block has written": (
        "    __syncthreads();\n    if (threadIdx.x == 0) {\n        // Cumulative",
        "    if (threadIdx.x == 0) {\n        // Cumulative",
    ),
    "nobody waits for flags": ("while (static_cast<int>(seen - operation) < 0)", "while (false)"),
    "the last unit is written whole": ("if (line * 8 + i * sizeof(T) < a.num_bytes) out[i]", "out[i]"),
}


def mutated(fault: str) -> str:
    right, wrong = PLANTED[fault]
    assert SOURCE.count(right) == 1
    return SOURCE.replace(right, wrong)


def _goes_wrong(rank: int, library: Path) -> bool:
    gpu, group = make_group(library, rank)
    wrong = torch.zeros(1)
    for k in range(60):
        rng = random.Random(k)
        checks = []
        with gpu.computing():
            for size in (rng.randrange(1, 3000), rng.randrange(20_000, 50_000)):
                parts = inputs(k, 2, (size,), torch.float16 if size < 20_000 else torch.float32)
                out = torch.full((size + 8,), 7, dtype=parts[0].dtype)
                group.all_reduce(parts[rank].clone(), out=out[:size])
                checks.append((out, torch.cat([expected_sum(parts), out.new_full((8,), 7)])))
        torch.cuda.synchronize()
        wrong += not all(torch.equal(got, expected) for got, expected in checks)
        seen = wrong.clone()
        dist.all_reduce(seen)
        if seen.item():
            break
    group.destroy()
    return bool(seen.item())


@pytest.mark.parametrize("fault", PLANTED)
def test_mistakes_in_the_kernel_are_seen(fault: str) -> None:
    assert all(run_ranks(_goes_wrong, 2, build(mutated(fault))))

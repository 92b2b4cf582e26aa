"""Collectives of CUDA tensors through host memory: bits, layouts, graphs, streams.

The tests spawn their own ranks, which share the GPUs there are; those that compare with NCCL need one GPU a rank.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_group import make_group
from rank_harness import run_ranks
from sums import DTYPES, expected_sum, same_bits

from tpoverlap.comm import Reason

KIB, MIB = 1 << 10, 1 << 20


def inputs(seed: int, count: int, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's input, the same on all ranks: random, with special values among them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    parts = []
    for q in range(count):
        x = torch.randn(num_elements, generator=generator, device="cuda") * 10 ** (seed % 5 - 2)
        x = x.to(dtype)
        special = torch.tensor(
            [float("nan"), float("inf"), float("-inf"), torch.finfo(dtype).smallest_normal / 4, -0.0], device="cuda"
        ).to(dtype)
        if num_elements > 64:
            at = torch.randint(0, num_elements, (20,), generator=generator, device="cuda")
            x[at] = special.repeat(4).roll(q)
        parts.append(x)
    return parts


def _sizes(rank: int, nccl: bool) -> dict[str, int]:
    n = dist.get_world_size()
    group = make_group()
    sizes = [
        2,
        6,
        16,
        30,
        2 * KIB,
        10_000,
        64 * KIB,
        64 * KIB + 2,
        256 * KIB,
        256 * KIB + 2,
        MIB,
        3 * MIB + 6,
        8_192_000,
        16 * MIB,
    ]
    sizes += [20 * MIB, 33 * MIB + 2, 64 * MIB] if n == 2 else [21 * MIB]
    for dtype in DTYPES:
        for seed, size in enumerate(sizes):
            count = max(1, size // dtype.itemsize)
            parts = inputs(seed, n, count, dtype)
            expected = expected_sum(parts)
            if nccl:
                reference = parts[rank].clone()
                dist.all_reduce(reference, group=group.device_group)
                assert same_bits(reference, expected), ("NCCL", dtype, size)
            kept = parts[rank].clone()
            out = torch.full_like(kept, float("nan"))
            group.all_reduce(parts[rank], out=out)
            got = group.all_reduce(parts[rank])
            parts[rank].fill_(7)  # right after the call
            assert same_bits(got, expected), (dtype, size)
            assert same_bits(out, expected), (dtype, size, "out")
            unaligned = torch.empty(count + 3, dtype=dtype, device="cuda")[3:]
            unaligned.copy_(kept)
            assert same_bits(group.all_reduce(unaligned), expected), (dtype, size, "unaligned")
            strided = torch.stack([kept, kept], -1)[:, 0]
            assert same_bits(group.all_reduce(strided), expected), (dtype, size, "strided")
            group.all_reduce(kept, out=kept)
            assert same_bits(kept, expected), (dtype, size, "in place")
    served = group.served
    group.destroy()
    return served


@pytest.mark.multigpu
def test_two_ranks_give_the_bits_of_nccl() -> None:
    for served in run_ranks(_sizes, 2, True, timeout_s=110):
        assert set(served) == {"kernel", "copy_engine"}


@pytest.mark.gpu
def test_two_ranks_hold_the_sum() -> None:
    for served in run_ranks(_sizes, 2, False, timeout_s=110):
        assert set(served) == {"kernel", "copy_engine"}


@pytest.mark.gpu
def test_four_ranks_on_two_gpus_hold_the_sum_in_rank_order() -> None:
    for served in run_ranks(_sizes, 4, False, timeout_s=110):
        assert set(served) == {"kernel", "copy_engine"}


def _gather_and_scatter(rank: int) -> None:
    n = dist.get_world_size()
    group = make_group()
    for dtype in (*DTYPES, torch.int64):
        for shape in [(8, 16), (1000, 33 * n), (512, 4096 * n), (3000, 2048 * n)]:
            generator = torch.Generator(device="cuda").manual_seed(shape[0])
            if dtype == torch.int64:
                parts = [torch.randint(0, 99, shape, generator=generator, device="cuda") for _ in range(n)]
            else:
                parts = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(n)]
            for dim in (0, 1):
                assert torch.equal(group.all_gather(parts[rank], dim), torch.cat(parts, dim)), (dtype, shape, dim)
            if dtype != torch.int64:
                assert torch.equal(group.reduce_scatter(parts[rank], 1), expected_sum(parts).chunk(n, 1)[rank])
            total = group.all_reduce_sum2(parts[rank], parts[rank]) if dtype != torch.int64 else None
            assert total is None or torch.equal(total, expected_sum([p + p for p in parts]))
    assert group.served["copy_engine"] > 0
    group.destroy()


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_gather_reduce_scatter_and_sum2(world_size: int) -> None:
    run_ranks(_gather_and_scatter, world_size, timeout_s=110)


def _streams(rank: int) -> None:
    """Back to back on a side stream beside matrix products, and from two streams in turn; modes mixed."""
    group = make_group()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    cases = []
    for i in range(60):
        dtype = DTYPES[i % 3]
        count = [500, 100_000, 1_000_000, 3_000_000, 70, 130_000][i % 6]
        parts = inputs(i, 2, count, dtype)
        cases.append((parts[rank], expected_sum(parts)))
    torch.cuda.synchronize()
    results = []
    for i, (x, _) in enumerate(cases):
        torch.mm(a, a, out=product)
        stream = side if i < 30 or i % 2 else other
        event = torch.cuda.current_stream().record_event()
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            results.append(group.all_reduce(x))
            x.fill_(float("nan"))
    torch.cuda.synchronize()
    for i, (got, (_, expected)) in enumerate(zip(results, cases, strict=True)):
        assert same_bits(got, expected), i
    group.destroy()


@pytest.mark.gpu
def test_streams_and_modes_mixed() -> None:
    run_ranks(_streams, 2, timeout_s=110)


def _soak(rank: int, calls: int) -> None:
    group = make_group()
    generator = torch.Generator().manual_seed(1)
    pool = {
        dtype: [
            (torch.randn(6_000_000, device="cuda", generator=torch.Generator("cuda").manual_seed(q)) * 3).to(dtype)
            for q in range(2)
        ]
        for dtype in DTYPES
    }
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(calls):
        dtype = DTYPES[i % 3]
        largest = 2_000_000 if i % 10 == 0 else 100_000
        count = int(torch.randint(1, largest, (1,), generator=generator))
        start = int(torch.randint(0, 6_000_000 - count, (1,), generator=generator))
        parts = [p[start : start + count] for p in pool[dtype]]
        got = group.all_reduce(parts[rank])
        wrong += (got != parts[0] + parts[1]).sum()
    assert int(wrong) == 0
    group.destroy()


@pytest.mark.gpu
def test_ten_thousand_calls_all_checked() -> None:
    run_ranks(_soak, 2, 10_000, timeout_s=110)


def _graphs(rank: int, sizes: list[int]) -> dict[str, int]:
    group = make_group()
    n = dist.get_world_size()
    for dtype in DTYPES:
        for size in sizes:
            count = max(1, size // dtype.itemsize)
            x, out = torch.zeros(count, dtype=dtype, device="cuda"), torch.zeros(count, dtype=dtype, device="cuda")
            second = torch.zeros_like(x)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                group.all_reduce(x, out=out)
                second.copy_(group.all_reduce(out))
            for seed in range(4):
                parts = inputs(seed, n, count, dtype)
                x.copy_(parts[rank])
                graph.replay()
                eager = group.all_reduce(parts[rank])  # between replays, on the same stream
                expected = expected_sum(parts)
                assert same_bits(out, expected), (dtype, size, seed)
                assert same_bits(eager, expected), (dtype, size, seed, "eager")
                assert same_bits(second, expected_sum([expected] * n)), (dtype, size, seed, "second")
    served = group.served
    group.destroy()
    return served


@pytest.mark.gpu
def test_graphs_replay_with_changed_inputs() -> None:
    sizes = [2, 2 * KIB, 256 * KIB, MIB, 8_192_000, 20 * MIB]
    for served in run_ranks(_graphs, 2, sizes, timeout_s=110):
        assert set(served) == {"kernel", "captured_copy_engine", "copy_engine"}


@pytest.mark.gpu
def test_graphs_of_four_ranks_on_two_gpus() -> None:
    run_ranks(_graphs, 4, [2 * KIB, 3 * MIB], timeout_s=110)


def _nothing(rank: int) -> None:
    for config in ({}, {"max_bytes": 0}):
        group = make_group(**config)
        for dtype in DTYPES:
            for shape in ((0,), (4, 0)):
                x = torch.empty(shape, dtype=dtype, device="cuda")
                assert group.all_reduce(x).shape == x.shape
        for _ in range(5):
            group.all_reduce(torch.empty(0, device="cuda"))
        x = torch.full((1000,), float(rank + 1), device="cuda")
        assert group.all_reduce(x).unique().tolist() == [3]
        group.destroy()


@pytest.mark.gpu
def test_empty_tensors_with_and_without_kernel_mode() -> None:
    run_ranks(_nothing, 2)


def _reasons(rank: int) -> None:
    group = make_group()
    small, large = torch.ones(8, device="cuda"), torch.ones(1_000_000, device="cuda")
    assert group.rejection_reasons(small)["kernel"] is None
    assert group.rejection_reasons(large)["kernel"] == Reason.ABOVE_MAX_BYTES
    assert group.rejection_reasons(large)["copy_engine"] is None
    assert group.rejection_reasons(large)["captured_copy_engine"] == Reason.NOT_CAPTURING
    assert group.rejection_reasons(large.long())["copy_engine"] == Reason.DTYPE_UNSUPPORTED
    assert group.all_reduce(torch.ones(8, dtype=torch.int64, device="cuda")).tolist() == [2] * 8
    off = make_group(copy_engine_max_bytes=0)
    assert off.rejection_reasons(large)["copy_engine"] == Reason.DISABLED
    assert torch.equal(off.all_reduce(large), large * 2)
    assert off.served == {"torch": 1}
    off.destroy()
    group.destroy()


@pytest.mark.multigpu
def test_reasons_and_the_last_provider() -> None:
    run_ranks(_reasons, 2)


def _wrong_device(rank: int) -> None:
    group = make_group()
    x = torch.full((300_000,), float(rank + 1), device="cuda")
    small = x[:8]
    torch.cuda.set_device(1 - rank)
    for tensor in (x, small):
        with pytest.raises(NotImplementedError, match=rf"set_device\({rank}\)"):
            group.all_reduce(tensor)
    # Nothing has begun: the group works on, on all ranks.
    with torch.cuda.device(rank):
        assert group.all_reduce(small).tolist() == [3] * 8
        assert group.all_reduce(x).unique().tolist() == [3]
    group.destroy()


@pytest.mark.multigpu
def test_another_current_device_is_refused_before_anything_begins() -> None:
    run_ranks(_wrong_device, 2)

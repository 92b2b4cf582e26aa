"""Faults in the middle of the copy engines' work: failing calls of the driver, interrupts, calls that differ, leaving.

Every rank raises, nothing hangs, and nothing is left behind.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks
from simulated_gpu import SimulatedGpu
from sums import expected_sum, inputs

from tpoverlap.comm import GroupCoordinator
from tpoverlap.comm.captured import CapturedCopyEngineProvider
from tpoverlap.comm.copy_engine import CopyEngineProvider
from tpoverlap.cuda.driver import CudaDriverError
from tpoverlap.cuda.streams import StreamCalls
from tpoverlap.errors import CollectiveAbortedError, CollectiveMismatchError, TpOverlapError

SLOT = 64 << 10
_NO_ERRORS = ("cuGetErrorName", "cuGetErrorString")


def _at_call(number: int) -> Callable[[str], bool]:
    """The ``number``-th call from now on fails, those that name errors not counted."""
    calls = itertools.count()
    return lambda name: name not in _NO_ERRORS and next(calls) == number


def _works(gpu: SimulatedGpu, group: GroupCoordinator, seed: int) -> None:
    n, rank = dist.get_world_size(), group.rank_in_group
    parts = inputs(seed, n, (7001,), torch.float32)
    with gpu.computing():
        result = group.all_reduce(parts[rank] * 1.0)
        rows = group.all_gather(parts[rank] * 1.0, 0)
    torch.cuda.synchronize()
    group.check()
    assert torch.equal(result, expected_sum(parts))
    assert torch.equal(rows, torch.cat(parts))


def _collectives_until_one_fails(gpu: SimulatedGpu, group: GroupCoordinator, rng: random.Random) -> None:
    captured = next(p for p in group._providers if isinstance(p, CapturedCopyEngineProvider))
    with gpu.computing():
        for _ in range(6):
            x = torch.ones(group.world_size * rng.choice([1, 3000, 20_000]))
            kind = rng.randrange(4)
            if kind == 0:
                group.all_reduce(x, out=x)
            elif kind == 1:
                group.all_gather(x, 0)
            elif kind == 2:
                group.reduce_scatter(x, 0)
            else:
                captured.all_reduce(x, torch.empty_like(x))

    while True:
        time.sleep(0.005)
        group.check()


_ON_PEERS: tuple[type[TpOverlapError], str] = (CollectiveAbortedError, "CudaDriverError during")


def _random_errors(rank: int, cases: int) -> None:
    """Each case: a call of the driver fails on one rank, anywhere in a queue of collectives."""
    n = dist.get_world_size()
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    for case in range(cases):
        rng = random.Random(case)
        victim, number = rng.randrange(n), rng.randrange(50)
        if rank == victim:
            gpu.fails = _at_call(number)
        expected, words = (CudaDriverError, "CUDA_ERROR_UNKNOWN") if rank == victim else _ON_PEERS
        started = time.monotonic()
        with pytest.raises(expected, match=words):
            _collectives_until_one_fails(gpu, group, rng)
        assert time.monotonic() - started < 5
        gpu.fails = lambda name: False
        torch.cuda.synchronize()  # nothing waits any more
        group.reset()
        _works(gpu, group, case)
        dist.barrier()
    group.destroy()


@pytest.mark.parametrize(("n", "cases"), [(2, 25), (3, 12)])
def test_a_failing_call_raises_on_every_rank_and_reset_mends_it(n: int, cases: int) -> None:
    run_ranks(_random_errors, n, cases, timeout_s=100)


def _memory_of_a_failed_call(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    x = torch.ones(2 * SLOT // 4)
    out = torch.zeros_like(x)
    if rank == 0:
        provider = group._choose("all_reduce", x)
        assert isinstance(provider, CopyEngineProvider)
        held_up, uploads = threading.Event(), itertools.count()
        gpu._streams[provider._segment.down].put(held_up.wait)
        with gpu.computing():
            gpu.fails = lambda name: name == "cuMemcpyDtoHAsync" and next(uploads) == 1  # of the second operation
            with pytest.raises(CudaDriverError):
                group.all_reduce(x, out=out)
            gpu.fails = lambda name: False
            out.fill_(7.0)  # its next use
        time.sleep(0.1)
        held_up.set()
        torch.cuda.synchronize()
        assert bool((out == 7.0).all())
    dist.barrier()
    group.destroy()


def test_no_download_of_a_failed_call_comes_after_what_the_stream_is_given_next() -> None:
    run_ranks(_memory_of_a_failed_call, 2)


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "tpoverlap" in t.name]


def _errors_in_open(rank: int, numbers: range) -> list[dict[str, int]]:
    """For each number the group is made while rank 1's call of that number fails."""
    served = []
    gpu = SimulatedGpu(rank, pause_s=0)
    gpu.group().destroy()  # stream memory operations are tried out once
    for number in numbers:
        if rank == 1:
            gpu.fails = _at_call(number)
        group = gpu.group(copy_engine_max_bytes=SLOT)
        gpu.fails = lambda name: False
        if group.rejection_reasons(torch.ones(1))["copy_engine"] is None:
            _works(gpu, group, number)
        served.append(group.served)
        group.destroy()
        assert not gpu._pinned
        assert len(gpu._streams) == 1, gpu._streams
        assert not gpu._marks
        assert not _threads()
    return served


def test_a_call_that_fails_while_a_group_is_made_leaves_nothing_and_all_ranks_choose_alike() -> None:
    first, second = run_ranks(_errors_in_open, 2, range(14), timeout_s=100)
    assert first == second
    assert {} in first
    assert any(first)


def _errors_in_destroy(rank: int) -> None:
    gpu = SimulatedGpu(rank, pause_s=0)
    for name in ("cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister"):
        group = gpu.group(copy_engine_max_bytes=SLOT)
        _works(gpu, group, 1)
        gpu.fails = lambda called, name=name: called == name
        with pytest.raises(TpOverlapError, match=name):
            group.destroy()
        gpu.fails = lambda called: False
        group.destroy()
        assert not _threads()
        assert len(gpu._pinned) == (name == "cuMemHostUnregister")
        gpu._pinned.clear()
    last = gpu.group(copy_engine_max_bytes=SLOT)
    _works(gpu, last, 2)
    synchronize = torch.cuda.synchronize

    def broken(device: object = None) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    torch.cuda.synchronize = broken
    with pytest.raises(RuntimeError, match="illegal memory access"):
        last.destroy()
    torch.cuda.synchronize = synchronize
    assert not _threads()
    assert not gpu._pinned


def test_destroy_frees_the_rest_where_a_part_fails() -> None:
    run_ranks(_errors_in_destroy, 2)


def _no_sum_unmarked(rank: int) -> None:
    """Behind a synchronization, check() speaks of all calls before it, however long the watcher has not looked."""
    gpu = SimulatedGpu(rank, pause_s=0)
    group = gpu.group()
    assert group._channel is not None
    for k in range(20):
        dist.barrier()
        with gpu.computing():
            group.all_reduce(torch.ones(1000, dtype=[torch.float16, torch.bfloat16][rank]))
        torch.cuda.synchronize()
        with pytest.raises(CollectiveMismatchError, match="float16 2000 B"):
            [group.check, group._channel.end_run, lambda: group.all_reduce(torch.ones(9))][k % 3]()
        group.reset()
    _works(gpu, group, 1)
    group.destroy()


def test_a_mismatched_sum_is_marked_as_soon_as_it_can_be_read() -> None:
    run_ranks(_no_sum_unmarked, 2)


def _slow_to_issue(rank: int) -> None:
    """Rank 1 has its sum and leaves while rank 0's host is still inside the call."""
    gpu = SimulatedGpu(rank, pause_s=0)
    group = gpu.group()
    _works(gpu, group, 1)
    order, orders = StreamCalls.order, itertools.count()

    def late(calls: StreamCalls, *arguments: Any) -> None:
        if next(orders) == 1:
            time.sleep(0.5)
        order(calls, *arguments)

    dist.barrier()
    if rank == 0:
        StreamCalls.order = late  # type: ignore[method-assign]
    with gpu.computing():
        result = group.all_reduce(torch.ones(5))
    torch.cuda.synchronize()
    if rank == 0:
        time.sleep(0.1)
    group.check()
    assert result.tolist() == [2] * 5
    group.destroy()


def test_a_peer_that_has_all_it_needs_may_leave_while_this_rank_issues() -> None:
    run_ranks(_slow_to_issue, 2)


def _interrupted_reset(rank: int) -> None:
    """Ctrl-C on rank 0 when all ranks have restored; its watcher poisons the words of both until it comes again."""
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    channel = group._channel
    assert channel is not None
    restore = channel._restore

    def restore_and_interrupt() -> None:
        restore()
        time.sleep(0.1)
        channel._restore = restore  # type: ignore[method-assign]
        raise KeyboardInterrupt

    for k in range(3):
        _works(gpu, group, k)
        dist.barrier()
        group.abort("planted")
        if rank == 0:
            channel._restore = restore_and_interrupt  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                group.reset()
            time.sleep(0.1)
        group.reset()
        assert group.generation == k + 1
    _works(gpu, group, 9)
    group.destroy()


def test_a_rank_interrupted_in_a_reset_may_come_again_while_the_others_wait() -> None:
    run_ranks(_interrupted_reset, 2)


def _interrupted_twice(rank: int) -> None:
    """The second Ctrl-C comes before the first has been reported to the other ranks."""
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    channel = group._channel
    assert channel is not None
    twice = CollectiveAbortedError, "rank 0 was interrupted twice"
    # Where the other rank is in a call of another kind, who comes first finds the failure: so the rank `late` waits.
    other = torch.ones(9, dtype=torch.int64)
    first, second = "rank 0 calls all_reduce float32 36 B, copy_engine", "rank 1 calls all_reduce int64 72 B, torch"
    differs = CollectiveMismatchError, f"{first}, {second}|{second}, {first}"
    rounds = [(torch.ones(9), None, twice), (other, 1, twice), (other, 0, differs)]
    for k, (x, late, (error, words)) in enumerate(rounds):
        _works(gpu, group, k)
        dist.barrier()
        if rank == 0:
            whole, channel.interrupted = channel.interrupted, _interrupt  # type: ignore[method-assign]
            gpu.fails = _at_call(3)
            with gpu.computing(), pytest.raises(KeyboardInterrupt):
                group.all_reduce(torch.ones(9))
            channel.interrupted = whole  # type: ignore[method-assign]
            gpu.fails = lambda name: False
        while rank == late and not group.failed:
            time.sleep(0.001)
        with gpu.computing(), pytest.raises(error, match=words):
            _call_until_it_fails(group, x)
        torch.cuda.synchronize()
        group.reset()
    _works(gpu, group, 9)
    group.destroy()


def _call_until_it_fails(group: GroupCoordinator, x: torch.Tensor) -> None:
    for _ in range(50):
        group.all_reduce(x)
        time.sleep(0.01)


def _interrupt(error: BaseException) -> None:
    raise KeyboardInterrupt


def test_a_second_interrupt_inside_a_call_does_not_let_the_next_one_read_old_data() -> None:
    run_ranks(_interrupted_twice, 2)

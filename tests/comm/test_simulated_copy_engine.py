"""The copy engines' code on simulated GPUs: what it computes in whatever order streams get on, and how it fails.

The protocol is explored as a model in test_protocol_explored.py; here runs the code that issues it.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks, say, start_ranks
from simulated_gpu import SimulatedGpu
from sums import DTYPES, check_until_it_fails, expected_sum, inputs

from tpoverlap.comm import GroupCoordinator
from tpoverlap.comm.copy_engine import CopyEngineProvider
from tpoverlap.comm.layout import COPY_PUBLISHED, NUM_SLOTS
from tpoverlap.cuda.streams import StreamCalls
from tpoverlap.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    UnsupportedError,
)

# A slot of so few bytes makes several operations of one payload.
SLOT = 64 << 10


def _shape(rng: random.Random) -> tuple[int, ...]:
    largest = rng.choice([1, 10, 1000, SLOT // 2, 3 * SLOT // 2])
    return (rng.randint(1, max(1, largest // 8)), rng.choice([1, 3, 8]))


def _calls(rank: int, seed: int, count: int) -> dict[str, int]:
    """Random collectives one after the other, on random streams, with inputs that change right behind them."""
    gpu = SimulatedGpu(seed + 1000 * rank)
    n, rng = dist.get_world_size(), random.Random(seed)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    streams = [gpu.default, gpu.new_stream()]
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k in range(count):
        dtype, shape = rng.choice(DTYPES), _shape(rng)
        operation = rng.choice(["in place", "out", "new", "strided", "sum2", "gather", "scatter"])
        parts = inputs(seed + k, n, shape if operation != "scatter" else (shape[0] * n, shape[1]), dtype)
        gpu.current = rng.choice(streams)
        with gpu.computing():
            x = parts[rank] * 1.0  # made on the stream
            if operation == "in place":
                result, expected = group.all_reduce(x, out=x), expected_sum(parts)
            elif operation == "out":
                result, expected = group.all_reduce(x, out=torch.empty_like(x)), expected_sum(parts)
            elif operation == "new":
                result, expected = group.all_reduce(x), expected_sum(parts)
            elif operation == "strided":
                wide = torch.empty((shape[0], 2 * shape[1]), dtype=dtype)[:, ::2]
                wide.copy_(x)
                x, (result, expected) = wide, (group.all_reduce(wide), expected_sum(parts))
            elif operation == "sum2":
                result, expected = group.all_reduce_sum2(x, x), expected_sum([p + p for p in parts])
            elif operation == "gather":
                result, expected = group.all_gather(x, 0), torch.cat(parts)
            else:
                result, expected = group.reduce_scatter(x, 0), expected_sum(parts).chunk(n)[rank]
            result = result * 1.0
            if operation != "in place":
                x.zero_()
        results.append((result, expected))
        if k % 10 == 9:
            torch.cuda.synchronize()
            for at, (got, wanted) in enumerate(results):
                assert torch.equal(got, wanted), f"call {k - 9 + at} of seed {seed}"
            results.clear()
    served = group.served
    group.destroy()
    return served


@pytest.mark.parametrize(("n", "count"), [(2, 200), (3, 80), (4, 50)])
def test_sums_are_right_in_whatever_order_streams_get_on(n: int, count: int) -> None:
    for served in run_ranks(_calls, n, 11 * n, count, timeout_s=100):
        assert served == {"copy_engine": count}


def _graphs(rank: int, seed: int) -> dict[str, int]:
    gpu = SimulatedGpu(seed + 1000 * rank)
    n, rng = dist.get_world_size(), random.Random(seed)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    streams = [gpu.default, gpu.new_stream()]
    shapes = [(1,), (701,), (SLOT // 2,), (3 * SLOT // 2,)]
    graphs = []
    for shape in shapes:
        x = torch.zeros(shape, dtype=torch.bfloat16)
        with gpu.capture() as graph, gpu.computing():
            once = group.all_reduce(x)
            rows = group.all_gather(once * (rank + 1.0), 0)
        graphs.append((x, once, rows, graph))
    for k in range(25):
        gpu.current = rng.choice(streams)
        x, once, rows, graph = rng.choice(graphs)
        for _ in range(rng.randrange(3)):
            parts = inputs(seed + k, n, (500,), torch.float32)
            with gpu.computing():
                eager = group.all_reduce(parts[rank] * 1.0)
            torch.cuda.synchronize()  # the caller orders eager calls and replays
            assert torch.equal(eager, expected_sum(parts)), k
        parts = inputs(seed + k, n, tuple(x.shape), torch.bfloat16)
        x.copy_(parts[rank])
        for _ in range(rng.randrange(1, 3)):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(once, expected_sum(parts)), k
        assert torch.equal(rows, torch.cat([expected_sum(parts) * (q + 1.0) for q in range(n)])), k
    served = group.served
    group.destroy()
    return served


@pytest.mark.parametrize("n", [2, 3])
def test_graphs_give_the_sum_of_what_their_inputs_hold_at_each_replay(n: int) -> None:
    for served in run_ranks(_graphs, n, 5):
        assert set(served) == {"captured_copy_engine", "copy_engine"}
        assert served["captured_copy_engine"] == 8  # at capture alone


def _left_to_do(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    provider = group._choose("all_reduce", torch.ones(5))
    parts = inputs(1, 2, (40_000,), torch.float32)
    x, out = parts[rank].clone(), torch.empty(40_000)
    completion = provider.all_reduce(x, out)
    torch.cuda.synchronize()
    assert torch.equal(out, parts[1 - rank])
    assert completion is not None
    completion()
    assert torch.equal(out, expected_sum(parts))
    with gpu.computing():
        assert provider.all_reduce(x, x) is None
        spread = torch.empty(80_000)[::2]
        assert provider.all_reduce(parts[rank], spread) is None
    torch.cuda.synchronize()
    assert torch.equal(x, expected_sum(parts))
    assert torch.equal(spread, expected_sum(parts))
    group.destroy()


def test_the_addition_of_two_ranks_is_left_to_the_caller_where_it_can_be() -> None:
    run_ranks(_left_to_do, 2)


def _two_calls_of_two_streams(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    channel = group._channel
    assert channel is not None
    words, at = channel.segment.words, channel.layout.word(0, COPY_PUBLISHED) // 4
    rounds = [inputs(k, 2, (100,), torch.float32) for k in range(2)]
    for _ in range(2):
        published, results = words[at], []
        if rank == 1:
            dist.barrier()  # rank 0 has uploaded both
        for parts in rounds:
            gpu.current = gpu.new_stream()
            with gpu.computing():
                results.append(group.all_reduce(parts[rank] * 1.0))
        if rank == 0:
            give_up_s = time.monotonic() + 20
            while words[at] != published + 2:
                assert time.monotonic() < give_up_s, "the second upload waits for the first download"
                time.sleep(0.001)
            dist.barrier()
        torch.cuda.synchronize()
        for parts, result in zip(rounds, results, strict=True):
            assert torch.equal(result, expected_sum(parts))
        # Others keep their order with these.
        gpu.current = gpu.default
        with gpu.computing():
            rows = group.all_gather(rounds[0][rank] * 1.0, 0)
        torch.cuda.synchronize()
        assert torch.equal(rows, torch.cat(rounds[0]))
    group.destroy()


def test_a_call_of_another_stream_uploads_while_the_one_before_waits_for_its_peer() -> None:
    run_ranks(_two_calls_of_two_streams, 2)


def _late_reader(rank: int, first: str, second: str) -> None:
    """Rank 0 reads the first call's slot late, while calls of another stream are behind it."""
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    provider = group._choose("all_reduce", torch.ones(1))
    assert isinstance(provider, CopyEngineProvider)
    rounds = [inputs(k, 2, (100,), torch.float32) for k in range(2 * NUM_SLOTS)]
    stream, held_up, waits = gpu.new_stream(), threading.Event(), itertools.count()

    def hold_up_stream(name: str) -> bool:
        """Once the upload's order behind the stream is told, which is what it waits for."""
        if name == "cuStreamWaitEvent" and next(waits) == 0:
            stream.put(held_up.wait)
        return False

    if rank == 0 and first == "all_reduce":
        gpu._streams[provider._segment.down].put(held_up.wait)
    elif rank == 0:
        gpu.fails = hold_up_stream
    results = []
    for operation, parts in zip((first, *[second] * len(rounds)), rounds, strict=False):
        gpu.current = stream if operation == first else gpu.default
        with gpu.computing():
            x = parts[rank] * 1.0
            results.append(group.all_reduce(x) if operation == "all_reduce" else group.all_gather(x, 0))
    if rank == 0:
        time.sleep(0.2)  # in which rank 1 would write the slot again
        held_up.set()
    torch.cuda.synchronize()
    for result, parts in zip(results, rounds, strict=True):
        assert torch.equal(result, expected_sum(parts) if result.shape == parts[0].shape else torch.cat(parts))
    group.destroy()


@pytest.mark.parametrize(("first", "second"), [("all_reduce", "all_gather"), ("all_gather", "all_reduce")])
def test_calls_of_other_kinds_and_streams_read_slots_in_their_order(first: str, second: str) -> None:
    run_ranks(_late_reader, 2, first, second)


def _sums_of_nans(rank: int) -> list[int]:
    gpu = SimulatedGpu(rank)
    group = gpu.group()
    x = torch.full((8,), 0x7FC00001 + rank, dtype=torch.int32).view(torch.float32)  # each rank has a NaN of its own
    with gpu.computing():
        sums = [group.all_reduce(x), group.all_reduce(x, out=x.clone()), group.reduce_scatter(x, 0)]
        sums.append(group.all_reduce(x, out=x))
    torch.cuda.synchronize()
    group.destroy()
    assert all(bool(total.isnan().all()) for total in sums)
    return [int(total.view(torch.int32)[0]) for total in sums]


def test_all_ranks_hold_the_same_nan() -> None:
    first, second = run_ranks(_sums_of_nans, 2)
    assert first == second


# What the simulation would show


def _early_uploads(calls: StreamCalls, before: Any, event: Any, after: Any) -> None:
    _fork(calls, before, event, after[1:])


def _early_downloads(calls: StreamCalls, before: Any, event: Any, after: Any) -> None:
    _fork(calls, before, event, after[:1])


def _without_order_at_the_end(calls: StreamCalls, after: Any, event: Any, before: Any) -> None:
    if after == 0:  # the current stream behind up and down
        return
    _order(calls, after, event, before)


def _without_a_wait(calls: StreamCalls, stream: Any, address: Any, value: int) -> None:
    pass


def _early_flags(
    calls: StreamCalls, stream: Any, device: int, host: int, pieces: Any, counter: int, count: int
) -> None:
    for at, (offset, num_bytes) in enumerate(pieces):
        calls.write(stream, counter, count + at + 1)
        calls.to_host(host + offset, device + offset, num_bytes, stream)


_order, _fork = StreamCalls.order, StreamCalls.fork
PLANTED: dict[str, tuple[str, Callable[..., None]]] = {
    "uploads begin before the input is there": ("fork", _early_uploads),
    "downloads begin before the result may be written": ("fork", _early_downloads),
    "the input changes before it has been uploaded": ("order", _without_order_at_the_end),
    "slots are written again before they were read": ("wait_at_least", _without_a_wait),
    "pieces are announced before they are there": ("upload", _early_flags),
}


def _with_a_fault(rank: int, fault: str) -> bool:
    """Whether any of many calls went wrong."""
    gpu = SimulatedGpu(rank, pause_s=2e-3)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    name, function = PLANTED[fault]
    setattr(StreamCalls, name, function)
    wrong = False
    for k in range(30):
        # Larger than all slots together: between two calls the ranks keep step, so that no slot is in danger there.
        rounds = [inputs(10 * k + i, 2, (2 * SLOT,), torch.float32) for i in range(3)]
        with gpu.computing():
            results, out = [], torch.empty_like(rounds[0][rank])
            for parts in rounds:
                x = parts[rank] * 1.0
                results.append(group.all_reduce(x, out=out) * 1.0)
                x.zero_()
        torch.cuda.synchronize()
        wrong |= not all(torch.equal(r, expected_sum(p)) for r, p in zip(results, rounds, strict=True))
        seen = torch.tensor([int(wrong)])
        dist.all_reduce(seen)
        if seen.item():
            break
    group.destroy()
    return bool(seen.item())


@pytest.mark.parametrize("fault", PLANTED)
def test_faults_in_the_order_are_seen(fault: str) -> None:
    assert all(run_ranks(_with_a_fault, 2, fault))


# Failures


def _works_again(gpu: SimulatedGpu, group: GroupCoordinator) -> None:
    parts = inputs(3, 2, (5000,), torch.float32)
    with gpu.computing():
        result = group.all_reduce(parts[group.rank_in_group] * 1.0)
    torch.cuda.synchronize()
    group.check()
    assert torch.equal(result, expected_sum(parts))


def _waits_for_a_dead_peer(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group()
    _works_again(gpu, group)
    say()
    if rank == 1:
        time.sleep(60)
    with gpu.computing():
        x = torch.ones(5000)
        for _ in range(200):
            x = group.all_reduce(x)
    with pytest.raises(PeerLostError, match="rank 1 died"):
        check_until_it_fails(group)
    torch.cuda.synchronize()  # nothing waits any more
    with pytest.raises(PeerLostError):
        group.reset()
    group.destroy()


def test_a_dead_peer_releases_the_streams() -> None:
    ranks = start_ranks(_waits_for_a_dead_peer, 2)
    ranks.wait_for(0)
    ranks.wait_for(1)
    time.sleep(0.3)
    os.kill(ranks.pid(1), signal.SIGKILL)
    results = ranks.join()
    assert results[0].exit_code == 0, results[0].trace


def _aborted_and_late(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group(timeout_s=2.0)
    for fault in range(4):
        _works_again(gpu, group)
        dist.barrier()
        expected = CollectiveTimeoutError if fault % 2 else CollectiveAbortedError
        if rank == 0:
            with gpu.computing():
                for _ in range(20):
                    group.all_reduce(torch.ones(5000))
        elif fault % 2 == 0:
            time.sleep(0.2)
            group.abort("on purpose")
        with pytest.raises(expected):
            check_until_it_fails(group)
        torch.cuda.synchronize()
        group.reset()
    _works_again(gpu, group)
    group.destroy()


def test_abort_and_timeout_release_the_streams_and_reset_mends_them() -> None:
    """An abort right after a timeout, too: what the device waits for then looks as it did, and is not late again."""
    run_ranks(_aborted_and_late, 2)


def _call_and_check_until_it_fails(group: GroupCoordinator, size: int) -> None:
    for _ in range(3):
        group.all_reduce(torch.ones(size))
    check_until_it_fails(group)


def _different_sizes(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group()
    for size in (500, 700_000):
        _works_again(gpu, group)
        with gpu.computing(), pytest.raises(CollectiveMismatchError):
            _call_and_check_until_it_fails(group, size + rank)
        torch.cuda.synchronize()
        group.reset()
    _works_again(gpu, group)
    group.destroy()


def test_different_sizes_are_a_mismatch_on_both_ranks() -> None:
    run_ranks(_different_sizes, 2)


# What a call costs the host


def _driver_calls(rank: int, num_bytes: int) -> int:
    gpu = SimulatedGpu(rank, pause_s=0)
    group = gpu.group()
    x = torch.zeros(num_bytes // 4)
    with gpu.computing():
        group.all_reduce(x)
        before = sum(gpu.calls.values())
        group.all_reduce(x)
        calls = sum(gpu.calls.values()) - before
    torch.cuda.synchronize()
    group.destroy()
    return calls


@pytest.mark.parametrize(("num_bytes", "pieces"), [(512 << 10, 1), (1 << 20, 2), (8_192_000, 3), (16 << 20, 4)])
def test_a_call_makes_no_more_calls_of_the_driver_than_it_needs(num_bytes: int, pieces: int) -> None:
    """A piece: two copies, a write and a wait. Around them: three calls to begin, four to end, a wait and a write."""
    assert set(run_ranks(_driver_calls, 2, num_bytes)) == {4 * pieces + 9}


def _on_another_device(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group()
    torch.cuda.current_device = lambda: 1
    with pytest.raises(UnsupportedError, match="current device is cuda:1, this group's is cuda:0"):
        group.all_reduce(torch.ones(5))
    torch.cuda.current_device = lambda: 0
    assert isinstance(group._choose("all_reduce", torch.ones(5)), CopyEngineProvider)
    _works_again(gpu, group)
    group.destroy()


def test_a_call_with_another_current_device_is_refused_and_leaves_the_group_usable() -> None:
    run_ranks(_on_another_device, 2)

"""What a group prepares for a dtype and size is good for every later call of them, and for no other.

On simulated GPUs: other memory, layouts, streams and threads, captures, resets, failures, forks and new groups between
calls that are alike.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks
from simulated_gpu import SimulatedGpu
from sums import check_until_it_fails, expected_sum, inputs

from tpoverlap.comm import GroupCoordinator, copy_engine
from tpoverlap.comm.copy_engine import CopyEngineProvider
from tpoverlap.errors import ChannelError, CollectiveAbortedError, CollectiveMismatchError

SLOT = 64 << 10
SIZE = 40_000  # of FP32: three operations


def _new(group: GroupCoordinator, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x)


def _in_place(group: GroupCoordinator, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x, out=x)


def _beside(group: GroupCoordinator, x: torch.Tensor) -> torch.Tensor:
    """Input and output follow each other in one memory, and start on no more than an element."""
    memory = torch.full((2 * SIZE + 3,), 7.0)
    memory[1 : 1 + SIZE] = x
    result = group.all_reduce(memory[1 : 1 + SIZE], out=memory[1 + SIZE : 1 + 2 * SIZE])
    return torch.cat([memory[:1], memory[1 + 2 * SIZE :], result])[3:]


def _into_strides(group: GroupCoordinator, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x, out=torch.empty(2 * SIZE)[::2])


def _from_strides(group: GroupCoordinator, x: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(SIZE, 2)
    wide[:, 1] = x
    return group.all_reduce(wide[:, 1], out=torch.empty(SIZE))


def _transposed(group: GroupCoordinator, x: torch.Tensor) -> torch.Tensor:
    columns = x.view(200, 200).t().contiguous().t()
    return group.all_reduce(columns, out=torch.empty(200, 200)).view(-1)


Form = Callable[[GroupCoordinator, torch.Tensor], torch.Tensor]
FORMS: tuple[Form, ...] = (
    _new,
    _in_place,
    _beside,
    _into_strides,
    _from_strides,
    _transposed,
)


def _sum(
    gpu: SimulatedGpu, stream: Any, group: GroupCoordinator, form: Form, own: torch.Tensor, results: list[torch.Tensor]
) -> None:
    gpu.current = stream
    with gpu.computing():
        x = own * 1.0
        results.append(form(group, x) * 1.0)
        x.zero_()


def _one_signature(rank: int, seed: int, count: int) -> None:
    gpu = SimulatedGpu(seed + 1000 * rank)
    n, rng = dist.get_world_size(), random.Random(seed)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    streams = [gpu.default, gpu.new_stream()]
    captured_x = torch.zeros(SIZE)
    graph = None
    for k in range(count):
        parts = inputs(seed + k, n, (SIZE,), torch.float32)
        kind = rng.choice(["call"] * 5 + ["other thread", "capture", "replay", "reset"])
        form, stream = rng.choice(FORMS), rng.choice(streams)
        results: list[torch.Tensor] = []
        work = functools.partial(_sum, gpu, stream, group, form, parts[rank], results)
        if kind == "call":
            work()
        elif kind == "other thread":
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        elif kind == "reset":
            torch.cuda.synchronize()
            dist.barrier()
            if rank == 0:
                group.abort("on purpose")
            with pytest.raises(CollectiveAbortedError):
                check_until_it_fails(group)
            with pytest.raises(CollectiveAbortedError):
                work()
            group.reset()
            graph = None  # of words that a reset has set anew
            continue
        else:
            torch.cuda.synchronize()  # the caller orders eager calls and replays
            if graph is None or kind == "capture":
                with gpu.capture() as graph, gpu.computing():
                    captured = group.all_reduce(captured_x)
            captured_x.copy_(parts[rank])
            graph.replay()
            results.append(captured)
        torch.cuda.synchronize()
        group.check()
        assert torch.equal(results[0], expected_sum(parts)), (k, kind, form.__name__)
    group.destroy()


@pytest.mark.parametrize("n", [2, 3])
def test_calls_alike_are_right_whatever_happens_between_them(n: int) -> None:
    run_ranks(_one_signature, n, 17 * n, 60)


def _call_and_check(group: GroupCoordinator, call: Callable[[], torch.Tensor]) -> None:
    call()
    check_until_it_fails(group)


def _differing(rank: int) -> None:
    gpu = SimulatedGpu(rank)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    half, brain, single = (torch.ones(600, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: group.all_reduce(half),
        lambda: group.all_reduce(brain),
        lambda: group.all_reduce(single),
        lambda: group.all_reduce(half, out=half.clone()),
        lambda: group.all_gather(half),
    ]
    for first, second in ((0, 1), (1, 0), (0, 2), (3, 1), (4, 3)):
        with gpu.computing():
            for call in calls:  # all are prepared
                call()
            torch.cuda.synchronize()
            group.check()
            dist.barrier()
            with pytest.raises(CollectiveMismatchError) as caught:
                _call_and_check(group, calls[second if rank else first])
        assert "rank 0 calls" in str(caught.value)
        torch.cuda.synchronize()
        group.reset()
    group.destroy()


def test_prepared_calls_that_differ_are_a_mismatch_on_both_ranks() -> None:
    """Of one size in bytes, too."""
    run_ranks(_differing, 2)


def _elsewhere(rank: int) -> None:
    gpu = SimulatedGpu(rank, pause_s=0)
    group = gpu.group(copy_engine_max_bytes=SLOT)
    x = torch.ones(SIZE)

    def works(group: GroupCoordinator) -> None:
        with gpu.computing():
            result = group.all_reduce(x)
        torch.cuda.synchronize()
        assert result.unique().tolist() == [2.0]

    works(group)
    provider = group._choose("all_reduce", x)
    assert isinstance(provider, CopyEngineProvider)
    before = dict(gpu.calls)

    # Another thread, while this one is inside the very call.
    refused: list[ChannelError] = []

    def intrude() -> None:
        try:
            provider.all_reduce(x, torch.empty(SIZE))
        except ChannelError as error:
            refused.append(error)

    with provider._plans[torch.float32, SIZE].call:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "two threads" in str(refused[0])

    # A fork, which has the plan, and whose peers wait for the rank itself.
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            provider.all_reduce(x, torch.empty(SIZE))
        except ChannelError as error:
            status = 0 if "fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gpu.calls == before

    works(group)
    group.destroy()
    before = dict(gpu.calls)
    for call in (lambda: group.all_reduce(x), lambda: provider.all_reduce(x, torch.empty(SIZE))):
        with pytest.raises(ChannelError, match="destroyed"):
            call()
    assert gpu.calls == before
    anew = gpu.group(copy_engine_max_bytes=SLOT // 2)
    works(anew)
    anew.destroy()


def test_what_is_prepared_is_of_no_use_to_other_threads_forks_and_destroyed_groups() -> None:
    run_ranks(_elsewhere, 2)


def _more_than_are_kept(rank: int) -> None:
    gpu = SimulatedGpu(rank, pause_s=0)
    copy_engine._MAX_PLANS = 5
    group = gpu.group()
    for size in [*range(1, 14), 3, 0, 13, 3]:
        parts = inputs(size, 2, (size,), torch.float32)
        with gpu.computing():
            result = group.all_reduce(parts[rank])
        torch.cuda.synchronize()
        assert torch.equal(result, expected_sum(parts)), size
    provider = group._choose("all_reduce", torch.ones(1))
    assert isinstance(provider, CopyEngineProvider)
    assert len(provider._plans) <= 5
    group.destroy()


def test_more_sizes_than_are_kept_are_prepared_anew() -> None:
    run_ranks(_more_than_are_kept, 2)

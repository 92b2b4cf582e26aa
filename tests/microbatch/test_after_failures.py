"""What an executor knows must be the same on all ranks again once a failure is over; and its ends: close, fork."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
from rank_harness import run_ranks
from test_executor import RowwiseModel, make_batch, make_group

from tpoverlap.config import OverlapConfig
from tpoverlap.errors import ChannelError, CollectiveAbortedError, TpOverlapError
from tpoverlap.microbatch import Batch, MicroBatchExecutor
from tpoverlap.microbatch.cpu_lane import CpuCommLane
from tpoverlap.microbatch.split_run import SplitRun
from tpoverlap.microbatch.worker import Worker


class Planted(Exception):
    pass


def _run_until_it_fails(executor: MicroBatchExecutor, model: RowwiseModel) -> None:
    executor.run(model, make_batch(400))
    while True:
        executor.run(model, make_batch(4))


def _late_failure(rank: int, resets_itself: bool) -> list[int]:
    group = make_group(emulate_link_gbps=0.0005)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=4))
    model = RowwiseModel(group)

    def fails_at_the_end(batch: Batch) -> torch.Tensor:
        model(batch)
        raise Planted

    if rank == 1:
        with pytest.raises(Planted):
            executor.run(fails_at_the_end, make_batch(400))
    else:
        # Every collective of its first run was made: rank 0 has seen the size, rank 1 has not.
        with pytest.raises(CollectiveAbortedError):
            _run_until_it_fails(executor, model)
    if resets_itself:
        group.reset()
    counts = []
    for _ in range(5):
        executor.run(model, make_batch(400))
        counts.append(executor.stats.num_pieces)
    group.destroy()
    return counts


@pytest.mark.parametrize("resets_itself", [False, True], ids=["the executor resets", "the caller resets"])
def test_ranks_choose_alike_after_a_failure_that_only_one_of_them_met(resets_itself: bool) -> None:
    first, second = run_ranks(_late_failure, 2, resets_itself)
    assert first == second
    assert first[:2] == [2, 2]


def _closed(rank: int) -> None:
    group = make_group(emulate_link_gbps=0.0005)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=4))
    model = RowwiseModel(group)
    expected = model(make_batch(400))
    for _ in range(4):
        assert torch.equal(executor.run(model, make_batch(400)), expected)
        executor.close()
        assert executor.stats.num_collectives > 0
    executor.close()
    group.destroy()


def test_a_closed_executor_tells_its_last_run_and_runs_again() -> None:
    run_ranks(_closed, 2)


def _forked(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=4))
    executor.run(RowwiseModel(group), make_batch(400))
    pid = os.fork()
    if pid == 0:
        try:
            executor.run(RowwiseModel(group), make_batch(400))
        except ChannelError as e:
            os._exit(7 if "fork" in str(e) else 1)
        except TpOverlapError:
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    group.destroy()


def test_a_forked_child_is_refused_at_once() -> None:
    run_ranks(_forked, 2, timeout_s=30)


def test_a_run_that_cannot_start_all_its_pieces_settles() -> None:
    workers = [Worker("first"), Worker("second")]
    workers[1].start = lambda task: (_ for _ in ()).throw(Planted())  # type: ignore[method-assign]
    lane = CpuCommLane("lane")
    run = SplitRun(workers, lane)
    with pytest.raises(Planted):
        run.execute(lambda batch: torch.zeros(1), [make_batch(4), make_batch(4)], lambda piece: nullcontext())
    settled = threading.Thread(target=run.settle, daemon=True)
    settled.start()
    settled.join(10)
    assert not settled.is_alive()
    lane.close()
    workers[0].close()


def _freed(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=4))
    large: list[weakref.ref[torch.Tensor]] = []

    def fails(batch: Batch) -> torch.Tensor:
        activations = torch.zeros(1000)
        large.append(weakref.ref(activations))
        raise Planted

    gc.disable()
    try:
        with suppress(Planted):
            executor.run(fails, make_batch(400))
        assert large
        assert all(ref() is None for ref in large)
    finally:
        gc.enable()
    group.destroy()


def test_a_failed_run_keeps_no_activations() -> None:
    run_ranks(_freed, 2)

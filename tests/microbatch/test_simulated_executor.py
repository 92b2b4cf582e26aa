"""The executor's CUDA lane and the copy engines on simulated GPUs: bits, failures and times, however streams get on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
from faults import Faulty, random_faults
from rank_harness import run_ranks
from simulated_gpu import SimulatedGpu

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.microbatch import Batch, MicroBatchExecutor
from tpoverlap.microbatch.cuda_lane import CudaCommLane, CudaPending

HIDDEN, LAYERS = 32, 6


def make_batch(num_tokens: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        inputs_embeds=torch.randn(num_tokens, HIDDEN, generator=generator),
        positions=torch.arange(num_tokens),
        query_start_loc=[0, num_tokens // 3, num_tokens],
        seq_lens=[num_tokens // 3, num_tokens - num_tokens // 3],
        block_table=torch.zeros(2, 4, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens),
    )


class Stack:
    """Row by row. In a first pass pieces also leave their rows in a cache, which later pieces read."""

    def __init__(self, gpu: SimulatedGpu, group: GroupCoordinator, num_tokens: int) -> None:
        self.gpu = gpu
        self.group = group
        self.cache = torch.zeros(LAYERS, num_tokens, HIDDEN)

    def __call__(self, batch: Batch) -> torch.Tensor:
        with self.gpu.computing():
            x, tokens = batch.inputs_embeds, batch.positions
            assert x is not None
            assert tokens is not None
            for layer in range(LAYERS):
                partial = torch.sin(x * (layer + 1)) * (0.5 + 0.25 * self.group.rank)
                self.cache[layer, int(tokens[0]) : int(tokens[-1]) + 1] = partial
                # Half of each row comes from the token before it, which may be another piece's.
                before = self.cache[layer, (tokens - 1).clamp(min=0)]
                y = self.group.all_reduce(partial + 0.5 * before)
                x = torch.tanh(x + y)
                y.fill_(float("nan"))  # a collective's result is the caller's
            return x


def _reference(batch: Batch, n: int) -> torch.Tensor:
    x = batch.inputs_embeds
    assert x is not None
    before = (torch.arange(len(x)) - 1).clamp(min=0)
    for layer in range(LAYERS):
        parts = []
        for rank in range(n):
            partial = torch.sin(x * (layer + 1)) * (0.5 + 0.25 * rank)
            parts.append(partial + 0.5 * partial[before])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        x = torch.tanh(x + total)
    return x


def _random_batches(rank: int, batches: int) -> int:
    gpu, n = SimulatedGpu(rank), dist.get_world_size()
    group = gpu.group(copy_engine_max_bytes=64 << 10)
    split = 0
    for seed in range(batches):
        rng = random.Random(seed)
        batch = make_batch(rng.choice([3, 40, 100, 300]), seed)
        config = OverlapConfig(min_tokens=1, num_pieces=rng.choice([2, 3, 4]), cut_multiple=rng.choice([1, 16]))
        executor = MicroBatchExecutor(group, config)
        gpu.current = rng.choice([gpu.default, gpu.new_stream()])
        for _ in range(2):
            model = Stack(gpu, group, batch.num_tokens)
            with torch.inference_mode(), gpu.computing():
                output = executor.run(model, batch)
            torch.cuda.synchronize()
            assert torch.equal(output, _reference(batch, n)), (seed, executor.stats.piece_tokens)
        split += executor.stats.bypass_reason is None
        stats = executor.stats
        assert stats.num_collectives == LAYERS * stats.num_pieces
        for kind in ("compute", "communication"):
            spans = sorted((i.start_s, i.end_s) for i in stats.intervals if i.kind == kind)
            assert all(start_s <= end_s + 1e-6 for start_s, end_s in spans), kind
            assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans)), kind
        executor.close()
    group.destroy()
    return split


@pytest.mark.parametrize("n", [2, 3])
def test_pieces_give_the_bits_of_the_whole_batch(n: int) -> None:
    for split in run_ranks(_random_batches, n, 15, timeout_s=100):
        assert split > 10


def _faults(rank: int, cases: int) -> dict[str, int]:
    gpu = SimulatedGpu(rank)
    group = gpu.group()
    forward = Faulty.__call__

    def on_the_gpu(self: Faulty, batch: Batch) -> torch.Tensor:
        with gpu.computing():
            return forward(self, batch)

    faults.Faulty.__call__ = on_the_gpu  # type: ignore[method-assign]
    with gpu.computing():
        seen = random_faults(group, make_batch(60, 1), cases)
    group.destroy()
    return seen


@pytest.mark.parametrize(("n", "cases"), [(2, 100), (3, 40)])
def test_faults_end_a_run_everywhere_and_the_next_is_right(n: int, cases: int) -> None:
    assert min(run_ranks(_faults, n, cases, timeout_s=100)[0].values()) > 0


def _operations_of_the_lane(rank: int) -> int:
    gpu = SimulatedGpu(rank)
    group = gpu.group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1))
    batch, other = make_batch(100, 0), make_batch(120, 1)

    def sequence_parallel(piece: Batch) -> torch.Tensor:
        assert piece.inputs_embeds is not None
        with gpu.computing():
            return group.all_gather(group.reduce_scatter(piece.inputs_embeds * 2.0, -1), -1)

    with torch.inference_mode(), gpu.computing():
        output = executor.run(Stack(gpu, group, batch.num_tokens), batch)
        scattered = executor.run(sequence_parallel, other)
    torch.cuda.synchronize()
    n = dist.get_world_size()
    assert torch.equal(output, _reference(batch, n))
    assert other.inputs_embeds is not None
    assert torch.equal(scattered, other.inputs_embeds * 2 * n)
    assert isinstance(executor._lane, CudaCommLane)
    operations = sum(gpu.operations.get(stream.cuda_stream, 0) for stream in executor._lane._streams)
    group.destroy()
    return operations


def test_nothing_on_the_lane_of_two_ranks_needs_a_multiprocessor() -> None:
    """A kernel there would wait until those beside it leave one free, and the next transfer behind it."""
    assert run_ranks(_operations_of_the_lane, 2) == [0, 0]
    assert min(run_ranks(_operations_of_the_lane, 4)) > 0  # what the count would show


def _moments_of_collectives_that_pass_each_other(rank: int) -> None:
    SimulatedGpu(rank, pause_s=2e-3)
    lane = CudaCommLane(torch.device("cuda", 0))
    lane.begin_run()
    ready = lane.now()
    pending = [lane.submit(lambda: None, ready, lambda: False) for _ in range(40)]
    own = [lane.seconds(one._event) for one in pending]
    assert any(first > second for first, second in itertools.pairwise(own))  # what this is about
    spans = [(lane.seconds(one.start), lane.seconds(one.end)) for one in pending]
    assert all(start_s <= end_s for start_s, end_s in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    lane.close()


def test_collectives_whose_events_pass_each_other_end_in_their_order() -> None:
    run_ranks(_moments_of_collectives_that_pass_each_other, 1)


# What the simulation would show


def _without_wait_for_the_result(pending: CudaPending) -> Any:
    return pending._held[1]


def _without_wait_for_compute(lane: CudaCommLane, launch: Callable[[], Any], ready: Any, cancelled: Any) -> CudaPending:
    lane._streams = lane._streams[::-1]
    with torch.cuda.stream(lane._streams[0]):
        result = launch()
    return CudaPending(lane, launch, result, ready, (lane._record(lane._streams[0]),))


PLANTED: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "compute goes on before the collective has ended": (CudaPending, "result", _without_wait_for_the_result),
    "the collective begins before its input is there": (CudaCommLane, "submit", _without_wait_for_compute),
}


def _with_a_fault(rank: int, fault: str) -> bool:
    owner, name, function = PLANTED[fault]
    setattr(owner, name, function)
    gpu = SimulatedGpu(rank, pause_s=2e-3)
    group = gpu.group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1))
    batch = make_batch(100, 0)
    with torch.inference_mode(), gpu.computing():
        output = executor.run(Stack(gpu, group, batch.num_tokens), batch)
    torch.cuda.synchronize()
    wrong = not torch.equal(output, _reference(batch, 2))
    group.destroy()
    return wrong


@pytest.mark.parametrize("fault", PLANTED)
def test_faults_in_the_order_are_seen(fault: str) -> None:
    assert any(run_ranks(_with_a_fault, 2, fault))

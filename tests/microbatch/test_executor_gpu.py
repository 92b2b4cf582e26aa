"""The executor on CUDA ranks: bits, order on the streams, exceptions, measurements. Ranks share the GPUs there are."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

import pytest
import torch
from gpu_group import make_group
from rank_harness import run_ranks
from test_executor import LAYERS, Planted

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import CollectiveAbortedError
from tpoverlap.microbatch import Batch, MicroBatchExecutor

pytestmark = pytest.mark.gpu
HIDDEN = 1024


def cuda_batch(num_tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Batch:
    generator = torch.Generator("cuda").manual_seed(seed)
    return Batch(
        inputs_embeds=torch.randn(num_tokens, HIDDEN, generator=generator, device="cuda").to(dtype),
        positions=torch.arange(num_tokens, device="cuda"),
        query_start_loc=[0, num_tokens // 3, num_tokens],
        seq_lens=[num_tokens // 3, num_tokens - num_tokens // 3],
        block_table=torch.zeros(2, 4, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.arange(num_tokens, device="cuda"),
    )


class LayerStack:
    """Row by row in a fixed order of operations, with temporaries that the allocator hands out again at once."""

    def __init__(self, group: GroupCoordinator, layers: int = 12) -> None:
        self.group = group
        self.layers = layers

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = batch.inputs_embeds
        assert x is not None
        for layer in range(self.layers):
            partial = torch.sin(x * (layer + 1)) * (0.5 + 0.25 * self.group.rank)
            noise = torch.full_like(x, float("nan"))
            y = self.group.all_reduce(partial)
            del partial, noise
            scratch = torch.empty_like(x).fill_(float("inf"))
            x = torch.tanh(x + y)
            del y, scratch
        return x


def _split_equals_whole(rank: int, batches: int) -> None:
    group = make_group()
    model = LayerStack(group)
    side = torch.cuda.Stream()
    for seed in range(batches):
        rng = random.Random(seed)
        # Small ones go through kernel mode, large ones through the copy engines, and pieces mix them.
        batch = cuda_batch(rng.choice([40, 100, 300, 1600, 2500]), seed)
        config = OverlapConfig(min_tokens=1, num_pieces=rng.choice([2, 3, 4]), cut_multiple=rng.choice([1, 16]))
        executor = MicroBatchExecutor(group, config)
        with torch.inference_mode():
            expected = model(batch)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if seed % 2 else torch.cuda.current_stream()):
                got = executor.run(model, batch)
                again = executor.run(model, batch)
            torch.cuda.synchronize()
        assert torch.equal(got, expected), seed
        assert torch.equal(again, expected), seed
        assert not bool(got.isnan().any())
        executor.close()
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_pieces_give_the_bits_of_the_whole_batch(world_size: int) -> None:
    run_ranks(_split_equals_whole, world_size, 25, timeout_s=110)


def _measurements(rank: int) -> None:
    group = make_group()
    batch = cuda_batch(2048, 0)
    for num_pieces in (2, 3):
        executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=num_pieces, cut_multiple=1))
        executor.run(LayerStack(group), batch)
        stats = executor.stats
        assert stats.num_pieces == num_pieces
        assert stats.num_collectives == 12 * num_pieces
        assert stats.collective_bytes == 12 * 2048 * HIDDEN * 2
        assert stats.compute_s > 0
        assert stats.communication_s > 0
        assert stats.exposed_s >= 0
        by_kind: dict[str, list[tuple[float, float]]] = {}
        for i in stats.intervals:
            assert i.end_s >= i.start_s - 1e-5
            by_kind.setdefault(i.kind, []).append((i.start_s, i.end_s))
        # One stream each: neither computes nor communicates twice at a time.
        for kind in ("compute", "communication"):
            spans = sorted(by_kind[kind])
            assert all(a[1] <= b[0] + 1e-4 for a, b in itertools.pairwise(spans)), kind
        executor.close()
    group.destroy()


def test_times_come_from_the_streams() -> None:
    run_ranks(_measurements, 2)


class FailingStack(LayerStack):
    """Raises before the collective of that number, counted over all pieces."""

    def __init__(self, group: GroupCoordinator, at: int | None) -> None:
        super().__init__(group, LAYERS)
        self.at = at
        self.calls = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = batch.inputs_embeds
        assert x is not None
        for _ in range(self.layers):
            if self.calls == self.at:
                raise Planted("here")
            self.calls += 1
            x = torch.tanh(x + self.group.all_reduce(x))
        return x


def _run_again_and_again(executor: MicroBatchExecutor, model: LayerStack, batch: Batch) -> None:
    for _ in range(1000):
        executor.run(model, batch)


def _failures(rank: int, cases: int) -> None:
    group = make_group()
    batch = cuda_batch(1000, 1)
    model = LayerStack(group, LAYERS)
    expected = model(batch)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1))
    for case in range(cases):
        rng = random.Random(case)
        culprit, at = rng.randrange(2), rng.randrange(2 * LAYERS)
        if rank == culprit:
            with pytest.raises(Planted, match="here"):
                executor.run(FailingStack(group, at), batch)
        else:
            # The device may still be working when run returns: then the next call tells.
            with pytest.raises(CollectiveAbortedError, match=f"Planted on rank {culprit}"):
                _run_again_and_again(executor, FailingStack(group, None), batch)
        assert torch.equal(executor.run(model, batch), expected), case
    group.destroy()


def test_an_exception_releases_the_streams_and_the_next_run_is_right() -> None:
    run_ranks(_failures, 2, 20, timeout_s=110)


def _eager_decode_is_not_measured(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1))
    decode = Batch(
        inputs_embeds=torch.randn(3, HIDDEN, device="cuda"),
        positions=torch.arange(3, device="cuda"),
        query_start_loc=[0, 1, 2, 3],
        seq_lens=[5, 6, 7],
        block_table=torch.zeros(3, 4, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.arange(3, device="cuda"),
    )
    executor.run(LayerStack(group), decode)
    assert executor.stats.bypass_reason == "decode_only"
    assert executor.stats.intervals == []
    static = cuda_batch(64, 3)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = executor.run(LayerStack(group), static)
    assert executor.stats.bypass_reason == "captured"
    assert executor.run_counts == {"decode_only": 1, "captured": 1}
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, LayerStack(group)(static))
    group.destroy()


def test_decode_and_captured_batches_run_whole_and_unmeasured() -> None:
    run_ranks(_eager_decode_is_not_measured, 2)


def _small_steps_are_not_measured_either(rank: int, min_tokens: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=min_tokens))
    model = LayerStack(group)
    static = cuda_batch(64, 3)
    model(static)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # the executor's first run
        captured = executor.run(model, static)
    assert executor.stats.intervals == []
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, model(static))
    executor.run(
        model,
        dataclasses.replace(
            static,
            query_start_loc=list(range(65)),
            seq_lens=[1] * 64,
            block_table=torch.zeros(64, 4, dtype=torch.int32, device="cuda"),
        ),
    )
    assert executor.stats.intervals == []
    executor.run(model, static)  # a short prefill is measured
    assert executor.stats.num_collectives == 12
    assert executor.stats.communication_s > 0
    del graph
    group.destroy()


@pytest.mark.parametrize("min_tokens", [0, 1000])
def test_steps_below_min_tokens_may_be_captured_and_cost_nothing_more(min_tokens: int) -> None:
    run_ranks(_small_steps_are_not_measured_either, 2, min_tokens)


def _clock(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1))
    model, batch = LayerStack(group), cuda_batch(2048, 0)
    spans = []
    for _ in range(6):
        started_s = time.perf_counter()
        executor.run(model, batch)
        torch.cuda.synchronize()
        ended_s = time.perf_counter()
        intervals = executor.stats.intervals
        spans.append((min(i.start_s for i in intervals) - started_s, ended_s - max(i.end_s for i in intervals)))
    # Device moments lie between those of the host, whichever run they are of, and whatever was recycled in between.
    assert all(before > -2e-3 and after > -2e-3 for before, after in spans[2:]), spans
    group.destroy()


def test_device_times_stay_on_the_hosts_clock_from_run_to_run() -> None:
    run_ranks(_clock, 2)

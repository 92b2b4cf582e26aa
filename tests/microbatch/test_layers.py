"""Kinds of layers under the executor on CPU ranks: paged attention, sequence parallelism, mixture of experts."""

from __future__ import annotations

import math as mathlib
import random

import pytest
import torch
import torch.distributed as dist
from layer_models import ExactMath, ExpertModel, Math, PagedModel, SequenceParallelModel, Trace, random_batch, turns
from rank_harness import run_ranks
from test_executor import make_group

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import CollectiveAbortedError, CollectiveMismatchError
from tpoverlap.microbatch import MicroBatchExecutor

ATTENTION_AND_MLP = ["all_reduce"] * 4
GATHERED = ["all_gather", "reduce_scatter"] * 2 + ["all_gather"]


def compare_random_batches(group: GroupCoordinator, math: Math, first_seed: int, batches: int) -> int:
    """Random batches in pieces against the same ones whole: outputs, caches and the order of the pieces' collectives.

    Returns how many had more than one piece.
    """
    model = PagedModel(group, math, seed=first_seed)
    executors: dict[tuple[object, ...], MicroBatchExecutor] = {}
    split = 0
    for seed in range(first_seed, first_seed + batches):
        rng = random.Random(seed)
        batch = random_batch(seed, math)
        key = num_pieces, multiple, block, position = (
            rng.choice([2, 3, 4]),
            rng.choice([1, 4, 32]),
            rng.choice([None, None, 16]),
            rng.choice([mathlib.inf, 50.0]),
        )
        if key not in executors:
            config = OverlapConfig(min_tokens=1, num_pieces=num_pieces, cut_multiple=multiple)
            executors[key] = MicroBatchExecutor(group, config, state_block=block, balance_position=position)
        executor = executors[key]
        model.forget(batch)
        model.trace = trace = Trace()
        got = executor.run(model, batch)
        pieces = executor.stats.num_pieces
        assert trace.steps == turns(pieces, ATTENTION_AND_MLP), seed
        split += pieces > 1
        written = [c.clone() for cache in model.caches for c in cache]
        model.forget(batch)
        whole = model(batch)
        assert torch.equal(got, whole), f"seed {seed}, {pieces} pieces"
        assert len(got.unique()) > 8
        for a, b in zip(written, (c for cache in model.caches for c in cache), strict=True):
            assert torch.equal(a, b), f"seed {seed}, {pieces} pieces: caches"
    for executor in executors.values():
        executor.close()
    return split


def _paged(rank: int, batches: int, first_seed: int) -> int:
    group = make_group()
    split = compare_random_batches(group, ExactMath(), first_seed, batches)
    group.destroy()
    return split


@pytest.mark.parametrize("world_size", [2, 3])
def test_continued_requests_read_what_earlier_pieces_wrote(world_size: int) -> None:
    batches = {2: 150, 3: 50}[world_size]
    assert min(run_ranks(_paged, world_size, batches, 7_000 * world_size)) > 0.7 * batches


def _gathered(rank: int, kind: type[SequenceParallelModel], batches: int) -> int:
    group = make_group()
    exact, n = ExactMath(), dist.get_world_size()
    several = 0
    for seed in range(batches):
        rng = random.Random(seed)
        uneven = bool(seed % 2)
        model = kind(group, exact, seed, uneven=uneven)
        batch = random_batch(seed, exact, multiple=1 if uneven else n)
        config = OverlapConfig(
            min_tokens=1, num_pieces=rng.choice([2, 3]), cut_multiple=rng.choice([1, 5] if uneven else [n, 4 * n])
        )
        executor = MicroBatchExecutor(group, config)
        model.trace = trace = Trace()
        got = executor.run(model, batch)
        stats = executor.stats
        assert trace.steps == turns(stats.num_pieces, GATHERED), seed
        assert stats.num_collectives == len(trace.steps)
        names = [i.name for i in stats.intervals if i.kind == "communication" and i.piece == 0]
        assert names == GATHERED
        several += stats.num_pieces > 1
        assert torch.equal(got, model(batch)), seed
        executor.close()
    group.destroy()
    return several


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", [SequenceParallelModel, ExpertModel])
def test_gathered_and_scattered_layers_take_turns_too(kind: type[SequenceParallelModel], world_size: int) -> None:
    assert min(run_ranks(_gathered, world_size, kind, 30)) > 15


def _does_not_divide(rank: int) -> None:
    group = make_group()
    exact = ExactMath()
    model = SequenceParallelModel(group, exact, seed=3)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=2))
    odd = next(batch for seed in range(20) if (batch := random_batch(seed, exact)).num_tokens % 2)
    even = random_batch(0, exact, multiple=2)
    assert even.num_tokens > 4
    # The last piece has an odd number of tokens; its ranks hold shares of different sizes.
    with pytest.raises((CollectiveMismatchError, CollectiveAbortedError), match="all_gather float32"):
        executor.run(model, odd)
    assert torch.equal(executor.run(model, even), model(even))
    with pytest.raises((ValueError, CollectiveAbortedError), match="divides by 2 ranks"):
        executor.run(lambda piece: group.reduce_scatter(piece.inputs_embeds, 0), odd)  # type: ignore[arg-type]
    assert torch.equal(executor.run(model, even), model(even))
    group.destroy()


def test_tokens_that_do_not_divide_among_the_ranks_are_an_error() -> None:
    run_ranks(_does_not_divide, 2)

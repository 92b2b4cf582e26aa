"""The executor on CPU ranks: values, order of execution, exceptions, thread state, statistics."""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import random_faults
from rank_harness import run_ranks

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig, OverlapConfig
from tpoverlap.errors import CollectiveAbortedError, PieceMismatchError, UnsupportedError
from tpoverlap.microbatch import Batch, MicroBatchExecutor

LAYERS = 4


def make_batch(num_tokens: int, seed: int = 0, **fields: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        inputs_embeds=torch.randn(num_tokens + fields.get("num_padding_tokens", 0), 16, generator=generator),
        positions=torch.arange(num_tokens + fields.get("num_padding_tokens", 0)),
        query_start_loc=[0, num_tokens // 3, num_tokens],
        seq_lens=[num_tokens // 3, num_tokens - num_tokens // 3],
        block_table=torch.zeros(2, 4, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens + fields.get("num_padding_tokens", 0)),
        **fields,  # type: ignore[arg-type]
    )


class RowwiseModel:
    """Every row is computed by itself in a fixed order, so that cutting a batch cannot change a bit."""

    def __init__(self, group: GroupCoordinator, on_collective: Callable[[int, Batch], None] | None = None) -> None:
        self.group = group
        self.on_collective = on_collective or (lambda layer, batch: None)

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = batch.inputs_embeds
        assert x is not None
        for layer in range(LAYERS):
            self.on_collective(layer, batch)
            x = torch.sin(x * (layer + 1)) + self.group.all_reduce(x * (self.group.rank + 1) * 0.25)
        return x


def make_group(timeout_s: float = 20.0, **options: float) -> GroupCoordinator:
    return GroupCoordinator(
        range(dist.get_world_size()), dist.get_rank(), "cpu", HostReduceConfig(timeout_s=timeout_s), **options
    )


def _split_equals_whole(rank: int) -> None:
    group = make_group()
    model = RowwiseModel(group)
    for seed in range(40):
        rng = random.Random(seed)
        batch = make_batch(rng.randrange(8, 200), seed)
        config = OverlapConfig(min_tokens=1, num_pieces=rng.choice([2, 3, 4]), cut_multiple=rng.choice([1, 4]))
        executor = MicroBatchExecutor(group, config, state_block=rng.choice([None, 16]))
        with torch.inference_mode():
            assert torch.equal(executor.run(model, batch), model(batch)), f"seed {seed}"
        executor.close()
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces_give_the_bits_of_the_whole_batch(world_size: int) -> None:
    run_ranks(_split_equals_whole, world_size)


def _trace(rank: int, num_pieces: int) -> None:
    group = make_group()
    trace: list[str] = []
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=num_pieces, cut_multiple=1))
    first_token = {}

    def on_collective(layer: int, batch: Batch) -> None:
        trace.append(f"piece {first_token.setdefault(int(batch.positions[0]), len(first_token))} layer {layer}")

    @contextmanager
    def piece_context(piece: Batch) -> Iterator[None]:
        trace.append("enter")
        yield
        trace.append("leave")

    executor.run(RowwiseModel(group, on_collective), make_batch(12), piece_context=piece_context)
    expected = []
    for layer in range(LAYERS):
        for k in range(num_pieces):
            expected += ["enter", f"piece {k} layer {layer}", "leave"]
    expected += ["enter", "leave"] * num_pieces
    assert trace == expected
    stats = executor.stats
    assert stats.num_pieces == num_pieces
    assert stats.bypass_reason is None
    assert stats.num_collectives == LAYERS * num_pieces
    assert stats.collective_bytes == LAYERS * 12 * 16 * 4
    group.destroy()


@pytest.mark.parametrize("num_pieces", [2, 3, 4])
def test_pieces_take_turns_at_every_collective(num_pieces: int) -> None:
    run_ranks(_trace, 2, num_pieces)


def _bypasses(rank: int) -> None:
    group = make_group()
    model = RowwiseModel(group)
    decode = Batch(
        inputs_embeds=torch.randn(3, 16, generator=torch.Generator().manual_seed(1)),
        positions=torch.arange(3),
        query_start_loc=[0, 1, 2, 3],
        seq_lens=[5, 6, 7],
        block_table=torch.zeros(3, 4, dtype=torch.int32),
        slot_mapping=torch.arange(3),
    )
    for reason, batch, config in [
        ("off", make_batch(64), OverlapConfig()),
        ("below_min_tokens", make_batch(63), OverlapConfig(min_tokens=64)),
        ("draft_tokens", make_batch(64, num_draft_tokens=2), OverlapConfig(min_tokens=1)),
        ("padded", make_batch(62, num_padding_tokens=2), OverlapConfig(min_tokens=1)),
        ("decode_only", decode, OverlapConfig(min_tokens=1)),
        ("no_valid_cut", make_batch(40), OverlapConfig(min_tokens=1, cut_multiple=128)),
        (None, make_batch(300), OverlapConfig(min_tokens=1, cut_multiple=128)),
    ]:
        executor = MicroBatchExecutor(group, config)
        output = executor.run(model, batch)
        assert torch.equal(output, model(batch))
        assert executor.stats.bypass_reason == reason
        assert executor.stats.num_collectives == LAYERS * (1 if reason else 2)
        executor.close()
    group.destroy()


def test_batches_that_run_whole_say_why() -> None:
    run_ranks(_bypasses, 2)


def _bypass_counts(rank: int) -> None:
    group = make_group()
    model = RowwiseModel(group)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=32, num_pieces=2, cut_multiple=16))
    one_token_each = Batch(
        inputs_embeds=torch.randn(40, 16),
        positions=torch.arange(40),
        query_start_loc=list(range(41)),
        seq_lens=[9] * 40,
        block_table=torch.zeros(40, 1, dtype=torch.int32),
        slot_mapping=torch.arange(40),
    )
    assert executor.run_counts == {}
    small, large = make_batch(31), make_batch(32)
    for batch in (small, large, make_batch(40, num_draft_tokens=1), small, one_token_each, large, small, large, large):
        executor.run(model, batch)
    executor.run(model, make_batch(40, num_padding_tokens=3))
    assert executor.run_counts == {
        "split": 4,
        "below_min_tokens": 3,
        "draft_tokens": 1,
        "decode_only": 1,
        "padded": 1,
    }
    assert sum(executor.run_counts.values()) == 10
    # A run that fails counts too, but not one that does not begin because a peer has failed before.
    with pytest.raises((ZeroDivisionError, CollectiveAbortedError)) as caught:
        executor.run(lambda batch: 1 // 0, large)  # type: ignore[arg-type,return-value]
    executor.run(model, large)
    assert executor.run_counts["split"] == (6 if caught.type is ZeroDivisionError else 5)
    coarse = MicroBatchExecutor(group, OverlapConfig(min_tokens=32, cut_multiple=128))
    off = MicroBatchExecutor(group)
    alone = MicroBatchExecutor(GroupCoordinator([dist.get_rank()], rank, "cpu"), OverlapConfig(min_tokens=1))
    for reason, other in {"no_valid_cut": coarse, "off": off, "world_size_1": alone}.items():
        for _ in range(3):
            other.run(model, large)
        assert other.run_counts == {reason: 3}
    group.destroy()


def test_runs_are_counted_by_what_became_of_them() -> None:
    run_ranks(_bypass_counts, 2)


def _state(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1))
    seen = []

    def forward(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        x = group.all_reduce(batch.inputs_embeds)
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                threading.current_thread().name,
            )
        )
        return x, batch.positions

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        out, positions = executor.run(forward, make_batch(10))
    assert out.is_inference()
    assert positions.tolist() == list(range(10))
    with torch.no_grad():
        executor.run(forward, make_batch(10))
    # A model that enters inference mode by itself.
    model = RowwiseModel(group)
    assert torch.equal(executor.run(torch.inference_mode()(model), make_batch(10)), model(make_batch(10)))
    assert seen[0][:4] == seen[1][:4] == (False, True, True, torch.bfloat16)
    assert seen[2][:3] == seen[3][:3] == (False, False, False)
    assert {s[4] for s in seen} == {"tpoverlap-piece-0", "tpoverlap-piece-1"}
    # Both ranks fail: the slower one may see the other's abort first, with the same words in it.
    with pytest.raises((UnsupportedError, CollectiveAbortedError), match="a tensor, or a tuple"):
        executor.run(lambda batch: {"x": group.all_reduce(batch.inputs_embeds)}, make_batch(10))  # type: ignore[arg-type,return-value]
    group.destroy()


def test_workers_take_over_the_callers_state_and_outputs_are_joined() -> None:
    run_ranks(_state, 2)


class Planted(Exception):
    pass


class Plan:
    """Where an exception is planted: before which collective (or after the last) of which piece."""

    def __init__(self, case: int, piece: int, layer: int) -> None:
        self.case, self.piece, self.layer = case, piece, layer
        self.order: list[int] = []

    def raise_here(self, layer: int, part: Batch) -> None:
        first = int(part.positions[0])
        if first not in self.order:
            self.order.append(first)
        if layer == self.layer and self.order.index(first) == self.piece:
            raise Planted(f"case {self.case}")


class PlantedModel(RowwiseModel):
    def __init__(self, group: GroupCoordinator, plan: Plan | None) -> None:
        super().__init__(group, plan.raise_here if plan else None)
        self.plan = plan

    def __call__(self, batch: Batch) -> torch.Tensor:
        x = super().__call__(batch)
        if self.plan:
            self.plan.raise_here(LAYERS, batch)
        return x


def _failures(rank: int, cases: int) -> None:
    group = make_group()
    batch = make_batch(24)
    expected = RowwiseModel(group)(batch)
    executors = {
        n: MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=n, cut_multiple=1)) for n in (2, 3)
    }
    for case in range(cases):
        rng = random.Random(case)
        executor = executors[num_pieces := rng.choice([2, 3])]
        culprit = rng.randrange(dist.get_world_size())
        plan = Plan(case, piece=rng.randrange(num_pieces), layer=rng.randrange(LAYERS + 1))
        error: BaseException | None = None
        try:
            executor.run(PlantedModel(group, plan if rank == culprit else None), batch)
        except (Planted, CollectiveAbortedError) as e:
            error = e
        if rank == culprit:
            assert isinstance(error, Planted), repr(error)
            assert str(error) == f"case {case}"
            assert "raise_here" in [f.name for f in traceback.extract_tb(error.__traceback__)]
        else:
            if error is None:
                # The run was over before the culprit failed behind its last collective: the next call tells.
                assert plan.layer == LAYERS
                with pytest.raises(CollectiveAbortedError) as caught:
                    executor.run(RowwiseModel(group), batch)
                error = caught.value
            assert isinstance(error, CollectiveAbortedError), f"case {case}: {error!r}"
            assert f"Planted on rank {culprit}" in str(error)
        assert torch.equal(executor.run(RowwiseModel(group), batch), expected), f"case {case}"
    group.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exception_reaches_its_caller_and_the_next_run_works(world_size: int) -> None:
    run_ranks(_failures, world_size, 200, timeout_s=110)


def _random_faults(rank: int, cases: int) -> dict[str, int]:
    group = make_group()
    seen = random_faults(group, make_batch(24), cases)
    group.destroy()
    return seen


def test_memory_shapes_and_failing_collectives_end_a_run_everywhere() -> None:
    assert min(run_ranks(_random_faults, 2, 50, timeout_s=90)[0].values()) > 2


def _failure_of_the_next_run(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1))
    batch = make_batch(12)

    def slow_to_end(part: Batch) -> torch.Tensor:
        x = RowwiseModel(group)(part)
        while rank == 0 and not group.failed:
            time.sleep(0.001)
        return x

    def raise_at_once(part: Batch) -> torch.Tensor:
        raise Planted("in the next run")

    output = executor.run(slow_to_end, batch)
    with pytest.raises(CollectiveAbortedError if rank == 0 else Planted, match="in the next run"):
        executor.run(RowwiseModel(group) if rank == 0 else raise_at_once, batch)
    assert torch.equal(executor.run(RowwiseModel(group), batch), output)
    group.destroy()


def test_a_run_that_is_complete_keeps_its_output_when_a_peer_fails_in_the_next() -> None:
    run_ranks(_failure_of_the_next_run, 2)


def _mismatch(rank: int) -> list[bool]:
    group = make_group()
    own_error = []
    batch = make_batch(12)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=1))
    for counts in [(3, 2), (2, 3), (0, 1), (1, 0), (4, 1)]:

        def forward(part: Batch, counts: tuple[int, int] = counts) -> torch.Tensor:
            x = part.inputs_embeds
            assert x is not None
            for _ in range(counts[0 if int(part.positions[0]) == 0 else 1]):
                x = group.all_reduce(x)
            return x

        with pytest.raises(
            (PieceMismatchError, CollectiveAbortedError), match=r"piece \d ended after \d.*piece \d"
        ) as e:
            executor.run(forward, batch)
        own_error.append(isinstance(e.value, PieceMismatchError))
    assert executor.run(RowwiseModel(group), batch).shape == (12, 16)
    group.destroy()
    return own_error


def test_pieces_with_different_collectives_are_an_error_that_names_both_counts() -> None:
    # Every rank makes the mistake; one that is slower may see the other's abort first, with the same words in it.
    assert all(any(own) for own in zip(*run_ranks(_mismatch, 2), strict=True))


def _interrupt(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, cut_multiple=1))
    batch = make_batch(12)
    # Rank 1 is late, so that rank 0 is inside a collective when the signal comes.
    main = threading.main_thread()
    if rank == 0:
        threading.Timer(0.3, lambda: signal.pthread_kill(main.ident, signal.SIGINT)).start()  # type: ignore[arg-type]
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            executor.run(RowwiseModel(group), batch)
        assert time.monotonic() - started < 2
    else:
        time.sleep(0.8)
        with pytest.raises(CollectiveAbortedError, match="KeyboardInterrupt on rank 0"):
            executor.run(RowwiseModel(group), batch)
    assert executor.run(RowwiseModel(group), batch).shape == (12, 16)
    group.destroy()


def test_an_interrupt_reaches_the_caller_and_the_peers_raise() -> None:
    run_ranks(_interrupt, 2)


def _overlap(rank: int) -> float:
    # 64 KiB at 2 MB/s: 32 ms a collective in each of two halves, against 30 ms of sleeping "compute" a half.
    group = make_group(emulate_link_gbps=0.00105)
    batch = make_batch(1024)

    def forward(part: Batch) -> torch.Tensor:
        x = part.inputs_embeds
        assert x is not None
        for _ in range(3):
            time.sleep(0.03 * part.num_tokens / 512)
            x = group.all_reduce(x)
        return x

    walls = {}
    for name, config in {"whole": OverlapConfig(), "pieces": OverlapConfig(min_tokens=1)}.items():
        executor = MicroBatchExecutor(group, config)
        executor.run(forward, batch)
        stats = executor.stats
        walls[name] = stats.wall_s
        if name == "whole":
            assert stats.exposed_s == pytest.approx(stats.communication_s)
        else:
            assert stats.exposed_s < 0.6 * stats.communication_s
        executor.close()
    group.destroy()
    return walls["pieces"] / walls["whole"]


def test_communication_hides_behind_the_other_piece() -> None:
    # Sleeping needs no core, so this holds on a busy machine: the ideal is 7 / 12.
    assert max(run_ranks(_overlap, 2)) < 0.85


def test_an_executor_that_never_cuts_says_so(caplog: pytest.LogCaptureFixture) -> None:
    group: Any = SimpleNamespace(device=torch.device("cpu"), rank_in_group=0, generation=0)
    with caplog.at_level("INFO", "tpoverlap"):
        MicroBatchExecutor(group, OverlapConfig(min_tokens=1))
        assert not caplog.messages
        MicroBatchExecutor(group)
    assert "OverlapConfig(min_tokens=...)" in caplog.text

"""Collectives beside the group's: found in the first split batch wherever they hide; the group's own are left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_harness import run_ranks
from test_engine_features import DENSE
from test_executor import RowwiseModel, make_batch, make_group

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import CollectiveAbortedError, ConfigError, UnsupportedError
from tpoverlap.microbatch import Batch, MicroBatchExecutor
from tpoverlap.microbatch.foreign_collectives import foreign_collective_watch

Layer = Callable[[torch.Tensor], torch.Tensor]
SPLIT = OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1)
_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def operator(name: str, kernel: Layer) -> Layer:
    """torch.ops.tpoverlap_foreign.<name>, the way engines define theirs."""
    library = torch.library.Library("tpoverlap_foreign", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, kernel, "CPU")
    _libraries.append(library)
    return getattr(torch.ops.tpoverlap_foreign, name)  # type: ignore[no-any-return]


def torch_all_reduce(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def functional_all_reduce(x: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))  # type: ignore[no-any-return]


def foreign_layers() -> dict[str, tuple[str, Layer]]:
    """Name of the operator that is found, and a layer that calls it."""
    inner = operator("inner", torch_all_reduce)
    outer = operator("outer", lambda x: inner(x * 2))
    custom = torch.library.custom_op("tpoverlap_foreign::custom", torch_all_reduce, mutates_args=())
    return {
        "torch.distributed": ("c10d::allreduce_", torch_all_reduce),
        "functional": ("_c10d_functional::all_reduce", functional_all_reduce),
        "inside an operator": ("c10d::allreduce_", inner),
        "inside an operator of an operator": ("c10d::allreduce_", outer),
        "inside a custom_op": ("c10d::allreduce_", custom),
    }


def model_with(group: GroupCoordinator, layer: Layer) -> Callable[[Batch], torch.Tensor]:
    def forward(batch: Batch) -> torch.Tensor:
        assert batch.inputs_embeds is not None
        return torch.tanh(group.all_reduce(layer(group.all_reduce(batch.inputs_embeds))))

    return forward


def _found(rank: int) -> None:
    group = make_group()
    batch = make_batch(12)
    for name, (found, layer) in foreign_layers().items():
        executor = MicroBatchExecutor(group, SPLIT)
        whole = MicroBatchExecutor(group, OverlapConfig())
        with torch.inference_mode(name != "functional"):
            # Both ranks find it; one that is slower may see the other's abort first, with the same words in it.
            with pytest.raises((UnsupportedError, CollectiveAbortedError), match=found):
                executor.run(model_with(group, layer), batch)
            # Nothing else is under way beside it in a batch that runs whole.
            assert whole.run(model_with(group, layer), batch).shape == (12, 16)
            # The batch that was refused was not looked through: the next one is again.
            with pytest.raises((UnsupportedError, CollectiveAbortedError), match=found):
                executor.run(model_with(group, layer), batch)
            assert torch.equal(executor.run(RowwiseModel(group), batch), RowwiseModel(group)(batch))
    group.destroy()


def test_a_foreign_collective_is_refused_wherever_it_is_called() -> None:
    run_ranks(_found, 2)


def _allowed(rank: int) -> None:
    group = make_group()
    batch = make_batch(12)
    through_group = operator("through_group", lambda x: group.all_reduce(x))
    local = operator("local", lambda x: x * 2 + 1)
    # The channel does not serve integers: torch.distributed does, for the group.
    integers = operator("integers", lambda x: group.all_reduce((x * 100).long()).float())
    for layer in (through_group, local, integers):
        executor = MicroBatchExecutor(group, SPLIT)
        with torch.inference_mode():
            got = executor.run(model_with(group, layer), batch)
            assert torch.equal(got, model_with(group, layer)(batch))
        assert executor.stats.bypass_reason is None
    assert group.served["torch"] > 0
    group.destroy()


def test_the_groups_collectives_and_local_operators_are_allowed() -> None:
    run_ranks(_allowed, 2)


def _named(rank: int) -> None:
    group = make_group()
    batch = make_batch(12)
    fused = operator("fused_all_reduce_norm", lambda x: x * 2)
    features = dataclasses.replace(
        DENSE, collective_operators=frozenset({"tpoverlap_foreign::fused_all_reduce_norm", "other::one"})
    )
    executor = MicroBatchExecutor(group, SPLIT, features=features)
    with pytest.raises((UnsupportedError, CollectiveAbortedError), match="fused_all_reduce_norm issues a collective"):
        executor.run(model_with(group, fused), batch)
    assert torch.equal(executor.run(RowwiseModel(group), batch), RowwiseModel(group)(batch))
    unnamed = MicroBatchExecutor(group, SPLIT, features=DENSE)
    assert unnamed.run(model_with(group, fused), batch).shape == (12, 16)
    with pytest.raises(ConfigError, match="lora=True"):
        MicroBatchExecutor(group, SPLIT, features=dataclasses.replace(DENSE, lora=True))
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 is not supported with a group of 2"):
        MicroBatchExecutor(group, SPLIT, features=dataclasses.replace(DENSE, tensor_parallel_size=4))
    align = dataclasses.replace(DENSE, recurrent_state_cache_mode="align")
    with pytest.raises(ConfigError, match="'align' is not supported without state_block"):
        MicroBatchExecutor(group, SPLIT, features=align)
    MicroBatchExecutor(group, SPLIT, features=align, state_block=16)
    for name in ("state_block", "balance_position"):
        with pytest.raises(ValueError, match=f"{name}=0 is not supported"):
            MicroBatchExecutor(group, SPLIT, **{name: 0})  # type: ignore[arg-type]
    group.destroy()


def test_an_operator_that_the_engine_names_is_refused_and_only_that() -> None:
    run_ranks(_named, 2)


def _each_size(rank: int) -> None:
    group = make_group()
    executor = MicroBatchExecutor(group, SPLIT)

    def fused_when_small(x: torch.Tensor) -> torch.Tensor:
        return torch_all_reduce(x) if x.shape[0] <= 8 else x

    for tokens in (100, 100, 60):
        executor.run(model_with(group, fused_when_small), make_batch(tokens))
    with pytest.raises((UnsupportedError, CollectiveAbortedError), match="c10d::allreduce_"):
        executor.run(model_with(group, fused_when_small), make_batch(16))
    group.destroy()


def test_the_first_batch_of_each_size_is_looked_through() -> None:
    run_ranks(_each_size, 2)


def _uncut(rank: int) -> None:
    @dataclasses.dataclass(frozen=True)
    class TypedBatch(Batch):
        token_types: torch.Tensor | None = None

    group = make_group()
    plain = make_batch(12)
    values = {f.name: getattr(plain, f.name) for f in dataclasses.fields(Batch)}
    expected = RowwiseModel(group)(plain)
    executor = MicroBatchExecutor(group, SPLIT)
    typed = TypedBatch(**values, token_types=torch.zeros(12))
    # One rank alone has it, against the rules: the other does not wait for it.
    with pytest.raises((UnsupportedError, CollectiveAbortedError), match=r"TypedBatch\.token_types"):
        executor.run(RowwiseModel(group), typed if rank == 0 else plain)
    assert torch.equal(executor.run(RowwiseModel(group), TypedBatch(**values)), expected)
    # A batch that runs whole may hold anything.
    assert torch.equal(MicroBatchExecutor(group, OverlapConfig()).run(RowwiseModel(group), typed), expected)
    # What a forward takes from elsewhere is not cut; its rows tell.
    with pytest.raises((UnsupportedError, CollectiveAbortedError), match=r"tensor \(12, 16\) for a piece of [46] tok"):
        executor.run(lambda piece: group.all_reduce(expected), plain)
    group.destroy()


def test_what_cannot_be_cut_ends_the_run_on_all_ranks() -> None:
    run_ranks(_uncut, 2)


def test_a_watch_ends_with_its_block_and_leaves_values_alone() -> None:
    scaled = operator("scaled", lambda x: x * 3)
    x = torch.arange(4.0)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), foreign_collective_watch({"tpoverlap_foreign::scaled"}).watching():
            assert torch.equal(torch.sin(x) + 1, torch.sin(x) + 1)
            with pytest.raises(UnsupportedError, match="scaled"):
                scaled(x)
        assert torch.equal(scaled(x), x * 3)
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()

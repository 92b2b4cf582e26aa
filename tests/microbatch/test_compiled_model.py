"""A compiled model whose all-reduce is a custom operator: pieces stop inside compiled code, and nothing recompiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_group import make_group as make_gpu_group
from rank_harness import run_ranks

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig, OverlapConfig
from tpoverlap.microbatch import Batch, MicroBatchExecutor

HIDDEN = 64
LAYERS = 3
_groups: dict[str, GroupCoordinator] = {}


# Engines look their group up by its name, which a graph can hold.
@torch.library.custom_op("tpoverlap_tests::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return _groups[group].all_reduce(x)


@all_reduce.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


class Stack(torch.nn.Module):
    """Row-parallel products by sums over a fixed order of columns: elementwise, so that a row's bits are its own."""

    def __init__(self, rank: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.weights = torch.nn.Parameter(torch.randn(LAYERS, HIDDEN, generator=generator).to(device))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self._layer(self._layer(x, positions, 0), positions, 1)
        torch._dynamo.graph_break()
        return self._layer(x, positions, 2)

    def _layer(self, x: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        x = x + positions[:, None] * 0.01
        y = torch.ops.tpoverlap_tests.all_reduce(torch.relu(x) * self.weights[layer], "tp")
        return x * 0.5 + y.roll(1, 1)


def make_batch(tokens: int, device: str) -> Batch:
    return Batch(
        inputs_embeds=torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(device),
        positions=torch.arange(tokens, device=device),
        query_start_loc=[0, tokens // 3, tokens],
        seq_lens=[tokens // 3, tokens - tokens // 3],
        block_table=torch.zeros(2, 1, dtype=torch.int32, device=device),
        slot_mapping=torch.arange(tokens, device=device),
    )


def _compiled(rank: int, backend: str, device: str, folder: Path) -> None:
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / str(rank)), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    from torch._dynamo.utils import counters

    make: Callable[..., GroupCoordinator] = make_gpu_group if device == "cuda" else _cpu_group
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    model = Stack(rank, device)
    compiled = torch.compile(model, backend=backend, dynamic=True)

    def forward(batch: Batch) -> torch.Tensor:
        assert batch.inputs_embeds is not None
        return compiled(batch.inputs_embeds, batch.positions)  # type: ignore[no-any-return]

    graphs = None
    # None of these switches is in a graph. Without copy engines NCCL would serve, which ranks that share a GPU lack.
    for max_bytes, copy_bytes in ((262_144, 20_971_520), (1024, 65_536), (4096, 0 if device == "cpu" else 131_072)):
        _groups["tp"] = group = make(max_bytes=max_bytes, copy_engine_max_bytes=copy_bytes)
        for config in (
            OverlapConfig(min_tokens=1, num_pieces=2, cut_multiple=1),
            OverlapConfig(),
            OverlapConfig(min_tokens=40, num_pieces=3, cut_multiple=4),
            OverlapConfig(min_tokens=5000),
        ):
            executor = MicroBatchExecutor(group, config)
            for tokens in (17, 60, 200):
                batch = make_batch(tokens, device)
                with torch.inference_mode():
                    got = executor.run(forward, batch)
                    again = executor.run(forward, batch)
                    if graphs is None:
                        graphs = counters["stats"]["unique_graphs"]
                        assert graphs >= 2
                    assert torch.equal(got, forward(batch))
                    assert torch.equal(got, again)
                    torch.testing.assert_close(got, model(batch.inputs_embeds, batch.positions))
                assert executor.stats.num_collectives == LAYERS * executor.stats.num_pieces
            executor.close()
        group.destroy()
        dist.barrier()
    assert counters["stats"]["unique_graphs"] == graphs
    assert counters["frames"]["total"] == counters["frames"]["ok"]


def _cpu_group(**config: int) -> GroupCoordinator:
    return GroupCoordinator(
        range(dist.get_world_size()),
        dist.get_rank(),
        "cpu",
        HostReduceConfig(timeout_s=50.0, **config),  # type: ignore[arg-type]
    )


def test_switches_of_the_executor_and_the_group_recompile_nothing(tmp_path: Path) -> None:
    run_ranks(_compiled, 2, "aot_eager", "cpu", tmp_path, timeout_s=110)


@pytest.mark.gpu
def test_code_of_inductor_stops_and_goes_on_too(tmp_path: Path) -> None:
    run_ranks(_compiled, 2, "inductor", "cuda", tmp_path, timeout_s=110)

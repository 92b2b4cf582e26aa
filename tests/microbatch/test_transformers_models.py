"""transformers' own Llama and Qwen3 classes, sharded over two ranks, in pieces: one piece reads what another cached."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_harness import run_ranks
from test_executor import make_group
from torch import nn

from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.microbatch import Batch, MicroBatchExecutor

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
PROMPTS = (41, 23, 7)
CHUNKS = ((22, 9, 7), (19, 14, 0), (1, 1, 1))
# In float64 a library's choice of another order of sums for a piece moves the last bits only.
TOLERANCE = 1e-11


class RowParallelLinear(nn.Module):
    def __init__(self, weight: torch.Tensor, group: GroupCoordinator) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(F.linear(x, self.weight))


def shard(model: nn.Module, group: GroupCoordinator) -> None:
    """Megatron-LM's way: heads and intermediate features over the ranks, an all-reduce behind both blocks."""
    rank, n = group.rank_in_group, group.world_size
    for name, module in list(model.named_modules()):
        parent, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            module.weight = nn.Parameter(module.weight.chunk(n, 0)[rank].clone(), requires_grad=False)
        elif leaf in ("o_proj", "down_proj"):
            setattr(parent, leaf, RowParallelLinear(module.weight.chunk(n, 1)[rank].clone(), group))


class PackedRequests:
    """A model over one transformers cache that holds the tokens of all requests in the order of their arrival.

    A token's slot is its place in that cache. What a piece may see follows from its slots and positions alone.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        self.model = model
        self.cache = cache
        self.cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.owners = torch.empty(0, dtype=torch.int64)
        self.positions = torch.empty(0, dtype=torch.int64)

    def batch(self, prompts: list[torch.Tensor], done: list[int], counts: tuple[int, ...]) -> Batch:
        requests = [r for r, count in enumerate(counts) if count]
        parts = [torch.arange(done[r], done[r] + counts[r]) for r in requests]
        first = len(self.owners)
        self.owners = torch.cat([self.owners, *(torch.full_like(p, r) for r, p in zip(requests, parts, strict=True))])
        self.positions = torch.cat([self.positions, *parts])
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part))
        return Batch(
            input_ids=torch.cat([prompts[r][p] for r, p in zip(requests, parts, strict=True)]),
            positions=self.positions[first:],
            query_start_loc=starts,
            seq_lens=[done[r] + counts[r] for r in requests],
            block_table=torch.zeros(len(requests), 1, dtype=torch.int32),
            slot_mapping=torch.arange(first, len(self.owners)),
        )

    def __call__(self, batch: Batch) -> torch.Tensor:
        assert batch.input_ids is not None
        seen = int(batch.slot_mapping[-1]) + 1
        mask = (self.owners[batch.slot_mapping][:, None] == self.owners[:seen]) & (
            batch.positions[:, None] >= self.positions[:seen]
        )
        hidden: torch.Tensor = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            attention_mask=mask[None, None],
            use_cache=True,
            **{self.cache_argument: self.cache},
        ).last_hidden_state
        return hidden[0]


def _matches(rank: int, family: str, num_pieces: int) -> list[str | None]:
    import transformers

    config_type, model_type = {
        "llama": (transformers.LlamaConfig, transformers.LlamaModel),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
    }[family]
    config = config_type(**SIZES, attn_implementation="sdpa")
    torch.manual_seed(num_pieces)
    model = model_type(config).double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    prompts = [torch.randint(SIZES["vocab_size"], (n + 1,)) for n in PROMPTS]
    group = make_group(60.0)
    executor = MicroBatchExecutor(group, OverlapConfig(min_tokens=1, num_pieces=num_pieces, cut_multiple=1))
    reasons: list[str | None] = []
    with torch.inference_mode():
        references = [model(input_ids=prompt[None], use_cache=False).last_hidden_state[0] for prompt in prompts]
        shard(model, group)
        outputs: dict[str, list[torch.Tensor]] = {}
        for name in ("whole", "pieces", "pieces again"):
            packed = PackedRequests(model, transformers.DynamicCache(config=config))
            done = [0] * len(prompts)
            run: Callable[[Batch], Any] = packed if name == "whole" else lambda b: executor.run(packed, b)  # noqa: B023
            outputs[name] = []
            for counts in CHUNKS:
                outputs[name].append(run(packed.batch(prompts, done, counts)))
                if name == "pieces":
                    reasons.append(executor.stats.bypass_reason)
                done = [a + b for a, b in zip(done, counts, strict=True)]
            rows = torch.cat(outputs[name])
            for r, reference in enumerate(references):
                mine = (packed.owners == r).nonzero()[:, 0]
                error = (rows[mine] - reference[: len(mine)]).abs().max()
                assert error <= TOLERANCE, (name, r, error)
            assert packed.cache.get_seq_length() == sum(map(sum, CHUNKS))
    for a, b in zip(outputs["pieces"], outputs["pieces again"], strict=True):
        assert torch.equal(a, b), "the same bits in every run"
    group.destroy()
    return reasons


@pytest.mark.parametrize("num_pieces", [2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prefill_in_pieces_and_decode_match_the_whole_model(family: str, num_pieces: int) -> None:
    assert run_ranks(_matches, 2, family, num_pieces, timeout_s=100) == [[None, None, "decode_only"]] * 2

"""The decoder on processes, through the coordinator and the executor: pieces, bits and shared work."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_harness import run_ranks
from tiny_models import save_model

from tpoverlap.attention import BlockTables
from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import HostReduceConfig, OverlapConfig
from tpoverlap.microbatch import MicroBatchExecutor
from tpoverlap.model.checkpoint import load_decoder
from tpoverlap.model.runner import Runner
from tpoverlap.quant import NVFP4Linear

PROMPTS = [torch.randint(101, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 3, 41)]
LAYERS = 2


def run_once(group: GroupCoordinator, folder: Path, weights: str, config: OverlapConfig) -> dict[str, Any]:
    model = load_decoder(folder, weights=weights, group=group)  # type: ignore[arg-type]
    model.allocate_kv_cache(32, 8)
    executor = MicroBatchExecutor(group, config)
    runner = Runner(model, BlockTables(32, 8), PROMPTS, forward=lambda batch: executor.run(model, batch))
    bits = hashlib.sha256()
    workspaces = {module.workspace for module in model.modules() if isinstance(module, NVFP4Linear)}

    all_reduce = group.all_reduce
    sums: list[torch.Tensor] = []

    def recorded(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        total = all_reduce(x, **kwargs)
        sums.append(total)
        return total

    group.all_reduce = recorded  # type: ignore[method-assign]
    try:
        logits, pieces, dequantizations = [], [], []
        for chunk in runner.prefill(57):
            logits.append(model.logits(chunk.hidden))
            pieces.append(executor.stats.num_pieces)
            dequantizations.append(sum(workspace.dequantizations for workspace in workspaces))
        tokens = [runner.decode() for _ in range(5)]
    finally:
        group.all_reduce = all_reduce  # type: ignore[method-assign]
        executor.close()
    for total in sums:
        bits.update(total.contiguous().numpy().tobytes())
    return {
        "logits": torch.cat(logits),
        "tokens": tokens,
        "pieces": pieces,
        "dequantizations": dequantizations,
        "num_sums": len(sums),
        "bits": bits.hexdigest(),
    }


def whole_and_in_pieces(rank: int, folder: Path, weights: str, num_pieces: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    group = GroupCoordinator(range(dist.get_world_size()), rank, "cpu", HostReduceConfig(timeout_s=30))
    split = OverlapConfig(min_tokens=16, num_pieces=num_pieces, cut_multiple=8)
    results = [run_once(group, folder, weights, config) for config in (OverlapConfig(), split)]
    assert set(group.served) == {"cpu"}
    group.destroy()
    return results


@pytest.mark.parametrize(
    ("family", "weights", "world_size", "num_pieces"),
    [("llama", "fp32", 2, 2), ("qwen3", "fp32", 4, 3), ("qwen2", "nvfp4", 3, 2), ("llama", "nvfp4", 2, 4)],
)
def test_pieces_give_what_the_whole_batch_gives(
    tmp_path: Path, family: str, weights: str, world_size: int, num_pieces: int
) -> None:
    save_model(tmp_path, family, 30 + world_size, num_attention_heads=9, num_key_value_heads=3, hidden_size=144)
    ranks = run_ranks(whole_and_in_pieces, world_size, tmp_path, weights, num_pieces)
    for whole, split in ranks:
        assert whole["pieces"] == [1, 1]
        assert split["pieces"] == [num_pieces, num_pieces]
        assert (whole["logits"] - split["logits"]).abs().max() <= 1e-3
        assert whole["tokens"] == split["tokens"]
        decode_sums = 4 * 2 * LAYERS  # the first token needs no forward pass
        assert whole["num_sums"] == 2 * 2 * LAYERS + decode_sums
        assert split["num_sums"] == num_pieces * 2 * 2 * LAYERS + decode_sums
        # Every rank holds the same bits after every all-reduce.
        assert (whole["bits"], split["bits"]) == (ranks[0][0]["bits"], ranks[0][1]["bits"])
        assert torch.equal(split["logits"], ranks[0][1]["logits"])
        # Each of a layer's four weights is dequantized once a chunk, in whatever number of pieces.
        once = 4 * LAYERS if weights == "nvfp4" else 0
        assert whole["dequantizations"] == split["dequantizations"] == [once, 2 * once]

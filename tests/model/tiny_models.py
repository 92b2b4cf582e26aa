"""Tiny random checkpoints of each supported architecture, and ranks simulated by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

T = TypeVar("T")

_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_model(family: str, seed: int, **overrides: object) -> torch.nn.Module:
    """A transformers model with weights, norms and biases far from their initial zeros and ones."""
    config_class, model_class = _FAMILIES[family]
    settings: dict[str, object] = {
        "vocab_size": 101,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    model = model_class(config_class(**(settings | overrides))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def save_model(folder: Path, family: str, seed: int, **overrides: object) -> torch.nn.Module:
    """Saves such a model into ``folder`` and returns it."""
    model = make_model(family, seed, **overrides)
    model.save_pretrained(folder)
    return model


class ThreadGroup:
    """The collectives of one rank, for ranks that are threads of this process; sums are added in rank order."""

    def __init__(self, rank: int, slots: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank_in_group = rank
        self.world_size = len(slots)
        self.reduced: list[torch.Tensor] = []
        self._slots = slots
        self._barrier = barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._exchange(x)).float().sum(0).to(x.dtype)
        self.reduced.append(total)
        return total

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank_in_group] = x.clone()
        self._barrier.wait(timeout=60)
        parts = [part for part in self._slots if part is not None]
        self._barrier.wait(timeout=60)
        return parts


def run_ranks(world_size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Runs ``work`` once a rank, each in its own thread, and returns the results in rank order."""
    slots: list[torch.Tensor | None] = [None] * world_size
    barrier = threading.Barrier(world_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, slots, barrier))
        except BaseException as error:  # reported by the caller, below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    assert len(results) == world_size, "a rank did not finish"
    return [results[rank] for rank in range(world_size)]

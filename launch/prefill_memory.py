"""Whether a job fits into memory: estimated before anything takes long, and told in one line where it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from job_world import World
from prefill_options import Options

from tpoverlap.errors import ConfigError
from tpoverlap.model.checkpoint import compute_dtype
from tpoverlap.model.config import DecoderConfig

_NVFP4_BYTES = 9 / 16  # 4 bits, and a scale of 8 for every 16
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_HINT = "give fewer tokens (--tokens, --generate), smaller --weights, or more ranks and memory"


def require_memory(
    options: Options, config: DecoderConfig, prompt_tokens: int, world: World, device: torch.device
) -> None:
    """Errors: ConfigError where the ranks of this host hold more than its memory, or one more than its GPU's.

    What they hold at least is counted: weights and key/value cache, without activations.
    """
    value = compute_dtype(options.weights, device).itemsize
    linear = _NVFP4_BYTES if options.weights == "nvfp4" else value
    embeddings = config.vocab_size * config.hidden_size * value * (1 if config.tied_embeddings else 1 + 1 / world.size)
    weights = embeddings + config.num_layers * config.linear_weights_per_layer * linear / world.size
    kv_heads = -(-config.num_kv_heads // world.size)
    tokens = len(options.passes) * (prompt_tokens + options.generate)
    cache = config.num_layers * tokens * 2 * kv_heads * config.head_dim * value
    sharers, memory = (1, _gpu_bytes(device)) if device.type == "cuda" else (world.local_size, _host_bytes())
    needed = sharers * (weights + cache)
    if needed > memory:
        raise ConfigError(
            f"{f'the {sharers} ranks' if sharers > 1 else 'a rank'} would hold {needed / 1e9:,.1f} GB or more "
            f"(weights {sharers * weights / 1e9:,.1f}, key/value cache of {tokens:,} tokens "
            f"{sharers * cache / 1e9:,.1f}), and the {'GPU' if device.type == 'cuda' else 'host'} has "
            f"{memory / 1e9:,.1f}: {_HINT}"
        )


@contextmanager
def told_if_memory_ends(device: torch.device) -> Iterator[None]:
    """Errors: ConfigError in place of an allocation's failure."""
    try:
        yield
    except RuntimeError as error:
        # torch has a type of its own for a GPU's memory only.
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(f"the memory of {device} does not suffice: {_HINT}") from None
    except MemoryError:
        raise ConfigError(f"this process's memory does not suffice: {_HINT}") from None


def _gpu_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _host_bytes() -> int:
    """Of the machine, or of the container if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
    return min(found)

"""What prefill.py does before it computes: checks the request, encodes the text, loads the model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from job_machine import require_packages
from job_text import default_model, load_tokenizer, read_text
from job_world import World
from prefill_memory import require_memory, told_if_memory_ends
from prefill_options import Options
from prefill_passes import Pass
from progress_bar import Progress

from tpoverlap.attention import BlockTables
from tpoverlap.comm import GroupCoordinator
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import ConfigError
from tpoverlap.microbatch import MicroBatchExecutor, balance_position
from tpoverlap.model.checkpoint import load_decoder
from tpoverlap.model.config import DecoderConfig, load_config
from tpoverlap.model.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_RANKS = 8
_BLOCK_SIZE = 16
# Of most texts; and the tokens before a cut that it may change.
_CHARACTERS_PER_TOKEN, _CUT_TOKENS = 8, 64


@dataclass(frozen=True)
class Request:
    """What every rank must know. prompt: token ids."""

    model: Path
    config: DecoderConfig
    prompt: list[int]


@dataclass(frozen=True)
class Found:
    """What rank 0 has besides: the tokenizer."""

    request: Request
    tokenizer: PreTrainedTokenizerBase


def read_request(options: Options, world: World, device: torch.device) -> Found:
    """Finds the model, reads the text and encodes it; for rank 0.

    Errors: ConfigError and UnsupportedError for whatever cannot work, before anything takes long.
    """
    if world.size > _MAX_RANKS:
        raise ConfigError(f"{world.size} ranks are not supported: start 1 to {_MAX_RANKS}")
    if options.emulate_link_gbps is not None and device.type != "cpu":
        raise ConfigError(f"--emulate-link slows the link between CPU ranks, not {device.type} ones: give --device cpu")
    for path in output_files(options.timeline, options.trace):
        _check_output(path)
    require_packages("transformers", "safetensors", "rich", "matplotlib")
    text = read_text(options.text)
    model = options.model or default_model()
    if model.suffix == ".gguf":
        require_packages("gguf")
    _tell(f"reading {model}")
    config = load_config(model)
    tokenizer = load_tokenizer(model)
    prompt = _encode(tokenizer, text, options, config)
    require_memory(options, config, len(prompt), world, device)
    return Found(Request(model, config, prompt), tokenizer)


def output_files(timeline: Path, trace: Path | None) -> list[Path]:
    """What the job writes: the timeline as a page and as a picture, and the trace unless it is None."""
    pictures = [timeline.with_name(f"{timeline.name}{suffix}") for suffix in (".html", ".png")]
    return pictures if trace is None else [*pictures, trace]


def _check_output(path: Path) -> None:
    if not os.path.isdir(path.absolute().parent):
        raise ConfigError(f"the folder {path.parent} of {path} does not exist: make it, or give another path")
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}): give another path") from None
    if is_new:
        path.unlink()


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, options: Options, config: DecoderConfig) -> list[int]:
    ids = _first_tokens(tokenizer, text, options.tokens)
    source = {None: "the default text", "-": "stdin"}.get(options.text, options.text)
    if len(ids) < 2:
        raise ConfigError(f"{source} has {len(ids)} tokens: perplexity needs at least 2, give a longer text")
    if len(ids) < options.tokens:
        _tell(f"{source} has {len(ids)} tokens, fewer than --tokens {options.tokens}: all of them are used")
    prompt = ids[: options.tokens]
    if max(prompt) >= config.vocab_size:
        raise ConfigError(f"the tokenizer gives id {max(prompt)}, the model has {config.vocab_size}: they do not match")
    if len(prompt) + options.generate > config.max_positions:
        _tell(
            f"{len(prompt)} + {options.generate} tokens are more than the {config.max_positions} positions that the "
            "model was made for"
        )
    return prompt


def _first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> list[int]:
    """``count`` tokens or more, or all that there are. A long text is not encoded as a whole, which takes long."""
    length = _CHARACTERS_PER_TOKEN * (count + _CUT_TOKENS)
    while True:
        ids: list[int] = tokenizer(text[:length])["input_ids"]
        if len(ids) >= count + _CUT_TOKENS or length >= len(text):
            return ids
        length *= 2


def _tell(message: str) -> None:
    print(f"prefill: {message}", file=sys.stderr, flush=True)


def load_model(options: Options, request: Request, group: GroupCoordinator, device: torch.device) -> Decoder:
    """This rank's part of the model. Errors: ConfigError where memory does not suffice, and those of load_decoder."""
    with told_if_memory_ends(device), Progress("load layers", request.config.num_layers) as progress:
        return load_decoder(
            request.model,
            weights=options.weights,
            group=group,
            device=device,
            config=request.config,
            progress=lambda done, total: progress.advance(done - progress.done),
        )


def allocate_cache(options: Options, request: Request, model: Decoder) -> BlockTables:
    """A key/value cache with room for every pass, and its tables. Errors: ConfigError where memory does not suffice."""
    num_blocks = len(options.passes) * -(-(len(request.prompt) + options.generate) // _BLOCK_SIZE)
    with told_if_memory_ends(model.device):
        model.allocate_kv_cache(num_blocks, _BLOCK_SIZE)
    return BlockTables(num_blocks, _BLOCK_SIZE)


def make_pass(
    name: str, options: Options, request: Request, group: GroupCoordinator, model: Decoder, tables: BlockTables
) -> Pass:
    overlap = {
        "whole": OverlapConfig(min_tokens=0),
        "overlapped": OverlapConfig(min_tokens=options.overlap_min_tokens, num_pieces=options.num_pieces),
    }
    config = request.config
    balance = balance_position(config.linear_weights_per_layer, config.num_query_heads, config.head_dim)
    executor = MicroBatchExecutor(group, overlap[name], balance_position=balance)
    return Pass(name, model, tables, request.prompt, executor)

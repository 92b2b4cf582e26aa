"""Runs launch/prefill.py on a tiny random model: in this process, or on ranks forked by the rank harness."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from rank_harness import RankResult, start_ranks

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
if str(LAUNCH) not in sys.path:
    sys.path.insert(0, str(LAUNCH))

TEXT = "The quick brown fox jumps over the lazy dog; then the dog, not lazy at all, gives chase. " * 10


def save_tiny_model(folder: Path, seed: int = 0, *, intermediate_size: int = 75, head_dim: int = 16) -> Path:
    """A random Llama of 3 KV heads and a tokenizer whose 259 tokens are bytes and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + letters)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(special) + len(letters),
        hidden_size=144,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=head_dim,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class Outcome:
    """What a rank of the job said and how it ended. died: it was killed, and said nothing."""

    status: int | None
    out: str = ""
    err: str = ""
    died: bool = False


@dataclass
class Job:
    """A command line; sabotage: entered on each rank, with its number, for the time of the job."""

    arguments: list[str]
    sabotage: Callable[[int], AbstractContextManager[None]] | None = None


def run_jobs(jobs: Sequence[Job], world_size: int) -> list[list[Outcome]]:
    """Runs jobs one after the other on the same ranks; the outcomes of each job's ranks."""
    ranks = start_ranks(_rank, world_size, list(jobs), [_free_port() for _ in jobs], timeout_s=100, init=False)
    by_rank = [_outcomes(result, len(jobs)) for result in ranks.join()]
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def _outcomes(result: RankResult, count: int) -> list[Outcome]:
    if result.exit_code == -signal.SIGKILL:
        return [Outcome(None, died=True)] * count
    assert result.exit_code == 0, result.trace
    outcomes: list[Outcome] = result.value
    return outcomes


def _rank(rank: int, jobs: list[Job], ports: list[int]) -> list[Outcome]:
    outcomes = []
    for job, port in zip(jobs, ports, strict=True):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with job.sabotage(rank) if job.sabotage else contextlib.nullcontext():
            outcomes.append(run_here(job.arguments))
    return outcomes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_here(arguments: list[str], stdin: bytes = b"") -> Outcome:
    """Runs the job, or this rank of it, in this process."""
    import prefill

    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    sys.argv = ["prefill.py", *arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status: int | str | None = prefill.main()
            except SystemExit as end:
                status = end.code
    finally:
        sys.argv, sys.stdin = before
    assert isinstance(status, int)
    return Outcome(status, out.getvalue(), err.getvalue())

"""Ways of running the job: the prompt chunk by chunk, each token's loss, and what is generated after it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from progress_bar import Progress

from tpoverlap.attention import BlockTables
from tpoverlap.microbatch import Batch, MicroBatchExecutor, RunStats
from tpoverlap.model.decoder import Decoder
from tpoverlap.model.runner import PrefillChunk, Runner

_LARGEST_EXPONENT = math.log(sys.float_info.max)
# Rows whose logits are compared at a time.
_BLOCK = 256


class Pass:
    """One way of running the job on this rank, and what came of it.

    prefill_runs, decode_runs: statistics, one entry a chunk and one a decode step. generated: token ids. choice_s:
    seconds that the first token's choice took after the prefill. decode_s: seconds of the decode steps, the choice of
    the token included.
    """

    def __init__(
        self, name: str, model: Decoder, tables: BlockTables, prompt: Sequence[int], executor: MicroBatchExecutor
    ) -> None:
        self.name = name
        self.prefill_runs: list[RunStats] = []
        self.decode_runs: list[RunStats] = []
        self.generated: list[int] = []
        self.choice_s = 0.0
        self.decode_s = 0.0
        self._model = model
        self._tables = tables
        self._prompt = prompt
        self.executor = executor
        self._runner = Runner(model, tables, [prompt], forward=self._forward)
        self._loss_sum = 0.0
        self._num_losses = 0

    @property
    def perplexity(self) -> float:
        """NaN where the model's logits are; infinite above FP64's largest number."""
        mean = self._loss_sum / self._num_losses
        return math.exp(mean) if not mean > _LARGEST_EXPONENT else math.inf

    def warm_up(self, tokens: int, *, decodes: bool) -> None:
        """Runs the prompt's first tokens and forgets them, so that first-use costs are in nobody's time. decodes: a
        step behind them, too, for which the cache then has room."""
        runner = Runner(self._model, self._tables, [self._prompt[:tokens]], forward=self._forward)
        for _ in runner.prefill(tokens):
            pass
        if decodes:
            for _ in range(2):  # the first token comes from the prefill
                runner.decode()
        runner.free()

    def chunks(self, chunk_tokens: int) -> Iterator[PrefillChunk]:
        for chunk in self._runner.prefill(chunk_tokens):
            self.prefill_runs.append(self.executor.stats)
            yield chunk

    def add_losses(self, chunk: PrefillChunk) -> None:
        known = chunk.targets >= 0
        losses = self._model.token_losses(chunk.hidden[known], chunk.targets[known])
        self._loss_sum += float(losses.double().sum())
        self._num_losses += losses.shape[0]

    def generate_token(self) -> None:
        """Adds a token to ``generated``. The first comes from the prefill and is no decode step."""
        started_s = time.perf_counter()
        self.generated += self._runner.decode()
        seconds = time.perf_counter() - started_s
        if len(self.generated) == 1:
            self.choice_s = seconds
        else:
            self.decode_s += seconds
            self.decode_runs.append(self.executor.stats)

    def _forward(self, batch: Batch) -> torch.Tensor:
        output = self.executor.run(self._model, batch)
        assert isinstance(output, torch.Tensor)  # the decoder returns one
        return output


@dataclass
class Gap:
    """Between the passes' logits, in this rank's part of the vocabulary: largest difference and largest magnitude."""

    difference: float = 0.0
    magnitude: float = 0.0


def prefill(passes: Sequence[Pass], model: Decoder, prompt: Sequence[int], chunk_tokens: int) -> Gap:
    """Prefills each chunk in all ``passes``, in turns that change their order, so that a drift favours none."""
    gap = Gap()
    with Progress("prefill tokens", len(prompt)) as progress:
        for chunks in _alternate([p.chunks(chunk_tokens) for p in passes]):
            for one, chunk in zip(passes, chunks, strict=True):
                one.add_losses(chunk)
            if len(chunks) > 1:
                _widen(gap, model, *chunks)
            progress.advance(chunks[0].num_tokens)
    return gap


def generate(passes: Sequence[Pass], count: int) -> None:
    """Generates ``count`` tokens in each pass."""
    if not count:
        return
    with Progress("generate tokens", count * len(passes)) as progress:
        for one in passes:
            for _ in range(count):
                one.generate_token()
                progress.advance()


def _alternate(iterators: Sequence[Iterator[PrefillChunk]]) -> Iterator[list[PrefillChunk]]:
    """Steps all iterators once a round: first to last, then last to first, and so on."""
    order = list(range(len(iterators)))
    while True:
        chunks: dict[int, PrefillChunk] = {}
        for which in order:
            chunk = next(iterators[which], None)
            if chunk is None:
                return
            chunks[which] = chunk
        yield [chunks[which] for which in range(len(iterators))]
        order.reverse()


def _widen(gap: Gap, model: Decoder, one: PrefillChunk, other: PrefillChunk) -> None:
    if not model.lm_head.shape[0]:
        return
    for rows, other_rows in zip(one.hidden.split(_BLOCK), other.hidden.split(_BLOCK), strict=True):
        logits, others = model.shard_logits(rows).float(), model.shard_logits(other_rows).float()
        difference = float((logits - others).abs().max())
        gap.difference = math.inf if math.isnan(difference) else max(gap.difference, difference)
        gap.magnitude = max(gap.magnitude, float(logits.abs().max()))

"""Chunked prefill and greedy decode of prompts through the paged key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tpoverlap.attention import BlockTables, slot_mapping
from tpoverlap.microbatch.batch import Batch
from tpoverlap.model.decoder import Decoder


@dataclass(frozen=True)
class PrefillChunk:
    """What one chunk of packed prompt tokens gave.

    hidden: [tokens, hidden]. targets: int64 [tokens], the token that follows each one in its prompt, -1 after the last.
    """

    hidden: torch.Tensor
    targets: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.targets.shape[0]


class Runner:
    """Prefills prompts in chunks (the chunked prefill of Sarathi, Agrawal et al. 2023), then extends them greedily.

    All ranks make the same calls. The cache belongs to the model and ``tables`` to its cache, so several runners may
    use one model, each with blocks of its own.
    """

    def __init__(
        self,
        model: Decoder,
        tables: BlockTables,
        prompts: Sequence[Sequence[int]],
        *,
        forward: Callable[[Batch], torch.Tensor] | None = None,
    ) -> None:
        """prompts: token ids, none of them empty. forward: runs a batch through the model, such as
        ``lambda batch: executor.run(model, batch)``; None: the model itself.

        Errors: ValueError for no prompts, an empty prompt or an id outside the vocabulary.
        """
        if not prompts or not all(prompts):
            raise ValueError(f"prompts need at least one token each, got lengths {[len(p) for p in prompts]}")
        vocab_size = model.config.vocab_size
        if not all(0 <= token < vocab_size for prompt in prompts for token in prompt):
            raise ValueError(f"prompts hold token ids outside the vocabulary of {vocab_size}")
        self._model = model
        self._tables = tables
        self._forward = forward or model
        self._requests = [object() for _ in prompts]
        self._prompts = [list(prompt) for prompt in prompts]
        self._lengths = [0] * len(prompts)
        self._last_hidden: list[torch.Tensor | None] = [None] * len(prompts)
        self._next: torch.Tensor | None = None

    def prefill(self, chunk_tokens: int) -> Iterator[PrefillChunk]:
        """Runs the prompts, ``chunk_tokens`` packed tokens at a time: prompts in order, cut where a chunk is full.

        Errors: ValueError for a chunk below 1 token; CacheFullError where the cache has too few blocks.
        """
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        for pieces in _chunks([len(prompt) for prompt in self._prompts], chunk_tokens):
            batch = self._batch([(request, self._prompts[request][start:stop]) for request, start, stop in pieces])
            hidden = self._forward(batch)
            targets: list[int] = []
            for row, (request, start, stop) in enumerate(pieces):
                following = self._prompts[request][start + 1 : stop + 1]
                targets += following + [-1] * (stop - start - len(following))
                if stop == len(self._prompts[request]):
                    self._last_hidden[request] = hidden[batch.query_start_loc[row + 1] - 1]
            yield PrefillChunk(hidden, torch.tensor(targets, dtype=torch.int64, device=hidden.device))

    def decode(self) -> list[int]:
        """The next token of each prompt, the most likely one; the first call comes after :meth:`prefill` is done.

        Errors: RuntimeError where prompts are not prefilled; CacheFullError where the cache has too few blocks.
        """
        if self._next is None:
            rows = [row for row in self._last_hidden if row is not None]
            if len(rows) < len(self._prompts):
                raise RuntimeError(f"{len(self._prompts) - len(rows)} prompts are not prefilled yet: finish prefill")
            hidden = torch.stack(rows)
        else:
            hidden = self._forward(self._batch([(i, [token]) for i, token in enumerate(self._next.tolist())]))
        self._next = self._model.logits(hidden).argmax(dim=-1)
        return self._next.tolist()

    def free(self) -> None:
        """Gives the cache blocks back."""
        for request, length in zip(self._requests, self._lengths, strict=True):
            if length:
                self._tables.free(request)
        self._lengths = [0] * len(self._prompts)
        self._last_hidden = [None] * len(self._prompts)
        self._next = None

    def _batch(self, new_tokens: Sequence[tuple[int, list[int]]]) -> Batch:
        """Packs (index of the prompt, its next tokens), which from now on count as in the cache."""
        starts = [0]
        ids: list[int] = []
        positions: list[int] = []
        for request, tokens in new_tokens:
            before = self._lengths[request]
            self._tables.grow(self._requests[request], before + len(tokens))
            self._lengths[request] += len(tokens)
            ids += tokens
            positions += range(before, before + len(tokens))
            starts.append(len(ids))
        seq_lens = [self._lengths[request] for request, _ in new_tokens]
        device = self._model.device
        block_table = self._tables.table([self._requests[request] for request, _ in new_tokens], device=device)
        return Batch(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping(block_table, starts, seq_lens, self._tables.block_size),
        )


def _chunks(lengths: Sequence[int], chunk_tokens: int) -> Iterator[list[tuple[int, int, int]]]:
    """Chunks of (prompt, first token, past-the-end token)."""
    pieces: list[tuple[int, int, int]] = []
    room = chunk_tokens
    for prompt, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            pieces.append((prompt, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], chunk_tokens
    if pieces:
        yield pieces

"""Small tensor-parallel models whose bits do not depend on how a batch is cut, and random batches for them.

With ``ExactMath`` all values are small integers in float32, so that every sum is exact in whatever order a library
adds: a row that sees a wrong key, or a key too early, still gives another result.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import torch

from tpoverlap.attention import allocate_kv_cache, paged_prefill, slot_mapping, write_kv
from tpoverlap.comm import GroupCoordinator
from tpoverlap.microbatch import Batch

BLOCK_SIZE = 16
NUM_BLOCKS = 96


class Math(Protocol):
    """The operations that models are made of. Heads have ``head_dim`` values; each rank has two and one KV head."""

    head_dim: int
    hidden: int
    dtype: torch.dtype
    device: str

    def values(self, *shape: int, generator: torch.Generator) -> torch.Tensor: ...

    def weight(self, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor: ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def activation(self, x: torch.Tensor) -> torch.Tensor: ...

    def residual(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor: ...


class ExactMath:
    """Integers from -32 to 31 in float32; attention with integer weights in place of the softmax."""

    head_dim = 8
    hidden = 16
    dtype = torch.float32

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def values(self, *shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(-32, 32, shape, generator=generator).float().to(self.device)

    def weight(self, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(-2, 3, (rows, columns), generator=generator).float().to(self.device)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _wrapped(x @ weight)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    def residual(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _wrapped(x + y)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        _write(k_cache, batch, k)
        _write(v_cache, batch, v)
        out = torch.empty_like(q)
        for r, length in enumerate(batch.seq_lens):
            rows = slice(batch.query_start_loc[r], batch.query_start_loc[r + 1])
            count = rows.stop - rows.start
            keys, values = (c[batch.block_table[r].long()].flatten(0, 1)[:length, 0] for c in (k_cache, v_cache))
            visible = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
            weights = torch.where(visible[:, None], torch.remainder(q[rows] @ keys.T, 8), 0)
            out[rows] = _wrapped(weights @ values)
        return out


class TritonMath:
    """Floating point: products in fixed tiles, the package's paged attention, everything else element by element."""

    head_dim = 64
    hidden = 128
    dtype = torch.float16

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def values(self, *shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)

    def weight(self, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / rows**0.5).to(self.device, self.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        from fixed_tile_matmul import fixed_tile_matmul

        return fixed_tile_matmul(x, weight)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def residual(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).tanh()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        write_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        starts, lens = (
            torch.tensor(x, dtype=torch.int32, device=q.device) for x in (batch.query_start_loc, batch.seq_lens)
        )
        out = paged_prefill(
            q,
            k_cache,
            v_cache,
            batch.block_table,
            starts,
            lens,
            batch_invariant=True,
            backend="triton",
            max_query_len=batch.num_tokens,
        )
        assert isinstance(out, torch.Tensor)
        return out


def _write(cache: torch.Tensor, batch: Batch, values: torch.Tensor | float) -> None:
    cache[batch.slot_mapping // BLOCK_SIZE, batch.slot_mapping % BLOCK_SIZE] = values


def _wrapped(x: torch.Tensor) -> torch.Tensor:
    return torch.remainder(x + 32, 64) - 32


class Trace:
    """The order in which the pieces of a batch come to their collectives."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, str]] = []
        self._pieces: list[Batch] = []

    def __call__(self, batch: Batch, operation: str) -> None:
        if not any(batch is seen for seen in self._pieces):
            self._pieces.append(batch)
        self.steps.append((next(k for k, seen in enumerate(self._pieces) if seen is batch), operation))


def turns(num_pieces: int, operations: list[str]) -> list[tuple[int, str]]:
    """The trace of pieces that take turns at every collective."""
    return [(k, operation) for operation in operations for k in range(num_pieces)]


class _Model:
    def __init__(self, group: GroupCoordinator, math: Math, seed: int, layers: int = 2) -> None:
        self.group = group
        self.math = math
        self.layers = range(layers)
        self.trace: Callable[[Batch, str], None] = lambda batch, operation: None
        self._generator = torch.Generator().manual_seed(1000 * seed + group.rank_in_group)
        # The same on all ranks.
        self._shared = torch.Generator().manual_seed(seed)

    def _weights(self, rows: int, columns: int, count: int = 0) -> list[torch.Tensor]:
        return [self.math.weight(rows, columns, self._generator) for _ in range(count or len(self.layers))]

    def _all_reduce(self, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        self.trace(batch, "all_reduce")
        return self.group.all_reduce(x)


class PagedModel(_Model):
    """Attention over a paged cache and an MLP, each followed by an all-reduce."""

    def __init__(self, group: GroupCoordinator, math: Math, seed: int, layers: int = 2) -> None:
        super().__init__(group, math, seed, layers)
        hidden, head_dim = math.hidden, math.head_dim
        self.qkv = self._weights(hidden, 4 * head_dim)
        self.out = self._weights(2 * head_dim, hidden)
        self.up = self._weights(hidden, 2 * hidden)
        self.down = self._weights(2 * hidden, hidden)
        self.caches = [
            allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE, 1, head_dim, dtype=math.dtype, device=math.device)
            for _ in self.layers
        ]
        for cache in self.caches:
            for c in cache:
                c.copy_(math.values(*c.shape, generator=self._generator))

    def forget(self, batch: Batch) -> None:
        """Where the batch's keys and values go, there is now NaN."""
        for cache in self.caches:
            for c in cache:
                _write(c, batch, float("nan"))

    def __call__(self, batch: Batch) -> torch.Tensor:
        math, x = self.math, batch.inputs_embeds
        assert x is not None
        for layer in self.layers:
            q, k, v = math.linear(x, self.qkv[layer]).split([2 * math.head_dim, math.head_dim, math.head_dim], dim=1)
            q, k, v = (t.unflatten(1, (-1, math.head_dim)) for t in (q, k, v))
            attended = math.attend(q, k, v, *self.caches[layer], batch).flatten(1)
            x = math.residual(x, self._all_reduce(batch, math.linear(attended, self.out[layer])))
            h = math.activation(math.linear(x, self.up[layer]))
            x = math.residual(x, self._all_reduce(batch, math.linear(h, self.down[layer])))
        return x


class SequenceParallelModel(_Model):
    """Each rank holds its share of the tokens between layers (Korthikanti et al. 2022): all-gather, column- and
    row-parallel product, reduce-scatter.

    uneven: the ranks' shares need not be of one size.
    """

    def __init__(
        self, group: GroupCoordinator, math: Math, seed: int, layers: int = 2, *, uneven: bool = False
    ) -> None:
        super().__init__(group, math, seed)
        self.up = self._weights(math.hidden, 2 * math.hidden)
        self.down = self._weights(2 * math.hidden, math.hidden)
        self.uneven = uneven

    def __call__(self, batch: Batch) -> torch.Tensor:
        assert batch.inputs_embeds is not None
        sizes = self._sizes(batch)
        first = sum(sizes[: self.group.rank_in_group])
        x = batch.inputs_embeds[first : first + sizes[self.group.rank_in_group]]
        for layer in self.layers:
            x = self.layer(layer, batch, x)
        return self._all_gather(batch, x)

    def layer(self, layer: int, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        math = self.math
        h = math.activation(math.linear(self._all_gather(batch, x), self.up[layer]))
        return math.residual(x, self._reduce_scatter(batch, math.linear(h, self.down[layer])))

    def _sizes(self, batch: Batch) -> list[int]:
        n = self.group.world_size
        return [len(range(q, batch.num_tokens, n)) for q in range(n)]

    def _all_gather(self, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        self.trace(batch, "all_gather")
        return self.group.all_gatherv(x, 0, self._sizes(batch)) if self.uneven else self.group.all_gather(x, 0)

    def _reduce_scatter(self, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        self.trace(batch, "reduce_scatter")
        return self.group.reduce_scatterv(x, 0, self._sizes(batch)) if self.uneven else self.group.reduce_scatter(x, 0)


class ExpertModel(SequenceParallelModel):
    """Mixture of experts, one expert a token: tokens go to the ranks of the experts by all-gather, and come back summed
    by reduce-scatter."""

    experts_per_rank = 3

    def __init__(
        self, group: GroupCoordinator, math: Math, seed: int, layers: int = 2, *, uneven: bool = False
    ) -> None:
        super().__init__(group, math, seed, uneven=uneven)
        experts = group.world_size * self.experts_per_rank
        self.router = [math.weight(math.hidden, experts, self._shared) for _ in self.layers]
        self.expert_up = [self._weights(math.hidden, math.hidden, self.experts_per_rank) for _ in self.layers]
        self.expert_down = [self._weights(math.hidden, math.hidden, self.experts_per_rank) for _ in self.layers]

    def layer(self, layer: int, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        math = self.math
        tokens = self._all_gather(batch, x)
        logits = math.linear(tokens, self.router[layer])
        # Ties go to the last of the best.
        chosen = (logits * logits.shape[1] + torch.arange(logits.shape[1], device=x.device)).argmax(1)
        mine = torch.zeros_like(tokens)
        for e in range(self.experts_per_rank):
            rows = (chosen == self.group.rank_in_group * self.experts_per_rank + e).nonzero()[:, 0]
            h = math.activation(math.linear(tokens[rows], self.expert_up[layer][e]))
            mine[rows] = math.linear(h, self.expert_down[layer][e])
        return math.residual(x, self._reduce_scatter(batch, mine))


def random_batch(seed: int, math: Math, multiple: int = 1) -> Batch:
    """Requests of any mix: whole prompts, later chunks of prompts, single tokens that are decoded.

    The number of tokens is a multiple of ``multiple``, by a longer last request.
    """
    rng = random.Random(seed)
    counts = [rng.choice([1, rng.randint(2, 20), rng.randint(20, 120)]) for _ in range(rng.randint(1, 6))]
    counts[-1] += 1 + -(sum(counts) + 1) % multiple
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lens = [n + rng.choice([0, rng.randint(1, 100)]) for n in counts]
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    needed = [-(-length // BLOCK_SIZE) for length in lens]
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32)
    for r, count in enumerate(needed):
        table[r, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    positions = torch.cat([torch.arange(length - n, length) for n, length in zip(counts, lens, strict=True)])
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        inputs_embeds=math.values(starts[-1], math.hidden, generator=generator).to(math.dtype),
        positions=positions.to(math.device),
        query_start_loc=starts,
        seq_lens=lens,
        block_table=table.to(math.device),
        slot_mapping=slot_mapping(table, starts, lens, BLOCK_SIZE).to(math.device),
    )

"""QSA by its definitions, in loops over Python numbers, and the random cases that twin and kernels are compared on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from strided_views import spaced

from tpoverlap.attention import qsa

HEAD_DIM = 128


@dataclass(frozen=True)
class Batch:
    """Host lists of a batch; block_table rows of one width."""

    query_lens: list[int]
    seq_lens: list[int]
    slot_mapping: list[int]
    block_table: list[list[int]]
    num_tokens: int

    @property
    def query_start_loc(self) -> list[int]:
        starts = [0]
        for n in self.query_lens:
            starts.append(starts[-1] + n)
        return starts

    def tensors(self, device: str) -> tuple[torch.Tensor, ...]:
        """query_start_loc, seq_lens, slot_mapping, block_table."""
        width = len(self.block_table[0]) if self.block_table else 3
        return (
            torch.tensor(self.query_start_loc, dtype=torch.int32, device=device),
            torch.tensor(self.seq_lens, dtype=torch.int32, device=device),
            torch.tensor(self.slot_mapping, dtype=torch.int64, device=device),
            torch.tensor(self.block_table, dtype=torch.int32, device=device).view(len(self.query_lens), width),
        )


def random_batch(seed: int, *, ratio: int, storage_block_size: int, max_requests: int = 6) -> Batch:
    """Empty requests, padding, sequences shorter than their query, negative block ids and tables too narrow."""
    rng = random.Random(seed)
    requests = rng.randint(0, max_requests)
    query_lens = [rng.choice([0, 1, 1, 2, rng.randint(1, 40)]) for _ in range(requests)]
    seq_lens = [
        max(0, n + rng.choice([0, rng.randint(0, 100), rng.randint(0, 100), -rng.randint(0, 9)])) for n in query_lens
    ]
    num_tokens = sum(query_lens) + rng.choice([0, 0, rng.randint(1, 9)])
    need = max([1, *(-(-n // (ratio * storage_block_size)) for n in seq_lens)])
    width = rng.choice([need, need + 2, max(1, need // 2)])
    table = [[rng.choice([-1, *range(500), *range(500)]) for _ in range(width)] for _ in range(requests)]
    slots = [rng.choice([-1, rng.randint(0, 9999), rng.randint(0, 9999)]) for _ in range(sum(query_lens))]
    slots += [-1] * (num_tokens - len(slots))
    return Batch(query_lens, seq_lens, slots, table, num_tokens)


def loop_metadata(
    batch: Batch, *, storage_block_size: int, compress_ratio: int, circular_buffer_size: int, max_k_work: int
) -> dict[str, list[Any]]:
    r, size, ring = compress_ratio, storage_block_size, circular_buffer_size
    real = sum(batch.query_lens)
    token_to_req, positions, visible, work = [], [], [], []
    common = r == 1 and not ring
    slots = list(batch.slot_mapping) if common else []
    for request, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        table = batch.block_table[request]
        for i in range(query_len):
            position = seq_len - query_len + i
            token_to_req.append(request)
            positions.append(position)
            visible.append(max(0, min((position + 1) // r, seq_len // r)))
            slot = -1
            if ring:
                if query_len - i <= ring and table[0] >= 0:
                    slot = table[0] * ring + position % ring
            elif r > 1:
                compressed = position // r
                column = compressed // size
                exists = 0 <= column < len(table) and table[column] >= 0
                if (position + 1) % r == 0 and batch.slot_mapping[len(positions) - 1] >= 0 and exists:
                    slot = table[column] * size + compressed % size
            if not common:
                slots.append(slot)
        if query_len:
            count = max(1, seq_len // r - (seq_len - query_len) // r)
            work += [[request, i] for i in range(count)]
    padding = batch.num_tokens - real
    work = (work + [[-1, -1]] * max_k_work)[:max_k_work]
    return {
        "token_to_req": token_to_req + [0] * padding,
        "logical_positions": positions + [-1] * padding,
        "visible_blocks": visible + [0] * padding,
        "slot_mapping": slots if common else slots + [-1] * padding,
        "k_work": work,
    }


def check_metadata(seed: int, device: str, *, ratio: int, storage_block_size: int, ring: int, extra_work: int) -> None:
    """Compare a random batch's metadata with the loops: into fresh tensors, and of strided inputs into buffers with a
    guard behind.
    """
    batch = random_batch(seed, ratio=ratio, storage_block_size=storage_block_size)
    need = qsa.k_work_capacity(batch.num_tokens, len(batch.query_lens), ratio)
    sizes = {
        "storage_block_size": storage_block_size,
        "compress_ratio": ratio,
        "circular_buffer_size": ring,
        "max_k_work": max(0, need + extra_work),
    }
    want = loop_metadata(batch, **sizes)
    buffers = qsa.QSAMetadata.allocate(batch.num_tokens + 3, sizes["max_k_work"] + 2, device)
    for tensor in vars(buffers).values():
        tensor.fill_(77)
    dense = batch.tensors(device)
    for given, inputs in ((None, dense), (buffers, map(spaced, dense))):
        got = qsa.build_metadata(*inputs, num_tokens=batch.num_tokens, buffers=given, **sizes)
        for name, value in want.items():
            assert getattr(got, name).tolist() == value, name
    for name, value in want.items():
        tensor = getattr(buffers, name)
        assert bool((tensor[len(value) :] == 77).all()), f"{name} written past its end"


@dataclass(frozen=True)
class SelectCase:
    """Small integer queries and keys, so that every order of summation gives the same FP32 scores."""

    q: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    token_to_req: torch.Tensor
    logical_positions: torch.Tensor
    seq_lens: torch.Tensor
    compress_ratio: int

    def args(self, device: str) -> tuple[torch.Tensor, ...]:
        tensors = (self.q, self.key_cache, self.block_table, self.token_to_req, self.logical_positions, self.seq_lens)
        return tuple(t.to(device) for t in tensors)

    @property
    def visible(self) -> list[int]:
        r = self.compress_ratio
        lens, reqs = self.seq_lens.tolist(), self.token_to_req.tolist()
        return [
            max(0, min((p + 1) // r, lens[i] // r)) for p, i in zip(self.logical_positions.tolist(), reqs, strict=True)
        ]


def select_case(
    seed: int,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    ratio: int = 4,
    storage_block_size: int = 8,
    heads: int = 4,
    padding: int = 0,
    holes: bool = False,
    dtype: torch.dtype = torch.float16,
    sparse_keys: bool = True,
    extra_width: int = 1,
    padding_request: int = 0,
) -> SelectCase:
    """sparse_keys: most products are 0, which makes many ties. holes: some block ids lie outside the cache."""
    g = torch.Generator().manual_seed(seed)
    requests = len(query_lens)
    width = max([1, *(-(-n // (ratio * storage_block_size)) for n in seq_lens)])
    width = max(1, width + extra_width)
    blocks = requests * width + 2
    table = torch.randperm(blocks, generator=g)[: requests * width].to(torch.int32).view(requests, width)
    if holes:
        outside = torch.tensor([-1, blocks, 2**31 - 1], dtype=torch.int32)
        choice = torch.randint(0, 3, table.shape, generator=g)
        table = torch.where(torch.rand(table.shape, generator=g) < 0.3, outside[choice], table)
    q = torch.randint(-2, 3, (sum(query_lens) + padding, heads, HEAD_DIM), generator=g).to(dtype)
    keys = torch.randint(-2, 3, (blocks, storage_block_size, HEAD_DIM), generator=g)
    if sparse_keys:
        keys[..., 3:] = 0
    rows = [(i, s - n + j) for i, (n, s) in enumerate(zip(query_lens, seq_lens, strict=True)) for j in range(n)]
    rows += [(padding_request, -1)] * padding
    return SelectCase(
        q,
        keys.to(dtype),
        table,
        torch.tensor([i for i, _ in rows], dtype=torch.int32),
        torch.tensor([p for _, p in rows], dtype=torch.int64),
        torch.tensor(seq_lens, dtype=torch.int32),
        ratio,
    )


def exact_scores(case: SelectCase) -> list[list[float]]:
    """Scores of each token's visible columns, in Python integers times the default scale in FP32."""
    size = case.key_cache.shape[1]
    blocks = case.key_cache.shape[0]
    scale = torch.tensor(HEAD_DIM**-0.5, dtype=torch.float32)
    table = case.block_table.tolist()
    result = []
    for t, (request, visible) in enumerate(zip(case.token_to_req.tolist(), case.visible, strict=True)):
        row = []
        for column in range(min(visible, len(table[request]) * size)):
            block = table[request][column // size]
            if not 0 <= block < blocks:
                row.append(-torch.inf)
                continue
            products = (case.q[t].double() * case.key_cache[block, column % size].double()).sum(dim=1)
            row.append(float(torch.tensor(float(products.clamp(min=0).sum()), dtype=torch.float32) * scale))
        result.append(row)
    return result


def loop_select(case: SelectCase, top_k: int) -> list[list[int]]:
    r, seq_lens = case.compress_ratio, case.seq_lens.tolist()
    scores = exact_scores(case)
    result = []
    for t, (request, visible) in enumerate(zip(case.token_to_req.tolist(), case.visible, strict=True)):
        position = int(case.logical_positions[t])
        row = scores[t] + [-torch.inf] * (visible - len(scores[t]))
        best = sorted(sorted(range(visible), key=lambda c: (-row[c], c))[:top_k])
        tokens = [b * r + j for b in best for j in range(r)]
        if position >= 0:
            tokens += [p for p in range((position + 1) // r * r, position + 1) if p < seq_lens[request]]
        result.append(tokens + [-1] * (top_k * r + r - 1 - len(tokens)))
    return result


def score_words(scores: torch.Tensor, visible: list[int]) -> list[list[int]]:
    """The FP32 words of the visible columns."""
    words = scores.view(torch.int32).tolist()
    return [row[: min(n, len(row))] for row, n in zip(words, visible, strict=True)]

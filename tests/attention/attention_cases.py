"""Random paged-attention problems, and a float64 loop over rows that solves them independently of the package."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Case:
    """The tensors of one call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def prefill(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.block_table, self.cu_seqlens_q, self.seq_lens)

    @property
    def decode(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens)

    def only(self, request: int) -> Case:
        """The same call with one request left; caches are shared."""
        start, end = self.cu_seqlens_q[request : request + 2].tolist()
        return dataclasses.replace(
            self,
            q=self.q[start:end],
            block_table=self.block_table[request : request + 1],
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32, device=self.q.device),
            seq_lens=self.seq_lens[request : request + 1],
        )


def make_case(
    seed: int,
    requests: Sequence[tuple[int, int]],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "plain",
) -> Case:
    """requests: (query tokens, keys) of each.

    Blocks are shuffled; blocks that no request owns, and rows past a request's last key, hold NaN; unused table entries
    hold ids that must never be followed. layout: "plain", "interleaved" (K and V of a block side by side), "heads" (the
    head outermost in a block), "strided" (every second element of a wider storage, all tensors).
    """
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-keys // block_size) for _, keys in requests]
    blocks = sum(counts) + 3
    order = torch.randperm(blocks, generator=gen).to(torch.int32)
    columns = max([1, *counts]) + 1
    table = torch.tensor([2**31 - 1, -1, -(2**31), blocks], dtype=torch.int32).repeat(columns)[:columns]
    table = table.repeat(len(requests), 1)
    k, v = torch.full((2, blocks, block_size, kv_heads, head_dim), math.nan)
    at = 0
    for row, (count, (_, keys)) in enumerate(zip(counts, requests, strict=True)):
        mine = order[at : at + count]
        at += count
        table[row, :count] = mine
        for cache in (k, v):
            values = torch.full((count * block_size, kv_heads, head_dim), math.nan)
            values[:keys] = torch.randn(keys, kv_heads, head_dim, generator=gen)
            cache[mine.long()] = values.view(count, block_size, kv_heads, head_dim)
    starts = np.cumsum([0, *(n for n, _ in requests)])
    q = torch.randn(int(starts[-1]), q_heads, head_dim, generator=gen)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if layout == "interleaved":
        k, v = torch.stack((k, v), 1).to(device).unbind(1)
    elif layout == "heads":
        k, v = (x.transpose(1, 2).contiguous().to(device).transpose(1, 2) for x in (k, v))
    elif layout == "strided":
        q, k, v = (torch.stack((x, torch.full_like(x, math.nan)), -1).to(device)[..., 0] for x in (q, k, v))
    else:
        assert layout == "plain"
    return Case(
        q.to(device),
        k.to(device),
        v.to(device),
        table.to(device),
        torch.from_numpy(starts).to(torch.int32).to(device),
        torch.tensor([keys for _, keys in requests], dtype=torch.int32).to(device),
    )


def without_hidden_keys(case: Case, sliding_window: int) -> Case:
    """The same call once the keys that no row sees are gone: NaN in their places, their own blocks unmapped."""
    block_size = case.k_cache.shape[1]
    k_cache, v_cache, table = case.k_cache.clone(), case.v_cache.clone(), case.block_table.clone()
    for r, keys in enumerate(case.seq_lens.tolist()):
        tokens = int(case.cu_seqlens_q[r + 1] - case.cu_seqlens_q[r])
        first = max(0, keys - tokens + 1 - sliding_window) if tokens else keys
        for j in range(first):
            for cache in (k_cache, v_cache):
                cache[int(case.block_table[r, j // block_size]), j % block_size] = math.nan
        table[r, : first // block_size] = torch.tensor([-1, 2**31 - 1, 10**6]).repeat(keys + 1)[: first // block_size]
    return dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache, block_table=table)


def strided_lengths(case: Case) -> Case:
    """The same call with lengths that are columns of wider tensors."""
    starts, lens = (torch.stack((x, x + 10**6), 1)[:, 0] for x in (case.cu_seqlens_q, case.seq_lens))
    return dataclasses.replace(case, cu_seqlens_q=starts, seq_lens=lens)


def solve(
    case: Case, *, scale: float | None = None, sliding_window: int | None = None, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64, row by row from the definition."""
    q, k_cache, v_cache = (x.detach().cpu().double().numpy() for x in (case.q, case.k_cache, case.v_cache))
    table, starts, lens = (x.cpu().numpy() for x in (case.block_table, case.cu_seqlens_q, case.seq_lens))
    tokens, q_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = np.zeros_like(q), np.full((tokens, q_heads), -np.inf)
    for r, keys in enumerate(lens):
        n = starts[r + 1] - starts[r]
        where = [(table[r, j // block_size], j % block_size) for j in range(keys)]
        k = np.array([k_cache[b, o] for b, o in where]).reshape(keys, kv_heads, head_dim)
        v = np.array([v_cache[b, o] for b, o in where]).reshape(keys, kv_heads, head_dim)
        for i in range(n):
            last = keys - n + i
            first = 0 if sliding_window is None else max(0, last + 1 - sliding_window)
            if last < first:
                continue
            for h in range(q_heads):
                g = h // (q_heads // kv_heads)
                s = k[first : last + 1, g] @ q[starts[r] + i, h] * scale
                if softcap is not None:
                    s = softcap * np.tanh(s / softcap)
                w = np.exp(s - s.max())
                out[starts[r] + i, h] = w @ v[first : last + 1, g] / w.sum()
                lse[starts[r] + i, h] = s.max() + np.log(w.sum())
    return torch.from_numpy(out), torch.from_numpy(lse)


def assert_close(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], tol: float) -> None:
    """Both tensors within ``tol``, with -inf where -inf is expected and no NaN."""
    for name, a, b in zip(("output", "log-sum-exp"), got, want, strict=True):
        a = a.detach().cpu().double()
        assert a.shape == b.shape, name
        assert not a.isnan().any(), f"{name} has NaN"
        assert torch.equal(a.isinf(), b.isinf()), f"{name}: -inf at other rows than expected"
        error = (a - b).masked_fill(b.isinf(), 0).abs()
        worst = error.max().item() if error.numel() else 0.0
        assert worst <= tol, f"{name}: error {worst:.3g} above {tol:.3g}"

"""Top-k by a sort of Python tuples, and random score rows."""

from __future__ import annotations

import math
from typing import Literal

import torch
from strided_views import spaced

from tpoverlap.attention.topk import topk_indices


def random_scores(seed: int, rows: int, width: int, values: str) -> torch.Tensor:
    """values: "normal", "ties", "equal", "special" (NaN, infinities, both zeros), "descending" (the best together)."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, width, generator=g)
    if values == "ties":
        return torch.randint(-3, 4, (rows, width), generator=g).float()
    if values == "equal":
        return torch.full((rows, width), float(torch.randn(1, generator=g)))
    if values == "descending":
        return -torch.arange(width).float().expand(rows, width).contiguous()
    if values == "special":
        kind = torch.rand(rows, width, generator=g)
        for low, high, value in (
            (0, 0.2, math.nan),
            (0.2, 0.3, math.inf),
            (0.3, 0.7, -math.inf),
            (0.7, 0.75, -0.0),
            (0.75, 0.8, 0.0),
        ):
            scores = torch.where((kind >= low) & (kind < high), value, scores)
    return scores


def loop_topk(row: list[float], length: int, k: int, order: str, skip_neg_inf: bool) -> list[int]:
    live = [i for i in range(length) if not (skip_neg_inf and row[i] == -math.inf)]
    best = sorted(live, key=lambda i: (0, 0.0, i) if math.isnan(row[i]) else (1, -row[i], i))[:k]
    if order == "index":
        best.sort()
    return best + [-1] * (k - len(best))


def check_topk(
    seed: int,
    device: str,
    *,
    rows: int,
    width: int,
    k: int,
    values: str,
    order: Literal["score", "index"],
    skip_neg_inf: bool,
) -> None:
    """Random lengths, 0, 1, k and the width among them, strided for odd seeds; NaN stands where no column is live."""
    g = torch.Generator().manual_seed(seed)
    scores = random_scores(seed, rows, width, values)
    pool = torch.tensor([0, 1, min(k, width), min(k + 1, width), width])
    lengths = torch.where(
        torch.rand(rows, generator=g) < 0.5,
        pool[torch.randint(0, len(pool), (rows,), generator=g)],
        torch.randint(0, width + 1, (rows,), generator=g),
    )
    scores = scores.masked_fill(torch.arange(width) >= lengths.unsqueeze(1), math.nan)
    out = torch.full((rows, k), 99, dtype=torch.int32, device=device)
    want = [
        loop_topk(row, length, k, order, skip_neg_inf)
        for row, length in zip(scores.tolist(), lengths.tolist(), strict=True)
    ]
    lengths = lengths.int().to(device)
    got = topk_indices(
        scores.to(device), spaced(lengths) if seed % 2 else lengths, k, order=order, skip_neg_inf=skip_neg_inf, out=out
    )
    assert got.tolist() == want

"""DSA by the definition, in loops over Python numbers, and the random cases that twin and kernels are compared on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from strided_views import spaced

from tpoverlap.attention import dsa

INF = math.inf


@dataclass(frozen=True)
class DsaCase:
    """logits [rows, width] on the CPU; starts may be None."""

    logits: torch.Tensor
    starts: list[int] | None
    ends: list[int]
    block_size: int
    num_blocks: int
    row_repeat: int


def random_case(
    seed: int,
    *,
    rows: int,
    width: int,
    block_size: int,
    num_blocks: int,
    row_repeat: int = 1,
    with_starts: bool = True,
    values: str = "normal",
    max_end: int | None = None,
) -> DsaCase:
    """values: "normal"; "ties" (few distinct, both zeros); "special" (NaN, infinities and zeros among them)."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=g).tolist()

    logits = torch.randn(rows, width, generator=g)
    if values == "ties":
        logits = torch.randint(-2, 3, (rows, width), generator=g).float()
        logits = torch.where((logits == 0) & (torch.rand(rows, width, generator=g) < 0.5), -0.0, logits)
    elif values == "special":
        kind = torch.rand(rows, width, generator=g)
        for low, high, value in (
            (0, 0.05, math.nan),
            (0.05, 0.1, INF),
            (0.1, 0.7, -INF),
            (0.7, 0.75, -0.0),
            (0.75, 0.8, 0.0),
        ):
            logits = torch.where((kind >= low) & (kind < high), value, logits)
    entries = -(-rows // row_repeat)
    high = width + 2 * block_size if max_end is None else max_end
    ends = integers(0, high, entries)
    for entry, chosen in enumerate(integers(0, 9, entries)):
        ends[entry] = {0: 0, 1: 1, 2: width, 3: min(high, width + 3)}.get(chosen, ends[entry])
    starts = [integers(0, max(0, end) if i % 4 else width + 4, 1)[0] for i, end in enumerate(ends)]
    return DsaCase(logits, starts if with_starts else None, ends, block_size, num_blocks, row_repeat)


def _start_end(case: DsaCase, row: int) -> tuple[int, int]:
    entry = row // case.row_repeat
    return (0 if case.starts is None else case.starts[entry]), case.ends[entry]


def loop_scores(case: DsaCase) -> list[list[float]]:
    rows, width = case.logits.shape
    size, result = case.block_size, []
    for row in range(rows):
        start, end = _start_end(case, row)
        logits, scores = case.logits[row].tolist(), []
        for block in range(math.ceil(width / size)):
            live = logits[start + block * size : max(0, min(start + (block + 1) * size, end, width))]
            best = -INF
            for value in live:
                best = value if math.isnan(value) or value > best else best
                if math.isnan(best):
                    break
            scores.append(INF if end > start and block == (end - start - 1) // size else best)
        result.append(scores)
    return result


def loop_candidates(case: DsaCase, scores: list[list[float]]) -> list[list[int]]:
    def rank(row: list[float], block: int) -> tuple[int, float, int]:
        value = row[block]
        return (0, 0.0, block) if math.isnan(value) else (1, -value, block)

    result = []
    for row in scores:
        best = [b for b in sorted(range(len(row)), key=lambda b: rank(row, b)) if row[b] != -INF]
        best = best[: case.num_blocks]
        result.append(best + [-1] * (case.num_blocks - len(best)))
    return result


def loop_mask(case: DsaCase, candidates: list[list[int]]) -> torch.Tensor:
    rows, width = case.logits.shape
    size, masked = case.block_size, case.logits.clone()
    for row in range(rows):
        start, end = _start_end(case, row)
        kept = set()
        for block in candidates[row]:
            if block >= 0:
                first = start + block * size
                kept.update(range(first, first + size) if first < width else [width - 1])
        for column in range(max(0, min(end, width))):
            if column < start or column not in kept:
                masked[row, column] = -INF
    return masked


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def check_case(case: DsaCase, device: str, *, strided: bool = False, bounds_dtype: torch.dtype = torch.int32) -> None:
    """Compare the public functions on the device with the loops, also the bytes between a strided view's columns.

    strided: logits, bounds and candidates all lie in every second element of larger tensors.
    """
    rows, width = case.logits.shape
    step = 2 if strided else 1
    storage = torch.full((rows, width * step), 7.0, device=device)
    logits = storage[:, ::step]
    logits.copy_(case.logits)
    starts = None if case.starts is None else torch.tensor(case.starts, dtype=bounds_dtype, device=device)
    ends = torch.tensor(case.ends, dtype=bounds_dtype, device=device)
    if strided:
        starts, ends = None if starts is None else spaced(starts), spaced(ends)
    size, repeat = case.block_size, case.row_repeat

    scores = dsa.block_scores(logits, starts, ends, size, row_repeat=repeat)
    want_scores = loop_scores(case)
    torch.testing.assert_close(
        scores.cpu(), torch.tensor(want_scores).view(rows, -1), rtol=0, atol=0, equal_nan=True, check_stride=False
    )

    want = loop_candidates(case, want_scores)
    out = torch.full((rows, case.num_blocks), 99, dtype=torch.int32, device=device)
    got = dsa.select_candidate_blocks(logits, starts, ends, case.num_blocks, size, row_repeat=repeat, out=out)
    assert got is out
    assert got.tolist() == want

    # Candidates in any order, with repeats, ignored entries and blocks past the width.
    g = torch.Generator().manual_seed(case.num_blocks)
    past = -(-width // size) + torch.randint(0, 3, (rows, 1), generator=g)
    pool = torch.cat([torch.tensor(want, dtype=torch.int64).view(rows, -1), torch.full((rows, 1), -1), past], dim=1)
    for use in (pool[:, :-2], pool[:, torch.randperm(pool.shape[1], generator=g)]):
        candidates = torch.cat([use, use[:, :1]], dim=1).to(device, torch.int32)
        logits.copy_(case.logits)
        given = spaced(candidates) if strided else candidates
        dsa.apply_candidate_mask(logits, starts, ends, given, size, row_repeat=repeat)
        assert same_bits(logits.cpu(), loop_mask(case, candidates.tolist()))
        if strided:
            assert bool((storage[:, 1::2] == 7.0).all())

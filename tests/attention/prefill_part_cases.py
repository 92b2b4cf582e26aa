"""Prefills with tiles of the test's choice, so that short rows have several parts."""

from __future__ import annotations

import dataclasses
import math

import torch
from attention_cases import Case

from tpoverlap.attention.triton.configs import PrefillTiles
from tpoverlap.attention.triton.prefill import launch_prefill

Result = tuple[torch.Tensor, torch.Tensor]


def prefill_in_parts(
    case: Case,
    tiles: PrefillTiles,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **limits: int,
) -> Result:
    """Output and log-sum-exp, both filled with NaN before."""
    out = torch.full_like(case.q, math.nan)
    lse = torch.full(case.q.shape[:2], math.nan, device=case.q.device)
    launch_prefill(
        *case.prefill,
        scale=case.q.shape[2] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        softcap=softcap,
        out=out,
        lse=lse,
        tiles=tiles,
        **limits,
    )
    return out, lse


def chunk(case: Case, request: int, first: int, last: int) -> Case:
    """Query tokens first .. last - 1 of a request, as a prefill that comes when its keys end there."""
    start, end = case.cu_seqlens_q[request : request + 2].tolist()
    keys = int(case.seq_lens[request]) - (end - start) + last
    return dataclasses.replace(
        case.only(request),
        q=case.q[start + first : start + last],
        cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32, device=case.q.device),
        seq_lens=torch.tensor([keys], dtype=torch.int32, device=case.q.device),
    )


def joined(results: list[Result]) -> Result:
    out, lse = (torch.cat(x) for x in zip(*results, strict=True))
    return out, lse


def assert_same(a: Result, b: Result) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)

"""Exact, deterministic top-k of rows of scores with a length each.

One total order serves every caller: the larger score first, NaN above +inf, -0 equal to +0, ties to the lower index.
The selection is therefore a set of integers that does not depend on how the work was cut, and the kernels
(``topk_kernels.py``) and the torch version below give the same one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from tpoverlap.attention.triton_dispatch import on_device_of, triton_serves

NAN_KEY = 0x7FFFFFFF
NEG_INF_KEY = -0x7F800001
MAX_KERNEL_K = 4096
SHORT_ROW = 128
"""Rows of up to this many scores are sorted whole."""


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """FP32 scores -> int32 keys of the same shape whose integer order is the order of the scores.

    The bits of a non-negative float ascend with its value; those of a negative one are turned over below zero. -0 gets
    the key of +0, every NaN the largest key. (The order-preserving map known from radix sorts of floats.)
    """
    bits = scores.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = torch.where(scores == 0, 0, keys)
    return torch.where(torch.isnan(scores), NAN_KEY, keys)


def topk_indices(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    order: Literal["score", "index"] = "score",
    skip_neg_inf: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [rows, k]: the k best of each row's first ``lengths[row]`` columns, then -1.

    scores: FP32 [rows, width], unit stride along the width; columns at and past a row's length are never read.
    lengths: int32 [rows], clamped to [0, width]. order: ``"score"`` lists the best first, ``"index"`` ascending
    indices. skip_neg_inf: columns that hold -inf are not selected. Raises ValueError for other shapes and dtypes.

    On CUDA up to k = 4096 one launch, one program a row, in three steps: the k-th largest maximum of strided groups
    bounds the k-th score from below; the few scores that reach the bound are compacted; bisection over their integer
    keys finds the k-th one exactly. Rows are read at most twice, and only up to their length.
    """
    check_topk_arguments(scores, lengths, k)
    rows = scores.shape[0]
    out = check_topk_output(out, rows, k, scores.device)
    if not rows or not k:
        return out
    if triton_serves(scores) and k <= MAX_KERNEL_K:
        _launch(scores, lengths, k, order == "score", skip_neg_inf, out)
    else:
        out.copy_(topk_torch(scores, lengths, k, order=order, skip_neg_inf=skip_neg_inf))
    return out


def topk_torch(
    scores: torch.Tensor, lengths: torch.Tensor, k: int, *, order: Literal["score", "index"], skip_neg_inf: bool
) -> torch.Tensor:
    """The selection of :func:`topk_indices` in torch operations, on any device."""
    width = scores.shape[1]
    columns = torch.arange(width, device=scores.device)
    keys = order_keys(scores).long()
    live = columns < lengths.long().unsqueeze(1)
    if skip_neg_inf:
        live &= keys > NEG_INF_KEY
    # One integer holds score and index, so no two are equal and torch.topk has no tie to break.
    ranked = torch.where(live, (keys << 32) | (0xFFFFFFFF - columns), torch.iinfo(torch.int64).min)
    best = torch.topk(ranked, min(k, width), dim=1, sorted=True).values
    indices = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    missing = best == torch.iinfo(torch.int64).min
    if order == "index":
        indices = indices.masked_fill(missing, width).sort(dim=1).values
        missing = indices == width
    indices = indices.masked_fill(missing, -1).to(torch.int32)
    return torch.nn.functional.pad(indices, (0, k - indices.shape[1]), value=-1)


def check_topk_arguments(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> None:
    """Raise ValueError unless the arguments are as :func:`topk_indices` documents."""
    if scores.dim() != 2 or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 [rows, width], got {scores.dtype} {tuple(scores.shape)}")
    if scores.shape[1] > 1 and scores.stride(1) != 1:
        raise ValueError(f"scores must have unit stride along the width, got strides {scores.stride()}")
    if lengths.shape != scores.shape[:1] or lengths.dtype != torch.int32 or lengths.device != scores.device:
        raise ValueError(
            f"lengths must be int32 [{scores.shape[0]}] on {scores.device}, "
            f"got {lengths.dtype} {list(lengths.shape)} on {lengths.device}"
        )
    if not isinstance(k, int) or k < 0:
        raise ValueError(f"k must be an int of at least 0, got {k!r}")


def check_topk_output(out: torch.Tensor | None, rows: int, k: int, device: torch.device) -> torch.Tensor:
    """``out`` where it is int32 [rows, k] on the device, a new tensor for None; else ValueError."""
    if out is None:
        return torch.empty(rows, k, dtype=torch.int32, device=device)
    if out.shape != (rows, k) or out.dtype != torch.int32 or out.device != device:
        raise ValueError(
            f"out must be int32 [{rows}, {k}] on {device}, got {out.dtype} {list(out.shape)} on {out.device}"
        )
    return out


@dataclass(frozen=True)
class SelectPlan:
    """Compile-time sizes of the selection kernel for one k.

    groups: strided groups whose maxima bound the k-th score, and entries of the list of scores that reach the bound.
    k_padded: power of two >= k. tile: scores compacted at a time. unroll: groups' loads in flight. stages: tiles in
    flight. num_warps: of a program.
    """

    groups: int
    k_padded: int
    tile: int
    unroll: int
    stages: int
    num_warps: int

    @property
    def scratch_ints(self) -> int:
        """int32 words of scratch a row."""
        return 2 * self.groups + 2 * self.k_padded

    def constants(self) -> dict[str, int]:
        """What the kernels' launches take by name."""
        return {
            "GROUPS": self.groups,
            "K_PADDED": self.k_padded,
            "TILE": self.tile,
            "UNROLL": self.unroll,
            "STAGES": self.stages,
            "num_warps": self.num_warps,
        }


@functools.cache
def select_plan(k: int) -> SelectPlan:
    """Sizes for k: with 4k to 8k groups, random scores leave 1.07k to 1.15k entries that reach the bound."""
    k_padded = max(16, 1 << (k - 1).bit_length())
    groups = max(1024, 4 * k_padded if k_padded >= 2048 else 8 * k_padded)
    return SelectPlan(
        groups=groups,
        k_padded=k_padded,
        tile=min(groups // 2, 4096),
        unroll=4 if groups <= 8192 else 2,
        stages=3,
        num_warps=16 if groups >= 8192 else 8,
    )


def _launch(
    scores: torch.Tensor, lengths: torch.Tensor, k: int, by_score: bool, skip_neg_inf: bool, out: torch.Tensor
) -> None:
    from tpoverlap.attention.topk_kernels import topk_rows

    rows, width = scores.shape
    plan = select_plan(k)
    scratch = torch.empty(rows, plan.scratch_ints, dtype=torch.int32, device=scores.device)
    with on_device_of(scores):
        topk_rows[(rows,)](
            scores,
            scores.stride(0),
            lengths,
            width,
            scratch,
            out,
            out.stride(0),
            out.stride(1),
            k,
            SHORT=SHORT_ROW,
            BY_SCORE=by_score,
            SKIP_NEG_INF=skip_neg_inf,
            **plan.constants(),
        )

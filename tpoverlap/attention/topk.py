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

from tpoverlap.cuda.triton_dispatch import multiprocessors, on_device_of, triton_serves

NAN_KEY = 0x7FFFFFFF
NEG_INF_KEY = -0x7F800001
MAX_KERNEL_K = 4096
SHORT_ROW = 128
"""Rows of up to this many scores are sorted whole."""
MAXIMA_LANES = 512
"""Groups whose maxima a program takes at a time."""
LIST_TILE = 2048
"""Scores that a program compares with the bound at a time."""


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

    On CUDA up to k = 4096, in three launches of which the first two share a row among programs: the k-th largest
    maximum of strided groups bounds the k-th score from below; the few scores that reach the bound are listed;
    bisection over their integer keys finds the k-th one exactly. Rows are read twice, and only up to their length.
    Widths of up to 2k take the last launch alone.
    """
    check_topk_arguments(scores, lengths, k)
    rows = scores.shape[0]
    out = check_topk_output(out, rows, k, scores.device)
    if not rows or not k:
        return out
    if triton_serves(scores) and k <= MAX_KERNEL_K:
        _launch(scores, lengths.contiguous(), k, order == "score", skip_neg_inf, out)
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
    """Compile-time sizes of the selection kernels for one k.

    groups: strided groups whose maxima bound the k-th score. k_padded: power of two >= k; the list holds twice as many
    scores. num_warps: of the programs that list and finish.
    """

    groups: int
    k_padded: int
    num_warps: int

    @property
    def scratch_ints(self) -> int:
        """int32 words of scratch a row: header, group maxima, list, selected."""
        return 32 + self.groups + 6 * self.k_padded

    @property
    def constants(self) -> dict[str, int]:
        """What every kernel takes by name."""
        return {"GROUPS": self.groups, "K_PADDED": self.k_padded}


@functools.cache
def select_plan(k: int) -> SelectPlan:
    """Sizes for k: with 4k to 8k groups, random scores leave 1.1k to 1.3k entries that reach the bound."""
    k_padded = max(16, 1 << (k - 1).bit_length())
    groups = max(1024, 4 * k_padded if k_padded >= 2048 else 8 * k_padded)
    return SelectPlan(groups=groups, k_padded=k_padded, num_warps=16 if k_padded >= 2048 else 8)


def list_candidates(
    scores: torch.Tensor, lengths: torch.Tensor, k: int, plan: SelectPlan, *, skip_neg_inf: bool
) -> torch.Tensor:
    """Scratch int32 [rows, plan.scratch_ints] for ``select_row``, with the list of each row that needs one.

    lengths: int32 or int64 [rows], unit stride, clamped to [0, width]. No launch where no row of this width needs a
    list.
    """
    from tpoverlap.attention.topk_kernels import group_maxima, list_hits

    rows, width = scores.shape
    scratch = torch.empty(rows, plan.scratch_ints, dtype=torch.int32, device=scores.device)
    if width <= 2 * plan.k_padded:
        return scratch
    programs = multiprocessors(scores)
    chunks = plan.groups // MAXIMA_LANES
    with on_device_of(scores):
        group_maxima[(rows, min(chunks, -(-16 * programs // rows)))](
            scores,
            scores.stride(0),
            lengths,
            width,
            scratch,
            LANES=MAXIMA_LANES,
            UNROLL=8,
            num_warps=4,
            **plan.constants,
        )
        list_hits[(rows, min(-(-width // LIST_TILE), -(-2 * programs // rows)))](
            scores,
            scores.stride(0),
            lengths,
            width,
            scratch,
            k,
            TILE=LIST_TILE,
            STAGES=3,
            SKIP_NEG_INF=skip_neg_inf,
            num_warps=plan.num_warps,
            **plan.constants,
        )
    return scratch


def _launch(
    scores: torch.Tensor, lengths: torch.Tensor, k: int, by_score: bool, skip_neg_inf: bool, out: torch.Tensor
) -> None:
    from tpoverlap.attention.topk_kernels import topk_rows

    rows, width = scores.shape
    plan = select_plan(k)
    scratch = list_candidates(scores, lengths, k, plan, skip_neg_inf=skip_neg_inf)
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
            num_warps=plan.num_warps,
            **plan.constants,
        )

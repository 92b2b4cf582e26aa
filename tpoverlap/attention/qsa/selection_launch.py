"""The launch of the selection kernel."""

from __future__ import annotations

import torch

from tpoverlap.attention.qsa.selection_kernel import select_positions
from tpoverlap.attention.topk import list_candidates, select_plan
from tpoverlap.cuda.triton_dispatch import on_device_of


def select(
    scores: torch.Tensor,
    token_to_req: torch.Tensor,
    logical_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    visible_blocks: torch.Tensor,
    compress_ratio: int,
    top_k: int,
    out: torch.Tensor,
) -> None:
    if not seq_lens.numel():
        out.fill_(-1)
        return
    # The kernels read what they have one of for each row with unit stride.
    visible_blocks = visible_blocks.contiguous()
    rows, columns = scores.shape
    plan = select_plan(top_k)
    scratch = list_candidates(scores, visible_blocks, top_k, plan, skip_neg_inf=False)
    with on_device_of(scores):
        select_positions[(rows,)](
            scores,
            scores.stride(0),
            token_to_req.contiguous(),
            logical_positions.contiguous(),
            seq_lens.contiguous(),
            visible_blocks,
            columns,
            top_k,
            compress_ratio,
            scratch,
            out,
            *out.stride(),
            RATIO_PADDED=1 << (compress_ratio - 1).bit_length(),
            num_warps=plan.num_warps,
            **plan.constants,
        )

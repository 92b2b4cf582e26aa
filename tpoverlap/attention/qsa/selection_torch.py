"""Token selection in torch operations, on any device; the arguments have been checked."""

from __future__ import annotations

import torch

from tpoverlap.attention.topk import topk_torch


def visible_blocks(
    token_to_req: torch.Tensor, logical_positions: torch.Tensor, seq_lens: torch.Tensor, compress_ratio: int
) -> torch.Tensor:
    """int32 [tokens]: complete groups that each token may see, 0 for padding."""
    if not seq_lens.numel():
        return torch.zeros_like(token_to_req, dtype=torch.int32)
    length = seq_lens.long()[token_to_req.long()]
    seen = torch.minimum(logical_positions.long() + 1, length)
    return torch.div(seen, compress_ratio, rounding_mode="floor").clamp_(min=0).to(torch.int32)


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
    visible = visible_blocks.long().clamp(min=0).unsqueeze(1)
    scored = visible.clamp(max=scores.shape[1])
    order = torch.arange(top_k, device=scores.device)
    best = topk_torch(scores, scored.squeeze(1), top_k, order="index", skip_neg_inf=False).long()
    # Where nothing is left out all visible blocks are listed, those past the table's width too.
    count = torch.where(scored <= top_k, visible.clamp(max=top_k), top_k)
    blocks = torch.where(scored <= top_k, order, best)

    place = torch.arange(out.shape[1], device=scores.device)
    block_place = torch.div(place, compress_ratio, rounding_mode="floor").clamp(max=top_k - 1)
    tokens = blocks[:, block_place] * compress_ratio + place % compress_ratio
    position = logical_positions.long().unsqueeze(1)
    tail_start = torch.div(position + 1, compress_ratio, rounding_mode="floor") * compress_ratio
    listed = count * compress_ratio
    tail = tail_start + place - listed
    length = seq_lens.long()[token_to_req.long()].unsqueeze(1)
    tail = tail.masked_fill((position < 0) | (tail > position) | (tail >= length), -1)
    out.copy_(torch.where(place < listed, tokens, tail))

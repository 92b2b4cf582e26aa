"""The scorer in torch operations, on any device; the arguments have been checked.

Products are summed in FP64 and rounded to FP32 once, so a score does not depend on which rows are computed together.
"""

from __future__ import annotations

import torch


def score(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    visible_blocks: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    num_blocks, storage_block_size, _ = key_cache.shape
    heads = q.shape[1]
    for request in token_to_req.unique().tolist():
        rows = (token_to_req == request).nonzero().flatten()
        visible = visible_blocks[rows].clamp(0, out.shape[1])
        num_columns = int(visible.max())
        if not num_columns:
            continue
        table = block_table[request, : -(-num_columns // storage_block_size)].long()
        inside = (table >= 0) & (table < num_blocks)
        if num_blocks:
            pages = key_cache.view(torch.uint8)[table.clamp(0, num_blocks - 1)].view(key_cache.dtype)
        else:
            pages = key_cache.new_zeros(len(table), *key_cache.shape[1:])
        keys = pages.to(torch.float64).flatten(0, 1)[:num_columns]
        products = (q[rows].double().flatten(0, 1) @ keys.t()).float().view(len(rows), heads, num_columns)
        total = products[:, 0].relu()
        for head in range(1, heads):
            total = total + products[:, head].relu()
        absent = ~inside.repeat_interleave(storage_block_size)[:num_columns]
        total = (total * scale).masked_fill(absent, float("-inf"))
        written = torch.arange(num_columns, device=q.device) < visible.unsqueeze(1)
        out[rows, :num_columns] = torch.where(written, total, out[rows, :num_columns])

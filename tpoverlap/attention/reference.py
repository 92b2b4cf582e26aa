"""Paged attention in plain torch: what serves CPU tensors, and what every kernel is compared with.

A request's keys and values are gathered once and attended to by all its queries; requests never share an operation, so
a row's bits do not depend on what else is in the batch. All arithmetic is FP32 on the values of the working dtype.
On a GPU it reads the lengths on the host, and the process's own float32 matmul precision holds.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from tpoverlap.attention.backend import PACKED_PREFILL, PrefillRequest, prefill_prepared_by, prepared_by
from tpoverlap.attention.shared_reasons import missing_features, mixed_dtypes

name = "reference"
capabilities = frozenset({PACKED_PREFILL})

# Scores held at a time by the blocked path: query tokens x keys of one step, per query head. Measured on one core at
# 3 to 12 heads: 128 x 512 is within 2 % of the fastest of 32..128 x 256..1024.
_QUERY_BLOCK = 128
_KEY_BLOCK = 512


def rejection_reasons(request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
    return (*missing_features(request), *mixed_dtypes(request))


@torch.no_grad()
def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int | None,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    starts = cu_seqlens_q.tolist()
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > q.shape[0]:
        raise ValueError(f"cu_seqlens_q must ascend from 0 to at most {q.shape[0]} (the rows of q), got {starts}")
    most = max((end - start for start, end in pairwise(starts)), default=0)
    if most > max_query_len:
        raise ValueError(f"max_query_len must be at least the {most} tokens that a request brings, got {max_query_len}")
    _attend_requests(
        q, k_cache, v_cache, block_table, starts, seq_lens.tolist(), scale, sliding_window, softcap, out, lse
    )


@torch.no_grad()
def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    starts = list(range(q.shape[0] + 1))
    _attend_requests(
        q, k_cache, v_cache, block_table, starts, seq_lens.tolist(), scale, sliding_window, softcap, out, lse
    )


prepare_prefill = prefill_prepared_by(paged_prefill)
prepare_decode = prepared_by(paged_decode)


def _attend_requests(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    block_size, kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // kv_heads
    capacity = block_table.shape[1] * block_size
    _set_unseen(out, lse, starts[-1], q.shape[0])
    for request, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"seq_lens[{request}] must be from 0 to {capacity} (columns of block_table x block_size), got {length}"
            )
        end = starts[request + 1]
        # Rows before the first key see nothing and keep output 0 and log-sum-exp -inf.
        first = max(starts[request], end - length)
        _set_unseen(out, lse, starts[request], first)
        count = end - first
        if count == 0:
            continue
        first_key = 0 if sliding_window is None else max(0, length - count + 1 - sliding_window)
        first_block = first_key // block_size
        blocks = block_table[request, first_block : -(-length // block_size)].long()
        if int(blocks.min()) < 0 or int(blocks.max()) >= k_cache.shape[0]:
            raise ValueError(
                f"block_table[{request}] must name blocks from 0 to {k_cache.shape[0] - 1} for its {length} keys, "
                f"got {int(blocks.min())} to {int(blocks.max())}"
            )
        keys = slice(first_key - first_block * block_size, length - first_block * block_size)
        k, v = (
            cache.index_select(0, blocks).flatten(0, 1)[keys].transpose(0, 1).float() for cache in (k_cache, v_cache)
        )
        rows = q[first:end].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).float().contiguous() * scale
        if sliding_window is None and softcap is None and q.device.type == "cpu":
            result, row_lse = _attend_fused(rows, k, v)
        else:
            result, row_lse = _attend_blocked(rows, k, v, sliding_window, softcap)
        out[first:end] = result.permute(2, 0, 1, 3).flatten(1, 2)
        if lse is not None:
            lse[first:end] = row_lse.permute(2, 0, 1).flatten(1, 2)


def _set_unseen(out: torch.Tensor, lse: torch.Tensor | None, first: int, end: int) -> None:
    out[first:end] = 0
    if lse is not None:
        lse[first:end] = -math.inf


def _attend_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bottom-right causal attention by torch's flash kernel for CPU; 1.25 x the speed of the blocked path.

    q [kv_heads, group, n, head_dim], scaled, k and v [kv_heads, keys >= n, head_dim], all float32. The kernel knows
    only the top-left causal mask, so the keys before the chunk (all visible) and the chunk itself (square) are two
    calls, merged by log-sum-exp. In the first one the heads of a group are more rows of the same problem.
    """
    kv_heads, group, n, head_dim = q.shape
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    prefix = k.shape[1] if n == 1 else k.shape[1] - n
    parts = []
    if prefix:
        o, lse = flash(q.reshape(1, kv_heads, group * n, head_dim), k[None, :, :prefix], v[None, :, :prefix], scale=1.0)
        parts.append((o.reshape(q.shape), lse.reshape(q.shape[:3])))
    if n > 1:
        heads = (1, kv_heads * group, n, head_dim)
        k_chunk, v_chunk = (x[:, None, prefix:].expand(q.shape).reshape(heads) for x in (k, v))
        o, lse = flash(q.reshape(heads), k_chunk, v_chunk, is_causal=True, scale=1.0)
        parts.append((o.reshape(q.shape), lse.reshape(q.shape[:3])))
    if len(parts) == 1:
        return parts[0]
    (o, lse), (chunk_o, chunk_lse) = parts
    merged = torch.logaddexp(lse, chunk_lse)
    return o * (lse - merged).exp()[..., None] + chunk_o * (chunk_lse - merged).exp()[..., None], merged


def _attend_blocked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sliding_window: int | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a sliding window and softcap: online softmax (Milakov and Gimelshein) over blocks of keys.

    k and v hold the last keys of the request, from the first that any row sees. Shapes as in ``_attend_fused``.
    """
    kv_heads, group, n, head_dim = q.shape
    keys = k.shape[1]
    result, row_lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for begin in range(0, n, _QUERY_BLOCK):
        stop = min(begin + _QUERY_BLOCK, n)
        rows = stop - begin
        block = q[:, :, begin:stop].reshape(kv_heads, group * rows, head_dim)
        position = torch.arange(keys - n + begin, keys - n + stop, device=q.device)[:, None]
        first_key = 0 if sliding_window is None else max(0, keys - n + begin + 1 - sliding_window)
        last_key = keys - n + stop
        peak = block.new_full((kv_heads, group * rows, 1), -math.inf)
        total = torch.zeros_like(peak)
        acc = torch.zeros_like(block)
        for at in range(first_key, last_key, _KEY_BLOCK):
            to = min(at + _KEY_BLOCK, last_key)
            scores = torch.bmm(block, k[:, at:to].transpose(1, 2))
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            below = sliding_window is not None and at <= last_key - 1 - sliding_window
            if to > keys - n + begin + 1 or below:
                key = torch.arange(at, to, device=q.device)
                hidden = key > position
                if below:
                    hidden |= key <= position - sliding_window  # type: ignore[operator]
                scores.view(kv_heads, group, rows, to - at).masked_fill_(hidden, -math.inf)
            new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
            # A row that has not met a visible key yet subtracts 0, so that its -inf scores become weights 0, not NaN.
            shift = new_peak.masked_fill(new_peak == -math.inf, 0.0)
            scores.sub_(shift).exp_()
            decay = (peak - shift).exp_()
            total.mul_(decay).add_(scores.sum(-1, keepdim=True))
            acc.mul_(decay).baddbmm_(scores, v[:, at:to])
            peak = new_peak
        result[:, :, begin:stop] = (acc / total).view(kv_heads, group, rows, head_dim)
        row_lse[:, :, begin:stop] = (peak + total.log()).view(kv_heads, group, rows)
    return result, row_lse

"""Dense attention on a GPU in any precision: the reference of the GPU tests, and its error in the working dtype."""

from __future__ import annotations

import torch
from attention_cases import Case


def dense(
    case: Case,
    dtype: torch.dtype,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of each request from gathered keys, with every operation in ``dtype``."""
    tokens, q_heads, head_dim = case.q.shape
    block_size, kv_heads = case.k_cache.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(case.q.shape, dtype=dtype, device=case.q.device)
    lse = torch.full((tokens, q_heads), -torch.inf, dtype=dtype, device=case.q.device)
    starts = case.cu_seqlens_q.tolist()
    for r, keys in enumerate(case.seq_lens.tolist()):
        first, last = starts[r], starts[r + 1]
        n = last - first
        if not n or not keys:
            continue
        blocks = case.block_table[r, : -(-keys // block_size)].long()
        k, v = (c[blocks].flatten(0, 1)[:keys].to(dtype).permute(1, 2, 0) for c in (case.k_cache, case.v_cache))
        q = case.q[first:last].to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = (q @ k * scale).unflatten(1, (-1, n))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(keys - n, keys, device=q.device)[:, None]
        key = torch.arange(keys, device=q.device)[None]
        hidden = key > position
        if sliding_window is not None:
            hidden |= key <= position - sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        row_lse = scores.logsumexp(-1)
        weights = torch.nan_to_num(torch.softmax(scores, -1))
        rows = weights.flatten(1, 2) @ v.transpose(1, 2)
        out[first:last] = rows.unflatten(1, (-1, n)).permute(2, 0, 1, 3).flatten(1, 2)
        lse[first:last] = row_lse.permute(2, 0, 1).flatten(1, 2)
    return out, lse


def check(case: Case, got: tuple[torch.Tensor, torch.Tensor], **options) -> None:
    """At most twice the error that the dense computation has in the working dtype, plus 1e-5; -inf and 0 where due."""
    want = dense(case, torch.float64, **options)
    working = dense(case, case.q.dtype, **options)
    for name, a, b, c in zip(("output", "log-sum-exp"), got, want, working, strict=True):
        assert not a.isnan().any(), f"{name} has NaN"
        assert torch.equal(a.isinf(), b.isinf()), f"{name}: -inf at other rows than expected"
        if a.numel():
            seen = ~b.isinf()
            error = (a.double() - b)[seen].abs().amax() if seen.any() else torch.zeros(())
            allowed = 2 * ((c.double() - b)[seen].abs().amax() if seen.any() else torch.zeros(())) + 1e-5
            assert error <= allowed, f"{name}: error {error:.3g} above {allowed:.3g}"

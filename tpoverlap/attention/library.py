"""What the adapters of attention libraries share: conditions of their GPUs, their decode, rows that see no key."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch

from tpoverlap.attention.backend import PrefillRequest
from tpoverlap.attention.shared_reasons import dotted, missing_features, mixed_dtypes

_FIRST_CAPABILITY = (8, 0)


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def library_rejections(request: PrefillRequest, module: str, package: str) -> list[str]:
    """Reasons that hold for any library whose kernels need tensor cores of compute capability 8.0."""
    reasons = []
    if not _installed(module):
        reasons.append(f"{package} is not installed")
    if request.capability is None:
        reasons.append("it needs a CUDA device")
    elif request.capability < _FIRST_CAPABILITY:
        reasons.append(
            f"it needs compute capability {dotted(_FIRST_CAPABILITY)}, the device has {dotted(request.capability)}"
        )
    if request.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it computes in float16 or bfloat16, not {request.dtype}")
    return reasons + mixed_dtypes(request) + missing_features(request)


def decode_by(prefill: Callable[..., None]) -> Callable[..., None]:
    """The decode of a library whose prefill serves it: one query token a request, cut as the library chooses."""

    def paged_decode(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        num_splits: int,
        workspace: torch.Tensor | None,
        **options: Any,
    ) -> None:
        starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        prefill(q, k_cache, v_cache, block_table, starts, seq_lens, num_splits=None, max_query_len=1, **options)

    return paged_decode


def clear_unseen_rows(
    out: torch.Tensor, lse: torch.Tensor | None, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Output 0 and log-sum-exp -inf where a row sees no key: libraries leave or define those rows otherwise."""
    rows = torch.arange(out.shape[0], device=out.device, dtype=torch.int32)
    # The rows past the last request fall to one more, of no keys.
    owner = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    after = torch.nn.functional.pad(cu_seqlens_q[1:], (0, 1), value=out.shape[0])
    unseen = torch.nn.functional.pad(seq_lens, (0, 1))[owner] - after[owner] + rows < 0
    out.masked_fill_(unseen[:, None, None], 0.0)
    if lse is not None:
        lse.masked_fill_(unseen[:, None], -math.inf)

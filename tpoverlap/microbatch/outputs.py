"""What forward passes return, and the pieces' outputs as those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpoverlap.errors import UnsupportedError

Output = torch.Tensor | tuple[torch.Tensor, ...]


def join_outputs(outputs: list[Any], token_counts: list[int]) -> Output:
    """The pieces' outputs, joined along tokens. UnsupportedError for others than tensors with one row a token."""
    first = outputs[0]
    if all(isinstance(o, torch.Tensor) for o in outputs):
        return _join_rows(outputs, token_counts)
    if all(
        isinstance(o, tuple) and len(o) == len(first) and all(isinstance(t, torch.Tensor) for t in o) for o in outputs
    ):
        return tuple(_join_rows(parts, token_counts) for parts in zip(*outputs, strict=True))
    raise UnsupportedError(
        f"forward returned {sorted({type(o).__name__ for o in outputs})}: a tensor, or a tuple of tensors of one "
        "length, with one row a token, is supported"
    )


def _join_rows(parts: Sequence[torch.Tensor], token_counts: list[int]) -> torch.Tensor:
    for part, count in zip(parts, token_counts, strict=True):
        if part.dim() == 0 or part.shape[0] != count:
            raise UnsupportedError(
                f"forward returned a tensor {tuple(part.shape)} for a piece of {count} tokens: tensors with one row a "
                "token are supported, and what it reads per token must come from the batch that it is given"
            )
    return torch.cat(list(parts))

"""How a mean of raw keys becomes a compressed key: its norm and its rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpoverlap.attention.qsa.caches import POSITION_AXES


@dataclass(frozen=True)
class KeyTransform:
    """How a mean of raw keys becomes a compressed key.

    norm_weight: [head_size], of an RMSNorm that multiplies by weight + 1. cos_sin: [positions, rotary_dim], cosines
    then sines of each position's rotary_dim / 2 frequencies; rotary_dim is even, from 2 to head_size, and dimensions
    behind it pass unrotated. eps: of the norm. mrope_section: how many frequencies follow each of the three position
    axes, in order; None: all follow the first.
    """

    norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    eps: float = 1e-6
    mrope_section: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.norm_weight.dim() != 1:
            raise ValueError(f"norm_weight must be [head_size], got {list(self.norm_weight.shape)}")
        head_size = self.norm_weight.shape[0]
        if self.cos_sin.dim() != 2 or self.cos_sin.shape[1] not in range(2, head_size + 1, 2):
            raise ValueError(
                f"cos_sin must be [positions, rotary_dim] with an even rotary_dim from 2 to {head_size}, "
                f"got {list(self.cos_sin.shape)}"
            )
        section = self.mrope_section
        if section is not None and (
            len(section) != POSITION_AXES or min(section) < 0 or sum(section) != self.cos_sin.shape[1] // 2
        ):
            raise ValueError(
                f"mrope_section must be {POSITION_AXES} counts that sum to rotary_dim / 2 = "
                f"{self.cos_sin.shape[1] // 2}, got {section}"
            )

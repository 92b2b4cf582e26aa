"""QPN2, a tile layout of NVFP4: each lane of a warp finds the 16 codes of its row in 8 consecutive bytes.

Codes [N / 32][K / 16][32 lanes][8 bytes]. A lane holds row ((lane >> 2) & 3) * 8 + (lane & 3) + 4 * (lane >= 16).
Within a group the nibbles, low first, hold k = 0 2 4 6 1 3 5 7 8 10 12 14 9 11 13 15: nibbles j and j + 4 of a 32-bit
word are neighbours, so one mask takes out a pair that fills the two halves of a register.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpoverlap.quant.nvfp4.format import GROUP, NVFP4Tensor, check_field, check_global_scale, check_one_device

TILE_ROWS = 32
LANE_TO_ROW = tuple(((lane >> 2) & 3) * 8 + (lane & 3) + 4 * (lane >= 16) for lane in range(TILE_ROWS))
NIBBLE_TO_K = (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)


@dataclass(frozen=True, eq=False)
class QPN2Tensor:
    """A weight [N, K] in the QPN2 layout, N a multiple of 32 and K of 16.

    codes: uint8 [N // 32, K // 16, 32, 8]. scales: float8_e4m3fn [N // 32, K // 16, 32], by lane. global_scale:
    float32, 0-d or [N] in the order of the weight's rows. Raises ValueError for any other dtype or shape.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or min(self.shape) < 0 or self.shape[0] % TILE_ROWS or self.shape[1] % GROUP:
            raise ValueError(
                f"shape {tuple(self.shape)}: a QPN2 weight is [N, K], N a multiple of {TILE_ROWS} and K of {GROUP}; "
                "pad it first (NVFP4Tensor.pad)"
            )
        n, k = (int(size) for size in self.shape)
        tiles = (n // TILE_ROWS, k // GROUP, TILE_ROWS)
        check_field("codes", self.codes, torch.uint8, (*tiles, GROUP // 2))
        check_field("scales", self.scales, torch.float8_e4m3fn, tiles)
        check_global_scale(self.global_scale, n)
        check_one_device(self.codes, self.scales, self.global_scale)
        object.__setattr__(self, "shape", (n, k))
        for name in ("codes", "scales", "global_scale"):
            object.__setattr__(self, name, getattr(self, name).contiguous())

    @property
    def device(self) -> torch.device:
        return self.codes.device


def _inverse(permutation: tuple[int, ...]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def _permute_nibbles(codes: torch.Tensor, source: tuple[int, ...] | list[int]) -> torch.Tensor:
    """Groups of 8 bytes [..., 8] whose nibble i is nibble source[i] of the input's."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    nibbles = nibbles[..., list(source)]
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def to_qpn2(t: NVFP4Tensor) -> QPN2Tensor:
    """The same weight in the QPN2 layout; :func:`from_qpn2` gives back the same bytes.

    Raises ValueError where N is no multiple of 32 (pad it first).
    """
    n, k = t.shape
    if n % TILE_ROWS:
        raise ValueError(f"QPN2 needs N a multiple of {TILE_ROWS}, got {n}: pad the weight first (NVFP4Tensor.pad)")
    lanes = torch.tensor(LANE_TO_ROW, device=t.device)
    codes = t.codes.view(n // TILE_ROWS, TILE_ROWS, k // GROUP, GROUP // 2).index_select(1, lanes).transpose(1, 2)
    scales = t.scales.view(torch.uint8).view(n // TILE_ROWS, TILE_ROWS, k // GROUP)
    scales = scales.index_select(1, lanes).transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
    return QPN2Tensor(_permute_nibbles(codes, NIBBLE_TO_K), scales, t.global_scale, t.shape)


def from_qpn2(p: QPN2Tensor) -> NVFP4Tensor:
    """The row-major form of a QPN2 weight."""
    n, k = p.shape
    rows = torch.tensor(_inverse(LANE_TO_ROW), device=p.device)
    codes = _permute_nibbles(p.codes, _inverse(NIBBLE_TO_K)).transpose(1, 2).index_select(1, rows)
    scales = p.scales.view(torch.uint8).transpose(1, 2).index_select(1, rows)
    return NVFP4Tensor(
        codes.reshape(n, k // 2),
        scales.reshape(n, k // GROUP).view(torch.float8_e4m3fn),
        p.global_scale,
        p.shape,
    )

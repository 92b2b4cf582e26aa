"""How much of a weight one program of the dequantization kernels takes, per device: data from measurements.

A larger tile has more loads in flight; a smaller one leaves more programs to balance over the SMs. Every tile gives the
same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["row_major", "qpn2"]


@dataclass(frozen=True)
class Tile:
    """groups: groups of 16 k that one program takes, a power of two; in the QPN2 layout, of each of 8 rows.

    num_warps: warps of one program, a power of two.
    """

    groups: int
    num_warps: int


_TILES: dict[tuple[int, int], dict[Layout, Tile]] = {
    # Groups as reported for a Quadro RTX 8000, where 16 were 2.2 times as fast as 64; not measured here.
    (7, 0): {"row_major": Tile(64, 4), "qpn2": Tile(64, 8)},
    (7, 5): {"row_major": Tile(16, 1), "qpn2": Tile(16, 4)},
    # Two words of eight codes and two stores of 16 bytes a thread: the fastest on an H200.
    (8, 0): {"row_major": Tile(128, 4), "qpn2": Tile(16, 4)},
}


def tile_for(layout: Layout, capability: tuple[int, int]) -> Tile:
    """The tile of this compute capability, or of the newest older one that the table has."""
    known = [entry for entry in _TILES if entry <= capability]
    return _TILES[max(known, default=min(_TILES))][layout]

"""The colours of every picture. Pieces differ in hue and in lightness; red is kept for what nothing hides."""

from __future__ import annotations

# A fill, and the colour of letters that can be read on it.
PIECES = (("#2f6fde", "#ffffff"), ("#eba417", "#1f2328"), ("#0f9d82", "#ffffff"), ("#9a5bd6", "#ffffff"))
EXPOSED = "#d81e3a"
HANDOVER = "#7d8590"


def piece_colour(piece: int) -> str:
    return PIECES[piece % len(PIECES)][0]


def ink_on_piece(piece: int) -> str:
    return PIECES[piece % len(PIECES)][1]

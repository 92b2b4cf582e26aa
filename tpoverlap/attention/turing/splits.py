"""Split-KV by waves: into how many parts each key range is cut so that the last wave of blocks is full too."""

from __future__ import annotations

MAX_AUTOMATIC_SPLITS = 4


def choose_num_splits(num_ctas: int, slots: int, num_tiles: int) -> int:
    """The smallest s of 1 to 4 that minimizes ceil(num_ctas * s / slots) / s, the waves in units of an unsplit one.

    num_ctas: blocks of the unsplit launch. slots: blocks that the device runs at a time. num_tiles: tiles of the
    longest key range; no part is less than a tile. 150 blocks on 72 slots take 3 waves, in 4 parts 9 quarters of one.
    """
    best, best_waves = 1, -(-num_ctas // slots)
    for splits in range(2, min(MAX_AUTOMATIC_SPLITS, num_tiles) + 1):
        waves = -(-num_ctas * splits // slots)
        if waves * best < best_waves * splits:
            best, best_waves = splits, waves
    return best

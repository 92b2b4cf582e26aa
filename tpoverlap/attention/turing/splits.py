"""Split-KV by waves: into how many parts each key range is cut so that the last wave of blocks is full too."""

from __future__ import annotations

# Four parts let 18 blocks fill a device of 72 slots; a device with more slots takes as many parts as that needs there.
ANY_DEVICE_SPLITS = 4
BLOCKS_TO_FILL = 18
# Shorter parts than this are not tried past four: of 43 tiles, seven parts were slower than four.
TILES_OF_A_FURTHER_PART = 64


def choose_num_splits(num_ctas: int, slots: int, num_tiles: int) -> int:
    """The smallest s that minimizes ceil(num_ctas * s / slots) / s, the waves in units of an unsplit one.

    num_ctas: blocks of the unsplit launch. slots: blocks that the device runs at a time. num_tiles: tiles of the
    longest key range; no part is less than a tile. s is 1 to 4, on devices of more than 72 slots 1 to slots / 18
    (rounded up) where each part has at least 64 tiles. 150 blocks on 72 slots take 3 waves, in 4 parts 9 quarters of
    one.
    """
    further = min(-(-slots // BLOCKS_TO_FILL), num_tiles // TILES_OF_A_FURTHER_PART)
    best, best_waves = 1, -(-num_ctas // slots)
    for splits in range(2, min(max(ANY_DEVICE_SPLITS, further), num_tiles) + 1):
        waves = -(-num_ctas * splits // slots)
        if waves * best < best_waves * splits:
            best, best_waves = splits, waves
    return best

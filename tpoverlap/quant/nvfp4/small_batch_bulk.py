"""How a decode-sized NVFP4 product is laid out where the copy engine brings the weight: see small_batch_bulk.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tpoverlap.cuda.device import DeviceFacts

K_MULTIPLE = 256  # every row of the scales then starts on 16 bytes, and every warp's steps are whole
SCALES_ALIGNMENT = 16
_WARPS = 12
_HELPERS = 4
THREADS = 32 * (_WARPS + _HELPERS)
_TILE_ROWS = 16
_STEP_K = 128
_MAX_STEPS = 6  # of a warp: its part of x then takes 96 registers
_MAX_SLOTS = 16
_SUMS = 512 + 3 * _WARPS * 512  # bytes before the ring
_WINDOW = 144 * 1024
"""Bytes of codes in the ring. More of them on their way delay x, which comes through the same ports."""


COMMON_FIELDS = (
    ("codes", ctypes.c_void_p),
    ("scales", ctypes.c_void_p),
    ("global_scale", ctypes.c_void_p),
    ("x", ctypes.c_void_p),
    ("bias", ctypes.c_void_p),
    ("y", ctypes.c_void_p),
    ("n", ctypes.c_longlong),
    ("k", ctypes.c_int),
    ("m", ctypes.c_int),
    ("global_scale_stride", ctypes.c_int),
)
"""What the arguments of both kernels begin with."""


class Arguments(ctypes.Structure):
    _fields_ = (
        *COMMON_FIELDS,
        ("block_rows", ctypes.c_int),
        ("tile_rows", ctypes.c_int),
        ("slots", ctypes.c_int),
    )


@dataclass(frozen=True)
class Plan:
    """blocks, of block_rows rows each, in tiles of tile_rows; slots of the ring, a tile each.

    steps: of 128 k that a warp takes at most. shared_bytes: of a block.
    """

    blocks: int
    block_rows: int
    tile_rows: int
    slots: int
    steps: int
    shared_bytes: int

    @property
    def pays(self) -> bool:
        """Whether it is faster than the other kernel: with many tiles a block, or short ones.

        A few long tiles do not make up for the time until the first is there and the last is summed up: on an H200
        8192 x 5120 (four tiles of four steps) and 5120 x 8704 (three of six) are slower.
        """
        return self.steps <= 2 or self.block_rows > 4 * _TILE_ROWS


def plan_for(n: int, k: int, facts: DeviceFacts) -> Plan | None:
    """The layout for a weight [n, k]; None where it cannot be: before 9.0, or where x or W do not fit."""
    if facts.capability < (9, 0) or k % K_MULTIPLE:
        return None
    steps = -(-k // (_WARPS * _STEP_K))
    if steps > _MAX_STEPS:
        return None
    block_rows = max(-(-n // facts.num_sms), min(n, _TILE_ROWS // 2))
    tiles = -(-block_rows // _TILE_ROWS)
    tile_rows = -(-block_rows // tiles)
    slot, scales = tile_rows * (k // 2 + 64), tile_rows * k // 16
    slots = max(2, min(_MAX_SLOTS, tiles, _WINDOW // slot))
    while slots > 2 and _shared_bytes(slots, slot + scales) > facts.shared_memory_per_block:
        slots -= 1
    if _shared_bytes(slots, slot + scales) > facts.shared_memory_per_block:
        return None
    return Plan(-(-n // block_rows), block_rows, tile_rows, slots, steps, _shared_bytes(slots, slot + scales))


def _shared_bytes(slots: int, slot: int) -> int:
    return _SUMS + slots * slot

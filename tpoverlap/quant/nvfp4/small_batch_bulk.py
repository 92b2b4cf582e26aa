"""How a decode-sized NVFP4 product is laid out where the copy engine brings the weight: see small_batch_bulk.cu."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from tpoverlap.cuda.device import DeviceFacts
from tpoverlap.cuda.tensor_map import TensorMap, tensor_map

K_MULTIPLE = 512  # rows of half the scales then start on 16 bytes, which tensor copies demand
SCALES_ALIGNMENT = 16
CLUSTER = 2
"""Blocks, each of which takes half of K."""
WARPS = 12
"""Of a block, which share its K."""
_HELPERS = 3
THREADS = 32 * (WARPS + _HELPERS)
TILE_ROWS = 16
_STEP_K = 128
_MAX_STEPS = 3  # of a warp. More fit into registers, but have not been measured.
_SUMS = 21 * 1024  # bytes before the ring
_SLOT = TILE_ROWS * WARPS * (_STEP_K // 2 + _STEP_K // 16)
_MIN_TILES = 5


COMMON_FIELDS = (
    ("global_scale", ctypes.c_void_p),
    ("x", ctypes.c_void_p),
    ("bias", ctypes.c_void_p),
    ("y", ctypes.c_void_p),
    ("n", ctypes.c_longlong),
    ("k", ctypes.c_int),
    ("m", ctypes.c_int),
    ("global_scale_stride", ctypes.c_int),
)
"""What the arguments of both kernels have behind codes and scales."""


class Arguments(ctypes.Structure):
    _fields_ = (
        ("codes", TensorMap),
        ("scales", TensorMap),
        *COMMON_FIELDS,
        ("block_rows", ctypes.c_int),
        ("slots", ctypes.c_int),
    )


@dataclass(frozen=True)
class Plan:
    """blocks, in clusters that take block_rows rows each, a multiple of 16; slots of the ring, for a step of all warps.

    steps: of 128 k that a warp takes at most. halves: whether it takes the last one in two halves, for equal shares of
    the four quarters of an SM.
    """

    blocks: int
    block_rows: int
    slots: int
    steps: int
    halves: bool

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return _SUMS + self.slots * _SLOT

    @property
    def pays(self) -> bool:
        """Whether it is known to be faster than the other kernel.

        Measured were 5 to 17 tiles of rows a cluster. Fewer do less to make up for the time until the first is there
        and the last is summed up.
        """
        return self.block_rows >= _MIN_TILES * TILE_ROWS


def plan_for(n: int, k: int, facts: DeviceFacts) -> Plan | None:
    """The layout for a weight [n, k]; None where it cannot be: before 9.0, or for such a K or N."""
    clusters = facts.num_sms // CLUSTER
    if facts.capability < (9, 0) or k % K_MULTIPLE or n >= 2**31 or not clusters:
        return None
    steps = -(-k // (CLUSTER * WARPS * _STEP_K))
    if steps > _MAX_STEPS:
        return None
    # The quarters of an SM take a block's steps in turn, so that two of the four may have one more. Beside other steps
    # the halves cost more than they gain.
    halves = steps == 1 and k // CLUSTER // _STEP_K % 4 == 2
    block_rows = TILE_ROWS * -(-n // (TILE_ROWS * clusters))
    # More bytes on their way delay x, which comes through the same ports.
    plan = Plan(CLUSTER * -(-n // block_rows), block_rows, slots=2 if steps == 1 else 3, steps=steps, halves=halves)
    return plan if plan.shared_bytes <= facts.shared_memory_per_block else None


@functools.lru_cache(maxsize=4096)
def tensor_maps(
    ordinal: int, codes: int, scales: int, n: int, k: int
) -> tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_uint64]]:
    """Of the codes and scales of a weight [n, k] at these addresses of a device. Kept: to make them takes longer than a
    launch."""
    half, row = k // 4, k // 2  # bytes of codes
    pairs = WARPS // 2  # of steps, 128 bytes each
    boxes = (128, TILE_ROWS, pairs, 1), (16 * pairs, TILE_ROWS, 1)
    return (
        tensor_map(ordinal, codes, (128, n, half // 128, 2), (row, 128, half), boxes[0], swizzle_128=True),
        tensor_map(ordinal, scales, (half // 8, n, 2), (row // 8, half // 8), boxes[1]),
    )

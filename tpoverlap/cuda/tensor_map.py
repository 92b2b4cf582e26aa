"""Tensor maps: what the copy engine of compute capability 9.0 and later knows of an array, boxes of which it copies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tpoverlap.cuda.device import bind_context
from tpoverlap.cuda.driver import call, driver

TensorMap = ctypes.c_uint64 * 16
"""A kernel's parameter has it at a multiple of 64 bytes, and is __grid_constant__."""


def tensor_map(
    ordinal: int,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle_128: bool = False,
) -> ctypes.Array[ctypes.c_uint64]:
    """A map of an array of bytes at this address of a device's memory.

    sizes, innermost dimension first, of which there are at most 5. strides: of all dimensions but the innermost, in
    bytes, multiples of 16. box: what one copy moves, at most 256 in each dimension, and innermost a multiple of 16;
    what of it lies outside of the array arrives as zeros. swizzle_128: in shared memory, of each 1024 bytes the 16-byte
    piece i of the r-th 128 bytes lies where piece i ^ r would.

    Raises CudaDriverError where the driver refuses these, UnsupportedError without a driver that has tensor maps.
    """
    types = driver()
    swizzle = types.CUtensorMapSwizzle
    with torch.cuda.device(ordinal):
        bind_context(ordinal)
        encoded = call(
            "cuTensorMapEncodeTiled",
            types.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            address,
            [types.cuuint64_t(size) for size in sizes],
            [types.cuuint64_t(stride) for stride in strides],
            [types.cuuint32_t(size) for size in box],
            [types.cuuint32_t(1)] * len(sizes),
            types.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzle_128 else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            types.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            types.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    return TensorMap(*(int(word) for word in encoded.opaque))

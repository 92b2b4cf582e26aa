"""The row-major NVFP4 weight: what it holds, and cutting, joining and padding it on group borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP = 16
"""Consecutive k that share one scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code: magnitude in bits 0 to 2, sign in bit 3."""


def check_field(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise ValueError unless the field has this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; a weight of this shape needs {dtype} {list(shape)}"
        )


def check_global_scale(global_scale: torch.Tensor, rows: int) -> None:
    """Raise ValueError unless it is FP32, 0-d or [rows]."""
    if global_scale.dtype != torch.float32 or tuple(global_scale.shape) not in ((), (rows,)):
        raise ValueError(
            f"global_scale is {global_scale.dtype} {list(global_scale.shape)}; "
            f"it must be torch.float32, a scalar [] or one per row [{rows}]"
        )


def check_one_device(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> None:
    if not codes.device == scales.device == global_scale.device:
        raise ValueError(
            f"codes, scales and global_scale are on {codes.device}, {scales.device} and {global_scale.device}; "
            "they must be on one device"
        )


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """A weight [N, K] in NVFP4: value = code * (scale * global_scale).

    codes: uint8 [N, K // 2], two E2M1 codes a byte, even k in the low nibble. scales: float8_e4m3fn [N, K // 16].
    global_scale: float32, 0-d, or [N] where fused layers carry several. shape: (N, K), K a multiple of 16.
    codes and scales are stored contiguously. Raises ValueError for any other dtype or shape.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or min(self.shape) < 0 or self.shape[1] % GROUP:
            raise ValueError(f"shape {tuple(self.shape)}: an NVFP4 weight is [N, K] with K a multiple of {GROUP}")
        n, k = (int(size) for size in self.shape)
        check_field("codes", self.codes, torch.uint8, (n, k // 2))
        check_field("scales", self.scales, torch.float8_e4m3fn, (n, k // GROUP))
        check_global_scale(self.global_scale, n)
        check_one_device(self.codes, self.scales, self.global_scale)
        object.__setattr__(self, "shape", (n, k))
        for name in ("codes", "scales", "global_scale"):
            object.__setattr__(self, name, getattr(self, name).contiguous())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device | str) -> NVFP4Tensor:
        """The same weight on another device."""
        return NVFP4Tensor(self.codes.to(device), self.scales.to(device), self.global_scale.to(device), self.shape)

    def slice_rows(self, start: int, stop: int) -> NVFP4Tensor:
        """Rows [start, stop), as views (column-parallel sharding). Raises ValueError outside 0..N."""
        n, k = self.shape
        if not 0 <= start <= stop <= n:
            raise ValueError(f"rows [{start}, {stop}) of a weight with {n} rows")
        per_row = self.global_scale.ndim == 1
        return NVFP4Tensor(
            self.codes[start:stop],
            self.scales[start:stop],
            self.global_scale[start:stop] if per_row else self.global_scale,
            (stop - start, k),
        )

    def slice_columns(self, start: int, stop: int) -> NVFP4Tensor:
        """Columns [start, stop), copied (row-parallel sharding). Raises ValueError off the group borders."""
        n, k = self.shape
        if not 0 <= start <= stop <= k or start % GROUP or stop % GROUP:
            raise ValueError(
                f"columns [{start}, {stop}) of a weight with {k} columns: "
                f"cut on group borders, at multiples of {GROUP} within 0..{k}"
            )
        return NVFP4Tensor(
            self.codes[:, start // 2 : stop // 2],
            self.scales[:, start // GROUP : stop // GROUP],
            self.global_scale,
            (n, stop - start),
        )

    def pad(self, rows: int, columns: int) -> NVFP4Tensor:
        """The weight padded with zeros to [rows, columns], columns a multiple of 16.

        Padding holds zero codes under zero scales. New rows carry a global scale of 1 where it is per row.
        """
        n, k = self.shape
        if rows < n or columns < k or columns % GROUP:
            raise ValueError(f"cannot pad {list(self.shape)} to [{rows}, {columns}]: sizes may only grow, K by groups")
        codes = self.codes.new_zeros(rows, columns // 2)
        codes[:n, : k // 2] = self.codes
        scales = self.codes.new_zeros(rows, columns // GROUP)
        scales[:n, : k // GROUP] = self.scales.view(torch.uint8)
        global_scale = self.global_scale
        if global_scale.ndim == 1:
            global_scale = torch.cat((global_scale, global_scale.new_ones(rows - n)))
        return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), global_scale, (rows, columns))


def concat_rows(parts: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """The weights of a fused layer (QKV, gate and up) joined along N.

    Every part keeps its own global scale, so the result carries one per row: rescaling to a common value would change
    the weights. Raises ValueError for no parts or unequal K.
    """
    if not parts or len({part.shape[1] for part in parts}) != 1:
        raise ValueError(f"cannot join weights of shapes {[list(part.shape) for part in parts]} along N: K must agree")
    return NVFP4Tensor(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
        torch.cat([part.global_scale.expand(part.shape[0]) for part in parts]),
        (sum(part.shape[0] for part in parts), parts[0].shape[1]),
    )


def concat_columns(parts: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """Parts of one weight joined along K, such as the heads that a row-parallel shard keeps.

    Raises ValueError for no parts, unequal N, or global scales that differ: along K there is only one a row.
    """
    if not parts or len({part.shape[0] for part in parts}) != 1:
        raise ValueError(f"cannot join weights of shapes {[list(part.shape) for part in parts]} along K: N must agree")
    if not all(torch.equal(part.global_scale, parts[0].global_scale) for part in parts):
        raise ValueError("cannot join weights along K whose global scales differ")
    return NVFP4Tensor(
        torch.cat([part.codes for part in parts], dim=1),
        torch.cat([part.scales.view(torch.uint8) for part in parts], dim=1).view(torch.float8_e4m3fn),
        parts[0].global_scale,
        (parts[0].shape[0], sum(part.shape[1] for part in parts)),
    )

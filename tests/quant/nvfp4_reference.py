"""A slow NumPy reading of the NVFP4 definition, and random weights in the format."""

from __future__ import annotations

import numpy as np
import torch

from tpoverlap.quant.nvfp4 import NVFP4Tensor

GLOBAL_SCALES = (1.0, 2.0**-9, 3.1e-5, 24.5)
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def e4m3_value(byte: int) -> float:
    """Value of an E4M3 byte by its definition: bias 7, subnormals, no infinities, NaN at 0x7F and 0xFF."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def reference_fp32(t: NVFP4Tensor) -> np.ndarray:
    """FP32 values [N, K] of a row-major weight, element by element in the order that the definition gives."""
    codes, scales = t.codes.cpu().numpy(), t.scales.cpu().view(torch.uint8).numpy()
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(t.shape)
    code = np.where(nibbles & 8, -1, 1).astype(np.float32) * _MAGNITUDES[nibbles & 7]
    scale = np.array([e4m3_value(b) for b in range(256)], dtype=np.float32)[scales]
    global_scale = t.global_scale.cpu().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        inner = scale * (global_scale[:, None] if global_scale.ndim else global_scale)
        return code * np.repeat(inner, 16, axis=1)


def random_weight(
    n: int,
    k: int,
    seed: int,
    *,
    per_row: bool = False,
    nan_scales: bool = False,
    device: str = "cpu",
) -> NVFP4Tensor:
    """Random codes, any finite scale bytes (NaN ones too if asked), global scales around 1e-2."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(0, 256, (n, k // 16), dtype=torch.uint8, generator=g)
    if not nan_scales:
        scales[(scales & 0x7F) == 0x7F] = 0x40
    global_scale = torch.rand((n,) if per_row else (), generator=g) * 0.02 + 1e-3
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), global_scale, (n, k)).to(device)


def all_codes(global_scale: float) -> NVFP4Tensor:
    """Every code under every scale byte: row b has scale bytes b, so all 16 x 256 products occur."""
    order = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    codes = torch.cat((order, order.flip(0))).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 2)
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.tensor(global_scale), (256, 32))


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, context: str = "") -> None:
    """Equal dtype, shape and bits, zeros' signs included; every NaN equals every other."""
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device), context
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    wrong = (got.view(bits) != want.view(bits)) & ~(got.isnan() & want.isnan())
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{context}: {int(wrong.sum())} of {wrong.numel()} differ, first at {at}: {got[at]} instead of {want[at]}"
        )

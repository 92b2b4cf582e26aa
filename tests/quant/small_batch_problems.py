"""Problems for the products of few rows on the CPU, their exact results, and the errors that these allow."""

from __future__ import annotations

import numpy as np
import torch
from nvfp4_reference import reference_fp32

from tpoverlap.quant.nvfp4 import NVFP4Tensor
from tpoverlap.quant.nvfp4.small_batch import SOME_ROWS, Blocks
from tpoverlap.quant.nvfp4.small_batch_bulk import CLUSTER, WARPS, Plan


def codes_times_scales(weight: NVFP4Tensor) -> torch.Tensor:
    """[N, K] in FP64, exactly."""
    one = NVFP4Tensor(weight.codes, weight.scales, torch.tensor(1.0), weight.shape)
    return torch.from_numpy(reference_fp32(one)).double()


def random_rows(m: int, k: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: torch.Tensor, weight: NVFP4Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The result in FP64."""
    product = x.double() @ codes_times_scales(weight).T * weight.global_scale.double()
    return product if bias is None else product + bias.double()


def error_bound(
    x: torch.Tensor, weight: NVFP4Tensor, bias: torch.Tensor | None, layout: Blocks | Plan = SOME_ROWS
) -> torch.Tensor:
    """What FP32 sums and one rounding of the result may cost (Higham's gamma of a product's longest chain)."""
    k = weight.shape[1]
    magnitude = x.double().abs() @ codes_times_scales(weight).abs().T * weight.global_scale.double().abs()
    if bias is not None:
        magnitude += bias.double().abs()
    # A product passes through the sums of its warp, 128 k of every 128 * warps, and of all warps (of a block, then of
    # both, where a cluster shares K); then the global scale and the bias.
    warps = CLUSTER * WARPS if isinstance(layout, Plan) else layout.warps
    roundings = 128 * -(-k // (128 * warps)) + warps + 2
    gamma = roundings * 2.0**-24 / (1 - roundings * 2.0**-24)
    info = torch.finfo(x.dtype)
    of_sums = gamma * magnitude
    of_result = info.eps / 2 * (exact(x, weight, bias).abs() + of_sums) + info.smallest_normal * info.eps / 2
    return of_sums + of_result


def assert_equal(got: torch.Tensor, want: torch.Tensor, context: str = "") -> None:
    wrong = (got != want) & ~(got.isnan() & want.isnan())
    assert not wrong.any(), f"{context} wrong results, first at {tuple(wrong.nonzero()[0].tolist())}"


def exact_problem(
    n: int, k: int, m: int, seed: int, dtype: torch.dtype, *, per_row: bool, with_bias: bool
) -> tuple[torch.Tensor, NVFP4Tensor, torch.Tensor | None]:
    """Values of so few bits that every FP32 sum is exact, in any order: the result is rounded once."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 256, (n, k // 2), dtype=np.uint8))
    # 0.5 to 3.75, of either sign: a product is at most 180, in steps of 1/32
    magnitudes = rng.integers(0x30, 0x48, (n, k // 16), dtype=np.uint8)
    scales = torch.from_numpy(magnitudes | rng.choice(np.array([0, 0x80], np.uint8), magnitudes.shape))
    exponents = torch.from_numpy(rng.integers(-8, 1, (n,) if per_row else ()))
    weight = NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.exp2(exponents.float()), (n, k))
    x = torch.from_numpy(rng.integers(-8, 9, (m, k))).to(dtype)
    bias = torch.from_numpy(rng.integers(-8, 9, n)).to(dtype) if with_bias else None
    return x, weight, bias

"""The decoder's elementwise work and norms, each one launch on a GPU.

As torch operators a layer's norms, residual sums, activation and gate are some ten launches, whose host time a piece of
a thousand tokens cannot hide. CUDA tensors in FP16, BF16 (from compute capability 8.0 on) or FP32 take one Triton
kernel each, where Triton is installed, no gradient is asked for and the model is not being compiled; everything else
takes the torch operators. Kernels compute in FP32 and round where the operators round; only the order in which a norm
adds its squares up differs. A row's bits do not depend on the number of rows.

Tensors share one dtype and device, or are left to the torch operators and their errors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F

from tpoverlap.cuda.triton_dispatch import on_device_of, triton_serves
from tpoverlap.cuda.triton_launch import FastLaunch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Elements of a program. A longer row of a norm is one program's nevertheless, up to the limit.
_NORM_ELEMENTS = 2048
_MAX_NORM_SIZE = 16_384
_ELEMENTS = 1024
_PLANS = 1024
# Of a grid's first dimension and of its second.
_MAX_PROGRAMS = (2**31 - 1, 65_535)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019), contiguous, shaped like x.

    x: [..., size], any strides; a kernel takes [rows, size] and [tokens, heads, size] with rows that are contiguous.
    weight: [size]. The normalized value is rounded to the dtype before the weight, as transformers does it.
    """
    if _kernels_serve(x, weight):
        plan = _norm_plan(x.shape, x.stride(), None, weight.shape, weight.stride(), x.dtype, x.device, eps)
        if plan is not None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            plan.start(x, (x, x, weight, x, out))
            return out
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual sum x + update, rounded to the dtype, and its :func:`rms_norm`. update: shaped like x."""
    if x.shape == update.shape and _kernels_serve(x, update, weight):
        plan = _norm_plan(x.shape, x.stride(), update.stride(), weight.shape, weight.stride(), x.dtype, x.device, eps)
        if plan is not None:
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            out = torch.empty_like(total)
            plan.start(x, (x, update, weight, total, out))
            return total, out
    total = x + update
    return total, rms_norm(total, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [tokens, 2 * n], gates first, with contiguous rows: [tokens, n] (SwiGLU, Shazeer 2020)."""
    if _kernels_serve(gate_up):
        plan = _silu_plan(gate_up.shape, gate_up.stride(), gate_up.dtype, gate_up.device)
        if plan is not None:
            tokens, columns = gate_up.shape
            out = gate_up.new_empty((tokens, columns // 2))
            plan.start(gate_up, (gate_up, out))
            return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate) of two [tokens, heads, head_dim], any strides; a kernel takes contiguous heads."""
    if x.shape == gate.shape and _kernels_serve(x, gate):
        plan = _sigmoid_plan(x.shape, x.stride(), gate.stride(), x.dtype, x.device)
        if plan is not None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            plan.start(x, (x, gate, out))
            return out
    return x * gate.sigmoid()


def _kernels_serve(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """What may differ between calls of one signature, and whether the tensors belong together."""
    if torch.compiler.is_compiling() or not triton_serves(x):
        return False
    recorded = torch.is_grad_enabled()
    if recorded and x.requires_grad:
        return False
    dtype, device = x.dtype, x.device
    for other in others:
        if other.dtype != dtype or other.device != device or (recorded and other.requires_grad):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launch of one signature. values: the arguments that are not tensors."""

    launch: FastLaunch
    programs: tuple[int, int]
    values: tuple[float, ...]

    def start(self, x: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> None:
        programs, y = self.programs
        if programs:
            with on_device_of(x):
                self.launch(programs, tensors, self.values, y=y)


@functools.lru_cache(_PLANS)
def _norm_plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    update_strides: tuple[int, ...] | None,
    weight_shape: torch.Size,
    weight_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    eps: float,
) -> _Plan | None:
    """None: no kernel takes these."""
    adds = update_strides is not None
    given = (strides, update_strides) if update_strides is not None else (strides,)
    size = shape[-1] if shape else 0
    rows = prod(shape[:-1])
    if len(shape) not in (2, 3) or not 1 <= size <= _MAX_NORM_SIZE or tuple(weight_shape) != (size,):
        return None
    if not _computed(dtype, device) or rows > _MAX_PROGRAMS[0]:
        return None
    if not all(_contiguous_rows(shape, one) for one in (*given, weight_strides)):
        return None
    block = _power_of_two(size)
    heads = shape[1] if len(shape) == 3 else 1
    # The second stride of a matrix's rows is of no effect.
    outer_inner = tuple(one[:-1] if len(shape) == 3 else (one[0], 0) for one in given)
    values = (*outer_inner[0], *outer_inner[-1])
    rows_each = max(1, _NORM_ELEMENTS // block)
    launch = _norm_launch(device, dtype, size, max(heads, 1), values, adds, block, rows_each)
    return _Plan(launch, (-(-rows // rows_each), 1), (rows, float(eps), *values))


@functools.lru_cache(_PLANS)
def _norm_launch(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    heads: int,
    strides: tuple[int, ...],
    adds: bool,
    block: int,
    rows: int,
) -> FastLaunch:
    """Triton looks at the strides' values, and not at the number of rows and eps."""
    from tpoverlap.model.fused_kernels import norm_kernel

    constants = {"HEADS": heads, "SIZE": size, "BLOCK": block, "ROWS": rows, "ADDS": adds}
    return FastLaunch(norm_kernel, constants, num_warps=min(16, max(4, block * rows // 1024)))


@functools.lru_cache(_PLANS)
def _silu_plan(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Plan | None:
    if len(shape) != 2 or shape[1] % 2 or not shape[1] or not _contiguous_rows(shape, strides):
        return None
    columns = shape[1] // 2
    programs = (shape[0], -(-columns // _ELEMENTS))
    if not _computed(dtype, device) or not _fit(programs):
        return None
    return _Plan(_silu_launch(device, dtype, strides[0], columns), programs, (strides[0], columns))


@functools.lru_cache(_PLANS)
def _silu_launch(device: torch.device, dtype: torch.dtype, stride: int, columns: int) -> FastLaunch:
    from tpoverlap.model.fused_kernels import silu_mul_kernel

    return FastLaunch(silu_mul_kernel, {"BLOCK": _ELEMENTS}, num_warps=4)


@functools.lru_cache(_PLANS)
def _sigmoid_plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    gate_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> _Plan | None:
    if len(shape) != 3 or not shape[1] * shape[2]:
        return None
    if not _contiguous_rows(shape, strides) or not _contiguous_rows(shape, gate_strides):
        return None
    programs = (shape[0], -(-shape[1] * shape[2] // _ELEMENTS))
    if not _computed(dtype, device) or not _fit(programs):
        return None
    values = (*strides[:2], *gate_strides[:2])
    return _Plan(_sigmoid_launch(device, dtype, shape[1], shape[2], values), programs, values)


@functools.lru_cache(_PLANS)
def _sigmoid_launch(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, strides: tuple[int, ...]
) -> FastLaunch:
    from tpoverlap.model.fused_kernels import sigmoid_mul_kernel

    return FastLaunch(sigmoid_mul_kernel, {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK": _ELEMENTS}, num_warps=4)


def _computed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels compute in this dtype there: before 8.0 no instruction converts BF16."""
    if dtype == torch.bfloat16 and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return dtype in _DTYPES


def _contiguous_rows(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 or shape[-1] == 1


def _fit(programs: tuple[int, int]) -> bool:
    return all(count <= most for count, most in zip(programs, _MAX_PROGRAMS, strict=True))


def _power_of_two(size: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (size - 1).bit_length()

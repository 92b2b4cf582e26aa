"""Decode-sized products with an NVFP4 weight: 1 to 8 rows of x, the 4-bit weight read once by tensor-core CUDA C++."""

from __future__ import annotations

import ctypes
import functools
import warnings
from dataclasses import dataclass
from importlib import resources

import torch

from tpoverlap.cuda.device import device_facts
from tpoverlap.cuda.kernel import Kernel
from tpoverlap.cuda.nvrtc import compile_cuda
from tpoverlap.errors import TpOverlapError, UnsupportedError
from tpoverlap.quant.nvfp4.format import NVFP4Tensor

MAX_ROWS = 8
BLOCK_ROWS = 16
"""Rows of W that one block takes; a constant of the kernel."""
_K_MULTIPLE = 32  # rows of the codes then start on 16 bytes


class _Arguments(ctypes.Structure):
    _fields_ = (
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


@dataclass(frozen=True)
class Blocks:
    """How a launch is built. warps: of a block, which share its K. per_sm: blocks for which registers must suffice."""

    warps: int
    per_sm: int


FEW_ROWS, SOME_ROWS, MANY_ROWS = Blocks(8, 3), Blocks(8, 4), Blocks(4, 9)
# 7.5 holds 32 warps on an SM. Nine blocks leave a thread 56 registers: the others' loop then has 28 loads and stores of
# spilled ones, that of 8.0, 9.0 and later 6 at most.
_WITHOUT_MANY_ROWS = frozenset({(7, 5), (8, 6), (8, 7), (8, 9)})


def blocks_for(n: int, num_sms: int, capability: tuple[int, int]) -> Blocks:
    """Blocks of which all that n rows of W need run at once, where they can; the most registers among those.

    A last wave of few blocks takes as long as a full one.
    """
    on_fullest_sm = -(-n // (BLOCK_ROWS * num_sms))
    if on_fullest_sm <= FEW_ROWS.per_sm:
        return FEW_ROWS
    if SOME_ROWS.per_sm < on_fullest_sm <= MANY_ROWS.per_sm and capability not in _WITHOUT_MANY_ROWS:
        return MANY_ROWS
    return SOME_ROWS


def rejection(x: torch.Tensor, weight: NVFP4Tensor) -> str | None:
    """Why :func:`linear` cannot compute x @ W.T for x [..., K]; None if it can. Compiles the kernel where it can."""
    n, k = weight.shape
    rows = x.numel() // k if k else 0
    if x.device.type != "cuda":
        return f"x is on {x.device}, not on a CUDA device"
    if weight.device != x.device:
        return f"x is on {x.device}, the weight on {weight.device}"
    if not 1 <= rows <= MAX_ROWS:
        return f"x has {rows} rows, the kernel takes 1 to {MAX_ROWS}"
    if not n or k % _K_MULTIPLE or k > 2**24:
        return f"the weight is {[n, k]}, K must be a multiple of {_K_MULTIPLE} up to 2**24"
    if weight.codes.data_ptr() % 16 or weight.scales.data_ptr() % 2:
        return "codes must start on 16 bytes and scales on 2"
    return _unavailable(x.device.index, x.dtype, _blocks(n, x.device.index))


@functools.cache
def _unavailable(ordinal: int, dtype: torch.dtype, blocks: Blocks) -> str | None:
    """Why the kernel does not run on this device in this dtype; None if it does. Compiles and loads it."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not supported: FP16 and BF16 are"
    capability = device_facts(ordinal).capability
    needed = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    if capability < needed:
        return f"{dtype} needs compute capability {_dotted(needed)}, the device has {_dotted(capability)}"
    try:
        _kernel(ordinal, dtype, blocks)
    except TpOverlapError as error:
        warnings.warn(f"NVFP4 layers dequantize their weights for every decode step: {error}", stacklevel=2)
        return str(error)
    return None


def linear(x: torch.Tensor, weight: NVFP4Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ W.T + bias for x [..., K] of at most 8 rows, FP16 or BF16, on CUDA; bias [N] in x's dtype.

    Products are exact and sums are FP32, so the result is at least as exact as a GEMM on the dequantized weight, but
    not bit-identical to it. The order of the sums depends on N, K and the device alone: a row gives the same bits in
    any batch. May be captured in a CUDA graph.

    Raises UnsupportedError with :func:`rejection`'s reason, ValueError for a bias that does not fit.
    """
    if (reason := rejection(x, weight)) is not None:
        raise UnsupportedError(f"small-batch NVFP4 product: {reason}; dequantize the weight and use a GEMM")
    n, k = weight.shape
    if bias is not None and (tuple(bias.shape), bias.dtype, bias.device) != ((n,), x.dtype, x.device):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}; it must be {x.dtype} [{n}] there")
    rows = x.reshape(-1, k).contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    bias = None if bias is None else bias.contiguous()
    m = rows.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    arguments = _Arguments(
        *(t.data_ptr() for t in (weight.codes, weight.scales, weight.global_scale, rows)),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        n,
        k,
        m,
        weight.global_scale.ndim,
    )
    kernel = _kernel(x.device.index, x.dtype, _blocks(n, x.device.index))
    kernel.launch((-(-n // BLOCK_ROWS), 1, 1), arguments)
    return y.view(*x.shape[:-1], n)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@functools.cache
def _blocks(n: int, ordinal: int) -> Blocks:
    facts = device_facts(ordinal)
    return blocks_for(n, facts.num_sms, facts.capability)


@functools.cache
def _kernel(ordinal: int, dtype: torch.dtype, blocks: Blocks) -> Kernel:
    major, minor = device_facts(ordinal).capability
    image = compile_cuda(
        source(), name="small_batch.cu", arch=f"sm_{major}{minor}", options=compile_options(dtype, blocks)
    )
    return Kernel(image, "nvfp4_small_batch", ordinal, block=32 * blocks.warps)


def source() -> str:
    return resources.files(__package__).joinpath("small_batch.cu").read_text()


def compile_options(dtype: torch.dtype, blocks: Blocks) -> tuple[str, ...]:
    """The macros of the source."""
    return (
        f"-DBF16={int(dtype == torch.bfloat16)}",
        f"-DWARPS={blocks.warps}",
        f"-DBLOCKS_PER_SM={blocks.per_sm}",
    )

"""Decode-sized products with an NVFP4 weight: 1 to 8 rows of x, the 4-bit weight read once by tensor-core CUDA C++.

Two kernels: small_batch_bulk.cu, which the copy engine of compute capability 9.0 and later feeds through shared memory,
wherever :func:`tpoverlap.quant.nvfp4.small_batch_bulk.plan_for` has a plan that pays; small_batch.cu for the rest, and
where the first cannot be compiled or loaded.
"""

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
from tpoverlap.quant.nvfp4 import small_batch_bulk
from tpoverlap.quant.nvfp4.format import NVFP4Tensor
from tpoverlap.quant.nvfp4.small_batch_bulk import Plan

MAX_ROWS = 8
BLOCK_ROWS = 16
"""Rows of W that one block of small_batch.cu takes; a constant of the kernel."""
_K_MULTIPLE = 32  # rows of the codes then start on 16 bytes


class _Arguments(ctypes.Structure):
    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), *small_batch_bulk.COMMON_FIELDS)


@dataclass(frozen=True)
class Blocks:
    """How a launch of small_batch.cu is built.

    warps: of a block, which share its K. per_sm: blocks for which registers must suffice.
    """

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
    ordinal, dtype = x.device.index, x.dtype
    return _unsupported(ordinal, dtype) or _unavailable(ordinal, dtype, _layout(weight, ordinal, dtype))


@functools.cache
def _unsupported(ordinal: int, dtype: torch.dtype) -> str | None:
    """Why no kernel runs on this device in this dtype; None if one may."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not supported: FP16 and BF16 are"
    capability = device_facts(ordinal).capability
    needed = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    if capability < needed:
        return f"{dtype} needs compute capability {_dotted(needed)}, the device has {_dotted(capability)}"
    return None


@functools.cache
def _unavailable(ordinal: int, dtype: torch.dtype, layout: Blocks | Plan) -> str | None:
    """Why the kernel of this layout is not there; None if it is. Compiles and loads it."""
    try:
        _kernel(ordinal, dtype, layout)
    except TpOverlapError as error:
        instead = (
            "take small_batch.cu in place of small_batch_bulk.cu"
            if isinstance(layout, Plan)
            else "dequantize their weights for every decode step"
        )
        warnings.warn(f"NVFP4 layers {instead}: {error}", stacklevel=2)
        return str(error)
    return None


def linear(x: torch.Tensor, weight: NVFP4Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ W.T + bias for x [..., K] of at most 8 rows, FP16 or BF16, on CUDA; bias [N] in x's dtype.

    Products are exact and sums are FP32, so the result is at least as exact as a GEMM on the dequantized weight, but
    not bit-identical to it. The order of the sums depends on N, K, the device and whether scales start on 16 bytes: a
    row gives the same bits in any batch. May be captured in a CUDA graph.

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
    layout = _layout(weight, x.device.index, x.dtype)
    kernel = _kernel(x.device.index, x.dtype, layout)
    codes, scales = weight.codes.data_ptr(), weight.scales.data_ptr()
    common = (
        weight.global_scale.data_ptr(),
        rows.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        n,
        k,
        m,
        weight.global_scale.ndim,
    )
    arguments: ctypes.Structure
    if isinstance(layout, Plan):
        maps = small_batch_bulk.tensor_maps(x.device.index, codes, scales, n, k)
        arguments = small_batch_bulk.Arguments(*maps, *common, layout.block_rows, layout.slots)
    else:
        arguments = _Arguments(codes, scales, *common)
    kernel.launch((_launch_size(layout, n)[0], 1, 1), arguments)
    return y.view(*x.shape[:-1], n)


def launch_size(weight: NVFP4Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Blocks of a launch with this weight on its device and x of this dtype, and threads of a block."""
    return _launch_size(_layout(weight, weight.device.index, dtype), weight.shape[0])


def _launch_size(layout: Blocks | Plan, n: int) -> tuple[int, int]:
    if isinstance(layout, Plan):
        return layout.blocks, small_batch_bulk.THREADS
    return -(-n // BLOCK_ROWS), 32 * layout.warps


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _layout(weight: NVFP4Tensor, ordinal: int, dtype: torch.dtype) -> Blocks | Plan:
    """How the product with this weight is built, whatever x is: a row of x has the same bits in any batch."""
    aligned = weight.scales.data_ptr() % small_batch_bulk.SCALES_ALIGNMENT == 0
    return _layout_for(*weight.shape, aligned, ordinal, dtype)


@functools.cache
def _layout_for(n: int, k: int, aligned: bool, ordinal: int, dtype: torch.dtype) -> Blocks | Plan:
    facts = device_facts(ordinal)
    plan = small_batch_bulk.plan_for(n, k, facts) if aligned else None
    if plan and plan.pays and _unavailable(ordinal, dtype, plan) is None:
        return plan
    return blocks_for(n, facts.num_sms, facts.capability)


@functools.cache
def _kernel(ordinal: int, dtype: torch.dtype, layout: Blocks | Plan) -> Kernel:
    major, minor = device_facts(ordinal).capability
    name = "small_batch_bulk" if isinstance(layout, Plan) else "small_batch"
    options = compile_options(dtype, layout)
    image = compile_cuda(source(name), name=f"{name}.cu", arch=f"sm_{major}{minor}", options=options)
    if isinstance(layout, Plan):
        return Kernel(
            image,
            "nvfp4_small_batch_bulk",
            ordinal,
            block=small_batch_bulk.THREADS,
            shared_bytes=layout.shared_bytes,
            programmatic=True,
        )
    return Kernel(image, "nvfp4_small_batch", ordinal, block=32 * layout.warps)


def source(name: str = "small_batch") -> str:
    """The text of one of the two kernels, small_batch or small_batch_bulk, behind what they share."""
    folder = resources.files(__package__)
    return folder.joinpath("small_batch_common.cuh").read_text() + "\n" + folder.joinpath(f"{name}.cu").read_text()


def compile_options(dtype: torch.dtype, layout: Blocks | Plan) -> tuple[str, ...]:
    """The macros of the source."""
    bf16 = f"-DBF16={int(dtype == torch.bfloat16)}"
    if isinstance(layout, Plan):
        return bf16, f"-DSTEPS={layout.steps}", f"-DHALVES={int(layout.halves)}"
    return bf16, f"-DWARPS={layout.warps}", f"-DBLOCKS_PER_SM={layout.per_sm}"

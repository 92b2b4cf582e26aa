"""Decode-sized products with an NVFP4 weight: 1 to 8 rows of x, the 4-bit weight read once by tensor-core CUDA C++."""

from __future__ import annotations

import ctypes
import functools
import warnings
from importlib import resources

import torch

from tpoverlap.cuda.driver import call
from tpoverlap.cuda.kernel import Kernel
from tpoverlap.cuda.nvrtc import compile_cuda
from tpoverlap.errors import TpOverlapError, UnsupportedError
from tpoverlap.quant.nvfp4.format import NVFP4Tensor

MAX_ROWS = 8
_MAX_SPLITS = 64
BLOCK_ROWS = 128
"""Rows of W that one block takes; a constant of the kernel."""
STEP_K = 128
"""k that a block takes per step; a constant of the kernel."""
_BLOCK_THREADS = 128
_MIN_COUNTERS = 2048
_K_MULTIPLE = 32  # rows of the codes then start on 16 bytes


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("global_scale", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("n", ctypes.c_longlong),
        ("k", ctypes.c_int),
        ("m", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("steps_per_split", ctypes.c_int),
        ("global_scale_stride", ctypes.c_int),
    )


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
    return unavailable(x.device.index, x.dtype)


@functools.cache
def unavailable(ordinal: int, dtype: torch.dtype) -> str | None:
    """Why the kernel does not run on this device in this dtype; None if it does. Compiles and loads it."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not supported: FP16 and BF16 are"
    capability = torch.cuda.get_device_capability(ordinal)
    needed = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    if capability < needed:
        return f"{dtype} needs compute capability {needed}, the device has {capability}"
    try:
        _kernel(ordinal, dtype)
    except TpOverlapError as error:
        warnings.warn(f"NVFP4 layers dequantize their weights for every decode step: {error}", stacklevel=2)
        return str(error)
    return None


def linear(
    x: torch.Tensor, weight: NVFP4Tensor, bias: torch.Tensor | None = None, *, splits: int | None = None
) -> torch.Tensor:
    """x @ W.T + bias for x [..., K] of at most 8 rows, FP16 or BF16, on CUDA; bias [N] in x's dtype.

    Products are exact and sums are FP32, so the result is at least as exact as a GEMM on the dequantized weight, but
    not bit-identical to it. ``splits``: parts of K that different blocks sum; chosen for the device by default. The
    result is a function of its inputs and of ``splits`` alone. May be captured in a CUDA graph.

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
    kernel = _kernel(x.device.index, x.dtype)
    row_blocks = -(-n // BLOCK_ROWS)
    steps = -(-k // STEP_K)
    per_split = -(-steps // (splits or choose_splits(row_blocks, steps, m, kernel.slots)))
    splits = -(-steps // per_split)
    partial = arrivals = None
    if splits > 1:
        partial = torch.empty(row_blocks * splits * m * BLOCK_ROWS, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device, row_blocks)
    arguments = _Arguments(
        *(None if t is None else t.data_ptr() for t in (weight.codes, weight.scales, weight.global_scale, rows, bias)),
        *(None if t is None else t.data_ptr() for t in (y, partial, arrivals)),
        n,
        k,
        m,
        splits,
        per_split,
        weight.global_scale.ndim,
    )
    kernel.launch((row_blocks, splits, 1), arguments)
    return y.view(*x.shape[:-1], n)


@functools.lru_cache(maxsize=1024)
def choose_splits(row_blocks: int, steps: int, m: int, slots: int) -> int:
    """How many parts K is cut into: the count that keeps the device's ``slots`` blocks busiest.

    Minimises waves * (steps of the longest part + cost of a part), the latter in steps: a prologue, and writing and
    reading m FP32 partial sums a row, which weigh as much as a step at 8 rows. The smallest count among equals.
    """

    def cost(splits: int) -> float:
        waves = -(-row_blocks * splits // slots)
        overhead = 1 + (m / MAX_ROWS if splits > 1 else 0)
        return waves * (-(-steps // splits) + overhead)

    return min(range(1, min(steps, _MAX_SPLITS) + 1), key=cost)


@functools.cache
def _kernel(ordinal: int, dtype: torch.dtype) -> Kernel:
    major, minor = torch.cuda.get_device_capability(ordinal)
    source = resources.files(__package__).joinpath("small_batch.cu").read_text()
    image = compile_cuda(
        source,
        name="small_batch.cu",
        arch=f"sm_{major}{minor}",
        options=(f"-DBF16={int(dtype == torch.bfloat16)}",),
    )
    return Kernel(image, "nvfp4_small_batch", ordinal, block=_BLOCK_THREADS)


_counters: dict[tuple[int, int, bool], tuple[int, torch.Tensor]] = {}


def _arrivals(device: torch.device, row_blocks: int) -> torch.Tensor:
    """Zeroed counters, int32 [>= row_blocks]; every launch leaves them zeroed.

    One tensor per stream, since launches of one stream never overlap. A graph under capture gets its own, zeroed by a
    node at its first use: it may be replayed beside anything. Only the latest capture's is kept from being
    reused; a graph that shares its memory pool with later ones starts with zeroing whatever they left there.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    capturing = torch.cuda.is_current_stream_capturing()
    capture = int(call("cuStreamGetCaptureInfo", stream)[1]) if capturing else 0
    key = (device.index, stream, capturing)
    known_capture, counters = _counters.get(key, (None, None))
    if counters is None or known_capture != capture or counters.numel() < row_blocks:
        counters = torch.zeros(max(row_blocks, _MIN_COUNTERS), dtype=torch.int32, device=device)
        _counters[key] = (capture, counters)
    return counters

"""Host side of prefill.cu."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import math
import struct
from dataclasses import dataclass

import torch

from tpoverlap.attention.arguments import aligned_rows, aligned_strides, readable_columns, vector_rows
from tpoverlap.attention.turing.selection import CAPABILITY, HEAD_DIM
from tpoverlap.attention.turing.splits import choose_num_splits
from tpoverlap.cuda.device import device_facts
from tpoverlap.cuda.kernel import Kernel
from tpoverlap.cuda.nvrtc import compile_cuda
from tpoverlap.errors import UnsupportedError

# As in prefill.cu.
THREADS = 256
BLOCK_ROWS = 128
TILE_KEYS = 32
SHARED_BYTES = 65_536
MERGE_ROWS = 8

MAX_SPLITS = 64
# NVRTC 12 takes a generic lambda for a host function without the second.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


class Arguments(ctypes.Structure):
    """``struct Arguments`` of prefill.cu, field by field."""

    _fields_ = [
        *((field, ctypes.c_void_p) for field in ("q", "k", "v", "out", "lse", "partial_out", "partial_lse")),
        *((field, ctypes.c_void_p) for field in ("block_table", "cu_seqlens", "seq_lens")),
        *((field, ctypes.c_int64) for field in ("q_token", "q_head", "out_token", "out_head", "lse_token", "lse_head")),
        *((field, ctypes.c_int64) for field in ("k_head", "v_head")),
        *((field, ctypes.c_uint32) for field in ("k_block", "k_token", "v_block", "v_token")),
        *((field, ctypes.c_int32) for field in ("table_row", "table_columns", "num_blocks", "block_shift")),
        *((field, ctypes.c_int32) for field in ("requests", "tokens", "group", "q_heads", "num_splits")),
        ("scale", ctypes.c_float),
        ("q_keep", ctypes.c_uint32),
        ("q_flip", ctypes.c_uint32),
    ]


# The pointers are the first fields.
_ADDRESSES = struct.Struct("10Q")


def prepare_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int | None,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Prefill:
    """Flash attention (Dao et al.) with split-KV by waves; :func:`tpoverlap.attention.paged_prefill` says the rest.

    num_splits: 1 to 64 parts of each key range; None or 0: :func:`choose_num_splits`. Nothing is read back from the
    device, so the call can be captured; more than one part takes FP32 partial results of num_splits x the output.
    Raises UnsupportedError for caches whose rows are not contiguous or not 16-byte aligned, the call too.
    """
    if num_splits and num_splits > MAX_SPLITS:
        raise ValueError(f"num_splits must be 0 (automatic) to {MAX_SPLITS}, got {num_splits}")
    if not q.numel():
        return Prefill(None, None, (0, 0), 0, scale, b"")
    attend, merge = _kernels(q.device.index)
    grid = launch_grid(q, k_cache, block_table)
    splits = num_splits or choose_num_splits(
        count_blocks(q, k_cache, block_table.shape[0]) * grid[1],
        attend.slots,
        _capacity(k_cache, block_table) // TILE_KEYS,
    )
    tensors = q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse
    template = b""
    aligned = all(aligned_strides(x, alignment) for x, alignment in ((q, 4), (out, 16), (block_table, 1)))
    if aligned and cu_seqlens_q.is_contiguous() and seq_lens.is_contiguous():
        template = bytes(make_arguments(*tensors, None, splits=splits, scale=scale))
    return Prefill(attend, merge, grid, splits, scale, template)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The launches of one signature.

    No kernels: there are no rows. template: the kernels' argument but for its addresses; empty where the kernels cannot
    read some tensor as it lies, so that each call copies it.
    """

    attend: Kernel | None
    merge: Kernel | None
    grid: tuple[int, int]
    splits: int
    scale: float
    template: bytes

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if self.attend is None:
            return
        rows = q.shape[0] * q.shape[1]
        partial, partial_out, partial_lse = None, 0, 0
        if self.splits > 1:
            floats = self.splits * rows * (HEAD_DIM + 1)
            partial = torch.empty(floats, dtype=torch.float32, device=q.device)
            partial_out = partial.data_ptr()
            partial_lse = partial_out + 4 * self.splits * rows * HEAD_DIM
        at_q, at_k, at_v, at_out = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
        if not self.template or at_q & 3 or (at_k | at_v | at_out) & 15:
            self._with_copies(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse, partial)
            return
        arguments = Arguments.from_buffer_copy(self.template)
        _ADDRESSES.pack_into(
            arguments,
            0,
            at_q,
            at_k,
            at_v,
            at_out,
            0 if lse is None else lse.data_ptr(),
            partial_out,
            partial_lse,
            block_table.data_ptr(),
            cu_seqlens_q.data_ptr(),
            seq_lens.data_ptr(),
        )
        self._start(arguments, rows)

    @torch.no_grad()
    def _with_copies(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        partial: torch.Tensor | None,
    ) -> None:
        # Q and the output are small beside the cache: what the kernel cannot address is copied.
        q = q if aligned_rows(q, 4) else q.clone(memory_format=torch.contiguous_format)
        target = out if aligned_rows(out, 16) else torch.empty_like(q, memory_format=torch.contiguous_format)
        arguments = make_arguments(
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            target,
            lse,
            partial,
            splits=self.splits,
            scale=self.scale,
        )
        self._start(arguments, q.shape[0] * q.shape[1])
        if target is not out:
            out.copy_(target)

    def _start(self, arguments: Arguments, rows: int) -> None:
        assert self.attend is not None
        assert self.merge is not None
        self.attend.launch((*self.grid, self.splits), arguments)
        if self.splits > 1:
            self.merge.launch((-(-rows // MERGE_ROWS), 1, 1), arguments)


def count_blocks(q: torch.Tensor, k_cache: torch.Tensor, requests: int) -> int:
    """Row blocks of one KV head: exact for one request, else the most that so many tokens can take."""
    rows = q.shape[0] * (q.shape[1] // k_cache.shape[2])
    return (rows + requests * (BLOCK_ROWS - 1)) // BLOCK_ROWS


def launch_grid(q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor) -> tuple[int, int]:
    """Row blocks, those of tokens without a request counted, and KV heads."""
    return count_blocks(q, k_cache, block_table.shape[0] + 1), k_cache.shape[2]


def make_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial: torch.Tensor | None,
    *,
    splits: int,
    scale: float,
) -> Arguments:
    """The kernels' argument; the tensors must outlive the launch. Raises UnsupportedError for unsuitable caches."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not vector_rows(cache):
            raise UnsupportedError(
                f"backend 'turing' needs each token's head in {name} contiguous and 16-byte aligned, with blocks and "
                f"tokens less than 4 GiB apart; got strides {cache.stride()} (elements) at {cache.data_ptr():#x}. Lay "
                "the cache out so, or choose another backend"
            )
    cu_seqlens_q, seq_lens = cu_seqlens_q.contiguous(), seq_lens.contiguous()
    if block_table.stride(-1) != 1:
        block_table = block_table.contiguous()
    tokens, q_heads, _ = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    itemsize = q.element_size()
    arguments = Arguments(
        q=q.data_ptr(),
        k=k_cache.data_ptr(),
        v=v_cache.data_ptr(),
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        partial_out=None if partial is None else partial.data_ptr(),
        partial_lse=None if partial is None else partial[splits * tokens * q_heads * HEAD_DIM :].data_ptr(),
        block_table=block_table.data_ptr(),
        cu_seqlens=cu_seqlens_q.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        q_token=q.stride(0) * itemsize,
        q_head=q.stride(1) * itemsize,
        out_token=out.stride(0) * itemsize,
        out_head=out.stride(1) * itemsize,
        lse_token=0 if lse is None else lse.stride(0),
        lse_head=0 if lse is None else lse.stride(1),
        k_head=k_cache.stride(2) * itemsize,
        v_head=v_cache.stride(2) * itemsize,
        k_block=k_cache.stride(0) * itemsize,
        k_token=k_cache.stride(1) * itemsize,
        v_block=v_cache.stride(0) * itemsize,
        v_token=v_cache.stride(1) * itemsize,
        table_row=block_table.stride(0),
        table_columns=readable_columns(k_cache, block_table),
        num_blocks=num_blocks,
        block_shift=block_size.bit_length() - 1,
        requests=block_table.shape[0],
        tokens=tokens,
        group=q_heads // kv_heads,
        q_heads=q_heads,
        num_splits=splits,
        # A zero scale makes all scores equal: zero queries with any factor do so too.
        scale=abs(scale) * math.log2(math.e) or 1.0,
        q_keep=0xFFFFFFFF if scale else 0,
        q_flip=0x80008000 if scale < 0 else 0,
    )
    arguments.tensors = (block_table, cu_seqlens_q, seq_lens)  # they may be copies
    return arguments


def _capacity(k_cache: torch.Tensor, block_table: torch.Tensor) -> int:
    """Keys that a request can have at most."""
    return readable_columns(k_cache, block_table) * k_cache.shape[1]


@functools.cache
def _kernels(ordinal: int) -> tuple[Kernel, Kernel]:
    """The kernels on one device: machine code on compute capability 7.5, on newer GPUs its PTX."""
    arch = "sm_75" if device_facts(ordinal).capability == CAPABILITY else "compute_75"
    image = compile_cuda(source(), name="prefill.cu", arch=arch, options=OPTIONS)
    attend = Kernel(image, "attend", ordinal, block=THREADS, shared_bytes=SHARED_BYTES)
    return attend, Kernel(image, "merge", ordinal, block=THREADS)


def source() -> str:
    return importlib.resources.files(__package__).joinpath("prefill.cu").read_text()

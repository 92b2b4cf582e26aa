"""Host side of the split-KV decode: constants of a geometry, partial buffers, one launch or two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tpoverlap.attention.arguments import aligned_strides, readable_columns
from tpoverlap.attention.backend import PACKED_MATCHES_DECODE, PrefillRequest, PreparedDecode
from tpoverlap.attention.triton.common import common_rejections, padded_dim, score_factors, window_of
from tpoverlap.attention.triton.configs import DecodeTiles, decode_tiles, most_parts
from tpoverlap.attention.triton.gluon_available import hopper_decode_available
from tpoverlap.cuda.triton_dispatch import capability_of, dependent_launch, multiprocessors, on_device_of
from tpoverlap.cuda.triton_launch import FastLaunch

name = "triton"
capabilities = frozenset({PACKED_MATCHES_DECODE})

_MIN_MMA_ROWS = 16
# Of the separate merge, which takes one head a program.
_MERGE_WARPS = 1
# Programs a multiprocessor up to which each has more steps of keys in flight.
_FEW_PROGRAMS = 3
# Keys and values that a GPU reads in about the time that the host needs for a second launch and the call around it.
_MERGED_IN_LAUNCH_BYTES = 32 << 20


def rejection_reasons(request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
    return common_rejections(request)


def prepare_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> PreparedDecode:
    """Eager and short, the last program of each row merges its parts: the host issues one launch. Under capture, and
    where the rows can be so long that the host is not what a call waits for, a second kernel merges, which takes all
    parts at a time. One launch takes the stream's partial buffer; two take their own from torch, under capture from the
    graph's pool, since another thread's decode may come between them on the stream. All give the same bits.
    """
    on_gpu, rows = q.is_cuda, q.shape[0]
    most_keys = rows * block_table.shape[1] * k_cache.shape[1]
    short = 2 * most_keys * math.prod(k_cache.shape[2:]) * k_cache.element_size() <= _MERGED_IN_LAUNCH_BYTES
    start = _prepare(
        q,
        k_cache,
        v_cache,
        block_table,
        None,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        num_splits=num_splits,
        out=out,
        lse=lse,
        first_row=0,
        rows=rows,
    )

    def decode(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        workspace: torch.Tensor | None,
    ) -> None:
        if rows:
            captured = on_gpu and torch.cuda.is_current_stream_capturing()
            start(
                q,
                k_cache,
                v_cache,
                block_table,
                None,
                seq_lens,
                out,
                lse,
                workspace,
                merge_in_launch=short and not captured,
            )

    return decode


def decode_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    merge_in_launch: bool,
    first_row: int,
    rows: int,
    tiles: DecodeTiles | None = None,
) -> None:
    """Rows first_row .. first_row + rows - 1 of q: one a request, or with ``cu_seqlens_q`` packed tokens.

    tiles: None: those of the device.
    """
    if rows:
        start = _prepare(
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            num_splits=num_splits,
            out=out,
            lse=lse,
            first_row=first_row,
            rows=rows,
            tiles=tiles,
        )
        start(
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            out,
            lse,
            workspace,
            merge_in_launch=merge_in_launch,
        )


def _prepare(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    num_splits: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    first_row: int,
    rows: int,
    tiles: DecodeTiles | None = None,
) -> _Start:
    """The launches for tensors of these shapes, strides and dtypes on this device, with all that follows from them."""
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    if tiles is None:
        tiles = decode_tiles(capability_of(q) if q.is_cuda else None, q.dtype, q.shape[2], num_splits)
    requests, columns, window = block_table.shape[0], readable_columns(k_cache, block_table), window_of(sliding_window)
    strides = (*q.stride(), *k_cache.stride(), *v_cache.stride(), *out.stride())
    table_row, table_column = block_table.stride()
    key = (
        q.get_device(),
        q.dtype,
        q.shape[1:],
        k_cache.shape[1:],
        strides,
        table_column,
        table_row >= 2**31,  # an int64 then
        num_splits,
        sliding_window is None,
        softcap is None,
        lse is None,
        cu_seqlens_q is None,
        tiles,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan.make(
            q, k_cache, v_cache, num_splits, sliding_window, softcap, lse, cu_seqlens_q, tiles
        )
    max_keys = columns * block_size
    if sliding_window is not None:
        # A window begins at a multiple of block_n.
        max_keys = min(max_keys, window + tiles.block_n - 1)
    # Splits that no row can use have no programs.
    programs = rows * kv_heads * most_parts(num_splits, max_keys)
    few = programs <= _FEW_PROGRAMS * multiprocessors(q)
    sizes = (window, first_row, rows, requests, columns)
    return _Start(
        plan=plan,
        ring=plan.few_ring if few else plan.ring,
        device=q.get_device(),
        contiguous_lengths=seq_lens.is_contiguous(),
        programs=programs,
        floats=rows * plan.floats_a_row,
        counters=rows * kv_heads,
        decode_values=(*score_factors(scale, softcap), *sizes, num_blocks, *strides, table_row, table_column),
        merge_programs=rows * plan.merges_a_row if num_splits > 1 else 0,
        merge_values=(*sizes, *out.stride()),
    )


@dataclass(frozen=True, slots=True)
class _Start:
    """The launches of one signature: their sizes and the arguments that are not tensors."""

    plan: _Plan
    ring: FastLaunch | None
    device: int
    contiguous_lengths: bool
    programs: int
    floats: int
    counters: int
    decode_values: tuple[float, ...]
    merge_programs: int
    merge_values: tuple[int, ...]

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *,
        merge_in_launch: bool,
    ) -> None:
        with on_device_of(q):
            if not self.contiguous_lengths:
                seq_lens = seq_lens.contiguous()
            starts = seq_lens if cu_seqlens_q is None else cu_seqlens_q.contiguous()
            if merge_in_launch:
                buffers = _stream_buffers(q, self.device, self.floats, self.counters)
                partial = buffers.partial if workspace is None else workspace
                counters = buffers.counters
            else:
                partial = q.new_empty(self.floats, dtype=torch.float32) if workspace is None else workspace
                counters = partial
            # The kernels never touch what stands in for an absent tensor; it only has to be one of its type.
            lse_or_any = partial if lse is None else lse
            launch = self.plan.decode[merge_in_launch]
            if self.ring is not None and not merge_in_launch and not _misaligned(q, k_cache, v_cache):
                launch = self.ring
            launch(
                self.programs,
                (q, k_cache, v_cache, out, lse_or_any, partial, counters, block_table, starts, seq_lens),
                self.decode_values,
            )
            if not merge_in_launch and self.merge_programs:
                self.plan.merge(self.merge_programs, (out, lse_or_any, partial, starts, seq_lens), self.merge_values)


def _misaligned(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    return (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) & 15


@dataclass(frozen=True)
class _Plan:
    """What a geometry fixes: the launches (decode without and with the merge, the merge alone, and without it by a ring
    of tiles, for few and for many programs, where that serves) and sizes of a row."""

    decode: tuple[FastLaunch, FastLaunch]
    ring: FastLaunch | None
    few_ring: FastLaunch | None
    merge: FastLaunch
    floats_a_row: int
    merges_a_row: int

    @classmethod
    def make(
        cls,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_splits: int,
        sliding_window: int | None,
        softcap: float | None,
        lse: torch.Tensor | None,
        cu_seqlens_q: torch.Tensor | None,
        tiles: DecodeTiles,
    ) -> _Plan:
        from tpoverlap.attention.triton.decode_kernel import decode_kernel, merge_kernel

        _, q_heads, head_dim = q.shape
        _, block_size, kv_heads, _ = k_cache.shape
        group = q_heads // kv_heads
        dim = padded_dim(head_dim)
        # Each launch is set up while the kernel before it runs: short rows take little longer than a launch.
        dependent = dependent_launch(q)
        shape: dict[str, Any] = {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "DIM": dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_N": tiles.block_n,
            "PART_KEYS": tiles.part_keys,
            "NUM_SPLITS": num_splits,
            "STORE_LSE": lse is not None,
        }
        constants = {**shape, "WINDOW": sliding_window is not None, "PREFILL_ROWS": cu_seqlens_q is not None}
        decode = tuple(
            FastLaunch(
                decode_kernel,
                {
                    **constants,
                    "GROUP_PAD": max(_MIN_MMA_ROWS, 1 << (group - 1).bit_length()),
                    "SOFTCAP": softcap is not None,
                    "MERGE": merge,
                    "MERGE_UNROLL": in_launch_unroll(group, dim, tiles),
                    "DEPENDENT": dependent,
                },
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                launch_pdl=dependent,
            )
            for merge in (False, True)
        )
        rings: list[FastLaunch | None] = [None, None]
        plain = sliding_window is None and softcap is None and cu_seqlens_q is None
        if plain and _ring_serves(q, k_cache, v_cache, tiles):
            from tpoverlap.attention.triton.decode_hopper import WARPS, hopper_decode_kernel

            rings = [
                FastLaunch(
                    hopper_decode_kernel,
                    {**shape, "STAGES": stages, "DEPENDENT": dependent},
                    num_warps=WARPS,
                    launch_pdl=dependent,
                )
                for stages in (tiles.ring_stages, tiles.few_ring_stages)
            ]
        merge_dims = _merge_dims(dim, num_splits)
        merge_constants = {**constants, "MERGE_DIMS": merge_dims, "DEPENDENT": dependent}
        return cls(
            decode=(decode[0], decode[1]),
            ring=rings[0],
            few_ring=rings[1],
            merge=FastLaunch(merge_kernel, merge_constants, num_warps=_MERGE_WARPS, launch_pdl=dependent),
            floats_a_row=q_heads * num_splits * (head_dim + 2),
            merges_a_row=q_heads * (dim // merge_dims),
        )


def _ring_serves(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tiles: DecodeTiles) -> bool:
    """Whether the Gluon kernel serves tensors of these shapes and strides, whose rows it takes as aligned pieces."""
    if not tiles.ring_stages or not hopper_decode_available():
        return False
    from tpoverlap.attention.triton.decode_hopper import COPY_KEYS, HEADS

    return (
        q.shape[1] // k_cache.shape[2] <= HEADS
        and k_cache.shape[1] % COPY_KEYS == 0
        and q.shape[2] % 8 == 0
        and all(aligned_strides(x, 16) for x in (q, k_cache, v_cache))
        # Offsets within a copy are int32.
        and all(COPY_KEYS * cache.stride(1) < 2**31 for cache in (k_cache, v_cache))
    )


# Registers of a thread that hold parts on their way, where a warp full of dimensions needs no more.
_MERGE_REGISTERS = 64


def _merge_dims(dim: int, num_splits: int) -> int:
    """Dimensions of a program of the separate merge, which loads all parts at a time: a warp full or more."""
    fitting = _MERGE_REGISTERS * 32 * _MERGE_WARPS // num_splits
    return min(dim, max(32 * _MERGE_WARPS, 1 << (fitting.bit_length() - 1)))


def in_launch_unroll(group: int, dim: int, tiles: DecodeTiles) -> int:
    """Parts that a merge inside the decode's launch, of all ``group`` heads of a KV head, loads at a time."""
    elements = (1 << (group - 1).bit_length()) * dim
    return max(1, min(16, _MERGE_REGISTERS * 32 * tiles.num_warps // elements))


_plans: dict[tuple[Any, ...], _Plan] = {}


@dataclass(frozen=True)
class _StreamBuffers:
    """Partial states and counters (0 between launches) that the launches of one stream share, one after the other."""

    partial: torch.Tensor
    counters: torch.Tensor


_buffers: dict[tuple[int, int], _StreamBuffers] = {}


def _stream_buffers(q: torch.Tensor, device: int, floats: int, counters: int) -> _StreamBuffers:
    """The current stream's buffers, grown to the sizes asked for.

    Outgrown ones go back to the allocator of the stream they were made and used on, which hands them out in its order.
    """
    key = (device, torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0)
    buffers = _buffers.get(key)
    if buffers is None or buffers.partial.numel() < floats or buffers.counters.numel() < counters:
        have = (0, 0) if buffers is None else (buffers.partial.numel(), buffers.counters.numel())
        buffers = _buffers[key] = _StreamBuffers(
            q.new_empty(max(floats, have[0]), dtype=torch.float32),
            q.new_zeros(max(counters, have[1]), dtype=torch.int32),
        )
    return buffers

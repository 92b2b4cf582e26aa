"""Host side of the packed prefill: which kernel, how long rows are cut, and the launches of a signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpoverlap.attention.arguments import aligned_strides, readable_columns
from tpoverlap.attention.backend import PACKED_PREFILL, PrefillRequest, PreparedPrefill
from tpoverlap.attention.triton.common import common_rejections, padded_dim, score_factors, window_of
from tpoverlap.attention.triton.configs import PrefillTiles, prefill_tiles
from tpoverlap.attention.triton.gluon_available import hopper_prefill_available
from tpoverlap.cuda.triton_dispatch import capability_of, multiprocessors, on_device_of
from tpoverlap.cuda.triton_launch import FastLaunch

name = "triton"
capabilities = frozenset({PACKED_PREFILL})

# Partial results of one launch, in bytes, unless one tile's are more; more tiles than fit are launched in turn, which
# changes no bit.
_MAX_PARTIAL_BYTES = 512 << 20
# Programs that a multiprocessor is given where rows may have several parts, up to twice as many: enough to even out the
# last ones, while a graph captured for the longest table starts no more for nothing.
_PROGRAMS_A_MULTIPROCESSOR = 12
# Keys and values of all heads, in bytes, beyond which programs of one KV head follow each other, to share the L2 cache.
_SHARED_BYTES = 32 << 20
_MERGE_ROWS = 16
_MERGE_WARPS = 4


def rejection_reasons(request: PrefillRequest, *, forced: bool = False) -> tuple[str, ...]:
    return common_rejections(request)


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
) -> PreparedPrefill:
    """num_splits is of no effect: rows are cut at fixed keys, and their bits depend on nothing else.

    Where the table is longer than a part, an eager call takes its partial results' memory from torch's allocator, and a
    captured one from its graph's: tokens x query heads x parts x (head_dim + 2) floats, at most 512 MiB or those of one
    tile (645 MB for a table of 10 million keys, 8 KV heads of 256 and tiles of 128 rows).
    """
    return _prepare(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        out=out,
        lse=lse,
        tiles=None,
    )


def launch_prefill(
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
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tiles: PrefillTiles,
    max_partial_bytes: int = _MAX_PARTIAL_BYTES,
) -> None:
    """The launches with given tiles. The grid follows from shapes alone: nothing is read back, a graph can hold it."""
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
        out=out,
        lse=lse,
        tiles=tiles,
        max_partial_bytes=max_partial_bytes,
    )
    start(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse)


def _prepare(
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
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tiles: PrefillTiles | None,
    max_partial_bytes: int = _MAX_PARTIAL_BYTES,
) -> _Start:
    """The launches for tensors of these shapes, strides and dtypes on this device, with all that follows from them."""
    tokens, q_heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    requests = block_table.shape[0]
    if tiles is None:
        tiles = prefill_tiles(capability_of(q) if q.is_cuda else None, q.dtype, head_dim)
    strides = (*q.stride(), *k_cache.stride(), *v_cache.stride(), *out.stride())
    table_row, table_column = block_table.stride()
    specialized = (
        tiles.specialized_stages > 0
        and block_size % 16 == 0
        and head_dim % 8 == 0
        and all(aligned_strides(x, 16) for x in (q, k_cache, v_cache, out))
        and hopper_prefill_available()
    )
    key = (
        q.get_device(),
        q.dtype,
        q.shape[1:],
        k_cache.shape[1:],
        strides,
        table_column,
        table_row >= 2**31,  # an int64 then
        sliding_window is None,
        softcap is None,
        lse is None,
        specialized,
        tiles,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan.make(q, k_cache, sliding_window, softcap, lse, tiles, specialized)

    window = window_of(sliding_window)
    columns = readable_columns(k_cache, block_table)
    max_parts = -(-columns * block_size // tiles.part_keys)
    if sliding_window is not None:
        # Keys that some row of a tile sees, and the block before them, may begin and end within a part.
        max_parts = min(max_parts, (window + tiles.block_m + tiles.block_n) // tiles.part_keys + 2)
    max_parts = max(max_parts, 1)
    floats_a_tile = kv_heads * max_parts * tiles.block_m * (head_dim + 2) if max_parts > 1 else 0
    all_tiles = tokens * (q_heads // kv_heads) // tiles.block_m + requests + 1
    count = all_tiles
    if max_parts > 1:
        count = max(1, min(all_tiles, max_partial_bytes // (4 * floats_a_tile)))
    key_bytes = 2 * kv_heads * head_dim * q.element_size() * columns * block_size
    neighbours = 1 if key_bytes > _SHARED_BYTES else kv_heads
    sizes = (requests, tokens, columns)
    slabs = []
    for first_tile in range(0, all_tiles, count):
        here = min(count, all_tiles - first_tile)
        rounds = max(1, here * kv_heads * max_parts // (_PROGRAMS_A_MULTIPROCESSOR * multiprocessors(q)))
        slots = -(-max_parts // rounds)
        slabs.append(
            _Slab(
                slots * here * kv_heads,
                (
                    *score_factors(scale, softcap),
                    window,
                    *sizes,
                    num_blocks,
                    first_tile,
                    here,
                    slots,
                    max_parts,
                    neighbours,
                    *strides,
                    table_row,
                    table_column,
                ),
                here * kv_heads * (tiles.block_m // plan.merge_rows) if max_parts > 1 else 0,
                (window, *sizes, first_tile, here, max_parts, *out.stride()),
            )
        )
    return _Start(
        plan=plan,
        slabs=tuple(slabs) if tokens else (),
        floats=count * floats_a_tile if tokens else 0,
        contiguous_lengths=seq_lens.is_contiguous() and cu_seqlens_q.is_contiguous(),
    )


@dataclass(frozen=True, slots=True)
class _Slab:
    """Launches for a range of tiles: their programs, and the arguments that are not tensors."""

    programs: int
    values: tuple[float, ...]
    merge_programs: int
    merge_values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Start:
    """The launches of one signature."""

    plan: _Plan
    slabs: tuple[_Slab, ...]
    floats: int
    contiguous_lengths: bool

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
        plan = self.plan
        with on_device_of(q):
            if not self.contiguous_lengths:
                cu_seqlens_q, seq_lens = cu_seqlens_q.contiguous(), seq_lens.contiguous()
            # The kernels never touch what stands in for an absent tensor; it only has to be one of its type.
            partial = q.new_empty(self.floats, dtype=torch.float32) if self.floats else plan.any_floats
            lse_or_any = plan.any_floats if lse is None else lse
            tensors = (q, k_cache, v_cache, out, lse_or_any, partial, block_table, cu_seqlens_q, seq_lens)
            launch = plan.prefill
            if plan.specialized is not None and not _misaligned(q, k_cache, v_cache, out):
                launch = plan.specialized
            for slab in self.slabs:
                launch(slab.programs, tensors, slab.values)
                if slab.merge_programs:
                    merged = (out, lse_or_any, partial, cu_seqlens_q, seq_lens)
                    plan.merge(slab.merge_programs, merged, slab.merge_values)


def _misaligned(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> int:
    return (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr() | out.data_ptr()) & 15


@dataclass(frozen=True)
class _Plan:
    """What a geometry fixes: the launches (the warp-specialized one where it serves) and what stands for no tensor."""

    prefill: FastLaunch
    specialized: FastLaunch | None
    merge: FastLaunch
    merge_rows: int
    any_floats: torch.Tensor

    @classmethod
    def make(
        cls,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        sliding_window: int | None,
        softcap: float | None,
        lse: torch.Tensor | None,
        tiles: PrefillTiles,
        specialized: bool,
    ) -> _Plan:
        from tpoverlap.attention.triton.prefill_kernel import merge_prefill_kernel, prefill_kernel

        _, q_heads, head_dim = q.shape
        _, block_size, kv_heads, _ = k_cache.shape
        shape: dict[str, Any] = {
            "KV_HEADS": kv_heads,
            "GROUP": q_heads // kv_heads,
            "HEAD_DIM": head_dim,
            "DIM": padded_dim(head_dim),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "PART_KEYS": tiles.part_keys,
        }
        window, store_lse = {"WINDOW": sliding_window is not None}, {"STORE_LSE": lse is not None}
        options = {**window, "SOFTCAP": softcap is not None, **store_lse}
        merge_rows = min(_MERGE_ROWS, tiles.block_m)
        special = None
        if specialized:
            from tpoverlap.attention.triton.prefill_hopper import WARPS, hopper_prefill_kernel

            stages = {"STAGES": tiles.specialized_stages}
            special = FastLaunch(hopper_prefill_kernel, {**shape, **stages, **options}, num_warps=WARPS)
        return cls(
            prefill=FastLaunch(
                prefill_kernel, {**shape, **options}, num_warps=tiles.num_warps, num_stages=tiles.num_stages
            ),
            specialized=special,
            merge=FastLaunch(
                merge_prefill_kernel, {**shape, **window, **store_lse, "ROWS": merge_rows}, num_warps=_MERGE_WARPS
            ),
            merge_rows=merge_rows,
            any_floats=q.new_empty(4, dtype=torch.float32),
        )


_plans: dict[tuple[Any, ...], _Plan] = {}

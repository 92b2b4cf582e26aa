# mypy: disable-error-code="no-untyped-def, assignment"
"""Packed paged prefill for Hopper in Gluon: warps that copy keys, and two warp groups that attend to them.

The schedule is FlashAttention-3's: a producer fills a ring of key and value tiles; each consumer multiplies the next
keys while it weighs the last scores. Triton's own pipeline waits for scores right after it asks for them, and keeps all
warps in step. Importing this module raises ImportError or AttributeError where Triton's Gluon is absent or another.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tpoverlap.attention.triton import device, prefill_tile

# Gluon 3.6 and later name these differently.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(_core, "barrier", None) or _core.thread_barrier
_find_unit = gluon.jit(prefill_tile.find_unit.fn)
_find_tile = gluon.jit(prefill_tile.find_tile.fn)
_soft_capped = gluon.jit(device.soft_capped.fn)

# Warps of the first consumer, which are those of the launch.
WARPS = 4
# Rows of a consumer: what one warp-group instruction takes.
_ROWS = gl.constexpr(64)
_CONSUMERS = gl.constexpr(2)
_PRODUCER_WARPS = gl.constexpr(4)
# Keys that are copied with one block id: block sizes are multiples of it.
_COPY_KEYS = gl.constexpr(16)
# Registers a thread; three warp groups of 128 have 65,536.
_CONSUMER_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.constexpr_function
def _row_layout(dim, warps):
    """Pieces of 16 bytes of rows that lie together."""
    lanes = min(32, dim // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _part_range(part, first, end, first_part, BLOCK_N: gl.constexpr, PART_KEYS: gl.constexpr):
    """First and past-the-last key of a part, and the end of its blocks: one at least."""
    begin = gl.maximum((first_part + part) * PART_KEYS, first // BLOCK_N * BLOCK_N)
    part_end = gl.minimum((first_part + part + 1) * PART_KEYS, end)
    return begin, part_end, gl.maximum(part_end, begin + 1)


@gluon.jit
def _copy(tile, lanes, offsets, seen_from, seen_to, rows, real, COPIES: gl.constexpr, WINDOW: gl.constexpr):
    """Copy rows to a tile, a block id's at a time; zeros for those outside seen_from .. seen_to - 1."""
    for i in gl.static_range(COPIES):
        row = rows + i * _COPY_KEYS
        seen = row < seen_to
        if WINDOW:
            seen = seen & (row >= seen_from)
        pointers = lanes + offsets[i]
        pointers = gl.max_contiguous(gl.multiple_of(pointers, [2, 16]), [1, 8])
        _async_load(tile.slice(i * _COPY_KEYS, _COPY_KEYS), pointers, mask=seen[:, None] & real)


@gluon.jit
def _produce(
    source,
    strides,
    span,
    ring,
    HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PART_KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Copy the keys and values of the program's parts, block after block.

    Block ids are clamped, so that wrong ones cannot lead out of the cache. Rows that no query sees are zeros, not what
    a block holds or an id leads to: 0 times NaN would reach the accumulator.
    """
    k_head, v_head, table, table_column, num_blocks = source
    k_block, k_row, v_block, v_row = strides
    first, end, first_part, parts, slot, slots = span
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free = ring
    layout: gl.constexpr = _row_layout(DIM, _PRODUCER_WARPS)
    COPIES: gl.constexpr = BLOCK_N // _COPY_KEYS
    rows = gl.arange(0, _COPY_KEYS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    real = (dims < HEAD_DIM)[None, :]
    k_lanes = k_head + rows.to(gl.int64)[:, None] * k_row + dims[None, :]
    v_lanes = v_head + rows.to(gl.int64)[:, None] * v_row + dims[None, :]
    stage = 0
    phase = 1
    part = slot
    while part < parts:
        key, part_end, stop = _part_range(part, first, end, first_part, BLOCK_N, PART_KEYS)
        while key < stop:
            k_offsets = ()
            v_offsets = ()
            for i in gl.static_range(COPIES):
                at = key + i * _COPY_KEYS
                block = gl.load(table + (at // BLOCK_SIZE).to(gl.int64) * table_column, mask=at < part_end, other=0)
                block = gl.minimum(gl.maximum(block, 0), num_blocks - 1).to(gl.int64)
                row = (at % BLOCK_SIZE).to(gl.int64)
                k_offsets += (block * k_block + row * k_row,)
                v_offsets += (block * v_block + row * v_row,)
            mbarrier.wait(k_free.index(stage), phase)
            _copy(k_tiles.index(stage), k_lanes, k_offsets, first - key, part_end - key, rows, real, COPIES, WINDOW)
            async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
            mbarrier.wait(v_free.index(stage), phase)
            _copy(v_tiles.index(stage), v_lanes, v_offsets, first - key, part_end - key, rows, real, COPIES, WINDOW)
            async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            key += BLOCK_N
        part += slots
    # Nothing is written to shared memory once it is another program's.
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _weigh(
    scores,
    peak,
    total,
    key,
    full,
    end,
    position,
    factors,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """``softmax_step`` after the softcap and, from key ``full`` on, the mask; the bits are those of that step."""
    multiplier, tanh_factor, window = factors
    if SOFTCAP:
        scores = _soft_capped(scores, tanh_factor, False)
    if key >= full:
        keys = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        visible = (keys[None, :] <= position[:, None]) & (keys < end)[None, :]
        if WINDOW:
            visible = visible & (keys[None, :] > position[:, None] - window)
        scores = gl.where(visible, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * multiplier)
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(gl.fma(scores, multiplier, -shift[:, None]))
    decay = gl.exp2(peak - shift)
    return weights, decay, new_peak, gl.fma(total, decay, gl.sum(weights, 1))


@gluon.jit
def _consume(
    group: gl.constexpr,
    arguments,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PART_KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    STORE_LSE: gl.constexpr,
):
    """Attend with rows group * 64 to group * 64 + 63 of the tile to each of the program's parts."""
    tensors, strides, place, span, factors, ring = arguments
    q, out, lse, partial, states = tensors
    q_token, q_head, out_token, out_head = strides
    start, first_row, rows_left, origin, kv_head, heads, unit = place
    first, end, first_part, parts, slot, slots = span
    q_tiles, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free = ring
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    R: gl.constexpr = _row_layout(DIM, 4)
    first_row += group * _ROWS
    rows_left -= group * _ROWS

    lanes = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, R))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, R))
    inside = (lanes < rows_left)[:, None] & (dims < HEAD_DIM)[None, :]
    token = (start + (first_row + lanes) // GROUP).to(gl.int64)
    head = (kv_head * GROUP + (first_row + lanes) % GROUP).to(gl.int64)
    q_tile = q_tiles.index(group)
    q_rows = q + (token * q_token + head * q_head)[:, None] + dims[None, :]
    q_rows = gl.max_contiguous(gl.multiple_of(q_rows, [2, 16]), [1, 8])
    q_tile.store(gl.load(q_rows, mask=inside, other=0.0))
    fence_async_shared()
    _barrier()

    s_lanes = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, S))
    position = origin + (first_row + s_lanes) // GROUP
    full = gl.maximum(origin + first_row // GROUP + 1, 0) // BLOCK_N * BLOCK_N
    if WINDOW:
        full = 0
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=S)
    stage = 0
    phase = 0
    part = slot
    while part < parts:
        key, part_end, stop = _part_range(part, first, end, first_part, BLOCK_N, PART_KEYS)
        peak = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
        total = gl.zeros([_ROWS], gl.float32, layout=gl.SliceLayout(1, S))
        acc = gl.zeros([_ROWS, DIM], gl.float32, layout=O)
        mbarrier.wait(k_ready.index(stage), phase)
        fence_async_shared()
        scores = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False)
        mbarrier.arrive(k_free.index(stage))
        weights, decay, peak, total = _weigh(
            scores, peak, total, key, full, part_end, position, factors, BLOCK_N, S, WINDOW, SOFTCAP
        )
        p = gl.convert_layout(weights.to(q.dtype.element_ty), P)
        key += BLOCK_N
        while key < stop:
            next_stage = stage + 1
            next_phase = phase
            if next_stage == STAGES:
                next_stage = 0
                next_phase = phase ^ 1
            mbarrier.wait(k_ready.index(next_stage), next_phase)
            fence_async_shared()
            next_scores = warpgroup_mma(
                q_tile, k_tiles.index(next_stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(v_ready.index(stage), phase)
            fence_async_shared()
            next_acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[next_scores])
            mbarrier.arrive(k_free.index(next_stage))
            weights, decay, peak, total = _weigh(
                scores, peak, total, key, full, part_end, position, factors, BLOCK_N, S, WINDOW, SOFTCAP
            )
            acc = warpgroup_mma_wait(0, deps=[next_acc])
            mbarrier.arrive(v_free.index(stage))
            p = gl.convert_layout(weights.to(q.dtype.element_ty), P)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O))[:, None]
            stage = next_stage
            phase = next_phase
            key += BLOCK_N
        mbarrier.wait(v_ready.index(stage), phase)
        fence_async_shared()
        acc = warpgroup_mma(p, v_tiles.index(stage), acc)
        mbarrier.arrive(v_free.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

        if parts == 1:
            divisor = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, O))
            # The queries' shared memory turns the result, which has no more use for them, into whole rows.
            _barrier()
            q_tile.store((acc / divisor[:, None]).to(q.dtype.element_ty))
            _barrier()
            out_rows = out + (token * out_token + head * out_head)[:, None] + dims[None, :]
            out_rows = gl.max_contiguous(gl.multiple_of(out_rows, [2, 16]), [1, 8])
            gl.store(out_rows, q_tile.load(R), mask=inside)
            if STORE_LSE:
                LN_2: gl.constexpr = 0.6931471805599453
                s_token = (start + (first_row + s_lanes) // GROUP).to(gl.int64)
                s_head = kv_head * GROUP + (first_row + s_lanes) % GROUP
                gl.store(lse + s_token * heads + s_head, (peak + gl.log2(total)) * LN_2, mask=s_lanes < rows_left)
        else:
            at = (unit + part) * (_CONSUMERS * _ROWS) + group * _ROWS
            o_lanes = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, O))
            o_dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, O))
            gl.store(
                partial + (at + o_lanes)[:, None] * HEAD_DIM + o_dims[None, :],
                acc,
                mask=(o_lanes < rows_left)[:, None] & (o_dims < HEAD_DIM)[None, :],
            )
            gl.store(states + (at + s_lanes) * 2, peak, mask=s_lanes < rows_left)
            gl.store(states + (at + s_lanes) * 2 + 1, total, mask=s_lanes < rows_left)
        part += slots


@gluon.jit(
    do_not_specialize=[
        "window",
        "requests",
        "tokens",
        "columns",
        "num_blocks",
        "table_row",
        "first_tile",
        "tiles",
        "slots",
        "max_parts",
        "neighbours",
    ]
)
def hopper_prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    partial,
    block_table,
    cu_seqlens_q,
    seq_lens,
    multiplier,
    tanh_factor,
    window,
    requests,
    tokens,
    columns,
    num_blocks,
    first_tile,
    tiles,
    slots,
    max_parts,
    neighbours,
    q_token,
    q_head,
    q_dim,
    k_block,
    k_row,
    k_head,
    k_dim,
    v_block,
    v_row,
    v_head,
    v_dim,
    out_token,
    out_head,
    out_dim,
    table_row,
    table_column,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PART_KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    STORE_LSE: gl.constexpr,
):
    """``prefill_kernel`` with the same arguments, grid and bits, for tensors whose rows are aligned 16-byte pieces."""
    gl.static_assert(BLOCK_M == _CONSUMERS * _ROWS and BLOCK_SIZE % _COPY_KEYS == 0)
    slot, tile, kv_head = _find_unit(gl.program_id(0), tiles, neighbours, KV_HEADS)
    request, start, first_row, rows, origin, first, end, first_part, parts = _find_tile(
        first_tile + tile,
        cu_seqlens_q,
        seq_lens,
        window,
        requests,
        tokens,
        columns,
        GROUP,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        PART_KEYS,
        WINDOW,
    )
    if (rows <= 0) | (slot >= parts):
        return

    element: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], element)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(element, [_CONSUMERS, _ROWS, DIM], SHARED)
    k_tiles = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED)
    v_tiles = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=32 * _PRODUCER_WARPS)
        mbarrier.init(v_ready.index(i), count=32 * _PRODUCER_WARPS)
        mbarrier.init(k_free.index(i), count=_CONSUMERS)
        mbarrier.init(v_free.index(i), count=_CONSUMERS)
    fence_async_shared()
    _barrier()

    head = kv_head.to(gl.int64)
    unit = (tile.to(gl.int64) * KV_HEADS + kv_head) * max_parts
    # Peaks and sums lie after the accumulators of all units.
    states = partial + tiles.to(gl.int64) * KV_HEADS * max_parts * (BLOCK_M * HEAD_DIM)
    span = (first, end, first_part, parts, slot, slots)
    consumer = (
        (q, out, lse, partial, states),
        (q_token, q_head, out_token, out_head),
        (start, first_row, rows, origin, kv_head, KV_HEADS * GROUP, unit),
        span,
        (multiplier, tanh_factor, window),
        (q_tiles, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free),
    )
    source = (
        k_cache + head * k_head,
        v_cache + head * v_head,
        block_table + request.to(gl.int64) * table_row,
        table_column,
        num_blocks,
    )
    rings = (k_tiles, v_tiles, k_ready, v_ready, k_free, v_free)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    gl.constexpr(0),
                    consumer,
                    GROUP,
                    HEAD_DIM,
                    DIM,
                    BLOCK_N,
                    PART_KEYS,
                    STAGES,
                    WINDOW,
                    SOFTCAP,
                    STORE_LSE,
                ),
            ),
            (
                _consume,
                (
                    gl.constexpr(1),
                    consumer,
                    GROUP,
                    HEAD_DIM,
                    DIM,
                    BLOCK_N,
                    PART_KEYS,
                    STAGES,
                    WINDOW,
                    SOFTCAP,
                    STORE_LSE,
                ),
            ),
            (
                _produce,
                (
                    source,
                    (k_block, k_row, v_block, v_row),
                    span,
                    rings,
                    HEAD_DIM,
                    DIM,
                    BLOCK_SIZE,
                    BLOCK_N,
                    PART_KEYS,
                    STAGES,
                    WINDOW,
                ),
            ),
        ],
        [4, _PRODUCER_WARPS],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )

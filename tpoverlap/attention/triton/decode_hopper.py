# mypy: disable-error-code="no-untyped-def, assignment"
"""Split-KV decode for Hopper in Gluon: a warp that keeps a ring of keys and values full, and heads as columns.

A decode has few query heads for each KV head. Here they are the columns of the products (keys x heads, then dimensions
x heads): a tensor instruction has 8 columns, but 16 rows, half of which would be padding. That halves the products and
the accumulator's registers. Importing this module raises ImportError or AttributeError where Triton's Gluon is absent
or another.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpoverlap.attention.triton.decode_kernel import find_part, visible_range

# Gluon 3.6 and later name these differently.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(_core, "barrier", None) or _core.thread_barrier
_find_part = gluon.jit(find_part.fn)
_visible_range = gluon.jit(visible_range.fn)

WARPS = 1
# Query heads of a KV head at most: the columns of a tensor instruction.
HEADS = 8
_HEADS = gl.constexpr(HEADS)
# Keys that are copied with one block id: block sizes are multiples of it.
COPY_KEYS = 16
_COPY_KEYS = gl.constexpr(COPY_KEYS)
# Block ids that the lanes of a warp hold.
_IDS = gl.constexpr(32)


@gluon.constexpr_function
def _row_layout(dim):
    """Pieces of 16 bytes of rows that lie together."""
    lanes = min(32, dim // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [1, 1], [1, 0])


@gluon.constexpr_function
def _column_layout(dim):
    """The same of columns."""
    lanes = min(32, dim // 8)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, 1], [0, 1])


@gluon.jit
def _load_queries(q_row, q_head, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """The queries of a KV head as columns [DIM, 8], zeros beyond them."""
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(1, LAYOUT))
    heads = gl.arange(0, _HEADS, layout=gl.SliceLayout(0, LAYOUT))
    pointers = q_row + heads.to(gl.int64)[None, :] * q_head + dims[:, None]
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [16, 2]), [8, 1])
    return gl.load(pointers, mask=(dims < HEAD_DIM)[:, None] & (heads < GROUP)[None, :], other=0.0)


@gluon.jit
def _load_ids(table, table_column, key, end, lane, BLOCK_SIZE: gl.constexpr):
    """Block ids of the copies that begin at ``key``, one a lane; those past ``end`` are not read."""
    keys = key + lane * _COPY_KEYS
    return gl.load(table + (keys // BLOCK_SIZE).to(gl.int64) * table_column, mask=keys < end, other=0)


@gluon.jit
def _sum_of_halves(x, LAYOUT: gl.constexpr):
    """``sum_of_halves`` of the columns of x: the halves' halves of 16 rows lie in a thread and in lanes that differ by
    16, 8 and 4, which is how they are added."""
    for _ in gl.static_range(4):
        if x.shape[0] > 16:
            x = gl.sum(gl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)
    return gl.convert_layout(gl.sum(x, 0), LAYOUT)


@gluon.jit
def _copy_tile(tile, pointers, seen, real, MASKED: gl.constexpr):
    """Copy rows to a tile; zeros for those that are not seen."""
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [2, 16]), [1, 8])
    if MASKED:
        _async_load(tile, pointers, mask=seen[:, None] & real)
    else:
        _async_load(tile, pointers)


@gluon.jit
def _copy(
    ids,
    lane,
    number,
    key,
    stage,
    end,
    caches,
    strides,
    num_blocks,
    rows,
    real,
    tiles,
    BLOCK_SIZE: gl.constexpr,
    OFFSET: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Copy 16 keys from ``key`` on and their values, copy ``number`` of the part, to rows from OFFSET on of a stage.

    The id is clamped, so that a wrong one cannot lead out of the cache. Rows that no head sees are zeros, not what a
    block holds or an id leads to: 0 times NaN would reach the accumulator. WHOLE: where all are seen there is no mask.
    """
    k_base, v_base, k_lanes, v_lanes = caches
    k_block, k_row, v_block, v_row = strides
    k_tiles, v_tiles = tiles
    block = gl.sum(gl.where(lane == number % _IDS, ids, 0), 0)
    block = gl.minimum(gl.maximum(block, 0), num_blocks - 1).to(gl.int64)
    row = (key % BLOCK_SIZE).to(gl.int64)
    k_pointers = (k_base + (block * k_block + row * k_row)) + k_lanes
    v_pointers = (v_base + (block * v_block + row * v_row)) + v_lanes
    k_tile = k_tiles.index(stage).slice(OFFSET, _COPY_KEYS)
    v_tile = v_tiles.index(stage).slice(OFFSET, _COPY_KEYS)
    seen = rows < end - key
    if WHOLE:
        if end - key >= _COPY_KEYS:
            _copy_tile(k_tile, k_pointers, seen, real, False)
            _copy_tile(v_tile, v_pointers, seen, real, False)
        else:
            _copy_tile(k_tile, k_pointers, seen, real, True)
            _copy_tile(v_tile, v_pointers, seen, real, True)
    else:
        _copy_tile(k_tile, k_pointers, seen, real, True)
        _copy_tile(v_tile, v_pointers, seen, real, True)


@gluon.jit(do_not_specialize=["window", "first_row", "rows", "requests", "columns", "num_blocks", "table_row"])
def hopper_decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    partial,
    counters,
    block_table,
    cu_seqlens_q,
    seq_lens,
    multiplier,
    tanh_factor,
    window,
    first_row,
    rows,
    requests,
    columns,
    num_blocks,
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
    BLOCK_N: gl.constexpr,
    PART_KEYS: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    STORE_LSE: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """``decode_kernel`` with the same arguments, grid and bits, for up to 8 query heads a KV head, one row a request
    and rows of aligned 16-byte pieces; it has no window, softcap or merge.

    STAGES - 1 steps are being copied while one is computed. A copy's block id comes from a lane that loaded it up to 32
    copies before: a load in the step that needs it would add its latency to every step.
    """
    COPIES: gl.constexpr = BLOCK_N // _COPY_KEYS
    gl.static_assert(BLOCK_SIZE % _COPY_KEYS == 0 and BLOCK_N % _COPY_KEYS == 0 and GROUP <= _HEADS)
    gl.static_assert(STAGES >= 2 and (STAGES - 1) * COPIES <= _IDS)
    local_row, kv_head, split = _find_part(gl.program_id(0), rows, KV_HEADS)
    row = first_row + local_row
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    head = kv_head * GROUP
    element: gl.constexpr = q.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = _row_layout(DIM)
    # Queries of wide heads do not fit the registers beside the accumulator: each step loads them from shared memory.
    RELOAD: gl.constexpr = DIM > 128
    # They are on their way while the length and then the block ids are.
    q_row = q + row.to(gl.int64) * q_token + head.to(gl.int64) * q_head
    if RELOAD:
        queries = _load_queries(q_row, q_head, GROUP, HEAD_DIM, DIM, _column_layout(DIM))
    else:
        queries = _load_queries(q_row, q_head, GROUP, HEAD_DIM, DIM, B)
    request, first_key, length, part, used = _visible_range(
        row,
        cu_seqlens_q,
        seq_lens,
        window,
        requests,
        columns,
        BLOCK_SIZE,
        BLOCK_N,
        PART_KEYS,
        NUM_SPLITS,
        False,
        False,
    )
    begin = first_key + split * part
    # As ``split >= max(used, 1)``, without the division that ``used`` takes.
    if (split > 0) & (begin >= length):
        return
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    WHOLE: gl.constexpr = HEAD_DIM == DIM

    end = gl.minimum(begin + part, length)
    table = block_table + request.to(gl.int64) * table_row
    lane = gl.arange(0, _IDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    ids = _load_ids(table, table_column, begin, end, lane, BLOCK_SIZE)
    later_ids = _load_ids(table, table_column, begin + _IDS * _COPY_KEYS, end, lane, BLOCK_SIZE)

    copied = gl.arange(0, _COPY_KEYS, layout=gl.SliceLayout(1, ROWS))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS))
    real = (dims < HEAD_DIM)[None, :]
    tiles = (
        gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED),
        gl.allocate_shared_memory(element, [STAGES, BLOCK_N, DIM], SHARED),
    )
    caches = (
        k_cache + kv_head.to(gl.int64) * k_head,
        v_cache + kv_head.to(gl.int64) * v_head,
        copied[:, None] * k_row + dims[None, :],
        copied[:, None] * v_row + dims[None, :],
    )
    strides = (k_block, k_row, v_block, v_row)
    for i in gl.static_range(STAGES - 1):
        if begin + i * BLOCK_N < end:
            for c in gl.static_range(COPIES):
                number = i * COPIES + c
                key = begin + number * _COPY_KEYS
                _copy(
                    ids,
                    lane,
                    number,
                    key,
                    i,
                    end,
                    caches,
                    strides,
                    num_blocks,
                    copied,
                    real,
                    tiles,
                    BLOCK_SIZE,
                    c * _COPY_KEYS,
                    WHOLE,
                )
        async_copy.commit_group()
    if RELOAD:
        q_tile = gl.allocate_shared_memory(element, [_HEADS, DIM], SHARED, queries.permute((1, 0)))
        q_tile = q_tile.permute((1, 0))
        queries = q_tile.load(B)

    peak = gl.full([_HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
    total = gl.zeros([_HEADS], gl.float32, layout=gl.SliceLayout(0, MMA))
    acc = gl.zeros([DIM, _HEADS], gl.float32, layout=MMA)
    zeros = gl.zeros([BLOCK_N, _HEADS], gl.float32, layout=MMA)
    step_keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
    stage = 0
    filled = STAGES - 1
    number = (STAGES - 1) * COPIES
    first = begin
    while first < end:
        async_copy.wait_group(STAGES - 2)
        # All lanes see what all copied, and are done with the stage that is filled next.
        _barrier()
        next_first = first + (STAGES - 1) * BLOCK_N
        if next_first < end:
            for c in gl.static_range(COPIES):
                key = next_first + c * _COPY_KEYS
                if number % _IDS == 0:
                    ids = later_ids
                    later_ids = _load_ids(table, table_column, key + _IDS * _COPY_KEYS, end, lane, BLOCK_SIZE)
                _copy(
                    ids,
                    lane,
                    number,
                    key,
                    filled,
                    end,
                    caches,
                    strides,
                    num_blocks,
                    copied,
                    real,
                    tiles,
                    BLOCK_SIZE,
                    c * _COPY_KEYS,
                    WHOLE,
                )
                number += 1
        async_copy.commit_group()
        if RELOAD:
            queries = q_tile.load(B)
        scores = mma_v2(tiles[0].index(stage).load(A), queries, zeros)
        scores = gl.where((first + step_keys < end)[:, None], scores, float("-inf"))
        # ``softmax_step`` along the other dimension; the sum adds halves, as ``sum_of_halves`` does, through lanes.
        new_peak = gl.maximum(peak, gl.max(scores, 0) * multiplier)
        shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = gl.exp2(gl.fma(scores, multiplier, -shift[None, :]))
        decay = gl.exp2(peak - shift)
        total = gl.fma(total, decay, _sum_of_halves(weights, gl.SliceLayout(0, MMA)))
        peak = new_peak
        values = tiles[1].index(stage).permute((1, 0)).load(A)
        acc = mma_v2(values, gl.convert_layout(weights.to(element), B), acc * decay[None, :])
        first += BLOCK_N
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        filled = gl.where(filled + 1 == STAGES, 0, filled + 1)
    async_copy.wait_group(0)

    heads = gl.arange(0, _HEADS, layout=gl.SliceLayout(0, MMA))
    out_dims = gl.arange(0, DIM, layout=gl.SliceLayout(1, MMA))
    valid = heads < GROUP
    inside = (out_dims < HEAD_DIM)[:, None] & valid[None, :]
    if used <= 1:
        result = acc / gl.where(total == 0.0, 1.0, total)[None, :]
        out_row = out + row.to(gl.int64) * out_token
        out_columns = out_row + (head + heads).to(gl.int64)[None, :] * out_head
        gl.store(out_columns + out_dims.to(gl.int64)[:, None] * out_dim, result.to(element), mask=inside)
        if STORE_LSE:
            LN_2: gl.constexpr = 0.6931471805599453
            lse_row = lse + row.to(gl.int64) * (KV_HEADS * GROUP)
            gl.store(lse_row + head + heads, (peak + gl.log2(total)) * LN_2, mask=valid)
        return
    states = rows.to(gl.int64) * (KV_HEADS * GROUP * NUM_SPLITS)
    first_state = (local_row.to(gl.int64) * (KV_HEADS * GROUP) + head) * NUM_SPLITS + split
    partial_row = partial + first_state * HEAD_DIM
    state_row = partial + states * HEAD_DIM + first_state
    at = heads * NUM_SPLITS
    gl.store(partial_row + at[None, :] * HEAD_DIM + out_dims[:, None], acc, mask=inside)
    gl.store(state_row + at, peak, mask=valid)
    gl.store(state_row + states + at, total, mask=valid)

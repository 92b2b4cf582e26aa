# mypy: disable-error-code="no-untyped-def, assignment"
"""Split-KV decode (Flash-Decoding): partial states of a row's parts, and their merge."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tpoverlap.attention.triton.configs import FEW_PARTS, LONG_PART_KEYS
from tpoverlap.attention.triton.device import (
    find_request,
    finish_rows,
    key_offsets,
    load_block_ids,
    soft_capped,
    softmax_step,
)

_FEW_PARTS = tl.constexpr(FEW_PARTS)
_LONG_PART_KEYS = tl.constexpr(LONG_PART_KEYS)


@triton.jit
def visible_range(
    row,
    cu_seqlens_q,
    seq_lens,
    window,
    requests,
    columns,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PREFILL_ROWS: tl.constexpr,
):
    """Request, first key to read, past-the-last key, keys of a part, parts in use.

    The cut is a function of the row's own length, the window and NUM_SPLITS: equal parts, whole multiples of
    PART_KEYS; ``most_parts`` says how many there can be. A window starts at a multiple of BLOCK_N, so that no block of
    keys straddles cache blocks that a multiple of it divides.
    """
    FEW: tl.constexpr = (NUM_SPLITS + 1) // 2 if NUM_SPLITS < 2 * _FEW_PARTS else _FEW_PARTS
    request = row
    if PREFILL_ROWS:
        request = find_request(cu_seqlens_q, requests, row, 1, 1)
        length = 0
        if request < requests:
            after = tl.load(cu_seqlens_q + request + 1) - 1 - row
            length = tl.load(seq_lens + request) - after
    else:
        # Past L1: a merge reads it before it has waited for the kernel whose wait came after the lengths' last change.
        length = tl.load(seq_lens + row, cache_modifier=".cg")
    length = tl.minimum(tl.maximum(length, 0), columns * BLOCK_SIZE)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    keys = length - begin
    part = tl.maximum(tl.minimum(tl.cdiv(keys, FEW), _LONG_PART_KEYS), tl.cdiv(keys, NUM_SPLITS))
    part = tl.cdiv(part, PART_KEYS) * PART_KEYS
    used = tl.cdiv(keys, tl.maximum(part, 1))
    return request, begin, length, part, used


@triton.jit
def find_part(program, rows, KV_HEADS: tl.constexpr):
    """Row, KV head and split of a program.

    The split is outermost: programs of splits that short rows leave unused come last. Between the others they would
    fill the multiprocessors unevenly. The KV head is innermost: neighbours read neighbouring memory.
    """
    return program // KV_HEADS % rows, program % KV_HEADS, program // KV_HEADS // rows


@triton.jit
def sum_of_halves(x):
    """Sums of the rows of x, one half added to the other until one column is left.

    Every sum has two terms, so the bits hang on no layout: kernels with the keys along either dimension have the same.
    """
    ROWS: tl.constexpr = x.shape[0]
    # Up to 2^8 columns.
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [ROWS, 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def _load_parts(
    partial,
    first,
    used,
    at,
    lanes,
    dims,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The parts first .. first + COUNT - 1, whose loads are in flight together."""
    parts = ()
    for i in tl.static_range(COUNT):
        split = first + i
        live = tl.where(split < used, lanes, HEADS) < HEADS
        part = tl.load(
            partial + split * HEAD_DIM + at[:, None] * HEAD_DIM + dims[None, :],
            mask=live[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        parts += (part,)
    return parts


@triton.jit
def _add_parts(parts, first, weights, acc, COUNT: tl.constexpr):
    """Add the parts first .. first + COUNT - 1 to the merged accumulator."""
    LANES: tl.constexpr = acc.shape[0]
    for i in tl.static_range(COUNT):
        # Gathered as a vector: as a column a weight would go through shared memory to reach its row.
        column = tl.zeros([LANES, 1], tl.int32) + first + i
        weight = tl.reshape(tl.gather(weights, column, 1), [LANES])
        acc = tl.fma(tl.broadcast_to(weight[:, None], parts[i].shape), parts[i], acc)
    return acc


@triton.jit
def _merge_parts(
    partial,
    state,
    out_row,
    lse_row,
    head,
    first_dim,
    used,
    states,
    out_head,
    out_dim,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Merge DIMS dimensions of HEADS heads of a row, part by part in the order of their keys and by explicit FMAs.

    ``state`` points to the peaks of the first head, its sums lie ``states`` further. The order, and that of the sums'
    halves, make the bits independent of the launch that merges. UNROLL parts are loaded at a time, where that is all of
    them beside their peaks and sums. Loads bypass L1, which other programs' writes do not reach.
    """
    SPLITS_PAD: tl.constexpr = triton.next_power_of_2(NUM_SPLITS)
    LANES: tl.constexpr = triton.next_power_of_2(HEADS)
    lanes = tl.arange(0, LANES)
    dims = first_dim + tl.arange(0, DIMS)
    splits = tl.arange(0, SPLITS_PAD)
    valid = lanes < HEADS
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    at = lanes * NUM_SPLITS
    if UNROLL >= NUM_SPLITS:
        parts = _load_parts(partial, 0, used, at, lanes, dims, HEADS, HEAD_DIM, NUM_SPLITS)
    peaks = tl.load(
        state + at[:, None] + splits[None, :],
        mask=valid[:, None] & (splits < used)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    totals = tl.load(
        state + states + at[:, None] + splits[None, :],
        mask=valid[:, None] & (splits < used)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    peak = tl.max(peaks, 1)
    weights = tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    total = sum_of_halves(weights * totals)
    acc = tl.zeros([LANES, DIMS], tl.float32)
    if UNROLL >= NUM_SPLITS:
        acc = _add_parts(parts, 0, weights, acc, NUM_SPLITS)
    else:
        for first in tl.range(0, used, UNROLL):
            parts = _load_parts(partial, first, used, at, lanes, dims, HEADS, HEAD_DIM, UNROLL)
            acc = _add_parts(parts, first, weights, acc, UNROLL)
    result, lse = finish_rows(acc, peak, total)
    tl.store(
        out_row + (head + lanes).to(tl.int64)[:, None] * out_head + dims.to(tl.int64)[None, :] * out_dim,
        result.to(out_row.dtype.element_ty),
        mask=inside,
    )
    if STORE_LSE:
        tl.store(lse_row + head + lanes, lse, mask=valid)


@triton.jit(do_not_specialize=["window", "first_row", "rows", "requests", "columns", "num_blocks", "table_row"])
def decode_kernel(
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PREFILL_ROWS: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One part of one row for all GROUP query heads of one KV head: the keys and values are read once.

    Grid (splits in use at most * rows * KV_HEADS), see ``find_part``. ``partial`` holds accumulators [rows, q_heads,
    NUM_SPLITS, HEAD_DIM], then peaks and sums [rows, q_heads, NUM_SPLITS] each. With MERGE the program that finishes a
    row's last part merges it; ``counters`` [rows, KV_HEADS] are 0 before and after.

    With DEPENDENT (programmatic dependent launch) programs are set up while the kernel before still runs, and touch
    memory once it has ended.
    """
    local_row, kv_head, split = find_part(tl.program_id(0), rows, KV_HEADS)
    row = first_row + local_row
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    request, first_key, length, part, used = visible_range(
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
        WINDOW,
        PREFILL_ROWS,
    )
    if split >= tl.maximum(used, 1):
        return

    lanes = tl.arange(0, GROUP_PAD)
    valid = lanes < GROUP
    dims = tl.arange(0, DIM).to(tl.int64)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    head = kv_head * GROUP
    q_base = q + row.to(tl.int64) * q_token + head.to(tl.int64) * q_head
    q_rows = tl.load(q_base + lanes.to(tl.int64)[:, None] * q_head + dims[None, :] * q_dim, mask=inside, other=0.0)
    acc = tl.zeros([GROUP_PAD, DIM], tl.float32)
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    k_base = k_cache + kv_head.to(tl.int64) * k_head
    v_base = v_cache + kv_head.to(tl.int64) * v_head
    table = block_table + request.to(tl.int64) * table_row
    begin = first_key + split * part
    end = tl.minimum(begin + part, length)
    next_ids = load_block_ids(table, table_column, begin, end, BLOCK_SIZE, BLOCK_N)
    for key in tl.range(begin, end, BLOCK_N):
        ids = next_ids
        next_ids = load_block_ids(table, table_column, key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        keys = key + tl.arange(0, BLOCK_N)
        # Hidden keys are zeros, not what a block holds or a table entry leads to: 0 times NaN would reach ``acc``.
        visible = keys < end
        if WINDOW:
            visible &= keys >= length - window
        inside_keys = visible[:, None] & (dims < HEAD_DIM)[None, :]
        k_keys = k_base + key_offsets(ids, key, num_blocks, k_block, k_row, BLOCK_SIZE, BLOCK_N)
        k = tl.load(k_keys[:, None] + dims[None, :] * k_dim, mask=inside_keys, other=0.0)
        scores = tl.dot(q_rows, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            scores = soft_capped(scores, tanh_factor, k.dtype == tl.float32)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        weights, decay, peak, _ = softmax_step(scores, multiplier, peak, total)
        total = tl.fma(total, decay, sum_of_halves(weights))
        v_keys = v_base + key_offsets(ids, key, num_blocks, v_block, v_row, BLOCK_SIZE, BLOCK_N)
        v = tl.load(v_keys[:, None] + dims[None, :] * v_dim, mask=inside_keys, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

    out_row = out + row.to(tl.int64) * out_token
    lse_row = lse + row.to(tl.int64) * (KV_HEADS * GROUP)
    if used <= 1:
        result, row_lse = finish_rows(acc, peak, total)
        tl.store(
            out_row + (head + lanes).to(tl.int64)[:, None] * out_head + dims[None, :] * out_dim,
            result.to(out.dtype.element_ty),
            mask=inside,
        )
        if STORE_LSE:
            tl.store(lse_row + head + lanes, row_lse, mask=valid)
        return

    states = rows.to(tl.int64) * (KV_HEADS * GROUP * NUM_SPLITS)
    first_state = (local_row.to(tl.int64) * (KV_HEADS * GROUP) + head) * NUM_SPLITS
    partial_row = partial + first_state * HEAD_DIM
    state_row = partial + states * HEAD_DIM + first_state
    at = lanes * NUM_SPLITS
    tl.store(partial_row + split * HEAD_DIM + at[:, None] * HEAD_DIM + tl.arange(0, DIM)[None, :], acc, mask=inside)
    tl.store(state_row + split + at, peak, mask=valid)
    tl.store(state_row + states + split + at, total, mask=valid)
    if MERGE:
        counter = counters + local_row * KV_HEADS + kv_head
        # All threads' stores come before the release by the one thread that counts.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counter, 0)
            _merge_parts(
                partial_row,
                state_row,
                out_row,
                lse_row,
                head,
                0,
                used,
                states,
                out_head,
                out_dim,
                GROUP,
                HEAD_DIM,
                DIM,
                NUM_SPLITS,
                MERGE_UNROLL,
                STORE_LSE,
            )


@triton.jit(do_not_specialize=["window", "first_row", "rows", "requests", "columns"])
def merge_kernel(
    out,
    lse,
    partial,
    cu_seqlens_q,
    seq_lens,
    window,
    first_row,
    rows,
    requests,
    columns,
    out_token,
    out_head,
    out_dim,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    STORE_LSE: tl.constexpr,
    PREFILL_ROWS: tl.constexpr,
    MERGE_DIMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The merge as a launch of its own, for captured and long decodes. Grid (rows * q_heads * DIM // MERGE_DIMS).

    Arguments as above. A decode's lengths are read before the wait: it lets its dependents start when it has itself
    waited for all that came before it. Every program waits for the decode, also one with nothing to merge: what follows
    relies on the end of both.
    """
    if DEPENDENT and PREFILL_ROWS:
        gdc_wait()
    CHUNKS: tl.constexpr = DIM // MERGE_DIMS
    first_dim = tl.program_id(0) % CHUNKS * MERGE_DIMS
    head = tl.program_id(0) // CHUNKS % (KV_HEADS * GROUP)
    local_row = tl.program_id(0) // (CHUNKS * KV_HEADS * GROUP)
    row = first_row + local_row
    _, _, _, _, used = visible_range(
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
        WINDOW,
        PREFILL_ROWS,
    )
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if used <= 1:
        return
    states = rows.to(tl.int64) * (KV_HEADS * GROUP * NUM_SPLITS)
    first_state = (local_row.to(tl.int64) * (KV_HEADS * GROUP) + head) * NUM_SPLITS
    _merge_parts(
        partial + first_state * HEAD_DIM,
        partial + states * HEAD_DIM + first_state,
        out + row.to(tl.int64) * out_token,
        lse + row.to(tl.int64) * (KV_HEADS * GROUP),
        head,
        first_dim,
        used,
        states,
        out_head,
        out_dim,
        1,
        HEAD_DIM,
        MERGE_DIMS,
        NUM_SPLITS,
        NUM_SPLITS,
        STORE_LSE,
    )

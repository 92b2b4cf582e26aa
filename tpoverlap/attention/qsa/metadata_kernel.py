# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel that builds QSA metadata: token tiles first, then tiles of the work list, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def floor_div(a, b):
    """Floor for every sign of a (b > 0), where the machine's division truncates."""
    return tl.where(a >= 0, a, a - b + 1) // b


@triton.jit
def _floor_mod(a, b):
    return a - floor_div(a, b) * b


@triton.jit
def _token_tile(
    tile,
    query_start_loc,
    seq_lens,
    slot_mapping,
    slot_stride,
    block_table,
    table_row_stride,
    table_stride,
    table_width,
    requests,
    search_steps,
    num_tokens,
    storage_block_size,
    ratio,
    token_to_req,
    logical_positions,
    visible_blocks,
    slots,
    CIRCULAR: tl.constexpr,
    COMPRESSED: tl.constexpr,
    ring_size,
    TILE: tl.constexpr,
):
    token = tile * TILE + tl.arange(0, TILE)
    live = token < num_tokens
    real = live & (token < tl.load(query_start_loc + requests))
    # The first request that ends behind the token; query_start_loc[low + 1] > token from `high` on.
    low = tl.zeros([TILE], tl.int32)
    high = low + requests
    for _ in range(search_steps):
        middle = (low + high) // 2
        open_interval = low < high
        ends_before = tl.load(query_start_loc + 1 + middle, mask=open_interval, other=0) <= token
        low = tl.where(open_interval & ends_before, middle + 1, low)
        high = tl.where(open_interval & (ends_before == 0), middle, high)
    request = tl.minimum(low, tl.maximum(requests - 1, 0))
    end = tl.load(query_start_loc + request + 1, mask=real, other=0)
    length = tl.load(seq_lens + request, mask=real, other=0).to(tl.int64)
    position = length - end + token
    visible = tl.maximum(tl.minimum(floor_div(position + 1, ratio), floor_div(length, ratio)), 0)
    tl.store(token_to_req + token, tl.where(real, request, 0), mask=live)
    tl.store(logical_positions + token, tl.where(real, position, -1), mask=live)
    tl.store(visible_blocks + token, tl.where(real, visible, 0).to(tl.int32), mask=live)

    row = block_table + request.to(tl.int64) * table_row_stride
    if CIRCULAR:
        stored = real & (end - token <= ring_size) & (tl.zeros([TILE], tl.int32) < table_width)
        block = tl.load(row, mask=stored, other=-1).to(tl.int64)
        slot = tl.where(block >= 0, block * ring_size + _floor_mod(position, ring_size), -1)
    elif COMPRESSED:
        common = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=real, other=-1)
        group = floor_div(position, ratio)
        column = floor_div(group, storage_block_size)
        stored = (common >= 0) & (_floor_mod(position + 1, ratio) == 0) & (column >= 0) & (column < table_width)
        block = tl.load(row + column * table_stride, mask=real & stored, other=-1).to(tl.int64)
        slot = tl.where(block >= 0, block * storage_block_size + _floor_mod(group, storage_block_size), -1)
    else:
        slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride, mask=live, other=-1)
    tl.store(slots + token, slot, mask=live)


@triton.jit
def _work_tile(
    tile,
    query_start_loc,
    seq_lens,
    requests,
    ratio,
    k_work,
    max_k_work,
    ITEMS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    item = tile * ITEMS + tl.arange(0, ITEMS)
    request = tl.zeros([ITEMS], tl.int32)
    first = tl.zeros([ITEMS], tl.int32)
    total = 0
    lane = tl.arange(0, REQUESTS)
    for base in range(0, requests, REQUESTS):
        inside = base + lane < requests
        start = tl.load(query_start_loc + base + lane, mask=inside, other=0)
        query_len = tl.load(query_start_loc + base + lane + 1, mask=inside, other=0) - start
        length = tl.load(seq_lens + base + lane, mask=inside, other=0)
        completed = floor_div(length, ratio) - floor_div(length - query_len, ratio)
        count = tl.where(query_len > 0, tl.maximum(completed, 1), 0)
        end = total + tl.cumsum(count, 0)
        # An item belongs to the request whose predecessors end at or before it.
        passed = (end[None, :] <= item[:, None]) & inside[None, :]
        request += tl.sum(passed.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(passed, end[None, :], 0), 1))
        total += tl.sum(count)
    used = item < total
    tl.store(k_work + 2 * item, tl.where(used, request, -1), mask=item < max_k_work)
    tl.store(k_work + 2 * item + 1, tl.where(used, item - first, -1), mask=item < max_k_work)


@triton.jit(
    do_not_specialize=[
        "table_width",
        "requests",
        "search_steps",
        "num_tokens",
        "token_tiles",
        "max_k_work",
        "storage_block_size",
        "ratio",
        "ring_size",
    ]
)
def build_tiles(
    query_start_loc,
    seq_lens,
    slot_mapping,
    slot_stride,
    block_table,
    table_row_stride,
    table_stride,
    table_width,
    requests,
    search_steps,
    num_tokens,
    token_tiles,
    max_k_work,
    storage_block_size,
    ratio,
    ring_size,
    token_to_req,
    logical_positions,
    visible_blocks,
    slots,
    k_work,
    CIRCULAR: tl.constexpr,
    COMPRESSED: tl.constexpr,
    TILE: tl.constexpr,
    ITEMS: tl.constexpr,
    REQUESTS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    if tile < token_tiles:
        _token_tile(
            tile,
            query_start_loc,
            seq_lens,
            slot_mapping,
            slot_stride,
            block_table,
            table_row_stride,
            table_stride,
            table_width,
            requests,
            search_steps,
            num_tokens,
            storage_block_size,
            ratio,
            token_to_req,
            logical_positions,
            visible_blocks,
            slots,
            CIRCULAR,
            COMPRESSED,
            ring_size,
            TILE,
        )
    else:
        _work_tile(tile - token_tiles, query_start_loc, seq_lens, requests, ratio, k_work, max_k_work, ITEMS, REQUESTS)

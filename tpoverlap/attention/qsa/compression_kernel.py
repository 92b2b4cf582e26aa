# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel of ``update_key_caches``: one program a work item.

BF16 travels as its 16 bits, widened and rounded by integer operations: GPUs below compute capability 8.0 have no BF16
arithmetic, and Triton's interpreter truncates where it should round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.attention.qsa.metadata_kernel import floor_div


@triton.jit
def _widen(bits):
    """16 bits of BF16 -> FP32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round_bf16(x):
    """FP32 -> the 16 bits of the nearest BF16, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _encode_e4m3(x):
    """FP32 -> e4m3 code as uint8, nearest with ties to even, clamped to +-448; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    absolute = magnitude.to(tl.int32, bitcast=True)
    normal = ((absolute + 0x7FFFF + ((absolute >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Adding 2^14 leaves multiples of 2^-9, the subnormal step, in the low bits.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _rotary_axis(frequency, SECTION_0: tl.constexpr, SECTION_1: tl.constexpr):
    """Which position axis a frequency follows."""
    return (frequency >= SECTION_0).to(tl.int32) + (frequency >= SECTION_0 + SECTION_1).to(tl.int32)


@triton.jit
def update_caches(
    keys,
    key_stride,
    rope_positions,
    rope_token_stride,
    rope_axis_stride,
    state_keys,
    state_block_stride,
    state_row_stride,
    state_positions,
    position_block_stride,
    position_row_stride,
    compressed_keys,
    compressed_block_stride,
    compressed_row_stride,
    query_start_loc,
    seq_lens,
    state_table,
    state_table_stride,
    state_slots,
    compressed_slots,
    k_work,
    norm_weight,
    cos_sin,
    cos_sin_stride,
    eps,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    RATIO: tl.constexpr,
    CAPACITY: tl.constexpr,
    COMPRESSED_ROWS: tl.constexpr,
    SECTION_0: tl.constexpr,
    SECTION_1: tl.constexpr,
    POSITIONS: tl.constexpr,
    E4M3: tl.constexpr,
):
    item = tl.program_id(0)
    request = tl.load(k_work + 2 * item)
    if request >= 0:
        index = tl.load(k_work + 2 * item + 1)
        start = tl.load(query_start_loc + request).to(tl.int64)
        end = tl.load(query_start_loc + request + 1).to(tl.int64)
        length = tl.load(seq_lens + request).to(tl.int64)
        prefix = length - (end - start)
        group = floor_div(prefix, RATIO) + index
        dims = tl.arange(0, HEAD_PADDED)
        in_head = dims < HEAD
        ring = tl.load(state_table + request.to(tl.int64) * state_table_stride).to(tl.int64)
        ring = tl.maximum(ring, 0)
        slot = tl.full([], -1, tl.int64)
        if (group + 1) * RATIO <= length:
            slot = tl.load(compressed_slots + start + (group + 1) * RATIO - 1 - prefix)
        if slot >= 0:
            total = tl.zeros([HEAD_PADDED], tl.float32)
            for row in tl.static_range(RATIO):
                position = group * RATIO + row
                source = state_keys + ring * state_block_stride + (position % CAPACITY) * state_row_stride
                if position >= prefix:
                    source = keys + (start + position - prefix) * key_stride
                total += _widen(tl.load(source + dims, mask=in_head, other=0))
            mean = _widen(_round_bf16(tl.div_rn(total, tl.full([HEAD_PADDED], RATIO, tl.float32))))
            variance = tl.sum(mean * mean) / HEAD
            weight = tl.load(norm_weight + dims, mask=in_head, other=0.0).to(tl.float32) + 1.0
            key = _widen(_round_bf16(mean * tl.rsqrt(variance + eps) * weight))

            # NeoX rotary: dimension d < HALF pairs with d + HALF, both at frequency d.
            first = group * RATIO
            frequency = dims % HALF
            axis = _rotary_axis(frequency, SECTION_0, SECTION_1)
            if first >= prefix:
                token_axes = rope_positions + (start + first - prefix) * rope_token_stride
                rope_position = tl.load(token_axes + axis * rope_axis_stride)
            elif POSITIONS:
                kept_axes = state_positions + ring * position_block_stride + (first % CAPACITY) * position_row_stride
                rope_position = tl.load(kept_axes + axis)
            else:
                rope_position = tl.zeros([HEAD_PADDED], tl.int64) + first
            turned = dims < 2 * HALF
            cos = tl.load(cos_sin + rope_position * cos_sin_stride + frequency, mask=turned, other=1.0).to(tl.float32)
            sin = tl.load(cos_sin + rope_position * cos_sin_stride + HALF + frequency, mask=turned, other=0.0)
            partner = tl.gather(key, tl.where(turned, (dims + HALF) % (2 * HALF), dims), 0)
            sign = tl.where(dims < HALF, -1.0, 1.0)
            key = key * cos + sign * partner * sin.to(tl.float32)
            bits = _round_bf16(key)
            target = compressed_keys + (slot // COMPRESSED_ROWS) * compressed_block_stride
            target += (slot % COMPRESSED_ROWS) * compressed_row_stride + dims
            if E4M3:
                tl.store(target, _encode_e4m3(_widen(bits)), mask=in_head)
            else:
                tl.store(target, bits, mask=in_head)

        if index == 0:
            # The ring has been read; no other item of the request reads it.
            tl.debug_barrier()
            for token in range(tl.maximum(start, end - CAPACITY), end):
                state_slot = tl.load(state_slots + token)
                if state_slot >= 0:
                    block = state_slot // CAPACITY
                    row = state_slot % CAPACITY
                    raw = tl.load(keys + token * key_stride + dims, mask=in_head)
                    target = state_keys + block * state_block_stride + row * state_row_stride
                    tl.store(target + dims, raw, mask=in_head)
                    if POSITIONS:
                        axes = tl.arange(0, 4)
                        source = rope_positions + token * rope_token_stride + axes * rope_axis_stride
                        target_axes = state_positions + block * position_block_stride + row * position_row_stride
                        tl.store(target_axes + axes, tl.load(source, mask=axes < 3), mask=axes < 3)

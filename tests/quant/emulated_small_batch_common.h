// What the kernels of decode-sized products share of device primitives on the CPU, for BF16 = 0 or 1: see emulated_gpu.h.
//
// They rely on products of codes and scales being exact: one that is rounded is a fault.
#pragma once

#include "emulated_gpu.h"

namespace emulated {

#if BF16
constexpr auto widen = bfloat16_to_float;
constexpr auto narrow = float_to_bfloat16;
#else
constexpr auto widen = half_to_float;
constexpr auto narrow = float_to_half;
#endif

static uint16_t exact_product(uint16_t a, uint16_t b) {
    const double product = static_cast<double>(widen(a)) * widen(b);
    const uint16_t rounded = narrow(static_cast<float>(product));
    if (product == product && widen(rounded) != product) fail("a product of a code and a scale is rounded");
    return rounded;
}

using emulated::bits_as;

}  // namespace emulated

static u32 __funnelshift_l(u32 low, u32 high, u32 by) { return (static_cast<u64>(high) << 32 | low) << (by & 31) >> 32; }
static u32 __funnelshift_r(u32 low, u32 high, u32 by) { return (static_cast<u64>(high) << 32 | low) >> (by & 31); }
static u32 __byte_perm(u32 a, u32 b, u32 selectors) {
    if (selectors & ~0x7777u) emulated::fail("a byte is selected that is not there");
    const u64 bytes = static_cast<u64>(b) << 32 | a;
    u32 selected = 0;
    for (int i = 0; i < 4; i++) selected |= (bytes >> (selectors >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return selected;
}
static float __uint_as_float(u32 bits) { return emulated::bits_as<float>(bits); }
static float __int_as_float(int bits) { return emulated::bits_as<float>(bits); }
static u32 __shfl_xor_sync(u32 lanes, u32 x, int distance) {
    if (lanes != 0xffffffffu) emulated::fail("a shuffle of some lanes only");
    return emulated::lane_value<u32>(emulated::exchange("shfl.bfly", x), emulated::block->current % 32 ^ distance);
}
static void __syncthreads() { emulated::synchronize(0, 32 * emulated::kWarps, false, 0); }

static u32 multiply_pair(u32 a, u32 b) {
    return emulated::exact_product(a, b) | static_cast<u32>(emulated::exact_product(a >> 16, b >> 16)) << 16;
}
static u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
static void multiply_accumulate(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emulated::product<emulated::widen, 2>(c, c, {{a0, a1, b0}, {a2, a3, b1}});
}
static float to_float(const void* values, i64 index) {
    return emulated::widen(emulated::load<uint16_t>(static_cast<const uint16_t*>(values) + index));
}
static unsigned short round_to_16_bits(float value) { return emulated::narrow(value); }

// Device primitives of tpoverlap/attention/turing/prefill.cu on the CPU: see emulated_gpu.h. Global loads of the cache and the
// block table are checked against the ranges that may be read, matrix loads for bank conflicts.
#pragma once

#include "emulated_gpu.h"

#define DEVICE static inline

namespace emulated {

static void load_matrices(u32 (&x)[4], u32 at, bool transposed) {
    const auto values = exchange(transposed ? "ldmatrix.trans" : "ldmatrix", at);
    const int lane = block->current % kLanes;
    const int m = lane / 8;
    u32 banks = 0;
    for (int row = 0; row < 8; row++) banks |= 1u << lane_value<u32>(values, m * 8 + row) / 16 % 8;
    if (banks != 0xff) fail("bank conflict in a matrix load");
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int j = 0; j < 2; j++) {
            const int row = transposed ? lane % 4 * 2 + j : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + j;
            const u32 start = lane_value<u32>(values, i * 8 + row);
            if (start % 16) fail("a matrix row is not 16-byte aligned");
            memcpy(&pair[j], shared(start, 16, false) + column * 2, 2);
        }
        x[i] = pair[0] | static_cast<u32>(pair[1]) << 16;
    }
}

}  // namespace emulated

DEVICE u32 thread_id() { return emulated::block->current; }
DEVICE void store_shared(u32 at, uint4 x) { memcpy(emulated::shared(at, 16, true), &x, 16); }
DEVICE void store_shared(u32 at, uint2 x) { memcpy(emulated::shared(at, 8, true), &x, 8); }
DEVICE uint2 load_shared(u32 at) {
    uint2 x;
    memcpy(&x, emulated::shared(at, 8, false), 8);
    return x;
}
DEVICE void load_matrices(u32 (&x)[4], u32 at) { emulated::load_matrices(x, at, false); }
DEVICE void load_matrices_transposed(u32 (&x)[4], u32 at) { emulated::load_matrices(x, at, true); }
DEVICE void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 b) {
    emulated::product<emulated::half_to_float, 1>(d, d, {{a0, a1, b}});
}
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 b) {
    emulated::product<emulated::half_to_float, 1>(d, {0, 0, 0, 0}, {{a0, a1, b}});
}
DEVICE void load_global(uint4& x, const char* from, bool wanted) {
    if (wanted) x = emulated::load<uint4>(from);
}
DEVICE void load_global(u32& x, const int* from, bool wanted) {
    if (wanted) x = emulated::load<u32>(from);
}
DEVICE void prefetch(const char* at) { emulated::check_readable(at, 1); }
DEVICE void keep_loads_above() {}
DEVICE void barrier_all() { emulated::synchronize(0, 256, false, 0); }
DEVICE void barrier_all_if(bool joins) {
    if (joins) barrier_all();
}
DEVICE void barrier_pair() { emulated::synchronize(1 + thread_id() / 64, 64, false, thread_id() / 64 * 2); }
DEVICE bool barrier_pair_any(bool mine) {
    return emulated::synchronize(1 + thread_id() / 64, 64, mine, thread_id() / 64 * 2);
}
DEVICE float exp2_approximate(float x) { return exp2f(x); }
DEVICE u32 pack_half2(float low, float high) {
    return emulated::float_to_half(low) | static_cast<u32>(emulated::float_to_half(high)) << 16;
}
DEVICE float from_bits(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE u32 to_bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE float shuffle_xor(float x, int lanes) {
    return emulated::lane_value<float>(emulated::exchange("shfl.bfly", x), thread_id() % 32 ^ lanes);
}
DEVICE int shuffle_up(int x, int lanes) {
    const int lane = thread_id() % 32;
    return emulated::lane_value<int>(emulated::exchange("shfl.up", x), lane >= lanes ? lane - lanes : lane);
}
DEVICE int shuffle(int x, int lane) { return emulated::lane_value<int>(emulated::exchange("shfl.idx", x), lane); }
DEVICE u32 lanes_where(bool x) {
    const auto values = emulated::exchange("vote", x);
    u32 lanes = 0;
    for (int i = 0; i < 32; i++) lanes |= static_cast<u32>(emulated::lane_value<bool>(values, i)) << i;
    return lanes;
}
DEVICE bool any_lane(bool x) { return lanes_where(x) != 0; }
DEVICE int leading_zeros(u32 x) { return __builtin_clz(x); }
DEVICE int lowest_set_bit(u32 x) { return __builtin_ctz(x); }

// Device primitives of tpoverlap/quant/nvfp4/small_batch_bulk.cu on the CPU, for BF16 = 0 or 1: see emulated_gpu.h.
//
// Bulk copies are in no order: each is done at a random time after it was asked for, and until then its destination holds
// ones. Reading or overwriting it without having waited for its barrier is a race.
#pragma once

#define TPOVERLAP_EMULATED_WARPS 16
#include "emulated_small_batch_common.h"

static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static u32 __shfl_sync(u32, u32 value, int lane) {
    return emulated::lane_value<u32>(emulated::exchange("shfl.idx", value), lane);
}
static void __syncwarp() { emulated::exchange("syncwarp", 0u); }

namespace emulated {

struct Clock {
    u32 of[kWarps] = {};

    void join(const u32 (&other)[kWarps]) {
        for (int w = 0; w < kWarps; w++) of[w] = std::max(of[w], other[w]);
    }
};

// A mbarrier: of its current phase, how many arrivals and bytes are missing, and what was done before those that came.
struct PhaseBarrier {
    u32 arrivals, missing;
    i64 bytes = 0;
    u64 phase = 0;
    Clock arrived, seen;
};

struct BulkCopy {
    u32 to, bytes, barrier;
    const unsigned char* from;
    Clock issued;
};

constexpr u32 kBarrierBytes = 512;  // of shared memory, from its start: nothing else lies there
static PhaseBarrier barriers_of_phases[kBarrierBytes / 8];
static std::vector<BulkCopy> copies;
static u64 waits_in_vain;
static u64 waited_in[kWarps * kLanes];  // serial number of the block in which a thread has waited for the kernel ahead

static bool has_waited() { return waited_in[block->current] == block->serial; }

static int my_warp() { return block->current / kLanes; }

static PhaseBarrier& barrier_at(u32 at) {
    if (at % 8 || at >= kBarrierBytes) fail("no barrier at shared byte " + std::to_string(at));
    touch(block->words[at / 4], false, "barrier", at);
    if (!barriers_of_phases[at / 8].arrivals) fail("a barrier is used that nobody has made");
    return barriers_of_phases[at / 8];
}

static void complete_if_done(PhaseBarrier& barrier) {
    if (barrier.missing || barrier.bytes) return;
    barrier.seen = barrier.arrived;
    barrier.missing = barrier.arrivals;
    barrier.phase++;
    waits_in_vain = 0;
}

static void complete_copy(size_t i) {
    const BulkCopy copy = copies[i];
    copies.erase(copies.begin() + i);
    memcpy(block->shared.data() + copy.to, copy.from, copy.bytes);
    PhaseBarrier& barrier = barriers_of_phases[copy.barrier / 8];
    barrier.bytes -= copy.bytes;
    barrier.arrived.join(copy.issued.of);
    waits_in_vain = 0;
    complete_if_done(barrier);
}

static void check_outside_barriers(u32 at) {
    if (at < kBarrierBytes) fail("shared memory of the barriers is accessed");
}

}  // namespace emulated

static void barrier_init(u32 at, u32 arrivals) {
    using namespace emulated;
    if (at % 8 || at >= kBarrierBytes) fail("no place for a barrier");
    if (at == 0) {  // the first of a block
        if (block->index.x == 0) copies.clear();  // of a launch that has failed
        if (!copies.empty()) fail("a block has ended before its copies");
        for (auto& barrier : barriers_of_phases) barrier = PhaseBarrier{};
        waits_in_vain = 0;
    }
    touch(block->words[at / 4], true, "barrier", at);
    barriers_of_phases[at / 8] = PhaseBarrier{arrivals, arrivals};
}
static void fence_barriers() {}
static void barrier_arrive(u32 at) {
    using namespace emulated;
    PhaseBarrier& barrier = barrier_at(at);
    if (!barrier.missing) fail("too many arrive at a barrier");
    u32(&clock)[kWarps] = block->clock[my_warp()];
    barrier.arrived.join(clock);
    clock[my_warp()]++;
    barrier.missing--;
    complete_if_done(barrier);
}
static void barrier_expect(u32 at, u32 bytes) {
    emulated::barrier_at(at).bytes += bytes;
    barrier_arrive(at);
}
static void barrier_wait(u32 at, u32 parity) {
    using namespace emulated;
    PhaseBarrier& barrier = barrier_at(at);
    while (barrier.phase % 2 == parity) {
        if (!copies.empty() && block->random() % 64 == 0) complete_copy(block->random() % copies.size());
        if (barrier.phase % 2 != parity) break;
        if (copies.empty() && ++waits_in_vain > 1000 * kWarps * kLanes) fail("every thread waits: an arrival is missed");
        const u64 turn = 0;
        wait_for(turn, 1);
    }
    Clock mine;
    mine.join(block->clock[my_warp()]);
    mine.join(barrier.seen.of);
    memcpy(block->clock[my_warp()], mine.of, sizeof mine.of);
}
static void bulk_copy(u32 to, const unsigned char* from, u32 bytes, u32 barrier) {
    using namespace emulated;
    if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("a bulk copy is not aligned");
    if (!has_waited()) fail("global memory is read while the kernel ahead runs");
    check_readable(from, bytes);
    check_outside_barriers(to);
    barrier_at(barrier);
    BulkCopy copy{to, bytes, barrier, from, {}};
    for (u32 at = to; at < to + bytes; at += 4) *reinterpret_cast<u32*>(shared(at, 4, true)) = ~0u;
    u32(&clock)[kWarps] = block->clock[my_warp()];
    copy.issued.join(clock);
    clock[my_warp()]++;
    copies.push_back(copy);
}
template <class T>
static T load_shared(u32 at) {
    emulated::check_outside_barriers(at);
    T value;
    if constexpr (sizeof(T) >= 4) {
        memcpy(&value, emulated::shared(at, sizeof(T), false), sizeof(T));
    } else {
        if (at % sizeof(T)) emulated::fail("a load of shared memory is not aligned");
        memcpy(&value, emulated::shared(at / 4 * 4, 4, false) + at % 4, sizeof(T));
    }
    return value;
}
static void store_shared(u32 at, float4 value) {
    emulated::check_outside_barriers(at);
    memcpy(emulated::shared(at, sizeof value, true), &value, sizeof value);
}
static void wait_for_previous_kernel() {
    emulated::waited_in[emulated::block->current] = emulated::block->serial;
}
static void let_next_kernel_start() {
    if (!emulated::has_waited()) emulated::fail("the next kernel may start while the one ahead runs");
}
static uint4 load_x(const unsigned char* from) {
    if (!emulated::has_waited()) emulated::fail("global memory is read while the kernel ahead runs");
    return emulated::load<uint4>(from);
}
static u32 half_pair(u32 bytes) {
    u32 pair = 0;
    for (int i = 0; i < 2; i++) {
        const u32 byte = bytes >> 8 * i & 0xff, exponent = byte >> 3 & 15, mantissa = byte & 7;
        const float magnitude = exponent ? ldexpf(8 + mantissa, static_cast<int>(exponent) - 10) : ldexpf(mantissa, -9);
        const u32 half = (byte & 0x7f) == 0x7f ? 0x7fff : emulated::float_to_half(magnitude) | (byte & 0x80) << 8;
        pair |= half << 16 * i;
    }
    return pair;
}
#if BF16
static u32 lift(u32 halves) {
    const auto lifted = [&](u32 half) -> u32 {
        return emulated::float_to_bfloat16(emulated::half_to_float(half) * ldexpf(1, 117));
    };
    return lifted(halves & 0xffff) | lifted(halves >> 16) << 16;
}
#endif
template <bool upper>
static u32 scaled(u32 pair, u32 scales) {
    const u32 scale = upper ? scales >> 16 : scales & 0xffff;
    return multiply_pair(pair, scale | scale << 16);
}

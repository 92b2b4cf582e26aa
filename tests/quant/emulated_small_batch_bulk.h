// Device primitives of tpoverlap/quant/nvfp4/small_batch_bulk.cu on the CPU, for BF16 = 0 or 1: see emulated_gpu.h.
//
// A cluster of two blocks runs as one emulated block of twice the warps, each half of which has its half of the shared
// memory. Tensor copies and stores to the peer are in no order: each is done at a random time after it was asked for, and
// until then its destination holds ones. Reading or overwriting it without having waited for its barrier is a race.
//
// A tensor map has its address, its number of dimensions (and 256 where it swizzles), its sizes, strides and box, in
// words of 8 bytes.
#pragma once

#define TPOVERLAP_EMULATED_WARPS 32
#include <set>

#include "emulated_small_batch_common.h"

#define __cluster_dims__(...)
#undef threadIdx
#undef blockIdx
#define threadIdx (EmulatedThread{emulated::my_thread()})
#define blockIdx (dim3{2 * emulated::block->index.x + emulated::my_rank(), 0, 0})

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

constexpr u32 kPiece = 16;

// Of a tensor copy, from global memory or, where that is null, zeros; or a store to the peer, whose value it holds.
struct Piece {
    u32 to;  // in the cluster's shared memory
    const unsigned char* from;
};

struct Copy {
    std::vector<Piece> pieces;
    PhaseBarrier* barrier;
    std::vector<unsigned char> value;  // of a store
    Clock issued;
};

struct ClusterBarrier {
    u32 arrived = 0;
    u64 generation = 0;
    Clock seen;
};

constexpr u32 kBarrierBytes = 512;  // of a block's shared memory, from its start: nothing else lies there
constexpr int kBlockThreads = kWarps * kLanes / 2;
static PhaseBarrier barriers_of_phases[2][kBarrierBytes / 8];
static ClusterBarrier cluster_barrier;
static std::vector<Copy> copies;
static std::set<std::pair<const void*, std::vector<i64>>> prefetched;  // and not copied yet: tensor maps and places
static u64 state_of;  // serial number of the cluster that the state above belongs to
static u64 waits_in_vain;
static u64 waited_in[kWarps * kLanes];  // serial number of the cluster in which a thread has waited for the kernel ahead

static bool has_waited() { return waited_in[block->current] == block->serial; }

static int my_warp() { return block->current / kLanes; }
static u32 my_rank() { return block->current / kBlockThreads; }
static u32 my_thread() { return block->current % kBlockThreads; }

static const char* left_over() {
    if (!copies.empty()) return "a block has ended before its copies";
    return prefetched.empty() ? "" : "what is prefetched does not come at all";
}

static void start_cluster() {
    if (state_of == block->serial) return;
    if (block->index.x != 0 && *left_over()) fail(left_over());
    copies.clear();
    prefetched.clear();
    for (auto& of_block : barriers_of_phases)
        for (auto& barrier : of_block) barrier = PhaseBarrier{};
    cluster_barrier = ClusterBarrier{};
    waits_in_vain = 0;
    state_of = block->serial;
}

static void join_clock(const Clock& other) {
    Clock mine;
    mine.join(block->clock[my_warp()]);
    mine.join(other.of);
    memcpy(block->clock[my_warp()], mine.of, sizeof mine.of);
}

// Adds what the thread has done so far to a clock.
static void publish_clock(Clock& to) {
    u32(&clock)[kWarps] = block->clock[my_warp()];
    to.join(clock);
    clock[my_warp()]++;
}

// Where a block has the byte `at` of its shared memory in that of the cluster.
static u32 in_cluster(u32 rank, u32 at, u32 bytes) {
    const u32 size = static_cast<u32>(block->shared.size() / 2);
    if (at + bytes > size) fail("shared memory access of " + std::to_string(bytes) + " bytes at " + std::to_string(at));
    return rank * size + at;
}

static void check_outside_barriers(u32 at) {
    if (at < kBarrierBytes) fail("shared memory of the barriers is accessed");
}

static unsigned char* shared_of(u32 rank, u32 at, u32 bytes, bool write) {
    check_outside_barriers(at);
    return shared(in_cluster(rank, at, bytes), bytes, write);
}

static void check_present(u32 rank) {
    const auto first = block->threads.begin() + rank * kBlockThreads;
    if (std::all_of(first, first + kBlockThreads, [](const Thread& thread) { return thread.done; }))
        fail("the peer has ended");
}

static PhaseBarrier& barrier_at(u32 at, u32 rank = my_rank()) {
    if (at % 8 || at >= kBarrierBytes) fail("no barrier at shared byte " + std::to_string(at));
    touch(block->words[in_cluster(rank, at, 8) / 4], false, "barrier", at);
    PhaseBarrier& barrier = barriers_of_phases[rank][at / 8];
    if (!barrier.arrivals) fail("a barrier is used that nobody has made");
    return barrier;
}

static void complete_if_done(PhaseBarrier& barrier) {
    if (barrier.missing || barrier.bytes) return;
    barrier.seen = barrier.arrived;
    barrier.missing = barrier.arrivals;
    barrier.phase++;
    waits_in_vain = 0;
}

static void arrive(PhaseBarrier& barrier) {
    if (!barrier.missing) fail("too many arrive at a barrier");
    publish_clock(barrier.arrived);
    barrier.missing--;
    complete_if_done(barrier);
}

static void complete_copy(size_t i) {
    const Copy copy = copies[i];
    copies.erase(copies.begin() + i);
    for (const Piece& piece : copy.pieces) {
        check_present(piece.to / (block->shared.size() / 2));
        unsigned char* to = block->shared.data() + piece.to;
        const unsigned char* from = copy.value.empty() ? piece.from : copy.value.data();
        if (from) memcpy(to, from, kPiece);
        else memset(to, 0, kPiece);
    }
    copy.barrier->bytes -= copy.pieces.size() * kPiece;
    copy.barrier->arrived.join(copy.issued.of);
    waits_in_vain = 0;
    complete_if_done(*copy.barrier);
}

// Pieces lie in the shared memory of block `rank`.
static void start_copy(u32 rank, std::vector<Piece> pieces, u32 barrier, std::vector<unsigned char> value) {
    Copy copy{std::move(pieces), &barrier_at(barrier, rank), std::move(value), {}};
    for (Piece& piece : copy.pieces) {
        memset(shared_of(rank, piece.to, kPiece, true), 0xff, kPiece);
        piece.to = in_cluster(rank, piece.to, kPiece);
    }
    publish_clock(copy.issued);
    copies.push_back(copy);
}

static void tensor_copy(u32 to, const void* map, const std::vector<i64>& first, u32 barrier) {
    u64 words[16];
    memcpy(words, map, sizeof words);
    const size_t rank = words[1] % 256;
    const bool swizzle = words[1] / 256;
    const u64 *sizes = words + 2, *strides = sizes + rank, *box = strides + rank - 1;
    if (rank != first.size()) fail("a tensor copy of another number of dimensions");
    if (to % (swizzle ? 1024 : 128) || box[0] % kPiece || (swizzle && box[0] != 128)) fail("a tensor copy is not aligned");
    if (!has_waited()) fail("global memory is read while the kernel ahead runs");
    const auto awaited = [&](const auto& one) { return one.first == map && one.second.back() == first.back(); };
    if (!prefetched.erase({map, first}) && std::any_of(prefetched.begin(), prefetched.end(), awaited))
        fail("what is prefetched does not come first");
    u64 pieces = box[0] / kPiece;
    for (size_t d = 1; d < rank; d++) pieces *= box[d];
    std::vector<Piece> copied;
    for (u64 i = 0; i < pieces; i++) {
        u32 at = to + i * kPiece;
        if (swizzle) at ^= at / 128 % 8 * 16;
        const unsigned char* from = reinterpret_cast<const unsigned char*>(words[0]);
        u64 rest = i;
        bool inside = true;
        for (size_t d = 0; d < rank; d++) {
            const u64 extent = d ? box[d] : box[d] / kPiece, unit = d ? 1 : kPiece;
            const i64 index = first[d] + static_cast<i64>(rest % extent * unit);
            inside = inside && index >= 0 && index + unit <= sizes[d];
            from += index * static_cast<i64>(d ? strides[d - 1] : 1);
            rest /= extent;
        }
        if (inside) check_readable(from, kPiece);
        copied.push_back({at, inside ? from : nullptr});
    }
    start_copy(my_rank(), copied, barrier, {});
}

// What is asked for in the L2 cache must be what the first copies take, and be asked for before the kernel ahead has ended.
static void prefetch(const void* map, const std::vector<i64>& first) {
    if (has_waited()) fail("a prefetch comes too late");
    prefetched.insert({map, first});
}

}  // namespace emulated

static void barrier_init(u32 at, u32 arrivals) {
    using namespace emulated;
    start_cluster();
    if (at % 8 || at >= kBarrierBytes) fail("no place for a barrier");
    touch(block->words[in_cluster(my_rank(), at, 8) / 4], true, "barrier", at);
    barriers_of_phases[my_rank()][at / 8] = PhaseBarrier{arrivals, arrivals};
}
static void fence_barriers() {}
static void barrier_arrive(u32 at) { emulated::arrive(emulated::barrier_at(at)); }
static void peer_barrier_arrive(u32 at, u32 peer) {
    emulated::check_present(peer);
    emulated::arrive(emulated::barrier_at(at, peer));
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
    join_clock(barrier.seen);
}
static void barrier_wait_for_peer(u32 at, u32 parity) { barrier_wait(at, parity); }
static void cluster_arrive() {
    using namespace emulated;
    start_cluster();
    publish_clock(cluster_barrier.seen);
    if (++cluster_barrier.arrived == kWarps * kLanes) cluster_barrier.generation++;
}
static void cluster_wait() {
    using namespace emulated;
    if (!cluster_barrier.generation) wait_for(cluster_barrier.generation, 0);
    join_clock(cluster_barrier.seen);
}
template <class Map>
static void copy_codes(u32 to, const Map& map, int pair, i64 row, u32 rank, u32 barrier) {
    emulated::tensor_copy(to, &map, {0, row, pair, rank}, barrier);
}
template <class Map>
static void copy_scales(u32 to, const Map& map, int pair, i64 row, u32 rank, u32 barrier) {
    emulated::tensor_copy(to, &map, {16 * pair, row, rank}, barrier);
}
template <class Map>
static void prefetch_codes(const Map& map, int pair, i64 row, u32 rank) {
    emulated::prefetch(&map, {0, row, pair, rank});
}
template <class Map>
static void prefetch_scales(const Map& map, int pair, i64 row, u32 rank) {
    emulated::prefetch(&map, {16 * pair, row, rank});
}
static void pass_to_peer(u32 at, u32 peer, float4 value, u32 barrier) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    emulated::check_present(peer);
    emulated::start_copy(peer, {{at, nullptr}}, barrier, {bytes, bytes + sizeof value});
}
template <class T>
static T load_shared(u32 at) {
    T value;
    if constexpr (sizeof(T) >= 4) {
        memcpy(&value, emulated::shared_of(emulated::my_rank(), at, sizeof(T), false), sizeof(T));
    } else {
        if (at % sizeof(T)) emulated::fail("a load of shared memory is not aligned");
        memcpy(&value, emulated::shared_of(emulated::my_rank(), at / 4 * 4, 4, false) + at % 4, sizeof(T));
    }
    return value;
}
static void store_shared(u32 at, float4 value) {
    memcpy(emulated::shared_of(emulated::my_rank(), at, sizeof value, true), &value, sizeof value);
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

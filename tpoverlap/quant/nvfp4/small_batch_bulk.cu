// The product of small_batch.cu for compute capability 9.0 and later, where the copy engine of each SM brings the weight.
//
// A cluster of two blocks, one an SM, takes rows of W in tiles of 16, and each block half of k: it reads half of x, and
// rows are rounded up to tiles for two SMs together. A tile's codes and scales come by tensor copies into a ring in shared
// memory, a step of every warp at a time. A mbarrier of the ring's slot says that they have arrived, another that they
// have been read.
//
// A block's k is cut between kWarps warps, each of which keeps its part of x in registers for all tiles. Their sums of a
// tile meet in shared memory, where a warp of its own adds them up while the others go on. It passes every other tile's
// sum to the other block, which finishes that tile. So the order of a sum depends on k alone.
//
// Compiled with BF16 = 0 or 1, with STEPS = the steps of 128 k that a warp takes, at most, and with HALVES = 1 where it
// takes the last of them in two halves of 64 k, of which the last warps have only one: the four quarters of an SM then
// have equal shares of what is not a step of every warp.

constexpr int kWarps = 12, kHelpers = 3, kAllWarps = kWarps + kHelpers;
constexpr int kTileRows = 16;  // rows of one mma
constexpr int kSteps = STEPS;
constexpr int kThreadK = 32;   // k that a thread takes per step
constexpr int kStepK = 4 * kThreadK;
constexpr int kHalfK = kStepK / 2;  // the second half of a step lies kWarps halves behind the first one
constexpr int kParts = 3;      // tiles whose sums are on their way to a finisher
constexpr int kPassed = 4;     // tiles whose sums are on their way between the blocks of a cluster
constexpr int kMaxSlots = 4;

struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

struct Arguments {
    TensorMap codes;                 // bytes [half of k][128 bytes of it][n][128], copied 1 x kWarps / 2 x 16 x 128 at a time
    TensorMap scales;                // bytes [half of k][n][k / 32], copied 1 x 16 x 8 kWarps at a time
    const float* global_scale;       // [1] or [n]
    const void* x;                   // [m, k], rows 16-byte aligned
    const void* bias;                // [n] or null
    void* y;                         // [m, n]
    long long n;
    int k;                           // multiple of 512
    int m;                           // 1 to 8
    int global_scale_stride;         // 1 where it is per row, else 0
    int block_rows;                  // rows of W that a cluster takes, a multiple of 16
    int slots;                       // of the ring, 2 to kMaxSlots
};

// Dynamic shared memory, by offsets. A slot holds a step of every warp for the rows of a tile: codes, where 128 bytes are
// two steps of a row and the 16-byte pieces of row r have traded places, piece i with i ^ r % 8 (128-byte swizzle); and
// scales. What lies beyond the end of k or n is zeros.
constexpr u32 kFull = 0, kFree = kFull + 8 * kMaxSlots;           // barriers of the slots
constexpr u32 kSumsFull = kFree + 8 * kMaxSlots, kSumsFree = kSumsFull + 8 * kParts;
constexpr u32 kPassedFull = kSumsFree + 8 * kParts, kPassedFree = kPassedFull + 8 * kPassed;
constexpr u32 kSums = 512;                                        // [kParts][kWarps][32] float4
constexpr u32 kPassedSums = kSums + kParts * kWarps * 32 * 16;    // [kPassed][32] float4
constexpr u32 kRing = (kPassedSums + kPassed * 32 * 16 + 1023) / 1024 * 1024;  // [slots][kWarps / 2][kTileRows][128]
constexpr u32 kCodeBytes = kTileRows * kWarps * kStepK / 2, kScaleBytes = kTileRows * kWarps * kStepK / 16;  // of a slot
// Behind the ring: the scales of its slots, [slots][kTileRows][kWarps][kStepK / 16].

#ifndef TPOVERLAP_EMULATED_GPU
extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ __forceinline__ u32 shared_address(u32 at) {
    return static_cast<u32>(__cvta_generic_to_shared(shared_memory)) + at;
}

template <class T>
__device__ __forceinline__ T load_shared(u32 at) {
    return *reinterpret_cast<const T*>(shared_memory + at);
}

__device__ __forceinline__ void store_shared(u32 at, float4 value) {
    *reinterpret_cast<float4*>(shared_memory + at) = value;
}

__device__ __forceinline__ void barrier_init(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(arrivals) : "memory");
}

// Makes barriers known to the copy engine and, before cluster_arrive, to the other block.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(at)) : "memory");
}

// Arrives, and has the phase wait for so many bytes as well.
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(at)), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity; a new barrier is in phase 0, behind one of parity 1.
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "wait: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra wait;\n}" ::"r"(shared_address(at)), "r"(parity) : "memory");
}

// The same where the other block of the cluster arrives, or passes what this one then reads.
__device__ __forceinline__ void barrier_wait_for_peer(u32 at, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n}" ::"r"(shared_address(at)), "r"(parity) : "memory");
}

// The same place in the shared memory of the cluster's block `peer`.
__device__ __forceinline__ u32 peer_address(u32 at, u32 peer) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(peer));
    return address;
}

__device__ __forceinline__ void peer_barrier_arrive(u32 at, u32 peer) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_address(at, peer)) : "memory");
}

// Stores to the peer's shared memory at some later time; its barrier counts the bytes.
__device__ __forceinline__ void pass_to_peer(u32 at, u32 peer, float4 v, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                     peer_address(at, peer)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(peer_address(barrier, peer))
                 : "memory");
}

// What either block did before it arrived is seen by both once they have waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// 16 rows of a weight's half of k, from `row` and from twice `pair` steps on.
__device__ __forceinline__ void copy_codes(u32 to, const TensorMap& map, int pair, long long row, u32 rank, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, %3, %4}], "
                 "[%5];" ::"r"(shared_address(to)), "l"(&map), "r"(static_cast<int>(row)), "r"(pair), "r"(rank),
                 "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void copy_scales(u32 to, const TensorMap& map, int pair, long long row, u32 rank, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
                 "[%5];" ::"r"(shared_address(to)), "l"(&map), "r"(16 * pair), "r"(static_cast<int>(row)), "r"(rank),
                 "r"(shared_address(barrier)) : "memory");
}

// Asks for what copy_codes and copy_scales would copy in the L2 cache. No value is taken from it: the copies behind the
// wait see what was written meanwhile.
__device__ __forceinline__ void prefetch_codes(const TensorMap& map, int pair, long long row, u32 rank) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {0, %1, %2, %3}];" ::"l"(&map),
                 "r"(static_cast<int>(row)), "r"(pair), "r"(rank) : "memory");
}

__device__ __forceinline__ void prefetch_scales(const TensorMap& map, int pair, long long row, u32 rank) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(16 * pair),
                 "r"(static_cast<int>(row)), "r"(rank) : "memory");
}

// Until the kernel ahead on the stream has ended, if this one was started before. Volatile and in need of memory, as are
// the loads of x: the compiler keeps them behind it.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ uint4 load_x(const unsigned char* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Two E4M3 bytes as FP16, exactly, NaN included.
__device__ __forceinline__ u32 half_pair(u32 bytes) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(bytes)));
    return halves;
}

#if BF16
// Two FP16 to BF16, times 2^117.
__device__ __forceinline__ u32 lift(u32 halves) {
    float low, high;
    u32 lifted;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(lifted) : "f"(high * 0x1p117f), "f"(low * 0x1p117f));
    return lifted;
}
#endif

// Both halves of `pair` times the upper or the lower half of `scales`: an operand of the multiplication, no instruction.
template <bool upper>
__device__ __forceinline__ u32 scaled(u32 pair, u32 scales) {
    u32 both;
    if (upper) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(both) : "r"(scales));
    else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(both) : "r"(scales));
    return multiply_pair(pair, both);
}
#endif

// As decode_word. A shift to the left is a multiplication to the compiler and runs beside the logical operations, which
// are what this kernel has most of.
__device__ __forceinline__ void decode(u32 word, u32 pairs[4]) {
#if BF16
    const u32 signs = __funnelshift_l(word, word, 6);
    const u32 low = select_bits(0x00FF00FFu, word, signs), mixed = select_bits(0xFF00FF00u, word, signs);
    const u32 high = __funnelshift_r(mixed, mixed, 8);
    const u32 code = 0x81C081C0u;
    pairs[0] = (low << 6) & code;
    pairs[1] = (low << 2) & code;
    pairs[2] = (high << 6) & code;
    pairs[3] = (high << 2) & code;
#else
    decode_word(word, pairs);
#endif
}

// The scales of two groups: as FP16, or as BF16 times 2^117. A NaN makes one of every product.
__device__ __forceinline__ u32 scales_of(u32 bytes) {
#if BF16
    return lift(half_pair(bytes));
#else
    return half_pair(bytes);
#endif
}

__device__ __forceinline__ u32 word_of(const uint4& v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }

__device__ constexpr bool in_halves(int step) { return HALVES && step == kSteps - 1; }

// The k of a block's half that is the first of 8 neighbors, the i-th ones that a thread takes in a step.
__device__ __forceinline__ int k_of(int warp, int in_quad, int s, int i) {
    if (in_halves(s))
        return (2 * s * kWarps + warp + i / 2 * kWarps) * kHalfK + in_quad * (kThreadK / 2) + i % 2 * 8;
    return (s * kWarps + warp) * kStepK + in_quad * kThreadK + i * 8;
}

// One step, or half of one: a thread's two rows for 32 or 16 k. Two chains of sums, since each mma waits for the one
// before.
template <int words>
__device__ __forceinline__ void accumulate(const uint4 codes[2], const u32 scale_bytes[2], const u32 x[16],
                                           float sums[2][4]) {
    const u32 scales[2] = {scales_of(scale_bytes[0]), scales_of(scale_bytes[1])};
#pragma unroll
    for (int w = 0; w < words; ++w) {
        u32 p[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            decode(word_of(codes[h], w), p[h]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                p[h][j] = w < 2 ? scaled<false>(p[h][j], scales[h]) : scaled<true>(p[h][j], scales[h]);
        }
        multiply_accumulate(sums[0], p[0][0], p[1][0], p[0][1], p[1][1], x[4 * w], x[4 * w + 1]);
        multiply_accumulate(sums[1], p[0][2], p[1][2], p[0][3], p[1][3], x[4 * w + 2], x[4 * w + 3]);
    }
}

// A slot, and the parity of the phase that its reader waits for.
struct Ring {
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) { slot = 0; parity ^= 1; }
    }
};

// Rows of W that this block's cluster takes.
struct Share {
    long long first;
    int rows, tiles;
    u32 rank;  // of this block in the cluster: the half of k that it takes
};

// What the ring takes first is on its way to the L2 cache while the kernel ahead still runs.
__device__ __forceinline__ void prefetch(const Arguments& a, const Share& share) {
    const int steps = min(a.slots, share.tiles * kSteps);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        const int pair = i % kSteps * (kWarps / 2);
        const long long row = share.first + i / kSteps * kTileRows;
        prefetch_codes(a.codes, pair, row, share.rank);
        prefetch_scales(a.scales, pair, row, share.rank);
    }
}

// One thread keeps the ring filled.
__device__ __forceinline__ void fetch(const Arguments& a, const Share& share) {
    Ring ring;
#pragma unroll 1
    for (int tile = 0; tile < share.tiles; ++tile) {
#pragma unroll 1
        for (int s = 0; s < kSteps; ++s) {
            const u32 full = kFull + 8 * ring.slot;
            barrier_wait(kFree + 8 * ring.slot, ring.parity ^ 1);
            barrier_expect(full, kCodeBytes + kScaleBytes);
            const long long row = share.first + tile * kTileRows;
            copy_codes(kRing + ring.slot * kCodeBytes, a.codes, s * (kWarps / 2), row, share.rank, full);
            copy_scales(kRing + a.slots * kCodeBytes + ring.slot * kScaleBytes, a.scales, s * (kWarps / 2), row,
                        share.rank, full);
            ring.advance(a.slots);
        }
    }
}

// The rows of a tile that a thread has are this one and the one 8 further. Shared memory serves 16 bytes of 8 threads at
// once: in this order 4 of them read from the lower and 4 from the upper half of its banks.
__device__ __forceinline__ int row_of(int quad) { return (quad >> 1) | (quad & 1) << 2; }

// The sums of all warps for a tile, in one order. A thread has its two rows, each for x's rows 2 * in_quad and
// 2 * in_quad + 1.
__device__ __forceinline__ float4 add_up(int tile, int lane) {
    const int part = tile % kParts;
    barrier_wait(kSumsFull + 8 * part, tile / kParts & 1);
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const float4 of_warp = load_shared<float4>(kSums + ((part * kWarps + w) * 32 + lane) * 16);
        sum.x += of_warp.x;
        sum.y += of_warp.y;
        sum.z += of_warp.z;
        sum.w += of_warp.w;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(kSumsFree + 8 * part);
    return sum;
}

// Each block of a cluster finishes every other tile, and passes its sums of the ones between to its peer.
__device__ __forceinline__ void pass(const Share& share, int lane) {
    const u32 peer = share.rank ^ 1;
    Ring ring;
#pragma unroll 1
    for (int tile = peer; tile < share.tiles; tile += 2) {
        const float4 sum = add_up(tile, lane);
        barrier_wait_for_peer(kPassedFree + 8 * ring.slot, ring.parity ^ 1);
        pass_to_peer(kPassedSums + (ring.slot * 32 + lane) * 16, peer, sum, kPassedFull + 8 * ring.slot);
        ring.advance(kPassed);
    }
}

__device__ __forceinline__ void finish(const Arguments& a, const Share& share, int lane) {
    const int quad = lane >> 2, in_quad = lane & 3;
    Ring ring;
#pragma unroll 1
    for (int tile = share.rank; tile < share.tiles; tile += 2) {
        if (lane == 0) barrier_expect(kPassedFull + 8 * ring.slot, 32 * 16);
        float factor[2], bias[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long row = share.first + min(tile * kTileRows + row_of(quad) + 8 * h, share.rows - 1);
            factor[h] = kUnscale * a.global_scale[row * a.global_scale_stride];
            bias[h] = a.bias != nullptr ? to_float(a.bias, row) : 0.0f;
        }
        const float4 mine = add_up(tile, lane);
        barrier_wait_for_peer(kPassedFull + 8 * ring.slot, ring.parity);
        const float4 passed = load_shared<float4>(kPassedSums + (ring.slot * 32 + lane) * 16);
        __syncwarp();
        // Only a peer that has another tile to pass through this slot waits for it, and so is sure to be there still.
        if (lane == 0 && tile + 2 * kPassed < share.tiles) peer_barrier_arrive(kPassedFree + 8 * ring.slot, share.rank ^ 1);
        ring.advance(kPassed);
        const float sum[4] = {mine.x + passed.x, mine.y + passed.y, mine.z + passed.z, mine.w + passed.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = 2 * in_quad + (i & 1), row = tile * kTileRows + row_of(quad) + 8 * (i >> 1);
            if (m >= a.m || row >= share.rows) continue;
            const float value = sum[i] * factor[i >> 1] + bias[i >> 1];
            static_cast<unsigned short*>(a.y)[m * a.n + share.first + row] = round_to_16_bits(value);
        }
    }
}

// A warp's part of x: for each of its steps 32 k of x's row quad, zeros where it has none.
__device__ __forceinline__ void take_x(const Arguments& a, int warp, int quad, int in_quad, u32 rank,
                                       u32 x[kSteps][16]) {
    const int half = a.k / 2;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        uint4 v[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int k = k_of(warp, in_quad, s, i);
            if (quad >= a.m || k >= half) continue;
            const long long at = static_cast<long long>(quad) * a.k + rank * half + k;
            v[i] = load_x(static_cast<const unsigned char*>(a.x) + 2 * at);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[s][4 * i] = v[i].x;
            x[s][4 * i + 1] = v[i].y;
            x[s][4 * i + 2] = v[i].z;
            x[s][4 * i + 3] = v[i].w;
        }
    }
}

// Brings x into the order of decode's pairs.
__device__ __forceinline__ void arrange(u32 x[16]) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const u32 v[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
        x[i] = __byte_perm(v[0], v[2], 0x5410);
        x[i + 1] = __byte_perm(v[0], v[2], 0x7632);
        x[i + 2] = __byte_perm(v[1], v[3], 0x5410);
        x[i + 3] = __byte_perm(v[1], v[3], 0x7632);
    }
}

// A thread's place in a slot: row of the tile, of two that are 8 apart, and part of a step.
struct Place {
    int warp, row, in_quad;
};

// A row's codes and scales of a whole step; codes and scales of the slot and of the first or second row begin at these
// places.
__device__ __forceinline__ void take_step(const Place& at, u32 codes_at, u32 scales_at, uint4& codes, u32& scales) {
    codes = load_shared<uint4>(codes_at + at.warp / 2 * (kTileRows * 128) + at.row * 128 +
                               ((at.warp % 2 * 4 + at.in_quad) ^ at.row) * 16);
    scales = load_shared<unsigned short>(scales_at + at.row * (kScaleBytes / kTileRows) + at.warp * (kStepK / 16) +
                                         at.in_quad * (kThreadK / 16));
}

// The same of a step in halves.
__device__ __forceinline__ void take_halves(const Place& at, u32 codes_at, u32 scales_at, uint4& codes, u32& scales) {
    const u32 first = codes_at + at.warp / 4 * (kTileRows * 128) + at.row * 128 +
                      ((at.warp % 4 * 2 + at.in_quad / 2) ^ at.row) * 16 + at.in_quad % 2 * 8;
    const uint2 low = load_shared<uint2>(first), high = load_shared<uint2>(first + kWarps / 4 * (kTileRows * 128));
    codes = {low.x, low.y, high.x, high.y};
    const u32 scale = scales_at + at.row * (kScaleBytes / kTileRows) + at.warp * (kHalfK / 16) + at.in_quad;
    scales = load_shared<unsigned char>(scale) | load_shared<unsigned char>(scale + kWarps * (kHalfK / 16)) << 8;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32 * kAllWarps, 1)
nvfp4_small_batch_bulk(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x & 31;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);  // the same for all lanes, as the compiler then knows
    Share share;
    share.rank = blockIdx.x & 1;
    share.first = static_cast<long long>(blockIdx.x >> 1) * a.block_rows;
    share.rows = static_cast<int>(min(static_cast<long long>(a.block_rows), a.n - share.first));
    share.tiles = (share.rows + kTileRows - 1) / kTileRows;

    if (threadIdx.x == 32 * kWarps) {
        for (int slot = 0; slot < a.slots; ++slot) {
            barrier_init(kFull + 8 * slot, 1);
            barrier_init(kFree + 8 * slot, kWarps);
        }
        for (int part = 0; part < kParts; ++part) {
            barrier_init(kSumsFull + 8 * part, kWarps);
            barrier_init(kSumsFree + 8 * part, 1);
        }
        for (int slot = 0; slot < kPassed; ++slot) {
            barrier_init(kPassedFull + 8 * slot, 1);
            barrier_init(kPassedFree + 8 * slot, 1);
        }
        fence_barriers();
    }
    __syncwarp();
    cluster_arrive();
    if (threadIdx.x == 32 * kWarps) prefetch(a, share);
    __syncwarp();
    // No value of global memory is taken or written before, and the next kernel starts no earlier than after it: launches
    // see each other's results as without programmatic launches.
    wait_for_previous_kernel();
    let_next_kernel_start();
    u32 x[kSteps][16];
    if (warp < kWarps) take_x(a, warp, lane >> 2, lane & 3, share.rank, x);
    cluster_wait();
    if (warp >= kWarps) {
        if (warp == kWarps && lane == 0) fetch(a, share);
        if (warp == kWarps + 1) pass(share, lane);
        if (warp == kWarps + 2) finish(a, share, lane);
        return;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) arrange(x[s]);

    const Place place{warp, row_of(lane >> 2), lane & 3};
    const u32 scales_of_slots = kRing + a.slots * kCodeBytes;
    Ring ring, parts;
#pragma unroll 1
    for (int tile = 0; tile < share.tiles; ++tile) {
        float sums[2][4] = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            uint4 codes[2];
            u32 scales[2];
            barrier_wait(kFull + 8 * ring.slot, ring.parity);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 row_codes = kRing + h * 8 * 128 + ring.slot * kCodeBytes;
                const u32 row_scales = scales_of_slots + ring.slot * kScaleBytes + h * 8 * (kScaleBytes / kTileRows);
                if (in_halves(s)) take_halves(place, row_codes, row_scales, codes[h], scales[h]);
                else take_step(place, row_codes, row_scales, codes[h], scales[h]);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(kFree + 8 * ring.slot);
            if (s < kSteps - 1 || k_of(warp, 0, s, 3) < a.k / 2) accumulate<4>(codes, scales, x[s], sums);
            else if (in_halves(s) && k_of(warp, 0, s, 0) < a.k / 2) accumulate<2>(codes, scales, x[s], sums);
            ring.advance(a.slots);
        }
        barrier_wait(kSumsFree + 8 * parts.slot, parts.parity ^ 1);
        store_shared(kSums + ((parts.slot * kWarps + warp) * 32 + lane) * 16,
                     make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                                 sums[0][3] + sums[1][3]));
        __syncwarp();
        if (lane == 0) barrier_arrive(kSumsFull + 8 * parts.slot);
        parts.advance(kParts);
    }
}

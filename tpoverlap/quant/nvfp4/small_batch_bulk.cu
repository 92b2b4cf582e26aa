// The product of small_batch.cu for compute capability 9.0 and later, where the copy engine of each SM brings the weight.
//
// One block an SM takes an equal share of the rows of W, in tiles of up to 16. A tile's codes and scales come by
// asynchronous bulk copies into a ring in shared memory: a single thread keeps more than 100 KB on their way, which costs
// the others neither registers nor instructions. A mbarrier of the ring's slot says that a tile has arrived, another that
// it has been used.
//
// k is cut between kWarps warps, each of which keeps its part of x in registers for all tiles. Their sums of a tile meet
// in shared memory, where one of kFinishers warps adds them up while the others go on. So the order of a sum depends on
// k alone.
//
// Compiled with BF16 = 0 or 1, and with STEPS = the steps of 128 k that a warp takes, at most.

constexpr int kWarps = 12, kHelpers = 4, kFinishers = kHelpers - 1, kAllWarps = kWarps + kHelpers;
constexpr int kSteps = STEPS;
constexpr int kThreadK = 32;  // k that a thread takes per step
constexpr int kStepK = 4 * kThreadK;
constexpr int kParts = 3;     // tiles whose sums are on their way to a finisher
constexpr int kMaxSlots = 16;

struct Arguments {
    const unsigned char* codes;      // [n, k / 2], starts on 16 bytes
    const unsigned char* scales;     // [n, k / 16], starts on 16 bytes
    const float* global_scale;       // [1] or [n]
    const void* x;                   // [m, k], rows 16-byte aligned
    const void* bias;                // [n] or null
    void* y;                         // [m, n]
    long long n;
    int k;                           // multiple of 256
    int m;                           // 1 to 8
    int global_scale_stride;         // 1 where it is per row, else 0
    int block_rows;                  // rows of W that a block takes
    int tile_rows;                   // of which a tile has so many, at most the 16 of a mma
    int slots;                       // of the ring, 2 to kMaxSlots
};

// Dynamic shared memory, by offsets. A row of a slot is 64 bytes longer than a row of codes: of two rows that follow each
// other, the 64 bytes that 4 threads read then lie in different banks.
constexpr u32 kFull = 0, kFree = kFull + 8 * kMaxSlots;           // barriers of the slots
constexpr u32 kSumsFull = kFree + 8 * kMaxSlots, kSumsFree = kSumsFull + 8 * kParts;
constexpr u32 kSums = 512;                                        // [kParts][kWarps][32] float4
constexpr u32 kRing = kSums + kParts * kWarps * 32 * 16;          // [slots][tile_rows][pitch_of(k)]
__device__ __forceinline__ int pitch_of(int k) { return k / 2 + 64; }
// Behind the ring: the scales of its slots, [slots][tile_rows][k / 16].

#ifndef TPOVERLAP_EMULATED_GPU
extern __shared__ __align__(128) unsigned char shared_memory[];

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

// Makes barriers known to the copy engine.
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

// Size and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 to, const unsigned char* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
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

// One step: rows quad and quad + 8 of the tile for 32 k. Two chains of sums, since each mma waits for the one before.
__device__ __forceinline__ void accumulate(const uint4 codes[2], const u32 scale_bytes[2], const u32 x[16],
                                           float sums[2][4]) {
    const u32 scales[2] = {scales_of(scale_bytes[0]), scales_of(scale_bytes[1])};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
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

// Rows of W that this block takes.
struct Share {
    long long first;
    int rows, tiles;
};

// Rows `first`, `first` + `stride`, ... of a tile's codes. A thread issues a copy in about 70 cycles.
__device__ __forceinline__ void fetch_rows(const Arguments& a, const Share& share, int tile, int slot, int first,
                                           int stride) {
    const int code_bytes = a.k / 2, pitch = pitch_of(a.k);
    const int rows = min(a.tile_rows, share.rows - tile * a.tile_rows);
    u32 to = kRing + (slot * a.tile_rows + first) * pitch;
    const unsigned char* from = a.codes + (share.first + tile * a.tile_rows + first) * code_bytes;
#pragma unroll 1
    for (int i = first; i < rows; i += stride, to += stride * pitch, from += static_cast<long long>(stride) * code_bytes)
        bulk_copy(to, from, code_bytes, kFull + 8 * slot);
}

// One thread of each helping warp fetches its rows of what the ring holds at first; the first one also fetches the
// scales, and all that follows.
__device__ __forceinline__ void fetch(const Arguments& a, const Share& share, int helper) {
    const int code_bytes = a.k / 2, scale_bytes = a.k / 16;
    Ring ring;
#pragma unroll 1
    for (int tile = 0; tile < share.tiles; ++tile) {
        const int rows = min(a.tile_rows, share.rows - tile * a.tile_rows);
        const bool at_first = tile < a.slots;
        if (helper != 0) {
            if (!at_first) return;
        } else {
            const u32 full = kFull + 8 * ring.slot;
            barrier_wait(kFree + 8 * ring.slot, ring.parity ^ 1);
            barrier_expect(full, rows * (code_bytes + scale_bytes));
            const u32 to = kRing + a.slots * a.tile_rows * pitch_of(a.k) + ring.slot * a.tile_rows * scale_bytes;
            bulk_copy(to, a.scales + (share.first + tile * a.tile_rows) * scale_bytes, rows * scale_bytes, full);
        }
        fetch_rows(a, share, tile, ring.slot, at_first ? helper : 0, at_first ? kHelpers : 1);
        ring.advance(a.slots);
    }
}

// Adds up the sums of every kFinishers-th tile and writes y. A thread has rows quad and quad + 8 of the tile, each for
// x's rows 2 * in_quad and 2 * in_quad + 1.
__device__ __forceinline__ void finish(const Arguments& a, const Share& share, int finisher, int lane) {
    const int quad = lane >> 2, in_quad = lane & 3;
#pragma unroll 1
    for (int tile = finisher; tile < share.tiles; tile += kFinishers) {
        float factor[2], bias[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long row = share.first + min(tile * a.tile_rows + quad + 8 * h, share.rows - 1);
            factor[h] = kUnscale * a.global_scale[row * a.global_scale_stride];
            bias[h] = a.bias != nullptr ? to_float(a.bias, row) : 0.0f;
        }
        const int part = tile % kParts;
        barrier_wait(kSumsFull + 8 * part, tile / kParts & 1);
        float sum[4] = {};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float4 of_warp = load_shared<float4>(kSums + ((part * kWarps + w) * 32 + lane) * 16);
            sum[0] += of_warp.x;
            sum[1] += of_warp.y;
            sum[2] += of_warp.z;
            sum[3] += of_warp.w;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(kSumsFree + 8 * part);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = 2 * in_quad + (i & 1), in_tile = quad + 8 * (i >> 1), row = tile * a.tile_rows + in_tile;
            if (m >= a.m || in_tile >= a.tile_rows || row >= share.rows) continue;
            const float value = sum[i] * factor[i >> 1] + bias[i >> 1];
            static_cast<unsigned short*>(a.y)[m * a.n + share.first + row] = round_to_16_bits(value);
        }
    }
}

// A warp's part of x: for each of its steps 32 k of x's row quad, zeros where it has none.
__device__ __forceinline__ void take_x(const Arguments& a, int warp, int quad, int in_quad, u32 x[kSteps][16]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        const int step = warp + s * kWarps;
        uint4 v[4] = {};
        if (quad < a.m && step * kStepK < a.k) {
            const long long first = static_cast<long long>(quad) * a.k + step * kStepK + in_quad * kThreadK;
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = load_x(static_cast<const unsigned char*>(a.x) + 2 * first + 16 * i);
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

extern "C" __global__ void __launch_bounds__(32 * kAllWarps, 1)
nvfp4_small_batch_bulk(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x & 31;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);  // the same for all lanes, as the compiler then knows
    Share share;
    share.first = static_cast<long long>(blockIdx.x) * a.block_rows;
    share.rows = static_cast<int>(min(static_cast<long long>(a.block_rows), a.n - share.first));
    share.tiles = (share.rows + a.tile_rows - 1) / a.tile_rows;

    if (threadIdx.x == 32 * kWarps) {
        for (int slot = 0; slot < a.slots; ++slot) {
            barrier_init(kFull + 8 * slot, 1);
            barrier_init(kFree + 8 * slot, kWarps);
        }
        for (int part = 0; part < kParts; ++part) {
            barrier_init(kSumsFull + 8 * part, kWarps);
            barrier_init(kSumsFree + 8 * part, 1);
        }
        fence_barriers();
    }
    // Nothing of global memory is touched before, and the next kernel starts no earlier than after it: launches see each
    // other's results as without programmatic launches.
    wait_for_previous_kernel();
    let_next_kernel_start();
    u32 x[kSteps][16];
    if (warp < kWarps) take_x(a, warp, lane >> 2, lane & 3, x);
    __syncthreads();
    if (warp >= kWarps) {
        const int helper = warp - kWarps;
        if (lane == 0) fetch(a, share, helper);
        __syncwarp();
        if (helper != 0) finish(a, share, helper - 1, lane);
        return;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) arrange(x[s]);

    const int quad = lane >> 2, in_quad = lane & 3;
    const int scale_bytes = a.k / 16, pitch = pitch_of(a.k);
    // Rows past a tile's end repeat one that has room; they end in sums that nobody stores.
    const int rows[2] = {min(quad, a.tile_rows - 1), min(quad + 8, a.tile_rows - 1)};
    Ring ring, parts;
#pragma unroll 1
    for (int tile = 0; tile < share.tiles; ++tile) {
        float sums[2][4] = {};
        u32 codes[2], scales[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            codes[h] = kRing + (ring.slot * a.tile_rows + rows[h]) * pitch + warp * (kStepK / 2) + in_quad * (kThreadK / 2);
            scales[h] = kRing + a.slots * a.tile_rows * pitch + (ring.slot * a.tile_rows + rows[h]) * scale_bytes +
                        warp * (kStepK / 16) + in_quad * (kThreadK / 16);
        }
        barrier_wait(kFull + 8 * ring.slot, ring.parity);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            if (s == kSteps - 1 && (warp + s * kWarps) * kStepK >= a.k) break;
            uint4 of_step[2];
            u32 scales_of_step[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                of_step[h] = load_shared<uint4>(codes[h] + s * kWarps * (kStepK / 2));
                scales_of_step[h] = load_shared<unsigned short>(scales[h] + s * kWarps * (kStepK / 16));
            }
            accumulate(of_step, scales_of_step, x[s], sums);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(kFree + 8 * ring.slot);
        ring.advance(a.slots);
        barrier_wait(kSumsFree + 8 * parts.slot, parts.parity ^ 1);
        store_shared(kSums + ((parts.slot * kWarps + warp) * 32 + lane) * 16,
                     make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                                 sums[0][3] + sums[1][3]));
        __syncwarp();
        if (lane == 0) barrier_arrive(kSumsFull + 8 * parts.slot);
        parts.advance(kParts);
    }
}

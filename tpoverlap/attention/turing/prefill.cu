// Paged causal prefill attention for compute capability 7.5: head dimension 256, FP16, FP32 accumulation.
//
// Flash attention (Dao et al.) over a paged cache with GQA packing: row r of a request is query token r / group, head
// r % group of one KV head. A block of 8 warps holds 128 such rows and walks the keys in tiles of 32. K and V tiles are
// double-buffered in 64 KiB of shared memory, all that the architecture has; Q (64 registers a thread) and the output
// (128) stay in registers.
//
// Every B fragment of mma.m16n8k8 is 128 bytes of shared memory, which delivers them exactly as fast as the tensor cores
// consume them. So that reading is not the limit, two warps share their rows for the second product:
//   scores   a warp computes S = Q K^T and the softmax of its own 16 rows, over all 256 dimensions;
//   values   a pair of warps exchanges its weights P through shared memory, and each of the two accumulates 32 rows over
//            one half of the dimensions: a V fragment serves two products.
//
// The warps of one scheduler must not be in their softmax at once, or the tensor cores wait. Time therefore runs in steps
// of half a tile, with a barrier between them, and warps 4..7 are one step behind warps 0..3. A warp's steps are in turn
//   first    S += Q K^T over dimensions 128..255 of tile x, softmax, O += P V over keys 0..15
//   second   O += P V over keys 16..31 of tile x, S = Q K^T over dimensions 0..127 of tile x + 1
// so that one warp's softmax falls into the other's products. K is stored in halves of its dimensions, V in halves of its
// keys, each in a ring of four halves of 8 KiB. Half i of K is read in steps i - 1 (by the warps ahead) and i (by those
// behind), half i of V in steps i and i + 1. Step t therefore stores half t + 2 of K and half t + 1 of V, over halves that
// nobody has read since step t - 2. Each is fetched into registers a quarter of a tile before that.
//
// Softmax: weights are 2^(x - m) with x in log2 units, summed up before any maximum is known. Only where the sum of a
// thread's 8 weights of a row shows that FP16 might not hold them (always in the first tile) are the maxima taken: m then
// moves to where the row's maximum has the weight 2^kRestExponent, if it had more than 2^kMaxExponent. That weight is not
// rounded: a key that dwarfs all others gives its value exactly.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Arguments {
    const char* q;
    const char* k;
    const char* v;
    char* out;
    float* lse;          // [tokens, q_heads] with strides below, in elements; may be null
    float* partial_out;  // [splits, tokens, q_heads, 256], used if num_splits > 1
    float* partial_lse;  // [splits, tokens, q_heads], in log2 units
    const int* block_table;
    const int* cu_seqlens;
    const int* seq_lens;
    i64 q_token, q_head, out_token, out_head;  // strides in bytes
    i64 lse_token, lse_head;
    i64 k_head, v_head;
    u32 k_block, k_token, v_block, v_token;
    int table_row, table_columns, num_blocks, block_shift;
    int requests, tokens, group, q_heads, num_splits;
    float scale;           // |softmax scale| * log2(e)
    u32 q_keep, q_flip;    // applied to pairs of Q: a negative scale flips signs, a zero one clears
};

#ifdef TPOVERLAP_EMULATED_GPU
#include TPOVERLAP_EMULATED_GPU
#else
#define DEVICE __device__ __forceinline__

// Reading it anew costs an instruction where a value kept from the prologue would cost a register.
DEVICE u32 thread_id() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

DEVICE u32 shared_address(u32 offset) {
    extern __shared__ __align__(128) unsigned char bytes[];
    return static_cast<u32>(__cvta_generic_to_shared(bytes)) + offset;
}
DEVICE void store_shared(u32 at, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(at)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
DEVICE void store_shared(u32 at, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared_address(at)), "r"(x.x), "r"(x.y) : "memory");
}
DEVICE uint2 load_shared(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(shared_address(at)) : "memory");
    return x;
}
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(at))
                 : "memory");
}
DEVICE void load_matrices_transposed(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(at))
                 : "memory");
}
// d += a b, or d = a b. a: 16 x 8, registers for rows g and g + 8; b: 8 x 8; lane 4 g + t holds columns 2 t, 2 t + 1.
DEVICE void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
}
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b), "f"(0.f));
}
// These keep the old value if not wanted. That also keeps their registers occupied from one use to the next, without
// which the assembler saves registers by moving the load down to its use and exposing its whole latency.
DEVICE void load_global(uint4& x, const char* from, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
        : "l"(from), "r"(static_cast<u32>(wanted))
        : "memory");
}
DEVICE void load_global(u32& x, const int* from, bool wanted) {
    asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %2, 0; @wanted ld.global.u32 %0, [%1]; }"
                 : "+r"(x)
                 : "l"(from), "r"(static_cast<u32>(wanted))
                 : "memory");
}
DEVICE void prefetch(const char* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// No load issued before it can be moved past it by the assembler. The arrival is on a barrier that nobody waits for.
DEVICE void keep_loads_above() { asm volatile("bar.arrive 15, 256;" ::: "memory"); }

DEVICE void barrier_all() { __syncthreads(); }
// Joined by some warps only, when the others are at barrier_all().
DEVICE void barrier_all_if(bool joins) {
    asm volatile("{ .reg .pred joins; setp.ne.u32 joins, %0, 0; @joins bar.sync 0; }" ::"r"(static_cast<u32>(joins))
                 : "memory");
}
DEVICE void barrier_pair() { asm volatile("bar.sync %0, 64;" ::"r"(thread_id() / 64 + 1) : "memory"); }
DEVICE bool barrier_pair_any(bool mine) {
    u32 any;
    asm volatile(
        "{ .reg .pred mine, any; setp.ne.u32 mine, %2, 0; bar.red.or.pred any, %1, 64, mine; selp.u32 %0, 1, 0, any; }"
        : "=r"(any)
        : "r"(thread_id() / 64 + 1), "r"(static_cast<u32>(mine))
        : "memory");
    return any;
}
DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 pack_half2(float low, float high) {
    u32 x;
    asm("{ .reg .f16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high}; }"
        : "=r"(x)
        : "f"(low), "f"(high));
    return x;
}
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }
DEVICE u32 to_bits(float x) { return __float_as_uint(x); }
DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
DEVICE int shuffle_up(int x, int lanes) { return __shfl_up_sync(0xffffffffu, x, lanes); }
DEVICE int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE u32 lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
DEVICE int lowest_set_bit(u32 x) { return __ffs(x) - 1; }
DEVICE int leading_zeros(u32 x) { return __clz(x); }
#endif

DEVICE float infinity() { return from_bits(0x7f800000); }

constexpr int kThreads = 256;
constexpr int kRows = 128;
constexpr int kKeys = 32;
constexpr int kDim = 256;
constexpr u32 kKeyBytes = kDim * 2;
constexpr u32 kHalfBytes = kKeys * kKeyBytes / 2;  // half a tile of K or V
constexpr u32 kWarpBytes = kHalfBytes / 8;         // what one warp stores of it
constexpr u32 kRingBytes = 4 * kHalfBytes;
constexpr u32 kValues = kRingBytes;  // shared memory: the ring of K, the ring of V

constexpr int kFirstChunks = 20;  // of 32, of a tile's dimensions: what a warp multiplies in the step before the softmax

constexpr float kNoMaximum = -3e38f;
constexpr float kRestExponent = 7.f;
constexpr float kMaxExponent = 12.f;
constexpr float kMaxSum = 32768.f;  // 8 weights of 2^kMaxExponent

// The 128 packed rows of this block: those from first to last (inclusive) of a request.
struct RowBlock {
    int first_token, count, seq_len, request, first, last;
};

// Finds the request of row block `index`; false beyond the last one. Tokens that no request owns (beyond the last entry of
// cu_seqlens) count as one more request without keys. Entries are clamped, so wrong ones cannot lead out of bounds.
DEVICE bool find_rows(const Arguments& a, int index, RowBlock& rows) {
    const int lane = thread_id() % 32;
    for (int base = 0; base <= a.requests; base += 32) {
        const int request = base + lane;
        int begin = 0, count = 0;
        if (request <= a.requests) {
            begin = min(max(a.cu_seqlens[request], 0), a.tokens);
            const int end = request < a.requests ? min(a.cu_seqlens[request + 1], a.tokens) : a.tokens;
            count = max(end - begin, 0);
        }
        const int blocks = (count * a.group + kRows - 1) / kRows;
        int sum = blocks;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = shuffle_up(sum, d);
            if (lane >= d) sum += below;
        }
        const u32 beyond = lanes_where(sum > index);
        if (beyond) {
            const int owner = lowest_set_bit(beyond);
            rows.request = base + owner;
            rows.first_token = shuffle(begin, owner);
            rows.count = shuffle(count, owner);
            rows.first = (index - shuffle(sum - blocks, owner)) * kRows;
            rows.last = min(rows.first + kRows, rows.count * a.group) - 1;
            const int capacity = a.table_columns << a.block_shift;
            rows.seq_len = rows.request < a.requests ? min(a.seq_lens[rows.request], capacity) : 0;
            return true;
        }
        index -= shuffle(sum, 31);
    }
    return false;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ Arguments a) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;

    RowBlock rows;
    // Later rows see more keys: they go first.
    if (!find_rows(a, gridDim.x - 1 - blockIdx.x, rows)) return;
    const int before = rows.seq_len - rows.count + 1;  // keys that the request's first token sees
    const int limit = max(before + rows.last / a.group, 0);
    const int last_key = limit - 1;
    const int tiles = (limit + kKeys - 1) / kKeys;
    int key = static_cast<int>(static_cast<i64>(tiles) * blockIdx.z / a.num_splits) * kKeys;
    const int end = static_cast<int>(static_cast<i64>(tiles) * (blockIdx.z + 1) / a.num_splits) * kKeys;

    float o[2][16][4];  // half the dimensions of this warp's rows, and of the other warp's
#pragma unroll
    for (int i = 0; i < 128; i++) o[i / 64][i / 4 % 16][i % 4] = 0.f;
    float m0 = kNoMaximum, m1 = kNoMaximum, l0 = 0.f, l1 = 0.f;  // of rows g and g + 8 of the warp's 16

    if (key < end) {
        const int row0 = min(rows.first + warp * 16 + g, rows.last), row1 = min(rows.first + warp * 16 + g + 8, rows.last);
        u32 q[32][2];
        {
            const i64 at0 = (rows.first_token + row0 / a.group) * a.q_token +
                            (blockIdx.y * a.group + row0 % a.group) * a.q_head + t * 4;
            const i64 at1 = (rows.first_token + row1 / a.group) * a.q_token +
                            (blockIdx.y * a.group + row1 % a.group) * a.q_head + t * 4;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                q[i][0] = (*reinterpret_cast<const u32*>(a.q + at0 + i * 16) & a.q_keep) ^ a.q_flip;
                q[i][1] = (*reinterpret_cast<const u32*>(a.q + at1 + i * 16) & a.q_keep) ^ a.q_flip;
            }
        }
        // How many of the block's keys each of the two rows does not see: 0..128, or all of them.
        const u32 hidden0 = min(limit - before - row0 / a.group, limit);
        const u32 hidden1 = min(limit - before - row1 / a.group, limit);
        const u32 table = min(rows.request, a.requests - 1) * static_cast<u32>(a.table_row);

        // Staged keys past the last one repeat it: what P = 0 multiplies must be finite.
        uint4 staged[2] = {};
        u32 block = 0;
        const auto look_up = [&](int from) {
            load_global(block, a.block_table + (table + (min(from, last_key) >> a.block_shift)), from < end);
        };
        const auto fetch = [&](const char* cache, u32 block_stride, u32 token_stride, int from, int distance, u32 byte) {
            const u32 slot = min(from, last_key) & ((1u << a.block_shift) - 1);
            const char* address = cache + (static_cast<u64>(min(block, a.num_blocks - 1u)) * block_stride +
                                           (static_cast<u64>(slot) * token_stride + byte));
            load_global(staged[0], address, from < end);
            load_global(staged[1], address + (from + distance <= last_key ? distance * token_stride : 0), from < end);
        };
        // Half `index` of K, dimensions 0..127 or 128..255 of a tile: half a warp loads one key's 256 bytes, a warp four keys.
        const char* k_head = a.k + blockIdx.y * a.k_head;
        const auto look_up_k = [&](u32 index) { look_up(index / 2 * kKeys + thread_id() / 32 * 4); };
        const auto fetch_k = [&](u32 index) {
            const u32 id = thread_id();
            const u32 from = index / 2 * kKeys + id / 32 * 4 + id / 16 % 2;
            fetch(k_head, a.k_block, a.k_token, from, 2, id % 16 * 16 + index % 2 * (kKeyBytes / 2));
        };
        // Half `index` of V, 16 keys: a warp loads two.
        const char* v_head = a.v + blockIdx.y * a.v_head;
        const auto look_up_v = [&](u32 index) { look_up(index * 16 + thread_id() / 32 * 2); };
        const auto fetch_v = [&](u32 index) {
            const u32 id = thread_id();
            fetch(v_head, a.v_block, a.v_token, index * 16 + id / 32 * 2, 1, id % 32 * 16);
        };

        // A key's 16-byte chunk c lies at chunk c ^ (key % 8): rows of a matrix then lie in different banks.
        const u32 upper = lane / 16;
        const u32 k_lane = upper * (kKeyBytes / 2) + ((lane % 16) ^ (warp % 2 * 4 + upper)) * 16;
        const u32 v_lane = (lane ^ (warp * 2 & 7)) * 16;
        const u32 lane_offsets = k_lane | v_lane << 16;
        // Where this warp stores in the ring of K at step t: in half t + 3. Packed with the hidden keys.
        u32 ring = 3 * kHalfBytes + warp * kWarpBytes + (hidden0 << 16 | hidden1 << 24);
        const auto ring_at = [&](u32 ahead) { return (ring + ahead * kHalfBytes) & (kRingBytes - 1); };
        const auto commit_k = [&]() {
            const u32 to = ring_at(0) + (lane_offsets & 0xffff);
            store_shared(to, staged[0]);
            store_shared((to + kKeyBytes) ^ 32, staged[1]);
        };
        const auto commit_v = [&]() {
            const u32 to = kValues + ring_at(2) + (lane_offsets >> 16);
            store_shared(to, staged[0]);
            store_shared((to + kKeyBytes) ^ 16, staged[1]);
        };
        const auto next_step = [&]() { ring = (ring + kHalfBytes) & ~kRingBytes; };

        u32 k_at = lane * (kKeyBytes / 2) + (lane & 7) * 16;
        u32 v_at = kValues + (lane & 7) * kKeyBytes + ((lane >> 3) ^ (lane & 7)) * 16 + (warp & 1) * (kKeyBytes / 2);

        u32 b[2][4];  // fragments of K or V: those in use, and the next ones
        float s[4][4];
        // Of 32 chunks of 8 dimensions.
        const auto load_k = [&](int i) {
            load_matrices(b[i % 2], (k_at ^ (i / 2 % 8 * 16)) + i % 2 * 128 + i / 16 * kHalfBytes);
        };
        // `between` runs halfway: what it does falls into the time of products whose fragments are loaded.
        const auto scores = [&](int from, int to, const auto& between) {  // after load_k(from)
#pragma unroll
            for (int i = from; i < to; i++) {
                if (i + 1 < to) load_k(i + 1);
                if (i == (from + to) / 2) between();
                const u32(&x)[2] = q[i / 16 * 16 + i % 2 * 8 + i / 2 % 8];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    if (i == 0)
                        multiply(s[n], x[0], x[1], b[i % 2][n]);
                    else
                        multiply_add(s[n], x[0], x[1], b[i % 2][n]);
                }
            }
        };
        const auto mask = [&]() {
            // Both rows' visible keys, counted from this thread's first column.
            const int seen = limit - key - static_cast<int>(thread_id() % 4) * 2;
            const int seen0 = seen - static_cast<int>(ring >> 16 & 0xff), seen1 = seen - static_cast<int>(ring >> 24);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int column = i / 2 * 8 + i % 2;
                if (column >= seen0) s[i / 2][i % 2] = -infinity();
                if (column >= seen1) s[i / 2][2 + i % 2] = -infinity();
            }
        };
        float rescale0, rescale1;  // of rows g and g + 8
        u32 weights[4][2];
        const auto weigh = [&](float& sum0, float& sum1) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float w0 = exp2_approximate(s[n][0] * a.scale - m0), w1 = exp2_approximate(s[n][1] * a.scale - m0);
                const float w2 = exp2_approximate(s[n][2] * a.scale - m1), w3 = exp2_approximate(s[n][3] * a.scale - m1);
                sum0 = n == 0 ? w0 + w1 : sum0 + (w0 + w1);
                sum1 = n == 0 ? w2 + w3 : sum1 + (w2 + w3);
                weights[n][0] = pack_half2(w0, w1);
                weights[n][1] = pack_half2(w2, w3);
            }
        };
        const auto move_maximum = [&](float& m, float& l, float x) {
            x = fmaxf(x, shuffle_xor(x, 1));
            x = fmaxf(x, shuffle_xor(x, 2)) * a.scale;
            const float moved = x > m + kMaxExponent ? x - kRestExponent : m;
            const float factor = exp2_approximate(m - moved);
            m = moved;
            l *= factor;
            return factor;
        };
        const auto softmax = [&]() {
            float sum0, sum1;
            weigh(sum0, sum1);
            rescale0 = rescale1 = 1.f;
            if (any_lane(sum0 > kMaxSum || sum1 > kMaxSum)) {
                const float x0 = fmaxf(fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1])),
                                       fmaxf(fmaxf(s[2][0], s[2][1]), fmaxf(s[3][0], s[3][1])));
                const float x1 = fmaxf(fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3])),
                                       fmaxf(fmaxf(s[2][2], s[2][3]), fmaxf(s[3][2], s[3][3])));
                rescale0 = move_maximum(m0, l0, x0);
                rescale1 = move_maximum(m1, l1, x1);
#pragma unroll
                for (int i = 0; i < 64; i++) o[0][i / 4][i % 4] *= i % 4 < 2 ? rescale0 : rescale1;
                weigh(sum0, sum1);
            }
            l0 += sum0;
            l1 += sum1;
        };
        // A warp's weights lie in the ring of V where it will store half t + 2 of V in the next step, the other warp's beside
        // them. Where a maximum has moved, the factors for the other warp's part of the output pass through there first.
        const auto weights_at = [&]() { return kValues + ring_at(3) + thread_id() % 32 * 8; };
        const auto store_weights = [&](int n) { store_shared(weights_at() + n * 256, uint2{weights[n][0], weights[n][1]}); };
        uint2 others[2];  // weights of the other warp's rows for 8 keys each
        const auto load_others = [&](int half) {
            const u32 at = (weights_at() ^ kWarpBytes) + half * 512;
            others[0] = load_shared(at);
            others[1] = load_shared(at + 256);
        };
        const auto exchange = [&]() {
            if (barrier_pair_any(rescale0 != 1.f || rescale1 != 1.f)) {
                store_shared(weights_at(), uint2{to_bits(rescale0), to_bits(rescale1)});
                barrier_pair();
                const uint2 factors = load_shared(weights_at() ^ kWarpBytes);
                barrier_pair();
                store_weights(0);
                barrier_pair();
#pragma unroll
                for (int i = 0; i < 64; i++) o[1][i / 4][i % 4] *= from_bits(i % 4 < 2 ? factors.x : factors.y);
            }
            load_others(0);
        };
        const auto load_v = [&](int half, int i) {
            load_matrices_transposed(
                b[i % 2], (v_at ^ (i % 2 * 64)) + i / 2 % 2 * 128 + i / 4 * 8 * kKeyBytes + half * kHalfBytes);
        };
        const auto values = [&](int half, const auto& before_others, const auto& between) {  // after load_v(half, 0)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (i < 7) load_v(half, i + 1);
                if (i == 4) between();
                const u32(&x)[2] = weights[half * 2 + i / 4];
#pragma unroll
                for (int n = 0; n < 4; n++) multiply_add(o[0][i % 4 * 4 + n], x[0], x[1], b[i % 2][n]);
                if (i == 0) before_others();
                const uint2& y = others[i / 4];
#pragma unroll
                for (int n = 0; n < 4; n++) multiply_add(o[1][i % 4 * 4 + n], y.x, y.y, b[i % 2][n]);
            }
        };
        // All blocks of threads read the same keys at about the same time, and would wait for memory together. One in 16
        // brings a tile into the L2 cache long before.
        const u32 share = gridDim.x < 16 ? (1u << (31 - leading_zeros(gridDim.x))) - 1 : 15;
        const auto look_ahead = [&](int from) {
            if (from >= end) return;
            const u32 id = thread_id();
            const u32 mine = min(from + static_cast<int>(id / 4 % kKeys), last_key), slot = mine & ((1u << a.block_shift) - 1);
            const u64 entry = min(static_cast<u32>(a.block_table[table + (mine >> a.block_shift)]), a.num_blocks - 1u);
            const char* at = id < 128 ? k_head + entry * a.k_block + static_cast<u64>(slot) * a.k_token
                                      : v_head + entry * a.v_block + static_cast<u64>(slot) * a.v_token;
            prefetch(at + id % 4 * 128);
        };

        // Before step 0, and what those behind would do in it: halves 0 to 3 of K and 0, 1 of V are stored. Those ahead store
        // the last ones again in step 0.
        const u32 behind = warp / 4;
        u32 step = key / 16;
        ring -= 3 * kHalfBytes;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            look_up_k(step + i);
            fetch_k(step + i);
            commit_k();
            if (i < 2) {
                ring += 2 * kHalfBytes;
                look_up_v(step + i);
                fetch_v(step + i);
                commit_v();
                ring -= 2 * kHalfBytes;
            }
            next_step();
        }
        step += behind;
        ring = (ring + (behind + 3) * kHalfBytes) & ~kRingBytes;
        look_up_k(step + 3);
        fetch_k(step + 3);
        look_up_v(step + 1);
        barrier_all();
        load_k(0);
        scores(0, kFirstChunks, [] {});
        barrier_all_if(behind);
        load_k(kFirstChunks);
        for (; key < end; key += kKeys) {
            barrier_all();
            scores(kFirstChunks, 32, [&] {
                commit_k();
                fetch_v(step + 1);
                look_up_k(step + 4);
                keep_loads_above();
            });
            if (key + kKeys + kRows > last_key) mask();
            softmax();
#pragma unroll
            for (int n = 0; n < 4; n++) store_weights(n);
            load_v(0, 0);
            values(0, exchange, [&] {
                commit_v();
                fetch_k(step + 4);
                look_up_v(step + 2);
                keep_loads_above();
            });
            load_others(1);
            next_step();
            if ((key / kKeys & share) == (blockIdx.x & share)) look_ahead(key + 16 * kKeys);
            barrier_all();
            load_v(1, 0);
            values(1, [] {}, [&] {
                commit_k();
                fetch_v(step + 2);
                look_up_k(step + 5);
                keep_loads_above();
            });
            k_at ^= 2 * kHalfBytes;
            v_at ^= 2 * kHalfBytes;
            load_k(0);
            scores(0, kFirstChunks, [&] {
                commit_v();
                fetch_k(step + 5);
                look_up_v(step + 3);
                keep_loads_above();
            });
            load_k(kFirstChunks);
            next_step();
            step += 2;
        }
        barrier_all_if(!behind);
    }

    l0 += shuffle_xor(l0, 1);
    l1 += shuffle_xor(l1, 1);
    l0 += shuffle_xor(l0, 2);
    l1 += shuffle_xor(l1, 2);
    barrier_all();
    RowBlock own_rows;  // Found again: keeping it from the prologue would cost registers in the loop.
    if (!find_rows(a, gridDim.x - 1 - blockIdx.x, own_rows)) return;
    const u32 id = thread_id(), side = id / 32 % 2, sums = id * 8;
    store_shared(sums, uint2{to_bits(l0), to_bits(l1)});
    barrier_pair();
    const uint2 other = load_shared(sums ^ 256);
#pragma unroll
    for (int i = 0; i < 4; i++) {  // rows g and g + 8 of this warp's 16, then of the other's
        const int m = i / 2, e = i % 2 * 2;
        const int row = own_rows.first + id / 64 * 32 + (side ^ m) * 16 + i % 2 * 8 + id % 32 / 4;
        if (row > own_rows.last) continue;
        const float sum = m ? from_bits(e ? other.y : other.x) : e ? l1 : l0;
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const i64 token = own_rows.first_token + row / a.group, head = blockIdx.y * a.group + row % a.group;
        const bool own = m == 0 && id % 4 == 0;
        const float lse = sum > 0.f ? (e ? m1 : m0) + log2f(sum) : -infinity();
        const int column = side * 128 + id % 4 * 2;
        if (a.num_splits == 1) {
            u32* to = reinterpret_cast<u32*>(a.out + token * a.out_token + head * a.out_head + column * 2);
#pragma unroll
            for (int n = 0; n < 16; n++) to[n * 4] = pack_half2(o[m][n][e] * inverse, o[m][n][e + 1] * inverse);
            if (own && a.lse) a.lse[token * a.lse_token + head * a.lse_head] = lse * 0.69314718f;
        } else {
            const i64 at = (blockIdx.z * static_cast<i64>(a.tokens) + token) * a.q_heads + head;
            float2* to = reinterpret_cast<float2*>(a.partial_out + at * kDim + column);
#pragma unroll
            for (int n = 0; n < 16; n++) to[n * 4] = float2{o[m][n][e] * inverse, o[m][n][e + 1] * inverse};
            if (own) a.partial_lse[at] = lse;
        }
    }
}

// Merges the parts of each row by their log-sum-exp. One warp a row, 8 dimensions a lane.
extern "C" __global__ void __launch_bounds__(kThreads) merge(const __grid_constant__ Arguments a) {
    const i64 row = blockIdx.x * static_cast<i64>(kThreads / 32) + threadIdx.x / 32, count = static_cast<i64>(a.tokens) * a.q_heads;
    if (row >= count) return;
    const int lane = threadIdx.x % 32;
    float maximum = -infinity(), sum = 0.f, x[8] = {};
    for (int split = 0; split < a.num_splits; split++) maximum = fmaxf(maximum, a.partial_lse[split * count + row]);
    for (int split = 0; split < a.num_splits; split++) {
        const float lse = a.partial_lse[split * count + row];
        if (lse == -infinity()) continue;  // an empty part
        const float weight = exp2f(lse - maximum);
        const float4* from = reinterpret_cast<const float4*>(a.partial_out + (split * count + row) * kDim + lane * 8);
        const float4 y = from[0], z = from[1];
        sum += weight;
        x[0] += weight * y.x;
        x[1] += weight * y.y;
        x[2] += weight * y.z;
        x[3] += weight * y.w;
        x[4] += weight * z.x;
        x[5] += weight * z.y;
        x[6] += weight * z.z;
        x[7] += weight * z.w;
    }
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    const i64 token = row / a.q_heads, head = row % a.q_heads;
    uint4* to = reinterpret_cast<uint4*>(a.out + token * a.out_token + head * a.out_head + lane * 16);
    *to = uint4{pack_half2(x[0] * inverse, x[1] * inverse), pack_half2(x[2] * inverse, x[3] * inverse),
                pack_half2(x[4] * inverse, x[5] * inverse), pack_half2(x[6] * inverse, x[7] * inverse)};
    if (lane == 0 && a.lse)
        a.lse[token * a.lse_token + head * a.lse_head] =
            sum > 0.f ? (maximum + log2f(sum)) * 0.69314718f : -infinity();
}

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
// The warps of one scheduler must not all be in their softmax at once, or the tensor cores wait. Warps 0..3 lead: between
// two barriers they run scores(i), then values(i - 1). Warps 4..7 trail: values(i - 1), then scores(i). Both need K(i)
// and V(i - 1) there, and store K(i + 1) and V(i) for the next interval. A tile's keys are staged through registers in two
// halves of 16, each fetched a quarter of a tile ahead of its store.
//
// Softmax: weights are 2^(x - m) with x in log2 units. m lags the maximum: it moves only when a weight would exceed
// 2^kMaxExponent, which FP16 can hold. A maximum for which it moves gets the weight 2^kRestExponent, without rounding: a
// key that dwarfs all others gives its value exactly.

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
// No load issued before it can be moved past it by the assembler. The arrival is on a barrier that nobody waits for.
DEVICE void keep_loads_above() { asm volatile("bar.arrive 15, 256;" ::: "memory"); }

DEVICE void barrier_all() { __syncthreads(); }
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
DEVICE int lowest_set_bit(u32 x) { return __ffs(x) - 1; }
#endif

DEVICE float infinity() { return from_bits(0x7f800000); }

constexpr int kThreads = 256;
constexpr int kRows = 128;
constexpr int kKeys = 32;
constexpr int kDim = 256;
constexpr u32 kKeyBytes = kDim * 2;
constexpr u32 kTileBytes = kKeys * kKeyBytes;
constexpr u32 kHalfBytes = kTileBytes / 2;
constexpr u32 kValues = 2 * kTileBytes;  // shared memory: K tiles 0 and 1, V tiles 0 and 1
constexpr u32 kWarpBytes = kHalfBytes / 8;  // what a warp stores of half a tile: two keys

constexpr float kNoMaximum = -3e38f;
constexpr float kRestExponent = 7.f;  // a maximum for which m has moved has weight 2^7
constexpr float kMaxExponent = 15.f;  // m moves when a weight would exceed 2^15

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
    const bool trails = warp >= 4;

    RowBlock rows;
    // Later rows see more keys: they go first.
    if (!find_rows(a, gridDim.x - 1 - blockIdx.x, rows)) return;
    const int before = rows.seq_len - rows.count + 1;  // keys that the request's first token sees
    const int limit = max(before + rows.last / a.group, 0);
    const int last_key = limit - 1;
    const int tiles = (limit + kKeys - 1) / kKeys;
    int key = static_cast<int>(static_cast<i64>(tiles) * blockIdx.z / a.num_splits) * kKeys;
    const int end = static_cast<int>(static_cast<i64>(tiles) * (blockIdx.z + 1) / a.num_splits) * kKeys;

    float o[2][16][4];
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

        uint4 staged[2] = {};
        u32 block = 0;
        const auto look_up = [&](int from) {
            load_global(block, a.block_table + (table + (min(from, last_key) >> a.block_shift)), from < end);
        };
        // Two keys a warp, 16 bytes a lane. Keys past the last one repeat it: what P = 0 multiplies must be finite.
        const auto fetch = [&](const char* cache, u32 block_stride, u32 token_stride, int from) {
            const u32 id = thread_id();
            const int mine = from + (id / 32) * 2;
            const u32 slot = min(mine, last_key) & ((1u << a.block_shift) - 1);
            const char* address = cache + (static_cast<u64>(min(block, a.num_blocks - 1u)) * block_stride +
                                           (static_cast<u64>(slot) * token_stride + id % 32 * 16));
            load_global(staged[0], address, from < end);
            load_global(staged[1], address + (mine < last_key ? token_stride : 0), from < end);
        };
        const char* k_head = a.k + blockIdx.y * a.k_head;
        const char* v_head = a.v + blockIdx.y * a.v_head;
        const auto fetch_k = [&](int from) { fetch(k_head, a.k_block, a.k_token, from); };
        const auto fetch_v = [&](int from) { fetch(v_head, a.v_block, a.v_token, from); };

        // A key's 16-byte chunk c lies at chunk c ^ (key % 8): rows of a matrix then lie in different banks.
        // One register holds where this thread stores keys (low half) and how many of them its rows do not see.
        u32 store_at_hidden = warp * kWarpBytes + (lane ^ (warp * 2 & 7)) * 16 + (hidden0 << 16 | hidden1 << 24);
        const auto store_at = [&]() { return store_at_hidden & 0xffff; };
        u32 k_at = lane * kKeyBytes + (lane & 7) * 16;
        u32 v_at = kValues + (lane & 7) * kKeyBytes + ((lane >> 3) ^ (lane & 7)) * 16 + (warp & 1) * (kKeyBytes / 2);
        const auto commit = [&](u32 to) {
            store_shared(to, staged[0]);
            store_shared((to ^ 16) + kKeyBytes, staged[1]);
        };

        float s[4][4];
        const auto scores = [&](int half) {
#pragma unroll
            for (int i = half * 16; i < half * 16 + 16; i++) {
                const int chunk = i % 4 * 8 + i / 4;
                u32 b[4];
                load_matrices(b, (k_at ^ (chunk % 8 * 16)) + chunk / 8 * 128);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    if (i == 0)
                        multiply(s[n], q[chunk][0], q[chunk][1], b[n]);
                    else
                        multiply_add(s[n], q[chunk][0], q[chunk][1], b[n]);
                }
            }
        };
        const auto mask = [&]() {
            // Both rows' visible keys, counted from this thread's first column.
            const int seen = limit - key - static_cast<int>(thread_id() % 4) * 2;
            const int seen0 = seen - static_cast<int>(store_at_hidden >> 16 & 0xff), seen1 = seen - static_cast<int>(store_at_hidden >> 24);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int column = i / 2 * 8 + i % 2;
                if (column >= seen0) s[i / 2][i % 2] = -infinity();
                if (column >= seen1) s[i / 2][2 + i % 2] = -infinity();
            }
        };
        float rescale0 = 1.f, rescale1 = 1.f;  // of rows g and g + 8
        u32 weights[4][2] = {};
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
            const float x0 = fmaxf(fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1])),
                                   fmaxf(fmaxf(s[2][0], s[2][1]), fmaxf(s[3][0], s[3][1])));
            const float x1 = fmaxf(fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3])),
                                   fmaxf(fmaxf(s[2][2], s[2][3]), fmaxf(s[3][2], s[3][3])));
            rescale0 = move_maximum(m0, l0, x0);
            rescale1 = move_maximum(m1, l1, x1);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float w0 = exp2_approximate(s[n][0] * a.scale - m0), w1 = exp2_approximate(s[n][1] * a.scale - m0);
                const float w2 = exp2_approximate(s[n][2] * a.scale - m1), w3 = exp2_approximate(s[n][3] * a.scale - m1);
                l0 += w0 + w1;
                l1 += w2 + w3;
                weights[n][0] = pack_half2(w0, w1);
                weights[n][1] = pack_half2(w2, w3);
            }
        };
        // A warp's weights lie in the V buffer that is free, where only this warp will store keys: in its part of the second
        // half; the rescaling factors in its part of the first.
        const auto exchange_at = [&]() {
            const u32 id = thread_id();
            return kValues + (~v_at & kTileBytes) + id / 64 * (2 * kWarpBytes) + id % 32 * 8;
        };
        const auto publish = [&]() {
            const u32 pair = exchange_at(), own = pair + (thread_id() & 32) * (kWarpBytes / 32);
#pragma unroll
            for (int n = 0; n < 4; n++)
                store_shared(own + kHalfBytes + n * 256, uint2{weights[n][0], weights[n][1]});
            // The sums are never negative: asking keeps the assembler from putting off their additions, and holding 16
            // more registers until then.
            if (barrier_pair_any(rescale0 != 1.f || rescale1 != 1.f || l0 < 0.f || l1 < 0.f)) {
                store_shared(own, uint2{to_bits(rescale0), to_bits(rescale1)});
                barrier_pair();
                const uint2 factors[2] = {load_shared(pair), load_shared(pair + kWarpBytes)};
                barrier_pair();
#pragma unroll
                for (int i = 0; i < 128; i++)
                    o[i / 64][i / 4 % 16][i % 4] *= from_bits(i % 4 < 2 ? factors[i / 64].x : factors[i / 64].y);
            }
        };
        const auto values = [&](int n) {
            const u32 pair = exchange_at() + kHalfBytes + n * 256;
            const uint2 w0 = load_shared(pair), w1 = load_shared(pair + kWarpBytes);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 b[4];
                load_matrices_transposed(b, (v_at ^ (i % 2 * 64)) + i / 2 * 128 + n * 8 * kKeyBytes);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    multiply_add(o[0][i * 4 + j], w0.x, w0.y, b[j]);
                    multiply_add(o[1][i * 4 + j], w1.x, w1.y, b[j]);
                }
            }
        };

        // Before the first interval: K(0) stored; V(0) stored by those who trail; V(-1), which those who lead multiply by
        // weights of 0 in it, is 0.
        look_up(key);
        fetch_k(key);
        commit(store_at());
        look_up(key + 16);
        fetch_k(key + 16);
        commit(store_at() + kHalfBytes);
        staged[0] = staged[1] = uint4{};
        commit(store_at() + kValues + kTileBytes);
        commit(store_at() + kValues + kTileBytes + kHalfBytes);
        if (trails) {
            look_up(key);
            fetch_v(key);
            commit(store_at() + kValues);
            look_up(key + 16);
            fetch_v(key + 16);
            commit(store_at() + kValues + kHalfBytes);
            barrier_all();
        } else {
            v_at += kTileBytes;
        }
        store_at_hidden += kTileBytes;
        look_up(key + 32);
        fetch_k(key + 32);
        look_up(key + 48);
        for (; key < end; key += kKeys) {
            if (!trails) {
                barrier_all();
                publish();
            }
            scores(0);
            commit(store_at());
            fetch_k(key + 48);
            const int v_key = trails ? key + kKeys : key;
            look_up(v_key);
            keep_loads_above();
            scores(1);
            commit(store_at() + kHalfBytes);
            fetch_v(v_key);
            look_up(v_key + 16);
            keep_loads_above();
            if (key + kKeys + kRows > last_key) mask();
            softmax();
            if (trails) {
                barrier_all();
                publish();
            }
            const u32 v_store = kValues + (trails ? store_at() : store_at() ^ kTileBytes);
            values(0);
            values(1);
            commit(v_store);
            fetch_v(v_key + 16);
            look_up(key + 64);
            keep_loads_above();
            values(2);
            values(3);
            barrier_pair();  // the other warp has read this one's weights
            commit(v_store + kHalfBytes);
            fetch_k(key + 64);
            look_up(key + 80);
            keep_loads_above();
            store_at_hidden ^= kTileBytes;
            k_at ^= kTileBytes;
            v_at ^= kTileBytes;
        }
        if (!trails) {
            barrier_all();
            publish();
            values(0);
            values(1);
            values(2);
            values(3);
        }
    }

    l0 += shuffle_xor(l0, 1);
    l1 += shuffle_xor(l1, 1);
    l0 += shuffle_xor(l0, 2);
    l1 += shuffle_xor(l1, 2);
    barrier_all();
    RowBlock own_rows;  // Found again: keeping it from the prologue would cost registers in the loop.
    if (!find_rows(a, gridDim.x - 1 - blockIdx.x, own_rows)) return;
    const u32 id = thread_id(), sums = id / 64 * 512 + id % 32 * 8;
    store_shared(sums + (id & 32) * 8, uint2{to_bits(l0), to_bits(l1)});
    barrier_pair();
#pragma unroll
    for (int half = 0; half < 4; half++) {  // rows g, g + 8 of the pair's first 16, then of its last 16
        const int m = half / 2, e = half % 2 * 2;
        const int row = own_rows.first + id / 64 * 32 + half * 8 + id % 32 / 4;
        if (row > own_rows.last) continue;
        const uint2 both = load_shared(sums + m * 256);
        const float sum = from_bits(e ? both.y : both.x);
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const i64 token = own_rows.first_token + row / a.group, head = blockIdx.y * a.group + row % a.group;
        const bool own = m == static_cast<int>(id / 32 % 2) && id % 4 == 0;
        const float lse = sum > 0.f ? (e ? m1 : m0) + log2f(sum) : -infinity();
        const int column = id / 32 % 2 * 128 + id % 4 * 2;
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

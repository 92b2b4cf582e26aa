// y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]) for 1 to 8 rows of x and an NVFP4 weight, which is read once.
//
// The weight is the A operand of mma.m16n8k16 and x, transposed, the B operand of 8 columns. A sum over k may be taken
// in any order, so each thread feeds the tensor cores from 32 consecutive k of its own: it loads the 16 code bytes of
// a row with one instruction and needs neither shared memory nor shuffles. Code * scale is exact in FP16 and in BF16 (6
// significant bits), so nothing is rounded before the FP32 sum; the global scale is applied to the sum.
//
// Compiled with BF16 = 0 or 1 for the type of x, bias and y.

typedef unsigned int u32;

constexpr int kTileRows = 16;       // rows of one mma
constexpr int kTilesPerWarp = 2;
constexpr int kWarps = 4;
constexpr int kBlockRows = kTileRows * kTilesPerWarp * kWarps;
constexpr int kRowsPerThread = 2 * kTilesPerWarp;
constexpr int kThreadK = 32;        // k that a thread takes per step
constexpr int kStepK = 4 * kThreadK;

struct Arguments {
    const unsigned char* codes;      // [n, k / 2], rows 16-byte aligned
    const unsigned char* scales;     // [n, k / 16], rows 2-byte aligned
    const float* global_scale;       // [1] or [n]
    const void* x;                   // [m, k], rows 16-byte aligned
    const void* bias;                // [n] or null
    void* y;                         // [m, n]
    float* partial;                  // [row blocks, splits, m, kBlockRows] if splits > 1
    u32* arrivals;                   // [row blocks], zero before and after, if splits > 1
    long long n;
    int k;                           // multiple of 32
    int m;                           // 1 to 8
    int splits;                      // = gridDim.y, parts of k
    int steps_per_split;
    int global_scale_stride;         // 1 where it is per row, else 0
};

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 product;
#if BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0.0
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#endif
    return product;
}

// Codes travel as code * 2^-kCodeShift: their bits, moved into place, are a number with too small an exponent.
#if BF16
constexpr float kUnscale = 512.0f;     // code * 2^-126 times scale * 2^117
#else
constexpr float kUnscale = 16384.0f;   // code * 2^-14 times scale
#endif

// Four pairs of a word's eight codes: pairs[j] holds nibbles j and j + 4.
__device__ __forceinline__ void decode_word(u32 word, u32 pairs[4]) {
#if BF16
    const u32 sign = 0x80008000u, magnitude = 0x01C001C0u;
    pairs[0] = ((word << 12) & sign) | ((word << 6) & magnitude);
    pairs[1] = ((word << 8) & sign) | ((word << 2) & magnitude);
    pairs[2] = ((word << 4) & sign) | ((word >> 2) & magnitude);
    pairs[3] = (word & sign) | ((word >> 6) & magnitude);
#else
    // The high byte of an FP16 holds all of a code, so four codes are moved into place at once, a byte each.
    const u32 sign = 0x80808080u, magnitude = 0x0E0E0E0Eu;
    const u32 even = ((word << 4) & sign) | ((word << 1) & magnitude);
    const u32 odd = (word & sign) | ((word >> 3) & magnitude);
    pairs[0] = __byte_perm(even, 0, 0x2404);
    pairs[1] = __byte_perm(odd, 0, 0x2404);
    pairs[2] = even & 0xFF00FF00u;
    pairs[3] = odd & 0xFF00FF00u;
#endif
}

// Two E4M3 bytes to two 16-bit floats: scale (FP16) or scale * 2^117 (BF16), exactly; NaN stays NaN.
__device__ __forceinline__ u32 decode_scales(u32 bytes) {
    const u32 high = __byte_perm(bytes, 0, 0x1404);
#if BF16
    u32 pair = (high & 0x80008000u) | ((high >> 4) & 0x07F007F0u);
    pair = multiply_pair(multiply_pair(pair, 0x7B807B80u), 0x7A007A00u);  // 2^120, 2^117
#else
    u32 pair = (high & 0x80008000u) | ((high >> 1) & 0x3F803F80u);
    pair = multiply_pair(pair, 0x5C005C00u);  // 2^8
#endif
    if (((bytes & 0x7F7Fu) + 0x0101u) & 0x8080u) {
        if ((bytes & 0x7Fu) == 0x7Fu) pair |= 0x00007FFFu;
        if ((bytes & 0x7F00u) == 0x7F00u) pair |= 0x7FFF0000u;
    }
    return pair;
}

__device__ __forceinline__ void multiply_accumulate(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a2), "r"(a3), "r"(b1));
#endif
}

// Weights pass through once: they leave the L1 cache to x and the scales.
__device__ __forceinline__ uint4 load_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

__device__ __forceinline__ float to_float(const void* values, long long index) {
    const u32 bits = static_cast<const unsigned short*>(values)[index];
#if BF16
    return __uint_as_float(bits << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
#endif
}

__device__ __forceinline__ unsigned short round_to_16_bits(float value) {
    unsigned short bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

__device__ __forceinline__ void store(const Arguments& a, int m, long long row, float sum) {
    float value = sum * kUnscale * a.global_scale[row * a.global_scale_stride];
    if (a.bias != nullptr) value += to_float(a.bias, row);
    static_cast<unsigned short*>(a.y)[m * a.n + row] = round_to_16_bits(value);
}

// What a thread needs for one step: 32 k of each of its rows of W, and of its row of x.
struct Step {
    uint4 codes[kRowsPerThread];
    u32 scales[kRowsPerThread];
    uint4 x[4];
};

__device__ __forceinline__ u32 word_of(const uint4& v, int w) {
    return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
}

__device__ __forceinline__ void accumulate(const Step& s, float sums[kTilesPerWarp][4]) {
    u32 scale_pairs[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) scale_pairs[i] = decode_scales(s.scales[i]);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const uint4 v = s.x[w];
        // x in the order of decode_word's pairs
        const u32 b[4] = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                          __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
#pragma unroll
        for (int tile = 0; tile < kTilesPerWarp; ++tile) {
            u32 p[2][4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 scale = __byte_perm(scale_pairs[2 * tile + h], 0, w < 2 ? 0x1010 : 0x3232);
                decode_word(word_of(s.codes[2 * tile + h], w), p[h]);
#pragma unroll
                for (int j = 0; j < 4; ++j) p[h][j] = multiply_pair(p[h][j], scale);
            }
            multiply_accumulate(sums[tile], p[0][0], p[1][0], p[0][1], p[1][1], b[0], b[1]);
            multiply_accumulate(sums[tile], p[0][2], p[1][2], p[0][3], p[1][3], b[2], b[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps) nvfp4_small_batch(const Arguments a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int quad = lane >> 2, in_quad = lane & 3;  // quad: row of W within 8, and row of x
    const long long block_row = static_cast<long long>(blockIdx.x) * kBlockRows;
    const int block_rows = static_cast<int>(min(static_cast<long long>(kBlockRows), a.n - block_row));

    // Offsets within the block's rows fit 32 bits. Rows past the end, of W and of x, repeat one that is there: they
    // end in sums that nobody stores.
    u32 code_offset[kRowsPerThread], scale_offset[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        const int row = min(warp * kTileRows * kTilesPerWarp + quad + 8 * i, block_rows - 1);
        code_offset[i] = row * (a.k / 2) + in_quad * (kThreadK / 2);
        scale_offset[i] = row * (a.k / 16) + in_quad * (kThreadK / 16);
    }
    const u32 x_offset = 2 * ((quad < a.m ? quad : 0) * a.k + in_quad * kThreadK);
    const unsigned char* const codes = a.codes + block_row * (a.k / 2);
    const unsigned char* const scales = a.scales + block_row * (a.k / 16);
    const unsigned char* const x = static_cast<const unsigned char*>(a.x);

    auto load = [&](int step, Step& s) {
        const long long k = static_cast<long long>(step) * kStepK;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            s.codes[i] = load_once(codes + k / 2 + code_offset[i]);
            s.scales[i] = __ldg(reinterpret_cast<const unsigned short*>(scales + k / 16 + scale_offset[i]));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) s.x[i] = __ldg(reinterpret_cast<const uint4*>(x + 2 * k + x_offset) + i);
    };

    float sums[kTilesPerWarp][4] = {};
    const int first = blockIdx.y * a.steps_per_split;
    const int whole_steps = a.k / kStepK;
    const int last = min(first + a.steps_per_split, whole_steps);
    // Two buffers in turn: the next step's loads are in flight while the current one is computed.
    Step even, odd;
    if (first < last) load(first, even);
    for (int step = first; step < last; step += 2) {
        if (step + 1 < last) load(step + 1, odd);
        accumulate(even, sums);
        if (step + 1 >= last) break;
        if (step + 2 < last) load(step + 2, even);
        accumulate(odd, sums);
    }
    if (whole_steps * kStepK < a.k && blockIdx.y == a.splits - 1) {
        // The rest of k: threads beyond it take part with zeros (a scale of zero, since 0 * NaN is no zero).
        even = {};
        if (whole_steps * kStepK + in_quad * kThreadK < a.k) load(whole_steps, even);
        accumulate(even, sums);
    }

    // sums[tile]: rows quad and quad + 8 of the tile, each for x's rows 2 * in_quad and 2 * in_quad + 1
    const bool whole = a.splits == 1;
    float* partial = a.partial + (static_cast<long long>(blockIdx.x) * a.splits + blockIdx.y) * a.m * kBlockRows;
#pragma unroll
    for (int tile = 0; tile < kTilesPerWarp; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = 2 * in_quad + (i & 1);
            const int row = warp * kTileRows * kTilesPerWarp + tile * kTileRows + quad + 8 * (i >> 1);
            if (m >= a.m) continue;
            if (!whole) partial[m * kBlockRows + row] = sums[tile][i];
            else if (block_row + row < a.n) store(a, m, block_row + row, sums[tile][i]);
        }
    if (whole) return;

    // The last block of these rows adds the parts up, always in the same order.
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(a.arrivals + blockIdx.x, 1) == a.splits - 1;
        if (is_last) a.arrivals[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!is_last || block_row + threadIdx.x >= a.n) return;
    __threadfence();
    const float* parts = a.partial + static_cast<long long>(blockIdx.x) * a.splits * a.m * kBlockRows + threadIdx.x;
    for (int m = 0; m < a.m; ++m) {
        float sum = 0.0f;
        for (int split = 0; split < a.splits; ++split) sum += __ldcg(parts + (split * a.m + m) * kBlockRows);
        store(a, m, block_row + threadIdx.x, sum);
    }
}

// y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]) for 1 to 8 rows of x and an NVFP4 weight, which is read once.
//
// The weight is the A operand of mma.m16n8k16 and x, transposed, the B operand of 8 columns. A sum over k may be taken
// in any order, so each thread feeds the tensor cores from 32 consecutive k of its own: it loads the 16 code bytes of
// a row with one instruction and needs neither shared memory nor shuffles. Code * scale is exact in FP16 and in BF16 (6
// significant bits), so nothing is rounded before the FP32 sum; the global scale is applied to the sum.
//
// The warps of a block share its rows of W and take steps of k in turn; their sums meet in shared memory, so no block
// waits for another. A launch lasts a few microseconds, so fetching instructions counts: the loop holds one step, whose
// successor is on its way in registers, and gains its bytes in flight from many warps. x stays in the L1 cache.
//
// Compiled with BF16 = 0 or 1 for the type of x, bias and y, with WARPS of a block, and with BLOCKS_PER_SM, for which the
// registers must suffice. The order of a sum over k depends on k and WARPS alone.

constexpr int kTileRows = 16;       // rows of one mma
constexpr int kTiles = 1;           // of a block
constexpr int kWarps = WARPS;
constexpr int kBlocksPerSm = BLOCKS_PER_SM;
constexpr int kBlockRows = kTileRows * kTiles;
constexpr int kRowsPerThread = 2 * kTiles;
constexpr int kMaxRows = 8;         // of x: columns of one mma
constexpr int kThreadK = 32;        // k that a thread takes per step
constexpr int kStepK = 4 * kThreadK;

struct Arguments {
    const unsigned char* codes;      // [n, k / 2], rows 16-byte aligned
    const unsigned char* scales;     // [n, k / 16], rows 2-byte aligned
    const float* global_scale;       // [1] or [n]
    const void* x;                   // [m, k], rows 16-byte aligned
    const void* bias;                // [n] or null
    void* y;                         // [m, n]
    long long n;
    int k;                           // multiple of 32
    int m;                           // 1 to 8
    int global_scale_stride;         // 1 where it is per row, else 0
};

#ifndef TPOVERLAP_EMULATED_GPU
typedef float SharedFloat;

// Weights pass through once: they leave the L1 cache to x and the scales. The other half of a 128-byte line is wanted
// next, by the neighbouring warp.
__device__ __forceinline__ uint4 load_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}
#endif

// Two E4M3 bytes to two 16-bit floats: scale (FP16) or scale * 2^117 (BF16), exactly, but for NaN.
__device__ __forceinline__ u32 decode_scales(u32 bytes) {
    const u32 high = __byte_perm(bytes, 0, 0x1404);
#if BF16
    const u32 pair = (high & 0x80008000u) | ((high >> 4) & 0x07F007F0u);
    return multiply_pair(multiply_pair(pair, 0x7B807B80u), 0x7A007A00u);  // 2^120, 2^117
#else
    const u32 pair = (high & 0x80008000u) | ((high >> 1) & 0x3F803F80u);
    return multiply_pair(pair, 0x5C005C00u);  // 2^8
#endif
}

// Sets the highest bit of the bytes that are a NaN in E4M3; the other bits are of no meaning.
__device__ __forceinline__ u32 mark_nan(u32 bytes) { return (bytes & 0x7F7F7F7Fu) + 0x01010101u; }
constexpr u32 kNanMarks = 0x80808080u;

// What a thread needs of the weight for one step: 32 k of each of its rows.
struct Step {
    uint4 codes[kRowsPerThread];
    u32 scales[kRowsPerThread];
};

__device__ __forceinline__ u32 word_of(const uint4& v, int w) {
    return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
}

__device__ __forceinline__ void accumulate(const Step& s, const uint4 x[4], float sums[kTiles][4], u32 nans[kTiles]) {
    u32 scale_pairs[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) scale_pairs[i] = decode_scales(s.scales[i]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
        nans[tile] |= mark_nan(__byte_perm(s.scales[2 * tile], s.scales[2 * tile + 1], 0x5410));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const uint4 v = x[w];
        // x in the order of decode_word's pairs
        const u32 b[4] = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                          __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
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

extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm) nvfp4_small_batch(const Arguments a) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int quad = lane >> 2, in_quad = lane & 3;  // quad: row of W within 8, and row of x
    const long long block_row = static_cast<long long>(blockIdx.x) * kBlockRows;
    const int block_rows = static_cast<int>(min(static_cast<long long>(kBlockRows), a.n - block_row));

    // Rows past the end, of W and of x, repeat one that is there: they end in sums that nobody stores.
    const unsigned char* codes[kRowsPerThread];
    const unsigned char* scales[kRowsPerThread];
    const int first_k = warp * kStepK + in_quad * kThreadK;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        const long long row = block_row + min(quad + 8 * i, block_rows - 1);
        codes[i] = a.codes + row * (a.k / 2) + first_k / 2;
        scales[i] = a.scales + row * (a.k / 16) + first_k / 16;
    }
    const unsigned char* x =
        static_cast<const unsigned char*>(a.x) + 2 * ((quad < a.m ? quad : 0) * static_cast<long long>(a.k) + first_k);

    auto load = [&](Step& s) {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            s.codes[i] = load_once(codes[i]);
            s.scales[i] = __ldg(reinterpret_cast<const unsigned short*>(scales[i]));
            codes[i] += kWarps * (kStepK / 2);
            scales[i] += kWarps * (kStepK / 16);
        }
    };
    auto load_x = [&](uint4 v[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __ldg(reinterpret_cast<const uint4*>(x) + i);
        x += kWarps * (kStepK * 2);
    };

    float sums[kTiles][4] = {};
    u32 nans[kTiles] = {};  // marks of the scales of rows quad and quad + 8, two bytes each
    const int whole_steps = a.k / kStepK;
    int left = (whole_steps - warp + kWarps - 1) / kWarps;
    Step step, next;
    uint4 v[4];
    if (left > 0) load(step);
#pragma unroll 1
    for (; left > 0; --left) {
        load_x(v);
        if (left > 1) load(next);
        accumulate(step, v, sums, nans);
        step = next;
    }
    // The rest of k is the next step of one warp. Threads beyond it take part with zeros: a scale of zero would not do
    // alone, since 0 * NaN is no zero.
    if (whole_steps * kStepK < a.k && whole_steps % kWarps == warp) {
        Step rest = {};
        uint4 rest_x[4] = {};
        if (whole_steps * kStepK + in_quad * kThreadK < a.k) { load(rest); load_x(rest_x); }
        accumulate(rest, rest_x, sums, nans);
    }

    // sums[tile]: rows quad and quad + 8 of the tile, each for x's rows 2 * in_quad and 2 * in_quad + 1
    __shared__ SharedFloat parts[kWarps][kMaxRows][kBlockRows + 4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        u32 nan = nans[tile] & kNanMarks;
        nan |= __shfl_xor_sync(0xFFFFFFFFu, nan, 1);
        nan |= __shfl_xor_sync(0xFFFFFFFFu, nan, 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool is_nan = nan & (i < 2 ? 0x0000FFFFu : 0xFFFF0000u);
            parts[warp][2 * in_quad + (i & 1)][tile * kTileRows + quad + 8 * (i >> 1)] =
                is_nan ? __int_as_float(0x7FFFFFFF) : sums[tile][i];
        }
    }
    __syncthreads();
    for (int output = threadIdx.x; output < kBlockRows * a.m; output += 32 * kWarps) {
        const int m = output / kBlockRows, row = output % kBlockRows;
        if (row >= block_rows) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += parts[w][m][row];
        sum = sum * kUnscale * a.global_scale[(block_row + row) * a.global_scale_stride];
        if (a.bias != nullptr) sum += to_float(a.bias, block_row + row);
        static_cast<unsigned short*>(a.y)[m * a.n + block_row + row] = round_to_16_bits(sum);
    }
}

// What both kernels of decode-sized products share: products of pairs, the mma, and codes as 16-bit floats. Compiled with
// BF16 = 0 or 1.

typedef unsigned int u32;

#ifdef TPOVERLAP_EMULATED_GPU
#include TPOVERLAP_EMULATED_GPU
#else
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 product;
#if BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0.0
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#endif
    return product;
}

// Bits of a where the mask is set, of b elsewhere: one instruction.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 selected;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(selected) : "r"(a), "r"(b), "r"(mask));
    return selected;
}

// c += a b, for a of 16 x 16 and b of 16 x 8.
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
#endif

// The bits of a code, moved into place, are a number with too small an exponent: the sum makes up for it.
#if BF16
constexpr float kUnscale = 512.0f;     // code * 2^-126 times scale * 2^117
#else
constexpr float kUnscale = 16384.0f;   // code * 2^-14 times scale
#endif

// Four pairs of a word's eight codes: pairs[j] holds nibbles j and j + 4.
__device__ __forceinline__ void decode_word(u32 word, u32 pairs[4]) {
#if BF16
    // Rotated by 6, the sign of a nibble stands 7 above its exponent, as in a BF16; beside the magnitudes of the other
    // byte of each half they do not overlap, so that a pair is one shift and one mask away.
    const u32 signs = __funnelshift_l(word, word, 6);
    const u32 low = select_bits(0x00FF00FFu, word, signs), high = select_bits(0xFF00FF00u, word, signs);
    const u32 code = 0x81C081C0u;
    pairs[0] = (low << 6) & code;
    pairs[1] = (low << 2) & code;
    pairs[2] = __funnelshift_r(high, high, 2) & code;
    pairs[3] = __funnelshift_r(high, high, 6) & code;
#else
    // The high byte of an FP16 holds all of a code, so four codes are moved into place at once, a byte each.
    const u32 even = select_bits(0x80808080u, word << 4, word << 1);
    const u32 odd = select_bits(0x80808080u, word, word >> 3);
    const u32 code = 0x8E008E00u;
    pairs[0] = (even << 8) & code;
    pairs[1] = (odd << 8) & code;
    pairs[2] = even & code;
    pairs[3] = odd & code;
#endif
}

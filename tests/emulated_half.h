// FP16 and BF16 on a CPU, for kernels that run there from their own source.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

namespace emulated {

template <class To, class From>
static To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static float half_to_float(uint16_t x) {
    static const std::vector<float> table = [] {
        std::vector<float> values(65536);
        for (int i = 0; i < 65536; i++) {
            const int exponent = i >> 10 & 31, mantissa = i & 1023;
            float value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                          : exponent     ? ldexpf(1024 + mantissa, exponent - 25)
                                         : ldexpf(mantissa, -24);
            values[i] = i & 0x8000 ? -value : value;
        }
        return values;
    }();
    return table[x];
}

static uint16_t float_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    const float magnitude = fabsf(x);
    if (isnan(x)) return 0x7fff;  // as cvt.rn.f16.f32 has it
    if (magnitude >= 65520.f) return sign | 0x7c00;
    int exponent;
    frexpf(magnitude, &exponent);
    const float unit = ldexpf(1.f, std::max(exponent - 11, -24));
    const float rounded = nearbyintf(magnitude / unit) * unit;  // round to nearest, ties to even
    if (rounded < ldexpf(1.f, -14)) return sign | static_cast<uint16_t>(ldexpf(rounded, 24));
    frexpf(rounded, &exponent);
    return sign | static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(ldexpf(rounded, 11 - exponent)) & 1023));
}

static float bfloat16_to_float(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t float_to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (isnan(x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // round to nearest, ties to even
}

}  // namespace emulated

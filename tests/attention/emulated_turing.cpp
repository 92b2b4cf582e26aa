// Entry points of the emulation: launches of the kernels in prefill.cu, see emulated_turing.h.
#define TPOVERLAP_EMULATED_GPU "emulated_turing.h"
#include "prefill.cu"

// kRingBytes for K and as much for V.
constexpr u32 kSharedBytes = 2 * kRingBytes;

// Returns 0, or 1 with what went wrong in `message`. ranges: pairs of addresses, [begin, end), that loads of the cache and
// of the block table may touch.
extern "C" int run_attend(const Arguments* arguments, u32 x, u32 y, u32 z, const u64* ranges, int num_ranges, u64 seed,
                          char* message, int size) {
    std::vector<emulated::Range> readable;
    for (int i = 0; i < num_ranges; i++) readable.push_back({ranges[2 * i], ranges[2 * i + 1]});
    const std::string failure = emulated::run(
        [](const void* a) { attend(*static_cast<const Arguments*>(a)); }, arguments, {x, y, z}, kSharedBytes, readable,
        seed);
    snprintf(message, size, "%s", failure.c_str());
    return !failure.empty();
}

extern "C" int run_merge(const Arguments* arguments, u32 x, u32 y, u32 z, char* message, int size) {
    const std::string failure =
        emulated::run([](const void* a) { merge(*static_cast<const Arguments*>(a)); }, arguments, {x, y, z}, 0, {}, 0);
    snprintf(message, size, "%s", failure.c_str());
    return !failure.empty();
}

extern "C" u32 arguments_size() { return sizeof(Arguments); }

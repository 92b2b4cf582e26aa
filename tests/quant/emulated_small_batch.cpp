// Entry point of the emulation: launches of the kernel in small_batch.cu, see emulated_small_batch.h.
#define TPOVERLAP_EMULATED_GPU "emulated_small_batch.h"
#include "small_batch.cu"

extern "C" u32 arguments_size() { return sizeof(Arguments); }

// Returns 0, or 1 with what went wrong in `message`. ranges: pairs of addresses, [begin, end), that loads may touch.
extern "C" int run_small_batch(const Arguments* arguments, u32 grid, const u64* ranges, int num_ranges, u64 seed,
                               char* message, int size) {
    std::vector<emulated::Range> readable;
    for (int i = 0; i < num_ranges; i++) readable.push_back({ranges[2 * i], ranges[2 * i + 1]});
    const std::string failure = emulated::run(
        [](const void* a) { nvfp4_small_batch(*static_cast<const Arguments*>(a)); }, arguments, {grid, 1, 1}, 0, readable,
        seed);
    snprintf(message, size, "%s", failure.c_str());
    return !failure.empty();
}

// Entry points of the emulation: launches of the kernels in kernel_mode.cu, see emulated_kernel_mode.h.
#define TPOVERLAP_EMULATED_GPU "emulated_kernel_mode.h"
#include "kernel_mode.cu"

extern "C" int arguments_size() { return sizeof(Arguments); }

// item: bytes of a value, 3 for BF16. Returns when all blocks have ended.
extern "C" void run_all_reduce(int item, const Arguments *arguments, unsigned int grid, unsigned int threads, unsigned int seed) {
    void (*body)(const void *) = item == 4   ? [](const void *a) { all_reduce_float32(*static_cast<const Arguments *>(a)); }
                                 : item == 2 ? [](const void *a) { all_reduce_float16(*static_cast<const Arguments *>(a)); }
                                             : [](const void *a) { all_reduce_bfloat16(*static_cast<const Arguments *>(a)); };
    std::vector<emulated::Block> blocks(grid);
    std::vector<std::thread> running;
    for (unsigned int i = 0; i < grid; i++) {
        emulated::Block &block = blocks[i];
        block.index = i, block.grid = grid, block.size = threads, block.body = body, block.arguments = arguments;
        block.random.seed(seed + i);
        running.emplace_back([&block] { emulated::run_block(block); });
    }
    for (std::thread &thread : running) thread.join();
}

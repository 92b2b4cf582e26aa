// Functions of an emulation's library, for the kernel named KERNEL, whose clusters have CLUSTER blocks. LEFT_OVER() says
// what a launch that has ended should not have left, or nothing.
extern "C" u32 arguments_size() { return sizeof(Arguments); }

// Returns 0, or 1 with what went wrong in `message`. ranges: pairs of addresses, [begin, end), that loads may touch.
extern "C" int run_small_batch(const void* arguments, u32 grid, u32 shared_bytes, const u64* ranges, int num_ranges,
                               u64 seed, char* message, int size) {
    Arguments aligned;
    memcpy(&aligned, arguments, sizeof aligned);
    std::vector<emulated::Range> readable;
    for (int i = 0; i < num_ranges; i++) readable.push_back({ranges[2 * i], ranges[2 * i + 1]});
    const std::string failure =
        emulated::run([](const void* a) { KERNEL(*static_cast<const Arguments*>(a)); }, &aligned,
                      {grid / CLUSTER, 1, 1}, shared_bytes * CLUSTER, readable, seed);
    snprintf(message, size, "%s", failure.empty() ? LEFT_OVER() : failure.c_str());
    return message[0] != 0;
}

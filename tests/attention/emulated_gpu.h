// Runs tpoverlap/attention/turing/prefill.cu on the CPU: its device primitives in plain C++, one block at a time.
//
// Every thread is a coroutine. Warps are resumed in random order (from a seed), so what a missing barrier would allow
// happens. Beside that, accesses to shared memory are checked for races by vector clocks (as in FastTrack: Flanagan and
// Freund), at the granularity of warps and 4-byte words; matrix loads for bank conflicts; and global loads of the cache and
// the block table against the ranges that may be read.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulated_half.h"

#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    u32 x, y, z;
};
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline u32 min(u32 a, u32 b) { return a < b ? a : b; }

namespace emulated {

constexpr int kWarps = 8, kLanes = 32, kStack = 1 << 16;
constexpr u32 kSharedBytes = 65536;

struct Range {
    uintptr_t begin, end;
};

// One value per lane, exchanged by all lanes of a warp. Two sets: a lane may be in the next exchange while another still
// reads this one's, but not further.
struct Exchange {
    const char* what = nullptr;
    int arrived = 0;
    u64 generation = 0;
    unsigned char values[2][kLanes][32];
};

struct Barrier {
    int arrived = 0;
    u64 generation = 0;
    bool any = false, result = false;
};

struct Word {
    int writer = -1;
    u32 written = 0, read[kWarps] = {};
};

struct Thread {
    ucontext_t start;
    jmp_buf state;
    std::vector<unsigned char> stack;
    bool started = false, done = false;
    const u64* waits_for = nullptr;
    u64 seen = 0;
};

struct Block {
    dim3 grid, index;
    std::vector<Thread> threads;
    Exchange exchanges[kWarps];
    Barrier barriers[16];
    u32 clock[kWarps][kWarps];
    std::vector<Word> words;
    alignas(16) unsigned char shared[kSharedBytes];
    std::vector<Range> readable;
    std::mt19937_64 random;
    jmp_buf scheduler;
    int current = 0;
    std::string failure;
    void (*body)(const void*) = nullptr;
    const void* arguments = nullptr;
};

static Block* block;

[[noreturn]] static void fail(const std::string& why) {
    block->failure = "warp " + std::to_string(block->current / kLanes) + " lane " + std::to_string(block->current % kLanes) +
                     " of block " + std::to_string(block->index.x) + ", " + std::to_string(block->index.y) + ", " +
                     std::to_string(block->index.z) + ": " + why;
    _longjmp(block->scheduler, 1);
}

static void wait_for(const u64& generation, u64 seen) {
    Thread& self = block->threads[block->current];
    self.waits_for = &generation;
    self.seen = seen;
    if (!_setjmp(self.state)) _longjmp(block->scheduler, 1);
}

template <class T>
static const unsigned char (*exchange(const char* what, const T& mine))[32] {
    static_assert(sizeof(T) <= 32);
    Exchange& e = block->exchanges[block->current / kLanes];
    if (e.arrived && strcmp(e.what, what)) fail(std::string("in ") + what + " while another lane is in " + e.what);
    e.what = what;
    const u64 seen = e.generation;
    unsigned char(*values)[32] = e.values[seen % 2];
    memcpy(values[block->current % kLanes], &mine, sizeof(T));
    if (++e.arrived == kLanes) {
        e.arrived = 0;
        e.generation++;
    } else {
        wait_for(e.generation, seen);
    }
    return values;
}

template <class T>
static T lane_value(const unsigned char (*values)[32], int lane) {
    T x;
    memcpy(&x, values[lane], sizeof(T));
    return x;
}

// Waits for `count` threads; the warps that took part have then seen everything that the others did before.
static bool synchronize(int id, int count, bool mine, int first_warp) {
    Barrier& b = block->barriers[id];
    const u64 seen = b.generation;
    b.any = b.any || mine;
    if (++b.arrived == count) {
        b.arrived = 0;
        b.result = b.any;
        b.any = false;
        u32 joined[kWarps] = {};
        const int warps = count / kLanes;
        for (int w = first_warp; w < first_warp + warps; w++)
            for (int i = 0; i < kWarps; i++) joined[i] = std::max(joined[i], block->clock[w][i]);
        for (int w = first_warp; w < first_warp + warps; w++) {
            memcpy(block->clock[w], joined, sizeof joined);
            block->clock[w][w]++;
        }
        b.generation++;
    } else {
        wait_for(b.generation, seen);
    }
    return b.result;
}

static unsigned char* shared(u32 at, u32 bytes, bool write) {
    if (at % bytes || at + bytes > kSharedBytes) fail("shared memory access of " + std::to_string(bytes) + " bytes at " + std::to_string(at));
    const int me = block->current / kLanes;
    for (u32 i = at / 4; i < (at + bytes) / 4; i++) {
        Word& word = block->words[i];
        if (word.writer >= 0 && word.writer != me && word.written > block->clock[me][word.writer])
            fail("race at shared byte " + std::to_string(i * 4) + ": written by warp " + std::to_string(word.writer));
        if (!write) {
            word.read[me] = block->clock[me][me];
            continue;
        }
        for (int w = 0; w < kWarps; w++)
            if (w != me && word.read[w] > block->clock[me][w])
                fail("race at shared byte " + std::to_string(i * 4) + ": still read by warp " + std::to_string(w));
        word.writer = me;
        word.written = block->clock[me][me];
    }
    return block->shared + at;
}

static void check_readable(const void* from, size_t bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(from);
    const auto& ranges = block->readable;
    auto after = std::upper_bound(ranges.begin(), ranges.end(), at, [](uintptr_t x, const Range& r) { return x < r.begin; });
    if (after == ranges.begin() || at + bytes > (after - 1)->end) fail("global load outside of what may be read");
}

struct Matrix {
    u32 a0, a1, b;
};

static void product(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 b) {
    const auto values = exchange("mma", Matrix{a0, a1, b});
    const int lane = block->current % kLanes, g = lane / 4, t = lane % 4;
    float x[4] = {c[0], c[1], c[2], c[3]};
    for (int k = 0; k < 8; k++) {
        const Matrix left = lane_value<Matrix>(values, g * 4 + k / 2);
        const float top = half_to_float(left.a0 >> k % 2 * 16), bottom = half_to_float(left.a1 >> k % 2 * 16);
        for (int n = 0; n < 2; n++) {
            const float right = half_to_float(lane_value<Matrix>(values, (t * 2 + n) * 4 + k / 2).b >> k % 2 * 16);
            x[n] += top * right;
            x[2 + n] += bottom * right;
        }
    }
    memcpy(d, x, sizeof x);
}

static void load_matrices(u32 (&x)[4], u32 at, bool transposed) {
    const auto values = exchange(transposed ? "ldmatrix.trans" : "ldmatrix", at);
    const int lane = block->current % kLanes;
    const int m = lane / 8;
    u32 banks = 0;
    for (int row = 0; row < 8; row++) banks |= 1u << lane_value<u32>(values, m * 8 + row) / 16 % 8;
    if (banks != 0xff) fail("bank conflict in a matrix load");
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int j = 0; j < 2; j++) {
            const int row = transposed ? lane % 4 * 2 + j : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + j;
            const u32 start = lane_value<u32>(values, i * 8 + row);
            if (start % 16) fail("a matrix row is not 16-byte aligned");
            memcpy(&pair[j], shared(start, 16, false) + column * 2, 2);
        }
        x[i] = pair[0] | static_cast<u32>(pair[1]) << 16;
    }
}

static void enter() {
    block->body(block->arguments);
    block->threads[block->current].done = true;
    _longjmp(block->scheduler, 1);
}

// Runs the block's threads to their end, or to the first failure.
static void run_block() {
    std::vector<int> order(kWarps);
    for (int w = 0; w < kWarps; w++) order[w] = w;
    for (;;) {
        bool alive = false, moved = false;
        std::shuffle(order.begin(), order.end(), block->random);
        const int turns = 1 + block->random() % 64;
        for (int w : order) {
            for (int turn = 0; turn < turns; turn++) {
                bool warp_moved = false;
                for (int lane = 0; lane < kLanes; lane++) {
                    // Volatile: it lives across the jumps.
                    volatile int id = w * kLanes + lane;
                    Thread& thread = block->threads[id];
                    if (thread.done) continue;
                    alive = true;
                    if (thread.waits_for && *thread.waits_for == thread.seen) continue;
                    thread.waits_for = nullptr;
                    warp_moved = true;
                    block->current = id;
                    if (!_setjmp(block->scheduler)) {
                        if (thread.started) _longjmp(thread.state, 1);
                        thread.started = true;
                        setcontext(&thread.start);
                    }
                    if (!block->failure.empty()) return;
                }
                if (!warp_moved) break;
                moved = true;
            }
        }
        if (!alive) return;
        if (!moved) {
            block->failure = "every thread waits: a barrier is missed by some";
            return;
        }
    }
}

static std::string run(void (*body)(const void*), const void* arguments, dim3 grid, std::vector<Range> readable, u64 seed) {
    std::sort(readable.begin(), readable.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    Block state;
    block = &state;
    state.grid = grid;
    state.readable = readable;
    state.body = body;
    state.arguments = arguments;
    state.random.seed(seed);
    for (u32 i = 0; i < grid.x * grid.y * grid.z; i++) {
        state.index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        state.threads.assign(kWarps * kLanes, Thread());
        for (Thread& thread : state.threads) {
            thread.stack.resize(kStack);
            getcontext(&thread.start);
            thread.start.uc_stack = {thread.stack.data(), 0, static_cast<size_t>(kStack)};
            thread.start.uc_link = nullptr;
            makecontext(&thread.start, enter, 0);
        }
        for (int w = 0; w < kWarps; w++) {
            state.exchanges[w] = Exchange();
            memset(state.clock[w], 0, sizeof state.clock[w]);
            state.clock[w][w] = 1;
        }
        for (Barrier& b : state.barriers) b = Barrier();
        state.words.assign(kSharedBytes / 4, Word());
        memset(state.shared, 0xff, kSharedBytes);  // NaN
        run_block();
        if (!state.failure.empty()) break;
    }
    return state.failure;
}

}  // namespace emulated

struct EmulatedThread {
    u32 x;
};
#define threadIdx (EmulatedThread{static_cast<u32>(emulated::block->current)})
#define blockIdx (emulated::block->index)
#define gridDim (emulated::block->grid)

DEVICE u32 thread_id() { return emulated::block->current; }
DEVICE void store_shared(u32 at, uint4 x) { memcpy(emulated::shared(at, 16, true), &x, 16); }
DEVICE void store_shared(u32 at, uint2 x) { memcpy(emulated::shared(at, 8, true), &x, 8); }
DEVICE uint2 load_shared(u32 at) {
    uint2 x;
    memcpy(&x, emulated::shared(at, 8, false), 8);
    return x;
}
DEVICE void load_matrices(u32 (&x)[4], u32 at) { emulated::load_matrices(x, at, false); }
DEVICE void load_matrices_transposed(u32 (&x)[4], u32 at) { emulated::load_matrices(x, at, true); }
DEVICE void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 b) { emulated::product(d, d, a0, a1, b); }
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 b) { emulated::product(d, {0, 0, 0, 0}, a0, a1, b); }
DEVICE void load_global(uint4& x, const char* from, bool wanted) {
    if (!wanted) return;
    if (reinterpret_cast<uintptr_t>(from) % 16) emulated::fail("global load is not 16-byte aligned");
    emulated::check_readable(from, 16);
    memcpy(&x, from, 16);
}
DEVICE void load_global(u32& x, const int* from, bool wanted) {
    if (!wanted) return;
    emulated::check_readable(from, 4);
    memcpy(&x, from, 4);
}
DEVICE void prefetch(const char* at) { emulated::check_readable(at, 1); }
DEVICE void keep_loads_above() {}
DEVICE void barrier_all() { emulated::synchronize(0, 256, false, 0); }
DEVICE void barrier_all_if(bool joins) {
    if (joins) barrier_all();
}
DEVICE void barrier_pair() { emulated::synchronize(1 + thread_id() / 64, 64, false, thread_id() / 64 * 2); }
DEVICE bool barrier_pair_any(bool mine) {
    return emulated::synchronize(1 + thread_id() / 64, 64, mine, thread_id() / 64 * 2);
}
DEVICE float exp2_approximate(float x) { return exp2f(x); }
DEVICE u32 pack_half2(float low, float high) {
    return emulated::float_to_half(low) | static_cast<u32>(emulated::float_to_half(high)) << 16;
}
DEVICE float from_bits(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE u32 to_bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE float shuffle_xor(float x, int lanes) {
    return emulated::lane_value<float>(emulated::exchange("shfl.bfly", x), thread_id() % 32 ^ lanes);
}
DEVICE int shuffle_up(int x, int lanes) {
    const int lane = thread_id() % 32;
    return emulated::lane_value<int>(emulated::exchange("shfl.up", x), lane >= lanes ? lane - lanes : lane);
}
DEVICE int shuffle(int x, int lane) { return emulated::lane_value<int>(emulated::exchange("shfl.idx", x), lane); }
DEVICE u32 lanes_where(bool x) {
    const auto values = emulated::exchange("vote", x);
    u32 lanes = 0;
    for (int i = 0; i < 32; i++) lanes |= static_cast<u32>(emulated::lane_value<bool>(values, i)) << i;
    return lanes;
}
DEVICE bool any_lane(bool x) { return lanes_where(x) != 0; }
DEVICE int leading_zeros(u32 x) { return __builtin_clz(x); }
DEVICE int lowest_set_bit(u32 x) { return __builtin_ctz(x); }

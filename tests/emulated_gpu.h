// Runs CUDA C++ kernels of blocks of 8 warps on the CPU, one block at a time, from their own source. Each kernel brings its
// device primitives in plain C++, made from what stands here.
//
// Every thread is a coroutine. Warps are resumed in random order (from a seed), so what a missing barrier would allow
// happens. Beside that, accesses to shared memory are checked for races by vector clocks (as in FastTrack: Flanagan and
// Freund), at the granularity of warps and 4-byte words, and global loads against the ranges that may be read.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulated_half.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __forceinline__ inline
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
static inline i64 min(i64 a, i64 b) { return a < b ? a : b; }

namespace emulated {

#ifndef TPOVERLAP_EMULATED_WARPS
#define TPOVERLAP_EMULATED_WARPS 8
#endif
constexpr int kWarps = TPOVERLAP_EMULATED_WARPS, kLanes = 32, kStack = 1 << 16;

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

// Who has accessed a word of shared memory, and when by the warp's own clock.
struct Word {
    int writer = -1;
    u32 written = 0, read[kWarps] = {};
};

struct Thread {
    ucontext_t start;
    jmp_buf state;
    bool started = false, done = false;
    const u64* waits_for = nullptr;
    u64 seen = 0;
};

struct Block {
    dim3 grid, index;
    u64 serial;  // no other block has it, in any launch
    std::vector<Thread> threads;
    Exchange exchanges[kWarps];
    Barrier barriers[16];
    u32 clock[kWarps][kWarps];
    std::vector<unsigned char> shared;  // of dynamic size
    std::vector<Word> words;            // of `shared`
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

static void touch(Word& word, bool write, const char* what, u64 at) {
    const int me = block->current / kLanes;
    const auto race = [&](const char* how, int other) {
        fail("race at " + (what + (" " + std::to_string(at))) + ": " + how + " by warp " + std::to_string(other));
    };
    if (word.writer >= 0 && word.writer != me && word.written > block->clock[me][word.writer]) race("written", word.writer);
    if (!write) {
        word.read[me] = block->clock[me][me];
        return;
    }
    for (int w = 0; w < kWarps; w++)
        if (w != me && word.read[w] > block->clock[me][w]) race("still read", w);
    word.writer = me;
    word.written = block->clock[me][me];
}

// Shared memory of dynamic size.
static unsigned char* shared(u32 at, u32 bytes, bool write) {
    if (at % bytes || at + bytes > block->shared.size())
        fail("shared memory access of " + std::to_string(bytes) + " bytes at " + std::to_string(at));
    for (u32 i = at / 4; i < (at + bytes) / 4; i++) touch(block->words[i], write, "shared byte", i * 4);
    return block->shared.data() + at;
}

// A value in shared memory of static size, in the place of a T.
template <class T>
class Shared {
public:
    void operator=(T x) {
        if (owner_ != block->serial) word_ = Word();
        owner_ = block->serial;
        touch(word_, true, "address", reinterpret_cast<uintptr_t>(this));
        value_ = x;
    }
    operator T() {
        if (owner_ != block->serial) fail("shared memory is read that nobody has written");
        touch(word_, false, "address", reinterpret_cast<uintptr_t>(this));
        return value_;
    }

private:
    static_assert(sizeof(T) == 4);
    u64 owner_ = 0;  // the block's serial number
    Word word_;
    T value_ = {};
};

static void check_readable(const void* from, size_t bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(from);
    const auto& ranges = block->readable;
    auto after = std::upper_bound(ranges.begin(), ranges.end(), at, [](uintptr_t x, const Range& r) { return x < r.begin; });
    if (after == ranges.begin() || at + bytes > (after - 1)->end) fail("global load outside of what may be read");
}

template <class T>
static T load(const void* from) {
    T x;
    if (reinterpret_cast<uintptr_t>(from) % alignof(T)) fail("global load is not aligned");
    check_readable(from, sizeof(T));
    memcpy(&x, from, sizeof(T));
    return x;
}

// A thread's part of the operands of mma.m16n8k8.
struct Operands {
    u32 a0, a1, b;
};

// d = c + a b for `count` times 8 columns of a and rows of b, of 16-bit floats.
template <float (*to_float)(uint16_t), int count>
static void product(float (&d)[4], const float (&c)[4], const Operands (&mine)[count]) {
    const auto values = exchange("mma", mine);
    const int lane = block->current % kLanes, g = lane / 4, t = lane % 4;
    const auto of = [&](int lane, int i) {
        Operands x;
        memcpy(&x, values[lane] + i * sizeof x, sizeof x);
        return x;
    };
    float x[4] = {c[0], c[1], c[2], c[3]};
    for (int i = 0; i < count; i++)
        for (int k = 0; k < 8; k++) {
            const Operands left = of(g * 4 + k / 2, i);
            const float top = to_float(left.a0 >> k % 2 * 16), bottom = to_float(left.a1 >> k % 2 * 16);
            for (int n = 0; n < 2; n++) {
                const float right = to_float(of((t * 2 + n) * 4 + k / 2, i).b >> k % 2 * 16);
                x[n] += top * right;
                x[2 + n] += bottom * right;
            }
        }
    memcpy(d, x, sizeof x);
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

// Launches a kernel. Returns what went wrong first, or an empty string.
static std::string run(void (*body)(const void*), const void* arguments, dim3 grid, u32 shared_bytes,
                       std::vector<Range> readable, u64 seed) {
    static u64 blocks = 0;
    std::sort(readable.begin(), readable.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    Block state;
    block = &state;
    state.grid = grid;
    state.readable = readable;
    state.body = body;
    state.arguments = arguments;
    state.random.seed(seed);
    const std::unique_ptr<unsigned char[]> stacks(new unsigned char[kWarps * kLanes * kStack]);
    for (u32 i = 0; i < grid.x * grid.y * grid.z; i++) {
        state.index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        state.serial = ++blocks;
        state.threads.assign(kWarps * kLanes, Thread());
        for (int id = 0; id < kWarps * kLanes; id++) {
            Thread& thread = state.threads[id];
            getcontext(&thread.start);
            thread.start.uc_stack = {stacks.get() + id * kStack, 0, static_cast<size_t>(kStack)};
            thread.start.uc_link = nullptr;
            makecontext(&thread.start, enter, 0);
        }
        for (int w = 0; w < kWarps; w++) {
            state.exchanges[w] = Exchange();
            memset(state.clock[w], 0, sizeof state.clock[w]);
            state.clock[w][w] = 1;
        }
        for (Barrier& b : state.barriers) b = Barrier();
        state.words.assign(shared_bytes / 4, Word());
        state.shared.assign(shared_bytes, 0xff);  // NaN
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

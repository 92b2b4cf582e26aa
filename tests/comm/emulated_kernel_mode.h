// Runs tpoverlap/comm/kernel_mode.cu on the CPU, from its own source: every block in a thread of the system, whose own
// threads are coroutines that change at barriers, and at random where memory is shared with other ranks.
//
// Accesses of sixteen bytes to shared memory are two of eight, in random order, as the hardware promises no more.
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <random>
#include <thread>
#include <vector>

#include "emulated_half.h"

struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct Index {
    unsigned int x;
};
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

namespace emulated {

constexpr int kStack = 1 << 15;

struct Coroutine {
    ucontext_t context;
    std::vector<unsigned char> stack;
    bool done = false;
    unsigned long long barriers = 0;
};

struct Block {
    unsigned int index, grid, size;
    std::vector<Coroutine> threads;
    ucontext_t scheduler;
    std::mt19937 random;
    unsigned int current = 0, arrived = 0;
    unsigned long long barriers = 0;  // that all have passed
    void (*body)(const void *);
    const void *arguments;
};

static thread_local Block *block;

static void yield() { swapcontext(&block->threads[block->current].context, &block->scheduler); }
static void maybe_yield() {
    if (block->random() % 8 == 0) yield();
}

static void enter() {
    block->body(block->arguments);
    block->threads[block->current].done = true;
    yield();
}

static void run_block(Block &own) {
    block = &own;
    own.threads.resize(own.size);
    for (Coroutine &thread : own.threads) {
        thread.stack.resize(kStack);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = kStack;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, enter, 0);
    }
    for (unsigned int left = own.size; left;) {
        // Starts anywhere, so that no thread is always first.
        const unsigned int first = own.random() % own.size;
        left = 0;
        for (unsigned int i = 0; i < own.size; i++) {
            own.current = (first + i) % own.size;
            Coroutine &thread = own.threads[own.current];
            if (thread.done) continue;
            left++;
            if (thread.barriers <= own.barriers) swapcontext(&own.scheduler, &thread.context);
        }
        sched_yield();
    }
}

}  // namespace emulated

#define __device__
#define __global__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__
#define threadIdx (Index{emulated::block->current})
#define blockIdx (Index{emulated::block->index})
#define blockDim (Index{emulated::block->size})
#define gridDim (Index{emulated::block->grid})

static void __syncthreads() {
    emulated::Block &own = *emulated::block;
    own.threads[own.current].barriers++;
    if (++own.arrived == own.size) {
        own.arrived = 0;
        own.barriers++;
    }
    emulated::yield();
}

static void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static unsigned int atomicAdd(unsigned int *p, unsigned int value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }

using emulated::bits_as;
static float __uint_as_float(unsigned int bits) { return bits_as<float>(bits); }
static float __int_as_float(int bits) { return bits_as<float>(bits); }
static unsigned int __float_as_uint(float value) { return bits_as<unsigned int>(value); }

static unsigned int load_acquire(const unsigned int *p) {
    emulated::yield();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static void store_relaxed(unsigned int *p, unsigned int value) {
    emulated::maybe_yield();
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
}
static uint4 load_volatile(const unsigned char *p) {
    const uint64_t *words = reinterpret_cast<const uint64_t *>(p);
    uint64_t values[2];
    const int first = emulated::block->random() % 2;
    emulated::maybe_yield();
    values[first] = __atomic_load_n(words + first, __ATOMIC_RELAXED);
    emulated::maybe_yield();
    values[1 - first] = __atomic_load_n(words + 1 - first, __ATOMIC_RELAXED);
    emulated::maybe_yield();
    uint4 value;
    memcpy(&value, values, sizeof value);
    return value;
}
static void store_volatile(unsigned char *p, uint4 value) {
    uint64_t *words = reinterpret_cast<uint64_t *>(p), values[2];
    memcpy(values, &value, sizeof value);
    const int first = emulated::block->random() % 2;
    __atomic_store_n(words + first, values[first], __ATOMIC_RELAXED);
    emulated::maybe_yield();
    __atomic_store_n(words + 1 - first, values[1 - first], __ATOMIC_RELAXED);
}
static float half_to_float(unsigned short half) { return emulated::half_to_float(half); }
static unsigned short float_to_half(float wide) { return isnan(wide) ? 0x7fff : emulated::float_to_half(wide); }

// All-reduce of small payloads by one kernel: write the own slot in host memory, publish, wait for the peers, read, add.
//
// The grid is fixed and every block publishes on every call, whatever the payload, so that one operation number serves the
// whole grid. The number lives in device memory and is advanced by the last block: the kernel replays in CUDA graphs.
// A slot is rewritten two operations later. By then this rank has completed the operation between, so it has seen data of
// every peer's kernel for it, and a peer's kernel begins only when its former one, which read the slot, has ended.
//
// Small payloads travel in lines of sixteen bytes: four of data, the operation's number, four of data, the number again.
// Eight aligned bytes arrive whole, so a reader that sees the number has the data, and neither a fence nor a flag is in
// the way (NCCL's LL protocol). Lines lie in slots of their own, where every word of that place is a number that this
// rank has written or has been set to at the start; see refresh_lines for the wrap of the numbers.

constexpr int kMaxRanks = 8;

struct Arguments {
    const unsigned char *x;
    unsigned char *out;
    unsigned long long num_bytes;
    unsigned char *slots[kMaxRanks];   // two slots of slot_bytes each
    unsigned char *lines[kMaxRanks];   // two slots of lines_bytes each
    unsigned int *flags[kMaxRanks];    // a word a block, flag_stride words apart
    unsigned int *consumed;            // this rank's last completed operation
    unsigned int *state;               // device memory: operation number, blocks that are done
    unsigned long long slot_bytes;
    unsigned long long lines_bytes;
    unsigned long long lines_max_bytes;  // the largest payload that takes lines
    unsigned int flag_stride;
    int rank;
    int world_size;
};

// A wait that has been poisoned sees a number at least this far ahead; the protocol itself never leads by more than one.
constexpr unsigned int kPoisoned = 1u << 29;

#ifdef TPOVERLAP_EMULATED_GPU
#include TPOVERLAP_EMULATED_GPU
#else
__device__ __forceinline__ unsigned int load_acquire(const unsigned int *p) {
    unsigned int value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(unsigned int *p, unsigned int value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Host memory of a slot changes under the caches: never read it through them.
__device__ __forceinline__ uint4 load_volatile(const unsigned char *p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_volatile(unsigned char *p, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ float half_to_float(unsigned short half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return wide;
}

__device__ __forceinline__ unsigned short float_to_half(float wide) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(wide));
    return half;
}
#endif

// The two 16-bit formats by their bits: NVRTC comes without the toolkit's headers.
struct Float16 {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(Float16 v) { return half_to_float(v.bits); }
__device__ __forceinline__ float widen(BFloat16 v) { return __uint_as_float(static_cast<unsigned int>(v.bits) << 16); }

__device__ __forceinline__ void narrow(float v, float *to) { *to = v; }
__device__ __forceinline__ void narrow(float v, Float16 *to) { to->bits = float_to_half(v); }
// Round to nearest, ties to even, on the bits: the instruction for it exists from sm_80 on only.
__device__ __forceinline__ void narrow(float v, BFloat16 *to) {
    const unsigned int bits = __float_as_uint(v);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = nan ? 0x7fffu : static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <typename T>
union Unit {
    static constexpr int kCount = 16 / sizeof(T);
    uint4 bits;
    T values[kCount];
    __device__ Unit() {}  // nothing to set: every use fills it
};

// Sixteen bytes of a tensor that may start anywhere and end inside them.
template <typename T>
__device__ __forceinline__ uint4 load_tensor(const unsigned char *base, unsigned long long at, unsigned long long end,
                                             bool aligned) {
    if (aligned && at + 16 <= end) return *reinterpret_cast<const uint4 *>(base + at);
    Unit<T> unit;
    unit.bits = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < Unit<T>::kCount; ++i)
        if (at + i * sizeof(T) < end) unit.values[i] = *reinterpret_cast<const T *>(base + at + i * sizeof(T));
    return unit.bits;
}

template <typename T>
__device__ __forceinline__ void store_tensor(unsigned char *base, unsigned long long at, unsigned long long end,
                                             bool aligned, const Unit<T> &unit) {
    if (aligned && at + 16 <= end) {
        *reinterpret_cast<uint4 *>(base + at) = unit.bits;
        return;
    }
#pragma unroll
    for (int i = 0; i < Unit<T>::kCount; ++i)
        if (at + i * sizeof(T) < end) *reinterpret_cast<T *>(base + at + i * sizeof(T)) = unit.values[i];
}

// The operation's end: the last block to come here advances the number, which all threads of all blocks have read. The next
// kernel sees what this one wrote; nobody else orders anything by these words.
__device__ __forceinline__ void finish(const Arguments &a, unsigned int operation) {
    __syncthreads();
    if (threadIdx.x == 0) {
        if (atomicAdd(a.state + 1, 1) == gridDim.x - 1) {
            a.state[1] = 0;
            a.state[0] = operation;
            store_relaxed(a.consumed, operation);
        }
    }
}

// Writes the number into the lines of the own slot that this operation leaves alone, for two operations in a row out of
// 2^31 (one for each slot): no line is ever found with a number that is 2^32 operations old and looks like the present one.
__device__ __forceinline__ void refresh_lines(const Arguments &a, unsigned int operation, unsigned long long used) {
    unsigned char *own = a.lines[a.rank] + (operation & 1) * a.lines_bytes;
    const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    for (unsigned long long line = used + thread; line < a.lines_bytes / 16; line += threads)
        store_volatile(own + line * 16, make_uint4(0, operation, 0, operation));
}

template <typename T>
__device__ __forceinline__ void all_reduce_lines(const Arguments &a, unsigned int operation,
                                                 unsigned long long lines) {
    constexpr int kCount = 8 / sizeof(T);
    const unsigned long long slot = (operation & 1) * a.lines_bytes;
    const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    // For the watcher, who takes an operation whose blocks have not published for one that has not begun.
    if (threadIdx.x == 0) store_relaxed(a.flags[a.rank] + blockIdx.x * a.flag_stride, operation);

    for (unsigned long long line = thread; line < lines; line += threads) {
        union {
            uint2 bits;
            T values[kCount];
        } own, unit;
        own.bits = make_uint2(0, 0);
        const T *x = reinterpret_cast<const T *>(a.x + line * 8);
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (line * 8 + i * sizeof(T) < a.num_bytes) own.values[i] = x[i];
        const unsigned long long at = slot + line * 16;
        store_volatile(a.lines[a.rank] + at, make_uint4(own.bits.x, operation, own.bits.y, operation));

        float total[kCount];
        bool poisoned = false;
        for (int q = 0; q < a.world_size; ++q) {
            unit.bits = own.bits;
            if (q != a.rank) {
                uint4 seen = load_volatile(a.lines[q] + at);
                for (unsigned int polls = 1; (seen.y != operation || seen.w != operation) && !poisoned; ++polls) {
                    if (polls % 16 == 0) {
                        const int ahead = load_acquire(a.flags[q] + blockIdx.x * a.flag_stride) - operation;
                        poisoned = ahead >= static_cast<int>(kPoisoned);
                    }
                    seen = load_volatile(a.lines[q] + at);
                }
                unit.bits = make_uint2(seen.x, seen.z);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                total[i] = q == 0 ? widen(unit.values[i]) : total[i] + widen(unit.values[i]);
        }
        T *out = reinterpret_cast<T *>(a.out + line * 8);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            narrow(poisoned ? __int_as_float(0x7fffffff) : total[i], &unit.values[i]);
            if (line * 8 + i * sizeof(T) < a.num_bytes) out[i] = unit.values[i];
        }
    }
}

template <typename T>
__device__ __forceinline__ void all_reduce(const Arguments &a) {
    __shared__ int shared_poisoned;
    const unsigned int operation = *reinterpret_cast<volatile unsigned int *>(a.state) + 1;
    const unsigned int block = blockIdx.x;
    const unsigned long long lines = a.num_bytes <= a.lines_max_bytes ? (a.num_bytes + 7) / 8 : 0;
    if ((operation & 0x7ffffffeu) == 0) refresh_lines(a, operation, lines);
    if (lines != 0) {
        all_reduce_lines<T>(a, operation, lines);
        finish(a, operation);
        return;
    }
    if (threadIdx.x == 0) shared_poisoned = 0;
    const unsigned long long slot = (operation & 1) * a.slot_bytes;

    const unsigned long long units = (a.num_bytes + 15) / 16;
    const unsigned long long per_block = (units + gridDim.x - 1) / gridDim.x;
    const unsigned long long first = block * per_block;
    const unsigned long long last = first + per_block < units ? first + per_block : units;
    const bool x_aligned = reinterpret_cast<unsigned long long>(a.x) % 16 == 0;
    const bool out_aligned = reinterpret_cast<unsigned long long>(a.out) % 16 == 0;

    for (unsigned long long u = first + threadIdx.x; u < last; u += blockDim.x)
        store_volatile(a.slots[a.rank] + slot + u * 16, load_tensor<T>(a.x, u * 16, a.num_bytes, x_aligned));
    __syncthreads();
    if (threadIdx.x == 0) {
        // Cumulative: orders the stores of the whole block, which the barrier has made this thread's past.
        __threadfence_system();
        store_relaxed(a.flags[a.rank] + block * a.flag_stride, operation);
    }
    if (threadIdx.x < a.world_size && threadIdx.x != a.rank) {
        const unsigned int *flag = a.flags[threadIdx.x] + block * a.flag_stride;
        unsigned int seen = load_acquire(flag);
        while (static_cast<int>(seen - operation) < 0) seen = load_acquire(flag);
        if (seen - operation >= kPoisoned) shared_poisoned = 1;
    }
    __syncthreads();

    const bool poisoned = shared_poisoned != 0;
    for (unsigned long long u = first + threadIdx.x; u < last; u += blockDim.x) {
        float total[Unit<T>::kCount];
        Unit<T> unit;
        for (int q = 0; q < a.world_size; ++q) {
            unit.bits = q == a.rank ? load_tensor<T>(a.x, u * 16, a.num_bytes, x_aligned)
                                    : load_volatile(a.slots[q] + slot + u * 16);
#pragma unroll
            for (int i = 0; i < Unit<T>::kCount; ++i)
                total[i] = q == 0 ? widen(unit.values[i]) : total[i] + widen(unit.values[i]);
        }
#pragma unroll
        for (int i = 0; i < Unit<T>::kCount; ++i)
            narrow(poisoned ? __int_as_float(0x7fffffff) : total[i], &unit.values[i]);
        store_tensor<T>(a.out, u * 16, a.num_bytes, out_aligned, unit);
    }

    finish(a, operation);
}

extern "C" __global__ void __launch_bounds__(512) all_reduce_float32(const __grid_constant__ Arguments a) {
    all_reduce<float>(a);
}
extern "C" __global__ void __launch_bounds__(512) all_reduce_float16(const __grid_constant__ Arguments a) {
    all_reduce<Float16>(a);
}
extern "C" __global__ void __launch_bounds__(512) all_reduce_bfloat16(const __grid_constant__ Arguments a) {
    all_reduce<BFloat16>(a);
}

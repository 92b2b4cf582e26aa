// Nothing but mma.m16n8k8 (FP16 inputs, FP32 accumulation): eight independent chains a warp, as many as hide its latency.
struct Arguments {
    float* out;
    int rounds;
};

extern "C" __global__ void __launch_bounds__(256) mma_peak(const __grid_constant__ Arguments a) {
    float d[8][4] = {};
    // Any bits that are small, finite halves and differ between lanes; zeros would be faster than real data.
    const unsigned x = threadIdx.x * 0x00530035u & 0x33ff33ffu, y = x ^ 0x12341234u & 0x33ff33ffu;
    for (int i = 0; i < a.rounds; i++) {
#pragma unroll
        for (int j = 0; j < 64; j++) {
            float(&e)[4] = d[j % 8];
            asm volatile(
                "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                : "+f"(e[0]), "+f"(e[1]), "+f"(e[2]), "+f"(e[3])
                : "r"(x), "r"(y), "r"(x));
        }
    }
    float sum = 0;
    for (int j = 0; j < 32; j++) sum += d[j / 4][j % 4];
    a.out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Device primitives of tpoverlap/quant/nvfp4/small_batch.cu on the CPU, for BF16 = 0 or 1 and any WARPS: see
// emulated_gpu.h.
#pragma once

#define TPOVERLAP_EMULATED_WARPS WARPS
#include "emulated_small_batch_common.h"

#define __shared__ static

typedef emulated::Shared<float> SharedFloat;

template <class T>
static T __ldg(const T* from) {
    return emulated::load<T>(from);
}
static uint4 load_once(const void* from) { return emulated::load<uint4>(from); }

// Entry point of the emulation: launches of the kernel in small_batch.cu, see emulated_small_batch.h.
#define TPOVERLAP_EMULATED_GPU "emulated_small_batch.h"
#include "small_batch.cu"

#define KERNEL nvfp4_small_batch
#define CLUSTER 1
#define LEFT_OVER() ""
#include "emulated_small_batch_run.h"

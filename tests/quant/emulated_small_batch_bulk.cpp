// Entry point of the emulation: launches of the kernel in small_batch_bulk.cu, see emulated_small_batch_bulk.h.
#define TPOVERLAP_EMULATED_GPU "emulated_small_batch_bulk.h"
#include "small_batch_bulk.cu"

#define KERNEL nvfp4_small_batch_bulk
#define CLUSTER 2
#define LEFT_OVER emulated::left_over
#include "emulated_small_batch_run.h"

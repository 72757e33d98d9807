#pragma once

/* tests/gpu/rates.h - kernels that do one thing as fast as the device can: what the benchmark
 * measures the others against. */

#include "kernels/cuda/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* mma.sync of registers, no memory: `blocks` blocks of RATE_WARPS warps, each RATE_MMAS times
 * `rounds`. sums: [blocks * RATE_WARPS * 32], so that nothing is left out. */
#define RATE_WARPS 8
#define RATE_MMAS  16
PD_CHECKED pd_status rate_bf16(gpu_stream *stream, uint32_t blocks, uint32_t rounds, float *sums);
PD_CHECKED pd_status rate_int8(gpu_stream *stream, uint32_t blocks, uint32_t rounds, int32_t *sums);

#ifdef __cplusplus
}
#endif

#pragma once

/* tests/gpu-emu/planted.h - kernels for the tests of the emulator: right ones, and wrong ones.
 *
 * plant 0 is right; what the others break is said at each in planted.cu. Device pointers. */

#include "kernels/cuda/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out[i] = in[i] of the block reversed, 128 threads a block, count a multiple of 128. */
PD_CHECKED pd_status planted_reverse(gpu_stream *stream, int plant, uint32_t count, const float *in,
                                     float *out);
#define PLANTED_REVERSE 3 /* plants, numbered from 1 */
/* c[64][64] = a[64][64] b[64][64] (b: [n][k]) in f16 by ldmatrix, mma and a cp.async pipeline. */
PD_CHECKED pd_status planted_gemm(gpu_stream *stream, int plant, const uint16_t *a,
                                  const uint16_t *b, float *c);
#define PLANTED_GEMM 5
/* out[warp] = the sum of in[32] of each warp's, 4 warps a block, one block. */
PD_CHECKED pd_status planted_warps(gpu_stream *stream, int plant, const float *in, float *out);
#define PLANTED_WARPS 10
/* out[256] = the sums over pages of in[pages][256]: a producer warp streams pages through a ring of
 * 3 by bulk copies, 4 consumer warps. */
PD_CHECKED pd_status planted_ring(gpu_stream *stream, int plant, uint32_t pages, const float *in,
                                  float *out);
#define PLANTED_RING 6
/* total[0] = the sum of in[count], by 256 threads a block and an atomic a block. */
PD_CHECKED pd_status planted_total(gpu_stream *stream, int plant, uint32_t count,
                                   const uint32_t *in, uint32_t *total);
#define PLANTED_TOTAL 5

#ifdef __cplusplus
}
#endif

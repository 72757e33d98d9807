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
/* c[64][64] = a[64][64] b[64][64] (b: [n][k]) in f16 by ldmatrix, mma and a cp.async pipeline. */
PD_CHECKED pd_status planted_gemm(gpu_stream *stream, int plant, const uint16_t *a,
                                  const uint16_t *b, float *c);

#ifdef __cplusplus
}
#endif

#include "tests/gpu-emu/planted.h"

#include "kernels/cuda/words.h"

template <int PLANT> CU_KERNEL(128, 1) reverse_kernel(const float *in, float *out)
{
    CU_SHARED float tile[128];
    uint32_t i = threadIdx.x, at = blockIdx.x * 128;

    tile[i] = cu_load<float>(in + at + i);
    if constexpr (PLANT == 0)
        cu_sync();
    else if constexpr (PLANT == 1) /* no barrier at all */
        (void)0;
    else if (i < 64) /* half of the block */
        cu_sync();
    cu_store(out + at + i, tile[127 - i]);
}

pd_status planted_reverse(gpu_stream *stream, int plant, uint32_t count, const float *in,
                          float *out)
{
    dim3 grid(count / 128), block(128);

    switch (plant) {
    case 0: return CU_LAUNCH((reverse_kernel<0>), grid, block, 0, stream, in, out);
    case 1: return CU_LAUNCH((reverse_kernel<1>), grid, block, 0, stream, in, out);
    default: return CU_LAUNCH((reverse_kernel<2>), grid, block, 0, stream, in, out);
    }
}

/* Each of 4 warps computes 16 rows; k in steps of 16, two stages of both tiles. Rows of 16 halves
 * are 48 bytes apart, so that ldmatrix meets no bank twice. */
#define GEMM_STRIDE 24

CU_DEVICE void gemm_fill(uint16_t *tile, const uint16_t *from, uint32_t k)
{
    uint32_t row = threadIdx.x / 2, col = threadIdx.x % 2 * 8;

    cu_async_16(tile + row * GEMM_STRIDE + col, from + row * 64 + k + col, true);
}

template <int PLANT> CU_KERNEL(128, 1) gemm_kernel(const uint16_t *a, const uint16_t *b, float *c)
{
    CU_SHARED_DYNAMIC(bytes);
    uint16_t *tiles = (uint16_t *)bytes; /* [stage][a, b][64][GEMM_STRIDE] */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[8][4] = {};

    gemm_fill(tiles, a, 0);
    gemm_fill(tiles + 64 * GEMM_STRIDE, b, 0);
    cu_async_commit();
    for (uint32_t k = 0; k < 64; k += 16) {
        uint16_t *now = tiles + k / 16 % 2 * (128 * GEMM_STRIDE);
        uint16_t *then = tiles + (k / 16 + 1) % 2 * (128 * GEMM_STRIDE);
        if (k + 16 < 64) {
            gemm_fill(then, a, k + 16);
            gemm_fill(then + 64 * GEMM_STRIDE, b, k + 16);
        }
        cu_async_commit();
        if constexpr (PLANT == 1) /* one group too many may be under way */
            cu_async_wait<2>();
        else
            cu_async_wait<1>();
        if constexpr (PLANT != 2) /* others' copies are not waited for */
            cu_sync();
        uint32_t fa[4];
        uint32_t row = warp * 16 + lane % 16, half = lane / 16 * 8;
        cu_ldmatrix_x4(fa, now + row * GEMM_STRIDE + half + (PLANT == 4 && lane == 5));
        for (uint32_t n = 0; n < 8; n++) {
            uint32_t fb[2];
            const uint16_t *tile_b = now + 64 * GEMM_STRIDE;
            cu_ldmatrix_x2(fb, tile_b + (n * 8 + lane % 8) * GEMM_STRIDE + lane / 8 % 2 * 8);
            cu_mma_f16(sums[n], fa, fb);
        }
        if constexpr (PLANT != 3) /* the buffer is refilled while others read it */
            cu_sync();
    }
    for (uint32_t n = 0; n < 8; n++)
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t row = warp * 16 + lane / 4 + i * 8, col = n * 8 + lane % 4 * 2;
            cu_store(c + row * 64 + col, float2{sums[n][2 * i], sums[n][2 * i + 1]});
        }
}

pd_status planted_gemm(gpu_stream *stream, int plant, const uint16_t *a, const uint16_t *b,
                       float *c)
{
    uint64_t shared = 2 * 2 * 64 * GEMM_STRIDE * sizeof(uint16_t);

    switch (plant) {
    case 0: return CU_LAUNCH((gemm_kernel<0>), 1, 128, shared, stream, a, b, c);
    case 1: return CU_LAUNCH((gemm_kernel<1>), 1, 128, shared, stream, a, b, c);
    case 2: return CU_LAUNCH((gemm_kernel<2>), 1, 128, shared, stream, a, b, c);
    case 3: return CU_LAUNCH((gemm_kernel<3>), 1, 128, shared, stream, a, b, c);
    default: return CU_LAUNCH((gemm_kernel<4>), 1, 128, shared, stream, a, b, c);
    }
}

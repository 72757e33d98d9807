#include "tests/gpu/rates.h"

#include "kernels/cuda/words.h"

CU_KERNEL(RATE_WARPS * 32, 1) multiply_bf16(uint32_t rounds, float *sums)
{
    float c[RATE_MMAS][4] = {};
    uint32_t a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x, 5};

    for (uint32_t round = 0; round < rounds; round++) {
#pragma unroll
        for (uint32_t i = 0; i < RATE_MMAS; i++)
            cu_mma_bf16(c[i], a, b);
    }
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < RATE_MMAS; i++)
        sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    sums[blockIdx.x * RATE_WARPS * 32 + threadIdx.x] = sum;
}

CU_KERNEL(RATE_WARPS * 32, 1) multiply_int8(uint32_t rounds, int32_t *sums)
{
    int32_t c[RATE_MMAS][4] = {};
    uint32_t a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x, 5};

    for (uint32_t round = 0; round < rounds; round++) {
#pragma unroll
        for (uint32_t i = 0; i < RATE_MMAS; i++)
            cu_mma_s8(c[i], a, b);
    }
    int32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < RATE_MMAS; i++)
        sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    sums[blockIdx.x * RATE_WARPS * 32 + threadIdx.x] = sum;
}

pd_status rate_bf16(gpu_stream *stream, uint32_t blocks, uint32_t rounds, float *sums)
{
    return CU_LAUNCH(multiply_bf16, dim3(blocks), dim3(RATE_WARPS * 32), 0, stream, rounds, sums);
}

pd_status rate_int8(gpu_stream *stream, uint32_t blocks, uint32_t rounds, int32_t *sums)
{
    return CU_LAUNCH(multiply_int8, dim3(blocks), dim3(RATE_WARPS * 32), 0, stream, rounds, sums);
}

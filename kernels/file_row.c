#include "kernels/file_row.h"

#include "kernels/k_blocks.h"
#include "kernels/number.h"

static float half_at(pd_dtype dtype, const uint8_t *bytes)
{
    uint16_t half;

    memcpy(&half, bytes, sizeof half);
    return dtype == PD_BF16 ? kern_bf16_to_f32(half) : kern_f16_to_f32(half);
}

static void block_to_f32(pd_dtype dtype, const uint8_t *block, float *out)
{
    float d = half_at(PD_F16, block);

    for (int i = 0; i < KERN_BLOCK; i++) {
        int shift = i < 16 ? 0 : 4;
        switch (dtype) {
        case PD_Q8_0: out[i] = (float)(int8_t)block[2 + i] * d; break;
        case PD_Q4_0: out[i] = (float)((block[2 + i % 16] >> shift & 15) - 8) * d; break;
        default:
            out[i] = (float)(block[4 + i % 16] >> shift & 15) * d + half_at(PD_F16, block + 2);
            break;
        }
    }
}

static void q4k_to_f32(const uint8_t *block, float *out)
{
    const uint8_t *scales = block + KERN_Q4K_SCALES_AT;

    for (uint32_t i = 0; i < KERN_K_WEIGHTS; i++) {
        uint32_t run = i / KERN_BLOCK;
        float d = half_at(PD_F16, block) * (float)kern_q4k_scale(scales, run);
        float least = half_at(PD_F16, block + 2) * (float)kern_q4k_minimum(scales, run);
        out[i] = d * (float)kern_q4k_quant(block, run, i % KERN_BLOCK) - least;
    }
}

static void q6k_to_f32(const uint8_t *block, float *out)
{
    float d = half_at(PD_F16, block + KERN_Q6K_D_AT);

    for (uint32_t i = 0; i < KERN_K_WEIGHTS; i++) {
        uint32_t run = i / KERN_BLOCK, at = i % KERN_BLOCK;
        int32_t quant = (int32_t)kern_q6k_quant(block, run, at) - 32;
        out[i] = d * (float)(kern_q6k_scale(block, run, at / 16) * quant);
    }
}

void kern_row_to_f32(pd_dtype dtype, const void *row, uint32_t cols, float *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    const uint8_t *bytes = row;

    pd_assert(dtype <= PD_Q6_K && cols % info->block_weights == 0);
    if (dtype == PD_F32) {
        memcpy(out, row, cols * sizeof *out);
        return;
    }
    for (uint32_t col = 0; col < cols; col += info->block_weights, bytes += info->block_bytes) {
        if (info->block_weights == 1)
            out[col] = half_at(dtype, bytes);
        else if (dtype == PD_Q4_K)
            q4k_to_f32(bytes, out + col);
        else if (dtype == PD_Q6_K)
            q6k_to_f32(bytes, out + col);
        else
            block_to_f32(dtype, bytes, out + col);
    }
}

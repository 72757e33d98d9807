#include "tests/unit/kernels/quantise.h"

#include "kernels/k_blocks.h"
#include "kernels/number.h"

static void put_half(uint8_t *at, float value)
{
    uint16_t half = kern_f32_to_f16(value);

    memcpy(at, &half, sizeof half);
}

/* The nearest of low .. high to value / step. */
static int32_t step_of(float value, float step, int32_t low, int32_t high)
{
    float steps = step != 0 ? roundf(value / step) : 0;

    return steps < (float)low ? low : steps > (float)high ? high : (int32_t)steps;
}

static float largest_of(const float *x, uint32_t count)
{
    float largest = 0;

    for (uint32_t i = 0; i < count; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

/* The range of values and 0. */
static void range_of(const float *x, uint32_t count, float *low_out, float *high_out)
{
    *low_out = *high_out = 0;
    for (uint32_t i = 0; i < count; i++) {
        *low_out = fminf(*low_out, x[i]);
        *high_out = fmaxf(*high_out, x[i]);
    }
}

static float half_of(float value)
{
    return kern_f16_to_f32(kern_f32_to_f16(value));
}

static void block_of_32(pd_dtype dtype, const float *x, uint8_t *block)
{
    float low, high, d;

    if (dtype == PD_Q8_0) {
        d = half_of(largest_of(x, 32) / 127);
        put_half(block, d);
        for (int i = 0; i < 32; i++)
            block[2 + i] = (uint8_t)step_of(x[i], d, -127, 127);
        return;
    }
    if (dtype == PD_Q4_0) {
        d = half_of(largest_of(x, 32) / 7.5f);
        low = -8 * d;
    } else {
        range_of(x, 32, &low, &high);
        d = half_of((high - low) / 15);
        low = half_of(low);
        put_half(block + 2, low);
    }
    put_half(block, d);
    for (int i = 0; i < 16; i++)
        block[(dtype == PD_Q4_0 ? 2 : 4) + i] =
            (uint8_t)(step_of(x[i] - low, d, 0, 15) | step_of(x[i + 16] - low, d, 0, 15) << 4);
}

static void block_q4k(const float *x, uint8_t *block)
{
    uint8_t *scales = block + KERN_Q4K_SCALES_AT;
    float low[KERN_K_RUNS], high[KERN_K_RUNS], d = 0, least = 0;

    for (uint32_t run = 0; run < KERN_K_RUNS; run++) {
        range_of(x + 32 * run, 32, &low[run], &high[run]);
        d = fmaxf(d, (high[run] - low[run]) / 15 / 63);
        least = fmaxf(least, -low[run] / 63);
    }
    d = half_of(d);
    least = half_of(least);
    memset(block, 0, 144);
    put_half(block, d);
    put_half(block + 2, least);
    for (uint32_t run = 0; run < KERN_K_RUNS; run++) {
        int32_t scale = step_of((high[run] - low[run]) / 15, d, 0, 63);
        int32_t minimum = step_of(-low[run], least, 0, 63);
        if (run < 4) {
            scales[run] |= (uint8_t)scale;
            scales[run + 4] |= (uint8_t)minimum;
        } else {
            scales[run + 4] |= (uint8_t)((scale & 15) | (minimum & 15) << 4);
            scales[run - 4] |= (uint8_t)(scale >> 4 << 6);
            scales[run] |= (uint8_t)(minimum >> 4 << 6);
        }
        for (uint32_t i = 0; i < 32; i++) {
            float above = x[32 * run + i] + least * (float)minimum;
            int32_t quant = step_of(above, d * (float)scale, 0, 15);
            block[KERN_Q4K_QUANTS_AT + run / 2 * 32 + i] |= (uint8_t)(quant << (run % 2 * 4));
        }
    }
}

static void block_q6k(const float *x, uint8_t *block)
{
    float d = half_of(largest_of(x, KERN_K_WEIGHTS) / 31.5f / 127);

    memset(block, 0, 210);
    put_half(block + KERN_Q6K_D_AT, d);
    for (uint32_t run = 0; run < 16; run++) { /* of 16 */
        /* every other scale is negative: the format has a sign there */
        float wanted = largest_of(x + 16 * run, 16) / 31.5f * (run % 2 == 0 ? 1 : -1);
        int32_t scale = step_of(wanted, d, -128, 127);
        block[KERN_Q6K_SCALES_AT + run] = (uint8_t)scale;
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t at = 16 * run + i, half = at / 128, part = at % 128 / 32, byte = at % 32;
            uint32_t quant = (uint32_t)(step_of(x[at], d * (float)scale, -32, 31) + 32);
            block[half * 64 + part % 2 * 32 + byte] |= (uint8_t)((quant & 15) << part / 2 * 4);
            block[KERN_Q6K_HIGH_AT + half * 32 + byte] |= (uint8_t)(quant >> 4 << part * 2);
        }
    }
}

void test_quantise(pd_dtype dtype, const float *x, size_t count, void *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint8_t *block = out;

    pd_assert(count % info->block_weights == 0);
    for (size_t i = 0; i < count; i += info->block_weights, block += info->block_bytes) {
        uint16_t upper = (uint16_t)(kern_bits_of(x[i]) >> 16);
        switch (dtype) {
        case PD_F32: memcpy(block, x + i, sizeof *x); break;
        case PD_F16: put_half(block, x[i]); break;
        case PD_BF16: memcpy(block, &upper, sizeof upper); break;
        case PD_Q4_K: block_q4k(x + i, block); break;
        case PD_Q6_K: block_q6k(x + i, block); break;
        default: block_of_32(dtype, x + i, block); break;
        }
    }
}

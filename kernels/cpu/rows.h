#pragma once

/* kernels/cpu/rows.h - the operations on single rows, in the words of a v16 header included before.
 *
 * Part of one backend's source file; kernels/ref/ops.c says what each means. */

#include "kernels/kv_row.h"

V_INLINE v16 v_exp(v16 value)
{
    v16 x = v_min(v_max(value, v_set(KERN_EXP_MIN)), v_set(KERN_EXP_MAX));
    v16 shifted = v_fma(x, v_set(KERN_EXP_LOG2E), v_set(KERN_EXP_MAGIC));
    v16 n = v_sub(shifted, v_set(KERN_EXP_MAGIC));
    v16 r = v_fma(n, v_set(-KERN_LN2_HIGH), x);
    r = v_fma(n, v_set(-KERN_LN2_LOW), r);
    v16 p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    v16i bias = v_iset((int32_t)kern_bits_of(KERN_EXP_MAGIC) - 127);
    return v_mul(p, v_power(v_isub(v_bits(shifted), bias)));
}

/* Blocks quantised together, and the fewest that are. */
#define QUANT_BLOCKS     16
#define QUANT_BLOCKS_MIN 4

/* Any blocks from value at on, one by one. */
static void quantize_each(const kern_acts *acts, size_t at, uint32_t blocks)
{
    for (size_t end = at + (size_t)blocks * KERN_BLOCK; at < end; at += KERN_BLOCK) {
        v16 low = v_load(acts->values + at), high = v_load(acts->values + at + 16);
        float amax = kern_float_of(v_imax_of(v_bits(v_abs(low)), v_bits(v_abs(high))));
        bool plain = amax >= 1e-35f && amax <= 3e38f;
        v16 inverse = v_set(plain ? 127.0f / amax : 0);
        v16 magic = v_set(KERN_EXP_MAGIC);
        low = plain ? v_add(v_mul(low, inverse), magic) : magic;
        high = plain ? v_add(v_mul(high, inverse), magic) : magic;
        v16i low_quants = v_isub(v_bits(low), v_bits(magic));
        v16i high_quants = v_isub(v_bits(high), v_bits(magic));
        int32_t low_sum = v_isum(low_quants), sum = low_sum + v_isum(high_quants);
        float scale = plain ? amax / 127.0f : amax < 1 ? 0 : amax;
        v_store_i8(acts->quants + at, low_quants);
        v_store_i8(acts->quants + at + 16, high_quants);
        acts->scales[at / KERN_BLOCK] = scale;
        acts->sums[at / KERN_BLOCK] = scale * (float)sum;
        acts->quant_sums[at / KERN_BLOCK] = sum;
        if (acts->low_sums != NULL)
            acts->low_sums[at / KERN_BLOCK] = low_sum;
    }
}

/* Some blocks, the lanes' largest and sums of all found together. False: one of them is all but
 * zero or infinite, and nothing is done. */
V_INLINE bool quantize_together(const kern_acts *acts, size_t at, uint32_t blocks)
{
    const v16 magic = v_set(KERN_EXP_MAGIC);
    v16i low_lanes[QUANT_BLOCKS], high_lanes[QUANT_BLOCKS];
    float inverse[QUANT_BLOCKS];

    for (uint32_t b = 0; b < QUANT_BLOCKS; b++) {
        const float *values = acts->values + at + (size_t)b * KERN_BLOCK;
        low_lanes[b] =
            b < blocks ? v_imax(v_bits(v_abs(v_load(values))), v_bits(v_abs(v_load(values + 16))))
                       : v_bits(v_set(1.0f));
    }
    v16i most = v_imax_each(low_lanes);
    if (!v_iall_within(most, kern_bits_of(1e-35f), kern_bits_of(3e38f)))
        return false;
    v16 scale = v_div(v_as_floats(most), v_set(127.0f));
    v_store(inverse, v_div(v_set(127.0f), v_as_floats(most)));
    for (uint32_t b = 0; b < blocks; b++) {
        const float *values = acts->values + at + (size_t)b * KERN_BLOCK;
        int8_t *quants = acts->quants + at + (size_t)b * KERN_BLOCK;
        v16 factor = v_set(inverse[b]);
        v16 low = v_add(v_mul(v_load(values), factor), magic);
        v16 high = v_add(v_mul(v_load(values + 16), factor), magic);
        low_lanes[b] = v_isub(v_bits(low), v_bits(magic));
        high_lanes[b] = v_isub(v_bits(high), v_bits(magic));
        v_store_i8(quants, low_lanes[b]);
        v_store_i8(quants + 16, high_lanes[b]);
    }
    for (uint32_t b = blocks; b < QUANT_BLOCKS; b++)
        high_lanes[b] =
            most; /* of no use, as what low_lanes has; zeros would become a slow memset */
    v16i low_sums = v_isum_each(low_lanes);
    v16i sums = v_iadd(low_sums, v_isum_each(high_lanes));
    at /= KERN_BLOCK;
    v_store_some(acts->scales + at, blocks, scale);
    v_store_some(acts->sums + at, blocks, v_mul(scale, v_from_ints(sums)));
    v_store_some((float *)(void *)(acts->quant_sums + at), blocks, v_as_floats(sums));
    if (acts->low_sums != NULL)
        v_store_some((float *)(void *)(acts->low_sums + at), blocks, v_as_floats(low_sums));
    return true;
}

static void fast_quantize(const kern_acts *acts, uint32_t row, uint32_t col_first, uint32_t cols)
{
    size_t at = (size_t)row * acts->cols + col_first;

    for (uint32_t left = cols / KERN_BLOCK; left > 0;) {
        uint32_t blocks = left < QUANT_BLOCKS ? left : QUANT_BLOCKS;
        if (blocks < QUANT_BLOCKS_MIN || !quantize_together(acts, at, blocks))
            quantize_each(acts, at, blocks);
        at += (size_t)blocks * KERN_BLOCK;
        left -= blocks;
    }
}

static void fast_residual(const kern_acts *acts, uint32_t row, uint32_t col_first, uint32_t cols,
                          uint32_t residual_row)
{
    float *out = acts->values + (size_t)residual_row * acts->cols;

    for (uint32_t col = col_first; col < col_first + cols; col += 16) {
        size_t at = (size_t)row * acts->cols + col;
        v16 scale = v_set(-acts->scales[at / KERN_BLOCK]);
        v_store(out + col, v_fma(scale, v_load_i8(acts->quants + at), v_load(acts->values + at)));
    }
}

static void fast_rms_norm(const float *x, const float *weight, uint32_t count, float eps,
                          float *out)
{
    uint32_t whole = count / 16 * 16, rest = count - whole;
    v16 lanes = v_zero();

    for (uint32_t i = 0; i < whole; i += 16) {
        v16 part = v_load(x + i);
        lanes = v_fma(part, part, lanes);
    }
    if (rest != 0) {
        v16 part = v_load_some(x + whole, rest);
        lanes = v_fma(part, part, lanes); /* squares: adding 0 changes none of them */
    }
    float scale = 1.0f / sqrtf(v_tree_sum(lanes) / (float)count + eps);
    for (uint32_t i = 0; i < whole; i += 16)
        v_store(out + i, v_mul(v_mul(v_load(x + i), v_set(scale)), v_load(weight + i)));
    if (rest != 0) {
        v16 part = v_mul(v_load_some(x + whole, rest), v_set(scale));
        v_store_some(out + whole, rest, v_mul(part, v_load_some(weight + whole, rest)));
    }
}

static void fast_rope(float *head, const float *table, uint32_t pairs)
{
    for (uint32_t i = 0; i < 2 * pairs; i += 16) {
        uint32_t count = 2 * pairs - i;
        v16 x = v_load_some(head + i, count);
        v_store_some(head + i, count, v_rotate(x, v_load_some(table + i, count)));
    }
}

static void fast_store_f16(const float *x, uint32_t count, uint16_t *out)
{
    uint32_t i = 0;

    for (; i + 16 <= count; i += 16) /* the operand order keeps a NaN */
        v_store_f16(out + i, v_max(v_set(-65504.0f), v_min(v_set(65504.0f), v_load(x + i))));
    for (; i < count; i++)
        out[i] = kern_f32_to_f16(x[i]);
}

static void fast_store_kv(const pd_kv_layout *layout, const float *x, uint32_t token, void *half)
{
    uint8_t *row = (uint8_t *)half + token * layout->token_bytes;
    float *scale = (float *)((uint8_t *)half + layout->scales_at) + token;

    switch (layout->dtype) {
    case PD_F16: fast_store_f16(x, layout->head_dim, (uint16_t *)row); break;
    case PD_INT8: kern_kv_row_int8(x, layout->head_dim, (int8_t *)row, scale); break;
    default:
        pd_assert(layout->dtype == PD_FP8_E4M3);
        kern_kv_row_e4m3(x, layout->head_dim, row, scale);
        break;
    }
}

static void fast_silu_mul(float *gate, const float *up, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += 16) {
        uint32_t some = count - i;
        v16 x = v_load_some(gate + i, some);
        v16 silu = v_div(x, v_add(v_set(1.0f), v_exp(v_negate(x))));
        v_store_some(gate + i, some, v_mul(silu, v_load_some(up + i, some)));
    }
}

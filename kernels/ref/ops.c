#include "kernels/ref/ops.h"

#include "kernels/k_blocks.h"
#include "kernels/kv_row.h"
#include "kernels/number.h"

#include <stdio.h>

static int ref_probe(char *reason, size_t reason_size)
{
    snprintf(reason, reason_size, "plain C, for any machine; the reference");
    return 1;
}

static bool ref_supports(pd_dtype dtype)
{
    return dtype <= PD_Q6_K;
}

static size_t ref_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols)
{
    (void)dtype, (void)rows, (void)cols;
    return 0;
}

static void ref_pack(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows, void *out)
{
    (void)dtype, (void)rows, (void)cols, (void)file_rows, (void)out;
}

static void ref_quantize(const kern_acts *acts, uint32_t row, uint32_t col_first, uint32_t cols)
{
    for (uint32_t col = col_first; col < col_first + cols; col += KERN_BLOCK) {
        size_t at = (size_t)row * acts->cols + col;
        const float *x = acts->values + at;
        uint32_t amax_bits = 0; /* ordered as |x| is, and a NaN is above everything */
        int32_t sum = 0, low_sum = 0;

        for (int i = 0; i < KERN_BLOCK; i++) {
            uint32_t bits = kern_bits_of(x[i]) & 0x7fffffff;
            amax_bits = bits > amax_bits ? bits : amax_bits;
        }
        float amax = kern_float_of(amax_bits);
        /* Nothing there, or nothing sensible: a scale that is no number makes the result show it.
         */
        bool plain = amax >= 1e-35f && amax <= 3e38f;
        float inverse = plain ? 127.0f / amax : 0;
        for (int i = 0; i < KERN_BLOCK; i++) {
            /* half to even; |x * inverse| <= 127 and a bit */
            float shifted = plain ? x[i] * inverse + KERN_EXP_MAGIC : KERN_EXP_MAGIC;
            int32_t quant = (int32_t)(kern_bits_of(shifted) - kern_bits_of(KERN_EXP_MAGIC));
            acts->quants[at + (size_t)i] = (int8_t)quant;
            sum += (int8_t)quant;
            low_sum += i < KERN_BLOCK / 2 ? (int8_t)quant : 0;
        }
        float scale = plain ? amax / 127.0f : amax < 1 ? 0 : amax;
        acts->scales[at / KERN_BLOCK] = scale;
        acts->sums[at / KERN_BLOCK] = scale * (float)sum;
        acts->quant_sums[at / KERN_BLOCK] = sum;
        if (acts->low_sums != NULL)
            acts->low_sums[at / KERN_BLOCK] = low_sum;
    }
}

static void ref_residual(const kern_acts *acts, uint32_t row, uint32_t col_first, uint32_t cols,
                         uint32_t residual_row)
{
    const float *x = acts->values + (size_t)row * acts->cols;
    float *out = acts->values + (size_t)residual_row * acts->cols;

    for (uint32_t col = col_first; col < col_first + cols; col++) {
        size_t at = (size_t)row * acts->cols + col;
        out[col] = fmaf(-acts->scales[at / KERN_BLOCK], acts->quants[at], x[col]);
    }
}

static uint16_t load_u16(const uint8_t *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* One 32-block of weights times one of activations, added to sum. */
static float block_q4(float sum, const uint8_t *block, bool has_min, const kern_acts *acts,
                      size_t at)
{
    const uint8_t *nibbles = block + (has_min ? 4 : 2);
    const int8_t *x = acts->quants + at;
    int32_t dot = has_min ? 0 : -8 * acts->quant_sums[at / KERN_BLOCK];

    for (int i = 0; i < 16; i++)
        dot += (nibbles[i] & 15) * x[i] + (nibbles[i] >> 4) * x[i + 16];
    sum = fmaf(kern_f16_to_f32(load_u16(block)) * acts->scales[at / KERN_BLOCK], (float)dot, sum);
    if (has_min)
        sum = fmaf(kern_f16_to_f32(load_u16(block + 2)), acts->sums[at / KERN_BLOCK], sum);
    return sum;
}

static float block_q8(float sum, const uint8_t *block, const kern_acts *acts, size_t at)
{
    const int8_t *x = acts->quants + at;
    int32_t dot = 0;

    for (int i = 0; i < KERN_BLOCK; i++)
        dot += (int8_t)block[2 + i] * x[i];
    return fmaf(kern_f16_to_f32(load_u16(block)) * acts->scales[at / KERN_BLOCK], (float)dot, sum);
}

/* As block_q4 with a minimum, which is the run's own; both products with the block's scales are
 * exact. */
static float block_q4k(float sum, const uint8_t *block, uint32_t run, const kern_acts *acts,
                       size_t at)
{
    const uint8_t *scales = block + KERN_Q4K_SCALES_AT;
    const int8_t *x = acts->quants + at;
    float d = kern_f16_to_f32(load_u16(block)) * (float)kern_q4k_scale(scales, run);
    float least = kern_f16_to_f32(load_u16(block + 2)) * (float)kern_q4k_minimum(scales, run);
    int32_t dot = 0;

    for (uint32_t i = 0; i < KERN_BLOCK; i++)
        dot += (int32_t)kern_q4k_quant(block, run, i) * x[i];
    sum = fmaf(d * acts->scales[at / KERN_BLOCK], (float)dot, sum);
    return fmaf(-least, acts->sums[at / KERN_BLOCK], sum);
}

/* Both halves' dots times their scales are one integer, |dot| <= 32 * 32 * 127 * 128 < 2^24, so a
 * float has it exactly, and a run of 32 is one update as with the other formats. */
static float block_q6k(float sum, const uint8_t *block, uint32_t run, const kern_acts *acts,
                       size_t at)
{
    const int8_t *x = acts->quants + at;
    float d = kern_f16_to_f32(load_u16(block + KERN_Q6K_D_AT));
    int32_t dot = 0;

    for (uint32_t i = 0; i < KERN_BLOCK; i++)
        dot += kern_q6k_scale(block, run, i / 16) * ((int32_t)kern_q6k_quant(block, run, i) - 32) *
               x[i];
    return fmaf(d * acts->scales[at / KERN_BLOCK], (float)dot, sum);
}

/* The 32 columns from col on of a quantised row, times an activation row's. */
static float block_sum(float sum, pd_dtype dtype, const uint8_t *row, const kern_acts *acts,
                       size_t acts_at, uint32_t col)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    const uint8_t *block = row + (size_t)(col / info->block_weights) * info->block_bytes;
    uint32_t run = col / KERN_BLOCK % KERN_K_RUNS;

    switch (dtype) {
    case PD_Q8_0: return block_q8(sum, block, acts, acts_at + col);
    case PD_Q4_K: return block_q4k(sum, block, run, acts, acts_at + col);
    case PD_Q6_K: return block_q6k(sum, block, run, acts, acts_at + col);
    default: return block_q4(sum, block, dtype == PD_Q4_1, acts, acts_at + col);
    }
}

static float float_weight(pd_dtype dtype, const uint8_t *row, uint32_t col)
{
    float value;

    if (dtype == PD_F16)
        return kern_f16_to_f32(load_u16(row + 2 * (size_t)col));
    if (dtype == PD_BF16)
        return kern_bf16_to_f32(load_u16(row + 2 * (size_t)col));
    memcpy(&value, row + 4 * (size_t)col, sizeof value);
    return value;
}

/* Lane l takes columns l, l + 16, ...; columns past the end count as zeros. */
static float segment_float(pd_dtype dtype, const uint8_t *row, const float *x, uint32_t col_first,
                           uint32_t cols)
{
    float lanes[KERN_LANES] = {0};

    for (uint32_t i = 0; i < (cols + KERN_LANES - 1) / KERN_LANES * KERN_LANES; i++) {
        bool inside = i < cols;
        float weight = inside ? float_weight(dtype, row, col_first + i) : 0;
        lanes[i % KERN_LANES] = fmaf(weight, inside ? x[col_first + i] : 0, lanes[i % KERN_LANES]);
    }
    return kern_tree_sum(lanes);
}

/* A segment's sum over its columns, of one weight row and one activation row. */
static float segment_sum(const kern_matrix *matrix, const uint8_t *row, const kern_acts *acts,
                         uint32_t acts_row, uint32_t col_first, uint32_t cols)
{
    const pd_dtype_info *info = pd_dtype_info_of(matrix->dtype);
    size_t acts_at = (size_t)acts_row * acts->cols;
    float sum = 0;

    if (info->block_weights == 1)
        return segment_float(matrix->dtype, row, acts->values + acts_at, col_first, cols);
    for (uint32_t col = col_first; col < col_first + cols; col += KERN_BLOCK)
        sum = block_sum(sum, matrix->dtype, row, acts, acts_at, col);
    return sum;
}

/* The sums of the product's segments, added as the tree says. */
static float tree_sum(const kern_matrix *matrix, const uint8_t *row, const kern_acts *acts,
                      uint32_t acts_row)
{
    uint32_t cols = matrix->cols / matrix->segments, count = kern_matrix_segments(matrix);
    float waiting[KERN_TREE_DEPTH], sum = 0;
    uint32_t depth = 0;

    for (uint32_t s = 0; s < count; s++) {
        sum = segment_sum(matrix, row, acts, acts_row, (matrix->segment_from + s) * cols, cols);
        for (uint32_t adds = kern_tree_adds(s, count, depth); adds > 0; adds--)
            sum = waiting[--depth] + sum;
        if (s + 1 < count)
            waiting[depth++] = sum;
    }
    return sum;
}

static void ref_matmul(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                       const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                       float *const *out, bool add)
{
    const pd_dtype_info *info = pd_dtype_info_of(matrix->dtype);
    size_t row_bytes = (size_t)(matrix->cols / info->block_weights) * info->block_bytes;

    for (uint32_t n = 0; n < acts_rows; n++) {
        for (uint32_t r = row_first; r < row_first + rows; r++) {
            const uint8_t *row = (const uint8_t *)matrix->data + r * row_bytes;
            float total = tree_sum(matrix, row, acts, acts_first + n);
            out[n][r] = add ? out[n][r] + total : total;
        }
    }
}

static void ref_rms_norm(const float *x, const float *weight, uint32_t count, float eps, float *out)
{
    float lanes[KERN_LANES] = {0};

    for (uint32_t i = 0; i < count; i++)
        lanes[i % KERN_LANES] = fmaf(x[i], x[i], lanes[i % KERN_LANES]);
    float scale = 1.0f / sqrtf(kern_tree_sum(lanes) / (float)count + eps);
    for (uint32_t i = 0; i < count; i++)
        out[i] = x[i] * scale * weight[i];
}

static void ref_rope(float *head, const float *table, uint32_t pairs)
{
    for (uint32_t i = 0; i < pairs; i++) {
        float cosine = table[2 * i], sine = table[2 * i + 1];
        float even = head[2 * i], odd = head[2 * i + 1];
        head[2 * i] = fmaf(even, cosine, -(odd * sine));
        head[2 * i + 1] = fmaf(odd, cosine, even * sine);
    }
}

static void ref_store_f16(const float *x, uint32_t count, uint16_t *out)
{
    for (uint32_t i = 0; i < count; i++)
        out[i] = kern_f32_to_f16(x[i]);
}

static void ref_store_kv(const pd_kv_layout *layout, const float *x, uint32_t token, void *half)
{
    uint8_t *row = (uint8_t *)half + token * layout->token_bytes;
    float *scale = (float *)((uint8_t *)half + layout->scales_at) + token;

    switch (layout->dtype) {
    case PD_F16: ref_store_f16(x, layout->head_dim, (uint16_t *)row); break;
    case PD_INT8: kern_kv_row_int8(x, layout->head_dim, (int8_t *)row, scale); break;
    default:
        pd_assert(layout->dtype == PD_FP8_E4M3);
        kern_kv_row_e4m3(x, layout->head_dim, row, scale);
        break;
    }
}

static void ref_silu_mul(float *gate, const float *up, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        gate[i] = gate[i] / (1.0f + kern_exp(-gate[i])) * up[i];
}

static size_t ref_attention_scratch_bytes(uint32_t heads, uint32_t head_dim)
{
    (void)heads;
    return (KERN_SPLIT_TOKENS + 2 * (size_t)head_dim) * sizeof(float);
}

/* K (half 0) or V (1) of a token in the pool. */
typedef struct kv_row {
    pd_dtype dtype;
    const uint8_t *codes;
    float scale; /* 1 where the format has none */
} kv_row;

static kv_row kv_row_at(const kern_attention *args, uint32_t position, uint32_t half)
{
    const pd_kv_layout *layout = args->layout;
    uint32_t token = position % layout->block_tokens;
    const uint8_t *at =
        (const uint8_t *)args->pool + half * layout->half_bytes +
        pd_kv_layout_k_offset(layout, args->layer, args->blocks[position / layout->block_tokens],
                              args->kv_head);
    kv_row row = {layout->dtype, at + token * layout->token_bytes, 1};

    if (layout->scale_bytes != 0)
        memcpy(&row.scale, at + layout->scales_at + token * sizeof row.scale, sizeof row.scale);
    return row;
}

static float code_of(const kv_row *row, uint32_t d)
{
    uint16_t f16;

    switch (row->dtype) {
    case PD_INT8: return (float)(int8_t)row->codes[d];
    case PD_FP8_E4M3: return kern_e4m3_to_f32(row->codes[d]);
    default: memcpy(&f16, row->codes + 2 * (size_t)d, sizeof f16); return kern_f16_to_f32(f16);
    }
}

/* Even dimensions and odd ones are two chains. */
static float score(const float *query, const kv_row *key, uint32_t dim)
{
    float even = 0, odd = 0;

    for (uint32_t d = 0; d < dim; d += 2) {
        even = fmaf(query[d], code_of(key, d), even);
        odd = fmaf(query[d + 1], code_of(key, d + 1), odd);
    }
    return (even + odd) * key->scale;
}

/* Softmax over positions first .. first + count - 1 of one split: returns their largest score,
 * the sum of the exponentials (16 lanes by position) and the weighted sum of V (by position). */
static float attend_split(const kern_attention *args, const float *query, uint32_t first,
                          uint32_t count, float *scores, float *sum_out, float *out)
{
    uint32_t dim = args->layout->head_dim;
    float lanes[KERN_LANES] = {0};
    float largest = -INFINITY;

    for (uint32_t j = 0; j < count; j++) {
        kv_row key = kv_row_at(args, first + j, 0);
        scores[j] = score(query, &key, dim);
        largest = scores[j] > largest ? scores[j] : largest;
    }
    for (uint32_t d = 0; d < dim; d++)
        out[d] = 0;
    for (uint32_t j = 0; j < count; j++) {
        kv_row value = kv_row_at(args, first + j, 1);
        float p = kern_exp(scores[j] - largest), weight = p * value.scale;
        lanes[j % KERN_LANES] += p;
        for (uint32_t d = 0; d < dim; d++)
            out[d] = fmaf(weight, code_of(&value, d), out[d]);
    }
    *sum_out = kern_tree_sum(lanes);
    return largest;
}

/* What splits so far have come to, one query head's. */
typedef struct joined {
    float largest, sum;
    float *out; /* [dim] */
} joined;

static void join_split(joined *j, uint32_t dim, bool first, float largest, float sum,
                       const float *part)
{
    if (first) {
        j->largest = largest;
        j->sum = sum;
        for (uint32_t d = 0; d < dim; d++)
            j->out[d] = part[d];
        return;
    }
    float both = largest > j->largest ? largest : j->largest;
    float keep = kern_exp(j->largest - both), take = kern_exp(largest - both);
    j->sum = fmaf(sum, take, j->sum * keep);
    for (uint32_t d = 0; d < dim; d++)
        j->out[d] = fmaf(part[d], take, j->out[d] * keep);
    j->largest = both;
}

static void finish(const joined *j, uint32_t dim)
{
    float inverse = 1.0f / j->sum;

    for (uint32_t d = 0; d < dim; d++)
        j->out[d] *= inverse;
}

/* A query head's split at first, for a token at position. */
static float part_of(const kern_attention *args, const float *query, uint32_t position,
                     uint32_t first, float *sum_out, float *part)
{
    uint32_t dim = args->layout->head_dim, count = position + 1 - first;
    float *scores = args->scratch, *scaled = scores + KERN_SPLIT_TOKENS;

    for (uint32_t d = 0; d < dim; d++)
        scaled[d] = query[d] * args->scale;
    return attend_split(args, scaled, first, count < KERN_SPLIT_TOKENS ? count : KERN_SPLIT_TOKENS,
                        scores, sum_out, part);
}

/* One of the call's rows: a query head at one position. Splits of 256 positions, merged in order;
 * the first ones may have been made before. */
static void attend(const kern_attention *args, uint32_t row)
{
    uint32_t dim = args->layout->head_dim, rows = args->tokens * args->heads;
    uint32_t token = row / args->heads, position = args->position + token;
    size_t at = (size_t)(row % args->heads) * dim;
    const float *query = args->query + token * args->query_stride + at;
    float *part = (float *)args->scratch + KERN_SPLIT_TOKENS + dim;
    joined j = {.out = args->out + token * args->out_stride + at};

    for (uint32_t split = 0; split < args->parts_splits; split++) {
        const float *made = args->parts + split * kern_attention_part_floats(rows, dim);
        join_split(&j, dim, split == 0, made[row], made[rows + row],
                   made + 2 * (size_t)rows + (size_t)row * dim);
    }
    for (uint32_t first = args->parts_splits * KERN_SPLIT_TOKENS; first <= position;
         first += KERN_SPLIT_TOKENS) {
        float sum, largest = part_of(args, query, position, first, &sum, part);
        join_split(&j, dim, first == 0, largest, sum, part);
    }
    finish(&j, dim);
}

static void ref_attention_part(const kern_attention *args, uint32_t split, float *part)
{
    uint32_t dim = args->layout->head_dim, rows = args->tokens * args->heads;

    for (uint32_t row = 0; row < rows; row++) {
        const float *query = args->query + row / args->heads * args->query_stride +
                             (size_t)(row % args->heads) * dim;
        part[row] = part_of(args, query, args->position, split * KERN_SPLIT_TOKENS,
                            &part[rows + row], part + 2 * (size_t)rows + (size_t)row * dim);
    }
}

static void ref_attention_join(const kern_attention *args, uint32_t splits, const float *parts)
{
    uint32_t dim = args->layout->head_dim, heads = args->heads;

    for (uint32_t h = 0; h < heads; h++) {
        joined j = {.out = args->out + (size_t)h * dim};
        for (uint32_t split = 0; split < splits; split++) {
            const float *part = parts + split * kern_attention_part_floats(heads, dim);
            join_split(&j, dim, split == 0, part[h], part[heads + h],
                       part + 2 * (size_t)heads + (size_t)h * dim);
        }
        finish(&j, dim);
    }
}

static void ref_attention(const kern_attention *args)
{
    for (uint32_t row = 0; row < args->tokens * args->heads; row++)
        attend(args, row);
}

const kern_ops kern_ops_ref = {
    .name = "cpu-ref",
    .probe = ref_probe,
    .supports = ref_supports,
    .pack_bytes = ref_pack_bytes,
    .pack = ref_pack,
    .quantize = ref_quantize,
    .residual = ref_residual,
    .matmul = ref_matmul,
    .rms_norm = ref_rms_norm,
    .rope = ref_rope,
    .store_f16 = ref_store_f16,
    .store_kv = ref_store_kv,
    .silu_mul = ref_silu_mul,
    .attention_scratch_bytes = ref_attention_scratch_bytes,
    .attention = ref_attention,
    .attention_part = ref_attention_part,
    .attention_join = ref_attention_join,
};

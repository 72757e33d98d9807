/* Every operation of every table against the reference's on random shapes and numbers, in memory
 * where a byte too far is seen; and operations that are wrong in one way each, which must be found.
 *
 * test_fuzz [PARTS]: one of so many parts of the cases. KVFERRY_SEED=N repeats a run,
 * KVFERRY_FUZZ=OP:CASE does one case of it; KVFERRY_FULL=1 does 60 times as many. */

#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/fuzz.h"

#include "common/base/hash.h"
#include "common/base/mem.h"
#include "kernels/kv_row.h"
#include "kernels/number.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TABLES_MAX 8
#define FULL_TIMES 60

/* About as long for each of those that matter. */
static const uint32_t cases[FUZZ_OPS] = {
    [FUZZ_QUANTIZE] = 400,  [FUZZ_RESIDUAL] = 200,  [FUZZ_MATMUL] = 350,   [FUZZ_RMS_NORM] = 300,
    [FUZZ_ROPE] = 200,      [FUZZ_STORE_F16] = 300, [FUZZ_SILU_MUL] = 300, [FUZZ_STORE_KV] = 400,
    [FUZZ_ATTENTION] = 200, [FUZZ_PART] = 100,      [FUZZ_JOIN] = 60,
};

static uint64_t seed;
static uint32_t times, parts_of_all = 1;

static uint64_t seed_of(fuzz_op op, uint32_t number)
{
    return pd_mix64(pd_mix64(seed) + (uint64_t)op * 0x100000000 + number);
}

static void one_case(fuzz_op op, uint32_t number, const kern_ops *const *tables, uint32_t count)
{
    char text[400];

    if (!fuzz_case(op, seed_of(op, number), tables, count, text, sizeof text))
        fail_msg("%s (KVFERRY_SEED=%" PRIu64 " KVFERRY_FUZZ=%s:%u repeats it)", text, seed,
                 fuzz_name(op), number);
}

static uint32_t all_tables(const kern_ops **tables)
{
    char reason[128];
    uint32_t count = 0;

    for (uint32_t i = 1; kern_ops_at(i) != NULL; i++)
        if (kern_ops_at(i)->probe(reason, sizeof reason) > 0 && count < TABLES_MAX)
            tables[count++] = kern_ops_at(i);
    return count;
}

static void every_table_computes_what_the_reference_does(void **state)
{
    const kern_ops *tables[TABLES_MAX];
    uint32_t count = all_tables(tables);
    const char *only = getenv("KVFERRY_FUZZ");

    (void)state;
    for (fuzz_op op = 0; op < FUZZ_OPS; op++) {
        size_t name = strlen(fuzz_name(op));
        if (only != NULL && strncmp(only, fuzz_name(op), name) == 0 && only[name] == ':')
            one_case(op, (uint32_t)strtoul(only + name + 1, NULL, 10), tables, count);
        for (uint32_t n = 0; only == NULL && n < cases[op] * times / parts_of_all; n++)
            one_case(op, n, tables, count);
    }
}

/* ---- operations that are wrong in one way each ---- */

/* Table 0 of this build, the reference, is what they call: whatever else they do is their fault. */
#define RIGHT kern_ops_at(0)

static void last_row_is_missing(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                                const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                                float *const *out, bool add)
{
    RIGHT->matmul(matrix, row_first, rows - 1, acts, acts_first, acts_rows, out, add);
}
static void a_row_too_many(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                           const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                           float *const *out, bool add)
{
    RIGHT->matmul(matrix, row_first, rows, acts, acts_first, acts_rows, out, add);
    for (uint32_t n = 0; n < acts_rows; n++)
        out[n][row_first + rows] = 0;
}
static void one_activation_row_again(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                                     const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                                     float *const *out, bool add)
{
    RIGHT->matmul(matrix, row_first, rows, acts, acts_first, acts_rows, out, add);
    if (acts_rows > 8 && !add) /* as where eight rows are a tile: the next tile's first */
        memcpy(out[8] + row_first, out[7] + row_first, rows * sizeof **out);
}
static void never_added(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                        const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                        float *const *out, bool add)
{
    (void)add;
    RIGHT->matmul(matrix, row_first, rows, acts, acts_first, acts_rows, out, false);
}
static void segments_one_after_the_other(const kern_matrix *matrix, uint32_t row_first,
                                         uint32_t rows, const kern_acts *acts, uint32_t acts_first,
                                         uint32_t acts_rows, float *const *out, bool add)
{
    uint32_t count = kern_matrix_segments(matrix);

    for (uint32_t s = 0; s < count; s++) {
        kern_matrix leaf = kern_matrix_node(matrix, matrix->segment_from + s, 1);
        RIGHT->matmul(&leaf, row_first, rows, acts, acts_first, acts_rows, out, add || s > 0);
    }
}
static void zero_instead_of_nan(const kern_acts *acts, uint32_t row, uint32_t col_first,
                                uint32_t cols)
{
    size_t at = ((size_t)row * acts->cols + col_first) / KERN_BLOCK;

    RIGHT->quantize(acts, row, col_first, cols);
    for (uint32_t b = 0; b < cols / KERN_BLOCK; b++)
        if (acts->scales[at + b] != acts->scales[at + b])
            acts->scales[at + b] = 0;
}
static void sums_of_the_block_before(const kern_acts *acts, uint32_t row, uint32_t col_first,
                                     uint32_t cols)
{
    size_t at = ((size_t)row * acts->cols + col_first) / KERN_BLOCK;

    RIGHT->quantize(acts, row, col_first, cols);
    if (cols > KERN_BLOCK)
        acts->quant_sums[at + 1] = acts->quant_sums[at];
}
static void a_block_too_many(const kern_acts *acts, uint32_t row, uint32_t col_first, uint32_t cols)
{
    RIGHT->quantize(acts, row, col_first, cols + KERN_BLOCK);
}
static void residual_of_the_first_scale(const kern_acts *acts, uint32_t row, uint32_t col_first,
                                        uint32_t cols, uint32_t residual_row)
{
    float *out = acts->values + (size_t)residual_row * acts->cols;
    const float *x = acts->values + (size_t)row * acts->cols;
    size_t at = (size_t)row * acts->cols;

    for (uint32_t col = col_first; col < col_first + cols; col++)
        out[col] =
            fmaf(-acts->scales[(at + col_first) / KERN_BLOCK], acts->quants[at + col], x[col]);
}
static void norm_without_its_tail(const float *x, const float *weight, uint32_t count, float eps,
                                  float *out)
{
    float lanes[KERN_LANES] = {0};

    for (uint32_t i = 0; i < count / KERN_LANES * KERN_LANES; i++)
        lanes[i % KERN_LANES] = fmaf(x[i], x[i], lanes[i % KERN_LANES]);
    float scale = 1.0f / sqrtf(kern_tree_sum(lanes) / (float)count + eps);
    for (uint32_t i = 0; i < count; i++)
        out[i] = x[i] * scale * weight[i];
}
static void last_pair_stays(float *head, const float *table, uint32_t pairs)
{
    RIGHT->rope(head, table, pairs - 1);
}
static void rotated_the_other_way(float *head, const float *table, uint32_t pairs)
{
    for (uint32_t i = 0; i < pairs; i++) {
        float back[2] = {table[2 * i], -table[2 * i + 1]};
        RIGHT->rope(head + 2 * i, back, 1);
    }
}
static void too_large_is_infinite(const float *x, uint32_t count, uint16_t *out)
{
    RIGHT->store_f16(x, count, out);
    for (uint32_t i = 0; i < count; i++)
        if (fabsf(x[i]) >= 65520)
            out[i] = x[i] > 0 ? 0x7c00 : 0xfc00;
}
static void subnormals_are_zeros(const float *x, uint32_t count, uint16_t *out)
{
    RIGHT->store_f16(x, count, out);
    for (uint32_t i = 0; i < count; i++)
        if ((out[i] & 0x7c00) == 0)
            out[i] &= 0x8000;
}
static void the_next_tokens_scale(const pd_kv_layout *layout, const float *x, uint32_t token,
                                  void *half)
{
    RIGHT->store_kv(layout, x, token, half);
    if (layout->scale_bytes != 0) {
        float *scales = (float *)(void *)((uint8_t *)half + layout->scales_at);
        scales[token + 1] = scales[token];
    }
}
static void int8_of_128_steps(const pd_kv_layout *layout, const float *x, uint32_t token,
                              void *half)
{
    RIGHT->store_kv(layout, x, token, half);
    if (layout->dtype == PD_INT8)
        ((float *)(void *)((uint8_t *)half + layout->scales_at))[token] *= 127.0f / 128;
}
static void silu_past_the_end(float *gate, const float *up, uint32_t count)
{
    volatile float *past = gate + count; /* what a whole vector would leave as it was */

    RIGHT->silu_mul(gate, up, count);
    *past = *past;
}
static void attention_sees_the_next(const kern_attention *args)
{
    kern_attention late = *args;

    late.position++; /* its K and V are another token's, or nobody's */
    if (args->tokens > 1)
        late.tokens--;
    RIGHT->attention(&late);
}
static void the_first_part_is_left_out(const kern_attention *args)
{
    kern_attention late = *args;

    if (args->parts_splits > 0) {
        late.parts +=
            kern_attention_part_floats(args->tokens * args->heads, args->layout->head_dim);
        late.parts_splits--;
    }
    RIGHT->attention(&late);
}
static void largest_of_another_row(const kern_attention *args, uint32_t split, float *part)
{
    RIGHT->attention_part(args, split, part);
    if (args->tokens * args->heads > 1)
        part[0] = part[1];
}
static void joined_backwards(const kern_attention *args, uint32_t splits, const float *parts)
{
    size_t floats = kern_attention_part_floats(args->heads, args->layout->head_dim);
    float *turned = malloc(splits * floats * sizeof *turned);

    for (uint32_t split = 0; split < splits; split++)
        memcpy(turned + split * floats, parts + (splits - 1 - split) * floats,
               floats * sizeof *turned);
    RIGHT->attention_join(args, splits, turned);
    free(turned);
}
static size_t packs_nothing(pd_dtype dtype, uint32_t rows, uint32_t cols)
{
    return pd_dtype_info_of(dtype)->block_weights == 1 ? 0 : (size_t)rows * cols;
}
static void pack_a_byte_too_far(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows,
                                void *out)
{
    (void)dtype, (void)file_rows;
    memset(out, 0, (size_t)rows * cols + 1);
}

typedef struct planted {
    const char *name;
    fuzz_op op;
    kern_ops wrong; /* what is not set is the reference's */
} planted;

#define PLANTED(op, slot, function)                                                                \
    {                                                                                              \
#function, op,                                                                             \
        {                                                                                          \
            .slot = (function)                                                                     \
        }                                                                                          \
    }

static const planted planted_ops[] = {
    PLANTED(FUZZ_MATMUL, matmul, last_row_is_missing),
    PLANTED(FUZZ_MATMUL, matmul, a_row_too_many),
    PLANTED(FUZZ_MATMUL, matmul, one_activation_row_again),
    PLANTED(FUZZ_MATMUL, matmul, never_added),
    PLANTED(FUZZ_MATMUL, matmul, segments_one_after_the_other),
    PLANTED(FUZZ_QUANTIZE, quantize, zero_instead_of_nan),
    PLANTED(FUZZ_QUANTIZE, quantize, sums_of_the_block_before),
    PLANTED(FUZZ_QUANTIZE, quantize, a_block_too_many),
    PLANTED(FUZZ_RESIDUAL, residual, residual_of_the_first_scale),
    PLANTED(FUZZ_RMS_NORM, rms_norm, norm_without_its_tail),
    PLANTED(FUZZ_ROPE, rope, last_pair_stays),
    PLANTED(FUZZ_ROPE, rope, rotated_the_other_way),
    PLANTED(FUZZ_STORE_F16, store_f16, too_large_is_infinite),
    PLANTED(FUZZ_STORE_F16, store_f16, subnormals_are_zeros),
    PLANTED(FUZZ_STORE_KV, store_kv, the_next_tokens_scale),
    PLANTED(FUZZ_STORE_KV, store_kv, int8_of_128_steps),
    PLANTED(FUZZ_SILU_MUL, silu_mul, silu_past_the_end),
    PLANTED(FUZZ_ATTENTION, attention, attention_sees_the_next),
    PLANTED(FUZZ_ATTENTION, attention, the_first_part_is_left_out),
    PLANTED(FUZZ_PART, attention_part, largest_of_another_row),
    PLANTED(FUZZ_JOIN, attention_join, joined_backwards),
    {"pack_a_byte_too_far",
     FUZZ_MATMUL,
     {.pack_bytes = packs_nothing, .pack = pack_a_byte_too_far}},
};

static kern_ops completed(const kern_ops *wrong)
{
    kern_ops ops = *kern_ops_at(0);

    ops.name = "planted";
#define TAKE(slot) ops.slot = wrong->slot != NULL ? wrong->slot : ops.slot
    TAKE(pack_bytes);
    TAKE(pack);
    TAKE(quantize);
    TAKE(residual);
    TAKE(matmul);
    TAKE(rms_norm);
    TAKE(rope);
    TAKE(store_f16);
    TAKE(store_kv);
    TAKE(silu_mul);
    TAKE(attention);
    TAKE(attention_part);
    TAKE(attention_join);
#undef TAKE
    return ops;
}

/* Each within the cases of a short run, of this seed as of any. */
static void what_is_planted_is_found(void **state)
{
    char text[400] = "";

    (void)state;
    for (size_t p = 0; p < sizeof planted_ops / sizeof *planted_ops; p++) {
        const planted *is = &planted_ops[p];
        kern_ops ops = completed(&is->wrong);
        const kern_ops *tables[] = {&ops};
        uint32_t n = 0;
        while (n < cases[is->op] &&
               fuzz_case(is->op, seed_of(is->op, n), tables, 1, text, sizeof text))
            n++;
        if (n == cases[is->op])
            fail_msg("%s was not found in %u cases (KVFERRY_SEED=%" PRIu64 ")", is->name, n, seed);
        print_message("# %s: case %u, %s\n", is->name, n, text);
        assert_non_null(strstr(text, fuzz_name(is->op)));
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_table_computes_what_the_reference_does),
        cmocka_unit_test(what_is_planted_is_found),
    };

    seed = choice_seed();
    times = choice_full() ? FULL_TIMES : 1;
    if (argc > 1)
        parts_of_all = (uint32_t)strtoul(argv[1], NULL, 10);
    choice_filter();
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include "tests/unit/kernels/fuzz.h"

#include "kernels/number.h"
#include "tests/unit/kernels/guard.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"

#include <float.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define UNWRITTEN 0x5a /* as a float a number of its own, 1.5e16 */

/* ---- random ---- */

uint32_t fuzz_below(fuzz *f, uint32_t n)
{
    return (uint32_t)(pd_random_next(&f->random) % n);
}

uint32_t fuzz_between(fuzz *f, uint32_t least, uint32_t most)
{
    return least + fuzz_below(f, most - least + 1);
}

bool fuzz_chance(fuzz *f, uint32_t one_in)
{
    return fuzz_below(f, one_in) == 0;
}

void *fuzz_bytes(fuzz *f, size_t bytes, size_t align, uint8_t fill)
{
    return guard_take(bytes, align, !fuzz_chance(f, 3), fill);
}

static float special(fuzz *f)
{
    static const float values[] = {INFINITY, FLT_MAX, FLT_MIN, 1e-42f, 1e-45f,   0,        1e-35f,
                                   9e-36f,   3e38f,   3.1e38f, 65504,  65519.9f, 65520,    87,
                                   88,       89,      0.5f,    1,      2.5f,     1e-7f,    6e-8f,
                                   3e-8f,    1e19f,   2e19f,   127,    6.1e-5f,  6.09e-5f, 1e7f};
    static const uint32_t nans[] = {0x7fc00000, 0x7f800001, 0x7fabcdef};
    uint32_t which = fuzz_below(f, sizeof values / sizeof *values + 3);
    float value = which < 3 ? kern_float_of(nans[which]) : values[which - 3];

    return fuzz_chance(f, 2) ? -value : value;
}

/* Most often ordinary numbers with outliers; a NaN in one array of eight. */
void fuzz_fill(fuzz *f, float *x, size_t count)
{
    static const float scales[] = {1, 1, 1, 1e-3f, 30, 1e-20f, 1e-37f, 1e30f};
    uint32_t kind = fuzz_below(f, 16);
    float scale = scales[fuzz_below(f, sizeof scales / sizeof *scales)];

    for (size_t i = 0; i < count; i++) {
        x[i] = tiny_random(&f->random) * scale;
        if (kind == 0 && fuzz_chance(f, 40))
            x[i] = special(f);
        if (kind == 1 && fuzz_chance(f, 3))
            x[i] = fuzz_chance(f, 2) ? 0.0f : -0.0f;
        if (kind == 2 && i % 32 < 16)
            x[i] = special(f);
        if (kind == 3)
            x[i] = scale;
    }
    if (kind == 4) /* at the end, where tails are */
        x[count - 1] = special(f);
}

float *fuzz_floats(fuzz *f, size_t count)
{
    float *x = fuzz_bytes(f, count * sizeof *x, sizeof *x, 0xff);

    fuzz_fill(f, x, count);
    return x;
}

void fuzz_add_out(fuzz *f, const char *name, fuzz_kind kind, size_t bytes, size_t align,
                  const void *initial)
{
    fuzz_out *out = &f->outs[f->outs_count];

    if (f->outs_count++ == 0)
        guard_freeze();
    *out = (fuzz_out){.name = name, .kind = kind, .bytes = bytes, .initial = initial};
    for (int side = 0; side < 2; side++)
        out->side[side] = fuzz_bytes(f, bytes, align, UNWRITTEN);
}

void fuzz_describe(fuzz *f, const char *format, ...)
{
    va_list list;

    va_start(list, format);
    vsnprintf(f->shape, sizeof f->shape, format, list);
    va_end(list);
}

/* ---- rows ---- */

static struct {
    const float *x, *weight;
    uint32_t count;
    float eps;
} row;

static void call_rms_norm(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    ops->rms_norm(row.x, row.weight, row.count, row.eps, f->outs[0].side[side]);
}

static void make_rms_norm(fuzz *f)
{
    row.count = fuzz_between(f, 1, fuzz_chance(f, 2) ? 70 : 900);
    row.x = fuzz_floats(f, row.count);
    row.weight = fuzz_floats(f, row.count);
    row.eps = fuzz_chance(f, 2) ? 1e-5f : 1e-6f;
    fuzz_add_out(f, "out", FUZZ_FLOATS, row.count * sizeof(float), sizeof(float), NULL);
    f->call = call_rms_norm;
    fuzz_describe(f, "count %u", row.count);
}

static void call_rope(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    ops->rope(f->outs[0].side[side], row.weight, row.count);
}

static void make_rope(fuzz *f)
{
    row.count = fuzz_between(f, 1, 80);
    row.x = fuzz_floats(f, 2 * (size_t)row.count);
    row.weight = fuzz_floats(f, 2 * (size_t)row.count);
    fuzz_add_out(f, "head", FUZZ_FLOATS, 2 * row.count * sizeof(float), sizeof(float), row.x);
    f->call = call_rope;
    fuzz_describe(f, "pairs %u", row.count);
}

static void call_store_f16(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    ops->store_f16(row.x, row.count, f->outs[0].side[side]);
}

static void make_store_f16(fuzz *f)
{
    row.count = fuzz_between(f, 1, 300);
    row.x = fuzz_floats(f, row.count);
    fuzz_add_out(f, "halves", FUZZ_HALVES, row.count * sizeof(uint16_t), sizeof(uint16_t), NULL);
    f->call = call_store_f16;
    fuzz_describe(f, "count %u", row.count);
}

static void call_silu_mul(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    ops->silu_mul(f->outs[0].side[side], row.x, row.count);
}

static void make_silu_mul(fuzz *f)
{
    row.count = fuzz_between(f, 1, fuzz_chance(f, 2) ? 70 : 900);
    row.x = fuzz_floats(f, row.count);
    row.weight = fuzz_floats(f, row.count);
    fuzz_add_out(f, "gate", FUZZ_FLOATS, row.count * sizeof(float), sizeof(float), row.weight);
    f->call = call_silu_mul;
    fuzz_describe(f, "count %u", row.count);
}

/* ---- a case ---- */

static const struct {
    const char *name;
    void (*make)(fuzz *f);
} makers[FUZZ_OPS] = {
    [FUZZ_QUANTIZE] = {"quantize", fuzz_make_quantize},
    [FUZZ_RESIDUAL] = {"residual", fuzz_make_residual},
    [FUZZ_MATMUL] = {"matmul", fuzz_make_matmul},
    [FUZZ_RMS_NORM] = {"rms_norm", make_rms_norm},
    [FUZZ_ROPE] = {"rope", make_rope},
    [FUZZ_STORE_F16] = {"store_f16", make_store_f16},
    [FUZZ_SILU_MUL] = {"silu_mul", make_silu_mul},
    [FUZZ_STORE_KV] = {"store_kv", fuzz_make_store_kv},
    [FUZZ_ATTENTION] = {"attention", fuzz_make_attention},
    [FUZZ_PART] = {"attention_part", fuzz_make_part},
    [FUZZ_JOIN] = {"attention_join", fuzz_make_join},
};

const char *fuzz_name(fuzz_op op)
{
    return makers[op].name;
}

typedef struct side_run {
    const fuzz *f;
    const kern_ops *ops;
    uint32_t side;
} side_run;

static void run_side(void *ctx)
{
    const side_run *run = ctx;

    run->f->call(run->f, run->ops, run->side);
}

/* Outputs of a side to what they hold before, then the operation. NULL: well; else what happened.
 */
static const char *run_on(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    side_run run = {f, ops, side};

    for (uint32_t i = 0; i < f->outs_count; i++) {
        const fuzz_out *out = &f->outs[i];
        if (out->initial != NULL)
            memcpy(out->side[side], out->initial, out->bytes);
        else
            memset(out->side[side], UNWRITTEN, out->bytes);
    }
    if (!guard_run(run_side, &run))
        return "touches memory that is not its own";
    return guard_intact() ? NULL : "writes past an array's end";
}

static bool same_at(fuzz_kind kind, const void *left, const void *right, size_t i)
{
    const float *a = left, *b = right;
    const uint16_t *h = left, *k = right;
    const uint8_t *p = left, *q = right;

    switch (kind) {
    case FUZZ_FLOATS:
        return kern_bits_of(a[i]) == kern_bits_of(b[i]) || (a[i] != a[i] && b[i] != b[i]);
    case FUZZ_HALVES: return h[i] == k[i] || ((h[i] & 0x7fff) > 0x7c00 && (k[i] & 0x7fff) > 0x7c00);
    default: return p[i] == q[i];
    }
}

/* Whether the sides are the same; else where they differ first. */
static bool same_outs(const fuzz *f, char *text, size_t text_size)
{
    for (uint32_t i = 0; i < f->outs_count; i++) {
        const fuzz_out *out = &f->outs[i];
        size_t unit = out->kind == FUZZ_FLOATS ? 4 : out->kind == FUZZ_HALVES ? 2 : 1;
        for (size_t n = 0; n < out->bytes / unit; n++)
            if (!same_at(out->kind, out->side[0], out->side[1], n)) {
                snprintf(text, text_size, "%s[%zu] differs", out->name, n);
                return false;
            }
    }
    return true;
}

bool fuzz_case(fuzz_op op, uint64_t seed, const kern_ops *const *tables, uint32_t tables_count,
               char *text, size_t text_size)
{
    fuzz f = {.random = seed};
    const char *wrong;
    char place[64];
    bool right = true;

    makers[op].make(&f);
    wrong = run_on(&f, kern_ops_at(0), 0);
    if (wrong != NULL) {
        snprintf(text, text_size, "cpu-ref: %s %s; %s", fuzz_name(op), wrong, f.shape);
        right = false;
    }
    for (uint32_t t = 0; right && t < tables_count; t++) {
        wrong = run_on(&f, tables[t], 1);
        if (wrong == NULL && !same_outs(&f, place, sizeof place))
            wrong = place;
        if (wrong != NULL) {
            snprintf(text, text_size, "%s: %s %s; %s", tables[t]->name, fuzz_name(op), wrong,
                     f.shape);
            right = false;
        }
    }
    guard_give_back();
    return right;
}

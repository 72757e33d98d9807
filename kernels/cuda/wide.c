#include "kernels/cuda/wide.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/cuda/blaslt.h"
#include "kernels/cuda/stage.h"

#include <stdio.h>
#include <string.h>

#define SHAPES_MAX 8
#define TRIES      16 /* algorithms of a shape */

/* A product has as many rows as one of these; what is left over is our kernel's. */
static const uint32_t cuts[] = {2048, 1024, 512};
#define CUTS (sizeof cuts / sizeof *cuts)

typedef struct shape {
    const cu_matrix *matrix; /* one that has it */
    uint64_t out_stride;
    blaslt_plan *plans[CUTS]; /* NULL: none with our bits */
} shape;

struct cu_wide {
    gpu *device;
    blaslt *library;
    void *plain; /* the matrix that is multiplied, in the library's order */
    uint32_t count;
    shape shapes[SHAPES_MAX];
};

/* ---- which products ---- */

static bool same_shape(const cu_matrix *a, const cu_matrix *b)
{
    return a->dtype == b->dtype && a->rows == b->rows && a->cols == b->cols;
}

static const shape *find(const cu_wide *wide, const cu_matrix *matrix, uint64_t out_stride)
{
    for (uint32_t i = 0; i < wide->count; i++)
        if (same_shape(wide->shapes[i].matrix, matrix) && wide->shapes[i].out_stride == out_stride)
            return &wide->shapes[i];
    return NULL;
}

static void add_group(cu_wide *wide, const cu_group *group)
{
    for (uint32_t i = 0; i < group->count; i++) {
        const cu_matrix *m = &group->matrix[i];
        bool half = m->dtype == PD_F16 || m->dtype == PD_BF16;
        /* what the library needs of alignment: where the results begin, and their stride */
        bool aligned = group->rows % 4 == 0 && group->first[i] % 4 == 0;
        if (half && aligned && wide->count < SHAPES_MAX && find(wide, m, group->rows) == NULL)
            wide->shapes[wide->count++] = (shape){.matrix = m, .out_stride = group->rows};
    }
}

static void add_all(cu_wide *wide, const cu_weights *weights, uint32_t rows_max)
{
    for (uint32_t i = 0; rows_max >= CU_WIDE_ROWS_MIN && i < weights->shape.layers; i++) {
        add_group(wide, &weights->layers[i].qkv);
        add_group(wide, &weights->layers[i].gate_up);
    }
}

static uint64_t plain_bytes(const cu_wide *wide)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < wide->count; i++) {
        uint64_t bytes = 2 * (uint64_t)wide->shapes[i].matrix->rows * wide->shapes[i].matrix->cols;
        most = bytes > most ? bytes : most;
    }
    return most;
}

uint64_t cu_wide_bytes(const cu_weights *weights, uint32_t rows_max)
{
    cu_wide wide = {0};

    add_all(&wide, weights, rows_max);
    return wide.count == 0 ? 0 : BLASLT_WORKSPACE_BYTES + plain_bytes(&wide);
}

/* ---- whether the bits are the same ---- */

/* What is needed to look, and only then. */
typedef struct trial {
    cu_wide *wide;
    gpu_stream *stream;
    uint32_t rows;
    uint16_t *acts;    /* [rows][cols] of the widest */
    float *ours, *its; /* [rows][out_stride] likewise */
    uint32_t *differ;
} trial;

static uint32_t cut_most(uint32_t rows_max)
{
    for (uint32_t i = 0; i < CUTS; i++)
        if (cuts[i] <= rows_max)
            return cuts[i];
    return 0;
}

static uint64_t acts_count(const trial *t)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < t->wide->count; i++) {
        uint64_t count = (uint64_t)t->rows * t->wide->shapes[i].matrix->cols;
        most = count > most ? count : most;
    }
    return most;
}

static uint64_t out_bytes(const trial *t)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < t->wide->count; i++) {
        uint64_t bytes = t->rows * t->wide->shapes[i].out_stride * sizeof(float);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Both signs, sizes from 2^-4 to 2^3 and now and then 2^8, and whole fractions, as f16 or bf16 (an
 * exponent that is small in both is not the same number, which does not matter). */
static void fill_acts(uint16_t *acts, uint64_t count, bool bf16)
{
    uint32_t fraction_bits = bf16 ? 7 : 10, bias = bf16 ? 127 : 15;
    uint64_t random = 0x9e3779b97f4a7c15;

    for (uint64_t i = 0; i < count; i++) {
        random ^= random << 13; /* xorshift64, Marsaglia 2003 */
        random ^= random >> 7;
        random ^= random << 17;
        uint32_t bits = (uint32_t)(random >> 32), exponent = bias - 4 + (bits >> 16 & 7);
        if ((bits >> 20 & 0xff) == 0)
            exponent = bias + 8;
        acts[i] = (uint16_t)((bits >> 31) << 15 | exponent << fraction_bits |
                             (bits & ((1u << fraction_bits) - 1)));
    }
}

static pd_status send_acts(const trial *t, bool bf16)
{
    uint64_t bytes = acts_count(t) * sizeof(uint16_t);
    uint16_t *acts = pd_malloc(bytes);
    cu_stage *stage = NULL;

    if (acts == NULL)
        return PD_E_NOMEM;
    fill_acts(acts, acts_count(t), bf16);
    pd_status status = cu_stage_create(t->wide->device, 1u << 20, &stage);
    if (status == PD_OK)
        status = cu_stage_copy(stage, t->acts, acts, bytes);
    if (status == PD_OK)
        status = cu_stage_finish(stage);
    cu_stage_destroy(stage);
    pd_free(acts);
    return status;
}

/* *same_out: every word of t->its is t->ours'. */
static pd_status compare(const trial *t, const shape *s, uint32_t rows, bool *same_out)
{
    uint32_t differ = 1;

    pd_status status = gpu_fill(t->stream, t->differ, 0, sizeof differ);
    if (status == PD_OK)
        status = cu_compare(t->stream, t->ours, t->its, rows * s->out_stride, t->differ);
    if (status == PD_OK)
        status = gpu_copy_out(t->stream, &differ, t->differ, sizeof differ);
    if (status == PD_OK)
        status = gpu_stream_wait(t->stream);
    *same_out = differ == 0;
    return status;
}

/* The first of the library's algorithms that gives what t->ours has. */
static pd_status try_algorithms(const trial *t, const shape *s, uint32_t rows,
                                blaslt_plan **plan_out)
{
    const cu_matrix *m = s->matrix;
    const blaslt_shape wanted = {.bf16 = m->dtype == PD_BF16,
                                 .weight_rows = m->rows,
                                 .cols = m->cols,
                                 .rows = rows,
                                 .out_stride = s->out_stride};

    for (uint32_t nth = 0; nth < TRIES; nth++) {
        blaslt_plan *plan = NULL;
        bool same = false;
        pd_status status = blaslt_plan_create(t->wide->library, &wanted, nth, &plan);
        if (status == PD_OK)
            status = blaslt_matmul(plan, t->stream, t->wide->plain, t->acts, t->its);
        if (status == PD_OK)
            status = compare(t, s, rows, &same);
        if (status == PD_OK && same) {
            *plan_out = plan;
            return PD_OK;
        }
        blaslt_plan_destroy(plan);
        if (plan == NULL && status == PD_E_UNSUPPORTED)
            return PD_OK; /* there are no more */
        if (gpu_broken(t->wide->device) != NULL || status == PD_E_NOMEM)
            return status;
    }
    return PD_OK;
}

static pd_status try_shape(const trial *t, shape *s)
{
    const cu_matrix *m = s->matrix;
    cu_acts acts = {.cols = m->cols, .halves = t->acts, .halves_are_bf16 = m->dtype == PD_BF16};

    pd_status status = send_acts(t, acts.halves_are_bf16);
    if (status == PD_OK)
        status = cu_unpack(t->stream, m->rows, m->cols, m->data, t->wide->plain);
    for (uint32_t i = 0; status == PD_OK && i < CUTS; i++) {
        if (cuts[i] > t->rows)
            continue;
        /* places between the rows' results stay as they are: the same in both */
        status = gpu_fill(t->stream, t->ours, 0xff, out_bytes(t));
        if (status == PD_OK)
            status = gpu_fill(t->stream, t->its, 0xff, out_bytes(t));
        if (status == PD_OK)
            status = cu_matmul(t->stream, m, &acts, cuts[i], t->ours, s->out_stride);
        if (status == PD_OK)
            status = try_algorithms(t, s, cuts[i], &s->plans[i]);
    }
    return status;
}

static void trial_end(trial *t)
{
    gpu *g = t->wide->device;

    gpu_free(g, t->acts);
    gpu_free(g, t->ours);
    gpu_free(g, t->its);
    gpu_free(g, t->differ);
    gpu_stream_destroy(t->stream);
}

static pd_status trial_start(trial *t)
{
    gpu *g = t->wide->device;

    pd_status status = gpu_stream_create(g, &t->stream);
    if (status == PD_OK)
        status = gpu_alloc(g, acts_count(t) * sizeof *t->acts, (void **)&t->acts);
    if (status == PD_OK)
        status = gpu_alloc(g, out_bytes(t), (void **)&t->ours);
    if (status == PD_OK)
        status = gpu_alloc(g, out_bytes(t), (void **)&t->its);
    return status == PD_OK ? gpu_alloc(g, sizeof *t->differ, (void **)&t->differ) : status;
}

/* ---- creation ---- */

static uint32_t plans_of(const cu_wide *wide)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < wide->count; i++)
        for (uint32_t cut = 0; cut < CUTS; cut++)
            count += wide->shapes[i].plans[cut] != NULL;
    return count;
}

/* *reason is written where there is nothing to be had. */
static pd_status look(cu_wide *wide, uint32_t rows_max, char *reason, size_t reason_size)
{
    trial t = {.wide = wide, .rows = cut_most(rows_max)};
    uint64_t free_bytes = 0;
    uint64_t wanted = plain_bytes(wide) + BLASLT_WORKSPACE_BYTES + 2 * out_bytes(&t) +
                      acts_count(&t) * sizeof *t.acts;

    pd_status status = gpu_memory_free(wide->device, &free_bytes);
    if (status != PD_OK)
        return status;
    if (free_bytes < wanted + wanted / 8) {
        snprintf(reason, reason_size, "no memory is left to try it");
        return PD_OK;
    }
    status = blaslt_open(wide->device, &wide->library, reason, reason_size);
    if (status != PD_OK)
        return status == PD_E_UNSUPPORTED ? PD_OK : status;
    status = gpu_alloc(wide->device, plain_bytes(wide), &wide->plain);
    if (status == PD_OK)
        status = trial_start(&t);
    for (uint32_t i = 0; status == PD_OK && i < wide->count; i++)
        status = try_shape(&t, &wide->shapes[i]);
    trial_end(&t);
    snprintf(reason, reason_size, "none of its algorithms gives our kernel's bits");
    return status;
}

pd_status cu_wide_create(gpu *g, const cu_weights *weights, uint32_t rows_max, cu_wide **wide_out,
                         char *text_out, size_t text_size)
{
    char reason[256] = "";

    *wide_out = NULL;
    text_out[0] = '\0';
    cu_wide *wide = pd_calloc(1, sizeof *wide);
    if (wide == NULL)
        return PD_E_NOMEM;
    wide->device = g;
    add_all(wide, weights, rows_max);
    if (wide->count == 0) {
        cu_wide_destroy(wide);
        return PD_OK;
    }
    pd_status status = look(wide, rows_max, reason, sizeof reason);
    uint32_t plans = plans_of(wide);
    if (status == PD_OK && plans > 0) {
        snprintf(text_out, text_size, "%u of %u products of 16 bits by cuBLASLt", plans,
                 wide->count * (uint32_t)CUTS);
        *wide_out = wide;
        return PD_OK;
    }
    snprintf(text_out, text_size, "no cuBLASLt: %s", reason);
    cu_wide_destroy(wide);
    return status;
}

void cu_wide_destroy(cu_wide *wide)
{
    if (wide == NULL)
        return;
    for (uint32_t i = 0; i < wide->count; i++)
        for (uint32_t cut = 0; cut < CUTS; cut++)
            blaslt_plan_destroy(wide->shapes[i].plans[cut]);
    blaslt_close(wide->library);
    gpu_free(wide->device, wide->plain);
    pd_free(wide);
}

/* ---- the product ---- */

pd_status cu_wide_matmul(const cu_wide *wide, gpu_stream *stream, const cu_matrix *matrix,
                         const cu_acts *acts, uint32_t rows, float *out, uint64_t out_stride)
{
    const shape *s =
        wide == NULL || rows < CU_WIDE_ROWS_MIN ? NULL : find(wide, matrix, out_stride);
    cu_acts left = *acts;
    pd_status status = PD_OK;
    uint32_t done = 0;

    if (s != NULL)
        status = cu_unpack(stream, matrix->rows, matrix->cols, matrix->data, wide->plain);
    for (uint32_t i = 0; s != NULL && i < CUTS; i++)
        for (; status == PD_OK && s->plans[i] != NULL && rows - done >= cuts[i]; done += cuts[i])
            status =
                blaslt_matmul(s->plans[i], stream, wide->plain,
                              acts->halves + (uint64_t)done * acts->cols, out + done * out_stride);
    if (status != PD_OK || done == rows)
        return status;
    if (done > 0) /* 16-bit weights take nothing else */
        left.halves += (uint64_t)done * acts->cols;
    return cu_matmul(stream, matrix, &left, rows - done, out + done * out_stride, out_stride);
}

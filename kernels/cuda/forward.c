#include "kernels/cuda/forward.h"

#include "common/base/mem.h"
#include "kernels/cuda/items.h"
#include "kernels/cuda/stage.h"
#include "kernels/cuda/wide.h"
#include "kernels/model/rope.h"

#include <math.h>

#define ALIGNMENT 256
#define TERMS_MAX 2 /* attention's output and what rounding left of it */

/* Activations in every form that some matrix takes. */
typedef struct forms {
    cu_acts acts;   /* halves: f16, or bf16 where no matrix takes f16 */
    uint16_t *bf16; /* beside f16, where matrices of both formats share their input */
} forms;

struct cu_forward {
    cu_forward_options options;
    const cu_weights *weights;
    gpu *device;
    uint8_t *memory; /* all below */
    uint32_t ranks;
    float *rope;         /* [context_max][rope_dims / 2][cos, sin] */
    float *x;            /* [rows][hidden], the residual stream */
    float *qkv;          /* [rows][heads q, kv_heads k, kv_heads v][head_dim] */
    float *gate_up;      /* [rows][gate: ffn, up: ffn] */
    float *parts;        /* [rank][term][node][rows][hidden] */
    forms norm;          /* [rows][hidden] */
    forms attended;      /* [rows][heads * head_dim] */
    forms attended_rest; /* likewise: what rounding left; quants alone */
    forms ffn;           /* [rows][ffn] */
    forms last;          /* [logits][hidden] */
    float *logits;       /* [logits][vocab] */
    void *attention_scratch, *sample_scratch;
    cu_wide *wide; /* NULL: our kernels do it all */
    char wide_text[96];
};

/* ---- memory ---- */

typedef struct carver {
    uint8_t *base; /* NULL: only add up */
    uint64_t bytes;
} carver;

static void *carve(carver *c, uint64_t count, uint64_t size)
{
    uint64_t at = c->bytes;

    c->bytes += (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return c->base == NULL ? NULL : c->base + at;
}

static bool both_halves(uint32_t wanted)
{
    return (wanted & CU_FORM_F16) != 0 && (wanted & CU_FORM_BF16) != 0;
}

static forms carve_forms(carver *c, uint64_t rows, uint32_t cols, uint32_t wanted)
{
    forms f = {.acts = {.cols = cols}};
    uint64_t count = rows * cols;

    if ((wanted & CU_FORM_VALUES) != 0 || both_halves(wanted))
        f.acts.values = carve(c, count, sizeof *f.acts.values);
    if ((wanted & CU_FORM_QUANTS) != 0) {
        f.acts.quants = carve(c, count, sizeof *f.acts.quants);
        f.acts.scales = carve(c, count / 32, sizeof *f.acts.scales);
        f.acts.sums = carve(c, count / 32, sizeof *f.acts.sums);
        f.acts.quant_sums = carve(c, count / 32, sizeof *f.acts.quant_sums);
    }
    if ((wanted & (CU_FORM_F16 | CU_FORM_BF16)) != 0)
        f.acts.halves = carve(c, count, sizeof *f.acts.halves);
    if (both_halves(wanted))
        f.bf16 = carve(c, count, sizeof *f.bf16);
    return f;
}

/* Nodes that all ranks' shares of a term have room for. */
static uint64_t nodes_of(const cu_forward *f, uint32_t leaves)
{
    return (uint64_t)f->ranks * kern_nodes_most(leaves, f->ranks);
}

static uint64_t parts_rows(const cu_forward *f)
{
    uint64_t output = TERMS_MAX * nodes_of(f, f->weights->leaves_output);
    uint64_t down = nodes_of(f, f->weights->leaves_down);

    return output > down ? output : down;
}

uint32_t cu_forward_items_room(const cu_forward_options *options)
{
    uint32_t logits = options->logits_max;
    uint32_t rows = options->rows_max < logits ? options->rows_max : logits;

    return cu_items_room(rows, options->weights->heads, options->weights->shape.head_dim,
                         options->context_max);
}

static uint64_t attention_bytes(const cu_forward *f)
{
    const cu_forward_options *o = &f->options;
    uint32_t heads = f->weights->heads, dim = f->weights->shape.head_dim;
    uint64_t chunk = cu_attention_scratch_bytes(o->rows_max, heads, dim, o->context_max);
    uint64_t decode = cu_forward_items_room(o) * cu_attention_item_bytes(heads, dim);

    return chunk > decode ? chunk : decode;
}

/* A line a holder. */
static void carve_all(carver *c, cu_forward *f)
{
    const cu_weights *w = f->weights;
    const pd_model_shape *shape = &w->shape;
    uint64_t rows = f->options.rows_max, logits = w->head.count != 0 ? f->options.logits_max : 0;
    uint32_t norm = 0, output = CU_FORM_VALUES, down = 0, dim = shape->head_dim;

    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        norm |= w->layers[layer].qkv.forms | w->layers[layer].gate_up.forms;
        output |= cu_forms_of(w->layers[layer].output.dtype);
        down |= cu_forms_of(w->layers[layer].down.dtype);
    }
    f->rope = carve(c, (uint64_t)f->options.context_max * shape->rope_dims, sizeof(float));
    f->x = carve(c, rows * shape->hidden, sizeof(float));
    f->qkv = carve(c, rows * (w->heads + 2 * w->kv_heads) * dim, sizeof(float));
    f->gate_up = carve(c, rows * 2 * w->ffn, sizeof(float));
    f->parts = carve(c, parts_rows(f) * rows * shape->hidden, sizeof(float));
    f->norm = carve_forms(c, rows, shape->hidden, norm);
    f->attended = carve_forms(c, rows, w->heads * dim, output);
    f->attended_rest = carve_forms(c, rows, w->heads * dim, output & CU_FORM_QUANTS);
    f->ffn = carve_forms(c, rows, w->ffn, down);
    f->last = carve_forms(c, logits, shape->hidden, w->head.forms);
    f->logits = carve(c, logits * shape->vocab, sizeof(float));
    f->attention_scratch = carve(c, attention_bytes(f), 1);
    f->sample_scratch =
        carve(c, logits == 0 ? 0 : cu_sample_scratch_bytes((uint32_t)logits, shape->vocab), 1);
}

static cu_forward forward_of(gpu *g, const cu_forward_options *options)
{
    return (cu_forward){.options = *options,
                        .weights = options->weights,
                        .device = g,
                        .ranks = options->comm != NULL ? cu_comm_ranks(options->comm) : 1};
}

uint64_t cu_forward_bytes(const cu_forward_options *options)
{
    cu_forward f = forward_of(NULL, options);
    carver sizing = {0};

    carve_all(&sizing, &f);
    return sizing.bytes + cu_wide_bytes(options->weights, options->rows_max);
}

/* Angles are made on the host, by the code that every backend uses. */
static pd_status send_rope(const cu_forward *f)
{
    const pd_model_shape *shape = &f->weights->shape;
    uint64_t bytes = (uint64_t)f->options.context_max * shape->rope_dims * sizeof(float);
    cu_stage *stage = NULL;
    float *table = pd_malloc(bytes);
    double *frequencies = pd_calloc(shape->rope_dims / 2 + 1, sizeof *frequencies);

    if (table == NULL || frequencies == NULL) {
        pd_free(table);
        pd_free(frequencies);
        return PD_E_NOMEM;
    }
    kern_rope_frequencies(shape->rope_base, shape->rope_dims, frequencies);
    kern_rope_rows(frequencies, shape->rope_dims, 0, f->options.context_max, table);
    pd_free(frequencies);
    pd_status status = cu_stage_create(f->device, 1u << 20, &stage);
    if (status == PD_OK)
        status = cu_stage_copy(stage, f->rope, table, bytes);
    if (status == PD_OK)
        status = cu_stage_finish(stage);
    cu_stage_destroy(stage);
    pd_free(table);
    return status;
}

pd_status cu_forward_create(gpu *g, const cu_forward_options *options, cu_forward **forward_out)
{
    cu_forward *f = pd_calloc(1, sizeof *f);
    carver sizing = {0}, filling = {0};

    if (f == NULL)
        return PD_E_NOMEM;
    *f = forward_of(g, options);
    carve_all(&sizing, f);
    pd_status status = gpu_alloc(g, sizing.bytes, (void **)&f->memory);
    if (status == PD_OK) {
        filling.base = f->memory;
        carve_all(&filling, f);
        status = send_rope(f);
    }
    if (status == PD_OK)
        status = cu_wide_create(g, f->weights, options->rows_max, &f->wide, f->wide_text,
                                sizeof f->wide_text);
    if (status != PD_OK) {
        cu_forward_destroy(f);
        return status;
    }
    *forward_out = f;
    return PD_OK;
}

void cu_forward_destroy(cu_forward *f)
{
    if (f == NULL)
        return;
    cu_wide_destroy(f->wide);
    if (f->memory != NULL)
        gpu_free(f->device, f->memory);
    pd_free(f);
}

const char *cu_forward_products(const cu_forward *f)
{
    return f->wide_text;
}

const float *cu_forward_logits(const cu_forward *f)
{
    return f->logits;
}

/* ---- activations ---- */

/* From a row on. */
static cu_acts acts_at(cu_acts acts, uint32_t row)
{
    uint64_t at = (uint64_t)row * acts.cols;

    acts.values = acts.values == NULL ? NULL : acts.values + at;
    acts.quants = acts.quants == NULL ? NULL : acts.quants + at;
    acts.scales = acts.scales == NULL ? NULL : acts.scales + at / 32;
    acts.sums = acts.sums == NULL ? NULL : acts.sums + at / 32;
    acts.quant_sums = acts.quant_sums == NULL ? NULL : acts.quant_sums + at / 32;
    acts.halves = acts.halves == NULL ? NULL : acts.halves + at;
    return acts;
}

/* What a producer is to write for matrices that want these forms, beside values that are there. */
static cu_acts wanted_of(const forms *f, uint32_t wanted)
{
    cu_acts acts = f->acts;

    if ((wanted & CU_FORM_VALUES) == 0 && !both_halves(wanted))
        acts.values = NULL;
    if ((wanted & CU_FORM_QUANTS) == 0) {
        acts.quants = NULL;
        acts.scales = acts.sums = NULL;
        acts.quant_sums = NULL;
    }
    if ((wanted & (CU_FORM_F16 | CU_FORM_BF16)) == 0)
        acts.halves = NULL;
    acts.halves_are_bf16 = (wanted & CU_FORM_F16) == 0;
    return acts;
}

static cu_acts bf16_of(const forms *f, uint32_t wanted)
{
    if (!both_halves(wanted))
        return wanted_of(f, wanted);
    return (cu_acts){
        .cols = f->acts.cols, .values = f->acts.values, .halves = f->bf16, .halves_are_bf16 = true};
}

/* The form that no producer writes at once with the others. */
static pd_status second_halves(gpu_stream *stream, const forms *f, uint32_t wanted, uint32_t rows)
{
    cu_acts acts = bf16_of(f, wanted);

    return both_halves(wanted) ? cu_quantize(stream, rows, &acts, NULL) : PD_OK;
}

static pd_status multiply(const cu_forward *f, gpu_stream *stream, const cu_group *group,
                          const forms *in, uint32_t rows, float *out)
{
    cu_acts acts = wanted_of(in, group->forms), bf16 = bf16_of(in, group->forms);
    pd_status status = second_halves(stream, in, group->forms, rows);

    for (uint32_t i = 0; status == PD_OK && i < group->count; i++)
        status = cu_wide_matmul(f->wide, stream, &group->matrix[i],
                                group->matrix[i].dtype == PD_BF16 ? &bf16 : &acts, rows,
                                out + group->first[i], group->rows);
    return status;
}

/* ---- a step ---- */

/* The step that is being queued. */
typedef struct run {
    cu_forward *f;
    gpu_stream *stream;
    const cu_plan *plan;
    const cu_kv *kv;
    cu_groups *groups;
    uint32_t first, rows; /* that the layer works on */
    cu_residual pending;  /* products not yet added to x */
} run;

/* The terms of a row-parallel product, this rank's nodes of them, to everybody's. */
static pd_status sum_products(run *r, const cu_matrix *matrix, const cu_acts *terms[],
                              uint32_t terms_count)
{
    const cu_forward *f = r->f;
    uint64_t node = (uint64_t)r->rows * f->weights->shape.hidden;
    uint64_t term = kern_nodes_most(matrix->leaves_all, f->ranks) * node;
    float *own = f->parts + f->weights->rank * terms_count * term;
    pd_status status = PD_OK;

    for (uint32_t i = 0; status == PD_OK && i < terms_count; i++)
        status = cu_matmul_nodes(r->stream, matrix, terms[i], r->rows, own + i * term);
    if (status == PD_OK && f->ranks > 1)
        status = cu_comm_gather(f->options.comm, r->stream, own, f->parts,
                                terms_count * term * sizeof(float));
    r->pending = (cu_residual){.parts = f->parts,
                               .ranks = f->ranks,
                               .terms = terms_count,
                               .leaves_all = matrix->leaves_all};
    return status;
}

/* Adds what is pending to x, then its norm in the forms that are wanted. */
static pd_status normalize(run *r, const float *weight, uint32_t wanted)
{
    cu_forward *f = r->f;
    uint32_t hidden = f->weights->shape.hidden;
    cu_acts out = wanted_of(&f->norm, wanted);
    pd_status status =
        cu_residual_norm(r->stream, r->rows, hidden, f->x + (uint64_t)r->first * hidden,
                         &r->pending, weight, f->weights->shape.rms_eps, &out);

    r->pending = (cu_residual){0};
    return status;
}

static pd_status project(run *r, uint32_t index)
{
    cu_forward *f = r->f;
    const cu_layer_weights *layer = &f->weights->layers[index];

    pd_status status = normalize(r, layer->attention_norm, layer->qkv.forms);
    if (status == PD_OK)
        status = multiply(f, r->stream, &layer->qkv, &f->norm, r->rows, f->qkv);
    if (status == PD_OK)
        status = cu_append(r->stream, &r->plan->step, r->kv, index, f->weights->heads,
                           f->weights->shape.rope_dims, f->rope, f->qkv);
    return status;
}

/* The layer's K and V are written, by all ranks. */
static pd_status tell(run *r, uint32_t index)
{
    bool ends = index + 1 == r->kv->layers ||
                (index + 1) / r->kv->group_layers != index / r->kv->group_layers;
    pd_status status = PD_OK;

    if (r->groups == NULL)
        return PD_OK;
    if (ends)
        status = cu_groups_record(r->groups, r->stream);
    return status == PD_OK ? cu_groups_poll(r->groups) : status;
}

/* Where nothing is left to be exchanged: a rank's gather comes after what it wrote. */
static pd_status meet(run *r)
{
    enum { WORDS = 16 };
    float *parts = r->f->parts;

    return cu_comm_gather(r->f->options.comm, r->stream, parts + r->f->weights->rank * WORDS, parts,
                          WORDS * sizeof *parts);
}

/* Attention of the layer's rows; in the last layer, of the tiles that hold them. Its output goes on
 * as two quantised rows where the matrix is quantised: itself, and what rounding left
 * (docs/kernels, rule 3). */
static pd_status attend(run *r, uint32_t index)
{
    cu_forward *f = r->f;
    const cu_weights *w = f->weights;
    const cu_matrix *matrix = &w->layers[index].output;
    uint32_t wanted = cu_forms_of(matrix->dtype) | CU_FORM_VALUES;
    bool quantised = (wanted & CU_FORM_QUANTS) != 0;
    cu_step step = r->plan->step;

    if (r->rows < step.rows) {
        step.tile_row += r->plan->tile_first;
        step.tile_rows += r->plan->tile_first;
        step.tiles = r->plan->tiles_live;
    }
    pd_status status = cu_attention(r->stream, &step, r->kv, index, w->heads,
                                    r->plan->positions_max, 1.0f / sqrtf((float)w->shape.head_dim),
                                    f->qkv, f->attended.acts.values, f->attention_scratch);
    cu_acts acts = acts_at(wanted_of(&f->attended, wanted), r->first);
    cu_acts rest = acts_at(f->attended_rest.acts, r->first);
    const cu_acts *terms[TERMS_MAX] = {&acts, &rest};
    if (status == PD_OK && matrix->dtype != PD_F32)
        status = cu_quantize(r->stream, r->rows, &acts, quantised ? &rest : NULL);
    if (status == PD_OK)
        status = sum_products(r, matrix, terms, quantised ? 2 : 1);
    return status;
}

static pd_status feed_forward(run *r, uint32_t index)
{
    cu_forward *f = r->f;
    const cu_layer_weights *layer = &f->weights->layers[index];
    uint32_t wanted = cu_forms_of(layer->down.dtype);
    cu_acts acts = wanted_of(&f->ffn, wanted);
    const cu_acts *terms[1] = {&acts};

    pd_status status = normalize(r, layer->ffn_norm, layer->gate_up.forms);
    if (status == PD_OK)
        status = multiply(f, r->stream, &layer->gate_up, &f->norm, r->rows, f->gate_up);
    if (status == PD_OK)
        status = cu_silu_mul(r->stream, r->rows, f->weights->ffn, f->gate_up, &acts);
    if (status == PD_OK)
        status = sum_products(r, &layer->down, terms, 1);
    return status;
}

/* Rank 0's alone: the others have done their part when x's last product is gathered. */
static pd_status draw(run *r)
{
    cu_forward *f = r->f;
    const cu_weights *w = f->weights;
    const cu_plan *plan = r->plan;
    cu_acts out = wanted_of(&f->last, w->head.forms);

    if (w->head.count == 0)
        return PD_OK;
    pd_status status = normalize(r, NULL, 0);
    if (status == PD_OK)
        status = cu_norm_rows(r->stream, plan->logits_row, plan->logits, w->shape.hidden, f->x,
                              w->output_norm, w->shape.rms_eps, &out);
    if (status == PD_OK)
        status = multiply(f, r->stream, &w->head, &f->last, plan->logits, f->logits);
    if (status == PD_OK)
        status = cu_sample(r->stream, plan->logits, w->shape.vocab, f->logits, plan->sampling,
                           plan->token, plan->broken, f->sample_scratch);
    return status;
}

static pd_status run_layer(run *r, uint32_t index)
{
    bool alone = r->f->ranks == 1, last = index + 1 == r->f->weights->shape.layers;
    pd_status status = project(r, index);

    if (last) {
        r->first = r->plan->live_first;
        r->rows = r->plan->live_rows;
    }
    if (status == PD_OK && !alone && r->rows == 0)
        status = meet(r);
    if (status == PD_OK && (alone || r->rows == 0))
        status = tell(r, index);
    if (status != PD_OK || r->rows == 0)
        return status;
    status = attend(r, index);
    if (status == PD_OK && !alone) /* its sum was gathered */
        status = tell(r, index);
    return status == PD_OK ? feed_forward(r, index) : status;
}

pd_status cu_forward_queue(cu_forward *f, gpu_stream *stream, const cu_plan *plan, const cu_kv *kv,
                           cu_groups *groups)
{
    const cu_weights *w = f->weights;
    run r = {.f = f, .stream = stream, .plan = plan, .kv = kv, .groups = groups};
    pd_status status;

    pd_assert(plan->step.rows <= f->options.rows_max && plan->logits <= f->options.logits_max);
    r.rows = plan->step.rows;
    status = cu_embed(stream, &plan->step, w->embedding_dtype, w->embedding, w->shape.hidden,
                      w->embedding_row_bytes, f->x);
    for (uint32_t index = 0; status == PD_OK && index < w->shape.layers; index++) {
        status = run_layer(&r, index);
    }
    return status == PD_OK && r.rows > 0 ? draw(&r) : status;
}

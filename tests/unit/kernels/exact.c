#include "tests/unit/kernels/exact.h"

#include "kernels/file_row.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *take(size_t count, size_t size)
{
    void *memory = calloc(count, size);

    if (memory == NULL)
        abort();
    return memory;
}

void exact_rms_norm(const double *x, const float *weight, uint32_t count, double eps, double *out)
{
    double sum = 0;

    for (uint32_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    for (uint32_t i = 0; i < count; i++)
        out[i] = x[i] / sqrt(sum / count + eps) * (double)weight[i];
}

void exact_rope(double *head, uint32_t dims, double base, uint32_t position)
{
    for (uint32_t i = 0; i < dims / 2; i++) {
        double angle = position * pow(base, -2.0 * i / dims);
        double even = head[2 * i], odd = head[2 * i + 1];
        head[2 * i] = even * cos(angle) - odd * sin(angle);
        head[2 * i + 1] = odd * cos(angle) + even * sin(angle);
    }
}

double exact_silu_mul(double gate, double up)
{
    return gate / (1 + exp(-gate)) * up;
}

double exact_attention(const double *query, const double *keys, const double *values,
                       uint32_t count, uint32_t dim, uint32_t stride, double scale, double *out)
{
    double *p = take(count, sizeof *p), largest = -INFINITY, sum = 0, size = 0;

    for (uint32_t j = 0; j < count; j++) {
        double all = 0;
        for (uint32_t d = 0; d < dim; d++) {
            p[j] += query[d] * keys[(size_t)j * stride + d] * scale;
            all += fabs(query[d] * keys[(size_t)j * stride + d] * scale);
        }
        largest = fmax(largest, p[j]);
        size = fmax(size, all);
    }
    for (uint32_t j = 0; j < count; j++)
        sum += p[j] = exp(p[j] - largest);
    memset(out, 0, dim * sizeof *out);
    for (uint32_t j = 0; j < count; j++)
        for (uint32_t d = 0; d < dim; d++)
            out[d] += p[j] / sum * values[(size_t)j * stride + d];
    free(p);
    return size;
}

/* ---- a model ---- */

typedef struct text {
    const pd_model_file *file;
    const pd_model_shape *shape;
    uint32_t count;
    double *x, *norm;           /* [count][hidden] */
    double *q, *k, *v, *heads;  /* [count][heads or kv_heads][head_dim] */
    double *gate, *up, *logits; /* [count][ffn]; [count][vocab] */
} text;

static const pd_tensor *tensor_of(const text *t, int layer, const char *part)
{
    char name[64];

    if (layer < 0)
        snprintf(name, sizeof name, "%s.weight", part);
    else
        snprintf(name, sizeof name, "blk.%d.%s.weight", layer, part);
    return pd_model_file_tensor(t->file, name);
}

/* Row n of out, [count][rows], is the matrix times row n of x, [count][cols]; or has it added. */
static void multiply(const text *t, const pd_tensor *matrix, const double *x, double *out, bool add)
{
    size_t cols = matrix->dims[0], rows = matrix->dims[1], row_bytes = matrix->bytes / rows;
    float *row = take(cols, sizeof *row);

    for (size_t r = 0; r < rows; r++) {
        kern_row_to_f32(matrix->dtype, (const uint8_t *)matrix->data + r * row_bytes,
                        (uint32_t)cols, row);
        for (size_t n = 0; n < t->count; n++) {
            double sum = add ? out[n * rows + r] : 0;
            for (size_t c = 0; c < cols; c++)
                sum += (double)row[c] * x[n * cols + c];
            out[n * rows + r] = sum;
        }
    }
    free(row);
}

static void normalise(const text *t, const pd_tensor *weight)
{
    uint32_t hidden = t->shape->hidden;

    for (size_t n = 0; n < t->count; n++)
        exact_rms_norm(t->x + n * hidden, weight->data, hidden, (double)t->shape->rms_eps,
                       t->norm + n * hidden);
}

static void attend(const text *t)
{
    const pd_model_shape *s = t->shape;
    uint32_t dim = s->head_dim, group = s->heads / s->kv_heads;

    for (uint32_t n = 0; n < t->count; n++) {
        for (uint32_t h = 0; h < s->kv_heads; h++)
            exact_rope(t->k + ((size_t)n * s->kv_heads + h) * dim, s->rope_dims, s->rope_base, n);
        for (uint32_t h = 0; h < s->heads; h++) {
            size_t at = ((size_t)n * s->heads + h) * dim, kv = (size_t)(h / group) * dim;
            exact_rope(t->q + at, s->rope_dims, s->rope_base, n);
            exact_attention(t->q + at, t->k + kv, t->v + kv, n + 1, dim, s->kv_heads * dim,
                            1 / sqrt(dim), t->heads + at);
        }
    }
}

static void layer_of(const text *t, int layer)
{
    normalise(t, tensor_of(t, layer, "attn_norm"));
    multiply(t, tensor_of(t, layer, "attn_q"), t->norm, t->q, false);
    multiply(t, tensor_of(t, layer, "attn_k"), t->norm, t->k, false);
    multiply(t, tensor_of(t, layer, "attn_v"), t->norm, t->v, false);
    attend(t);
    multiply(t, tensor_of(t, layer, "attn_output"), t->heads, t->x, true);
    normalise(t, tensor_of(t, layer, "ffn_norm"));
    multiply(t, tensor_of(t, layer, "ffn_gate"), t->norm, t->gate, false);
    multiply(t, tensor_of(t, layer, "ffn_up"), t->norm, t->up, false);
    for (size_t i = 0; i < (size_t)t->count * t->shape->ffn; i++)
        t->gate[i] = exact_silu_mul(t->gate[i], t->up[i]);
    multiply(t, tensor_of(t, layer, "ffn_down"), t->gate, t->x, true);
}

static void embed(const text *t, const uint32_t *tokens)
{
    const pd_tensor *embedding = tensor_of(t, -1, "token_embd");
    uint64_t row_bytes = embedding->bytes / embedding->dims[1];
    uint32_t hidden = t->shape->hidden;
    float *row = take(hidden, sizeof *row);

    for (uint32_t n = 0; n < t->count; n++) {
        kern_row_to_f32(embedding->dtype, (const uint8_t *)embedding->data + tokens[n] * row_bytes,
                        hidden, row);
        for (uint32_t i = 0; i < hidden; i++)
            t->x[(size_t)n * hidden + i] = (double)row[i];
    }
    free(row);
}

void exact_logits(const pd_model_file *file, const uint32_t *tokens, uint32_t count, double *out)
{
    const pd_model_shape *s = pd_model_file_shape(file);
    size_t q = (size_t)s->heads * s->head_dim, kv = (size_t)s->kv_heads * s->head_dim;
    double *memory =
        take(count * (2 * (size_t)s->hidden + 2 * q + 2 * kv + 2 * (size_t)s->ffn), sizeof *memory);
    text t = {.file = file, .shape = s, .count = count, .logits = out, .x = memory};

    t.norm = t.x + (size_t)count * s->hidden;
    t.q = t.norm + (size_t)count * s->hidden;
    t.heads = t.q + count * q;
    t.k = t.heads + count * q;
    t.v = t.k + count * kv;
    t.gate = t.v + count * kv;
    t.up = t.gate + (size_t)count * s->ffn;
    embed(&t, tokens);
    for (uint32_t layer = 0; layer < s->layers; layer++)
        layer_of(&t, (int)layer);
    normalise(&t, tensor_of(&t, -1, "output_norm"));
    multiply(&t, tensor_of(&t, -1, s->tied_embeddings ? "token_embd" : "output"), t.norm, out,
             false);
    free(memory);
}

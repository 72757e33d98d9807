#pragma once

/* tests/unit/kernels/exact.h - what a model and its operations are, in double precision.
 *
 * Straight from the formulas (RMSNorm, rotary position embedding, softmax attention with grouped
 * queries, SwiGLU), one token after the other: no blocks, no splits, no tables of angles, and
 * nothing rounded but by double. Weights are the numbers that the file's blocks stand for. Any
 * thread. */

#include "common/model_file/model_file.h"

#include <stdint.h>

/* out: [count] */
void exact_rms_norm(const double *x, const float *weight, uint32_t count, double eps, double *out);
/* Pairs (2i, 2i + 1), i < dims / 2, turned by position * base^(-2i / dims). */
void exact_rope(double *head, uint32_t dims, double base, uint32_t position);
double exact_silu_mul(double gate, double up);
/* One query head over positions 0 .. count - 1; keys and values: [count] rows of dim numbers,
 * stride apart. out: [dim]. Returns the largest sum of |q k| * scale of a position, by which an
 * error is judged. */
double exact_attention(const double *query, const double *keys, const double *values,
                       uint32_t count, uint32_t dim, uint32_t stride, double scale, double *out);

/* Logits after each of a text's first count tokens. out: [count][vocab] */
void exact_logits(const pd_model_file *file, const uint32_t *tokens, uint32_t count, double *out);

#pragma once

/* kernels/cuda/roofline.h - what an operation of launch.h cannot do with less of: the bytes between
 * memory and the chip (everything read once, everything written once) and the multiplications. The
 * benchmarks and the ladder (tests/gpu) compare with it. Doubles: sizes, not results. */

#include "kernels/cuda/launch.h"

typedef struct cu_work {
    double bytes, macs;
} cu_work;

/* Bytes of one row of activations in every form that is not NULL. */
static inline double cu_work_row(const cu_acts *acts)
{
    double cols = acts->cols, blocks = cols / 32;

    return (acts->values != NULL ? 4 * cols : 0) + (acts->quants != NULL ? cols : 0) +
           (acts->scales != NULL ? 4 * blocks : 0) + (acts->sums != NULL ? 4 * blocks : 0) +
           (acts->quant_sums != NULL ? 4 * blocks : 0) + (acts->halves != NULL ? 2 * cols : 0);
}

/* out: rows of floats written, nodes of them. */
static inline cu_work cu_work_matmul(const cu_matrix *m, const cu_acts *acts, uint32_t rows,
                                     uint32_t nodes)
{
    return (cu_work){.bytes = (double)cu_pack_bytes(m->dtype, m->rows, m->cols) +
                              rows * (cu_work_row(acts) + 4.0 * m->rows * nodes),
                     .macs = (double)m->rows * m->cols * rows};
}

/* x read and written, the parts read, out written. */
static inline cu_work cu_work_norm(uint32_t rows, uint32_t hidden, uint32_t parts,
                                   const cu_acts *out)
{
    return (cu_work){.bytes = rows * (4.0 * hidden * (2 + parts) + cu_work_row(out))};
}

static inline cu_work cu_work_silu_mul(uint32_t rows, uint32_t ffn, const cu_acts *out)
{
    return (cu_work){.bytes = rows * (8.0 * ffn + cu_work_row(out))};
}

/* Queries are read and written as floats, K and V read as floats and written as f16. */
static inline cu_work cu_work_append(uint32_t rows, uint32_t heads, const cu_kv *kv)
{
    double q = (double)heads * kv->head_dim, k = (double)kv->kv_heads * kv->head_dim;

    return (cu_work){.bytes = rows * (8 * q + 2 * (4 + 2) * k)};
}

/* sequences of `context` tokens whose last `rows` tokens each are queries; K and V are read once a
 * sequence. Products with K and with V, of what is seen. */
static inline cu_work cu_work_attention(uint32_t sequences, uint32_t context, uint32_t rows,
                                        uint32_t heads, const cu_kv *kv)
{
    double seen = (double)rows * (context - (rows - 1) / 2.0), dim = kv->head_dim;

    return (cu_work){.bytes = sequences *
                              (4.0 * context * kv->kv_heads * dim + 8.0 * rows * heads * dim),
                     .macs = sequences * 2 * seen * heads * dim};
}

static inline cu_work cu_work_sample(uint32_t rows, uint32_t vocab)
{
    return (cu_work){.bytes = 4.0 * rows * vocab};
}

/* Blocks of one group: hashed where they lie, or copied (read and written). */
static inline cu_work cu_work_blocks(const cu_kv *kv, uint32_t layers, uint32_t blocks, bool copied)
{
    double bytes = (double)kv->layer_bytes * layers * kv->kv_heads * blocks;

    return (cu_work){.bytes = copied ? 2 * bytes : bytes};
}

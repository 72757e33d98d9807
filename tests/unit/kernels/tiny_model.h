#pragma once

/* tests/unit/kernels/tiny_model.h - a model of a few thousand weights, written as a GGUF file.
 *
 * Of any shape and mix of formats. In the one that tiny_open makes every format occurs, and no size
 * is a round number where it need not be. */

#include "common/kv/layout.h"
#include "common/model_file/model_file.h"

#define TINY_VOCAB 203

/* Random bytes that are sound blocks of the format; rows of cols weights. For tests of single
 * operations as well. outliers: some weights far larger than the rest. */
void tiny_fill(pd_dtype dtype, uint64_t seed, uint32_t rows, uint32_t cols, void *out);
/* A value in [-1, 1), one in 50 forty times as large. */
float tiny_random(uint64_t *state);

typedef struct tiny_shape {
    uint32_t hidden, heads, kv_heads, head_dim, ffn, layers, vocab, context;
    bool tied;        /* the head is the embedding */
    bool from_floats; /* matrices are random floats, the same in any format, as that has them; not
                         random blocks of the format */
    pd_dtype embedding, query, key, value, output, gate, up, down, head;
} tiny_shape;
extern const tiny_shape tiny_every_format;
/* All matrices of one format, from floats, of the least size that has whole blocks of 256; output
 * and down are sums of two segments. */
tiny_shape tiny_of_format(pd_dtype format);

/* The file alone; aborts on failure. */
void tiny_write(const tiny_shape *shape, const char *path);
/* Writes the file to a temporary path and opens it; aborts on failure. */
pd_model_file *tiny_open(void);
pd_model_file *tiny_open_shape(const tiny_shape *shape);
/* One that can be cut among as many ranks as divide kv_heads, in every format. */
pd_model_file *tiny_open_for_ranks(uint32_t kv_heads);
/* A layout for it, with blocks of 16 tokens and groups of one layer. */
pd_kv_layout tiny_layout(const pd_model_file *file, uint32_t blocks);
/* The same with KV in another format than f16. */
pd_kv_layout tiny_layout_of(const pd_model_file *file, uint32_t blocks, pd_dtype dtype);
/* The number at dimension d that a block's half holds for its token, in any format of KV; by the
 * definition in kernels/kv_row.h, and by another way than the kernels'. */
double tiny_kv_value(const pd_kv_layout *layout, const uint8_t *half, uint32_t token, uint32_t d);

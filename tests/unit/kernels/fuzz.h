#pragma once

/* tests/unit/kernels/fuzz.h - operations of tables against the reference's, on random shapes and
 * numbers.
 *
 * A case is made of its seed alone: shapes, alignments, inputs with outliers, subnormals,
 * infinities and NaNs, all in guarded memory (guard.h), what must not be read filled with NaN. The
 * reference and each table get the same inputs, and their outputs must be the same bits, where a
 * NaN is any NaN; nothing but outputs may be written. One thread. */

#include "kernels/ops.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum fuzz_op {
    FUZZ_QUANTIZE,
    FUZZ_RESIDUAL,
    FUZZ_MATMUL, /* pack, too */
    FUZZ_RMS_NORM,
    FUZZ_ROPE,
    FUZZ_STORE_F16,
    FUZZ_SILU_MUL,
    FUZZ_STORE_KV,
    FUZZ_ATTENTION,
    FUZZ_PART,
    FUZZ_JOIN,
    FUZZ_OPS,
} fuzz_op;

const char *fuzz_name(fuzz_op op);

/* False: text says which table differs from the reference, in what, and the shape. */
bool fuzz_case(fuzz_op op, uint64_t seed, const kern_ops *const *tables, uint32_t tables_count,
               char *text, size_t text_size);

/* ---- for the files that make cases ---- */

typedef enum fuzz_kind {
    FUZZ_BYTES,
    FUZZ_FLOATS,
    FUZZ_HALVES,
} fuzz_kind;

typedef struct fuzz_out {
    const char *name;
    fuzz_kind kind;
    size_t bytes;
    const void *initial; /* NULL: a pattern */
    void *side[2];       /* the reference's, the table's */
} fuzz_out;

typedef struct fuzz {
    uint64_t random;
    char shape[200];
    fuzz_out outs[8];
    uint32_t outs_count;
    /* Runs the operation on the outputs of a side. */
    void (*call)(const struct fuzz *f, const kern_ops *ops, uint32_t side);
} fuzz;

uint32_t fuzz_below(fuzz *f, uint32_t n); /* 0 .. n - 1 */
uint32_t fuzz_between(fuzz *f, uint32_t least, uint32_t most);
bool fuzz_chance(fuzz *f, uint32_t one_in);
/* Guarded, of random place. */
void *fuzz_bytes(fuzz *f, size_t bytes, size_t align, uint8_t fill);
void fuzz_fill(fuzz *f, float *x, size_t count); /* numbers of one kind or another */
float *fuzz_floats(fuzz *f, size_t count);       /* guarded and filled */
/* An output; its place on a side is f->outs[i].side[side], i counting from 0. Inputs are frozen
 * before the first one. initial: what it holds before, of inputs; NULL: a pattern. */
void fuzz_add_out(fuzz *f, const char *name, fuzz_kind kind, size_t bytes, size_t align,
                  const void *initial);
void fuzz_describe(fuzz *f, const char *format, ...) __attribute__((format(printf, 2, 3)));

void fuzz_make_quantize(fuzz *f);
void fuzz_make_residual(fuzz *f);
void fuzz_make_matmul(fuzz *f);
void fuzz_make_store_kv(fuzz *f);
void fuzz_make_attention(fuzz *f);
void fuzz_make_part(fuzz *f);
void fuzz_make_join(fuzz *f);

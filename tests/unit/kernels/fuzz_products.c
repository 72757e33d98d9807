/* Cases of tests/unit/kernels/fuzz.h: activations to blocks, and products with them. */

#include "kernels/number.h"
#include "tests/unit/kernels/fuzz.h"
#include "tests/unit/kernels/tiny_model.h"

#include <stdlib.h>
#include <string.h>

#define WORK_MAX      1200000 /* multiplications of a case */
#define ACTS_ROWS_MAX 40

static uint32_t min_of(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- quantize and residual ---- */

static struct {
    kern_acts acts;
    uint32_t row, residual_row, col_first, cols;
} blocks;

static void pick_range(fuzz *f, uint32_t rows)
{
    uint32_t all = fuzz_between(f, 1, 20), first = fuzz_below(f, all);

    blocks.acts = (kern_acts){.cols = all * KERN_BLOCK};
    blocks.row = fuzz_below(f, rows);
    blocks.col_first = first * KERN_BLOCK;
    blocks.cols = fuzz_between(f, 1, all - first) * KERN_BLOCK;
    blocks.acts.values = fuzz_floats(f, (size_t)rows * all * KERN_BLOCK);
    fuzz_describe(f, "rows %u, row %u, columns %u from %u of %u", rows, blocks.row, blocks.cols,
                  blocks.col_first, blocks.acts.cols);
}

static void call_quantize(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    kern_acts acts = blocks.acts;

    acts.quants = f->outs[0].side[side];
    acts.scales = f->outs[1].side[side];
    acts.sums = f->outs[2].side[side];
    acts.quant_sums = f->outs[3].side[side];
    acts.low_sums = f->outs_count > 4 ? f->outs[4].side[side] : NULL;
    ops->quantize(&acts, blocks.row, blocks.col_first, blocks.cols);
}

void fuzz_make_quantize(fuzz *f)
{
    uint32_t rows = fuzz_between(f, 1, 3);

    pick_range(f, rows);
    size_t count = (size_t)rows * blocks.acts.cols, scales = count / KERN_BLOCK * sizeof(float);
    fuzz_add_out(f, "quants", FUZZ_BYTES, count, 1, NULL);
    fuzz_add_out(f, "scales", FUZZ_FLOATS, scales, sizeof(float), NULL);
    fuzz_add_out(f, "sums", FUZZ_FLOATS, scales, sizeof(float), NULL);
    fuzz_add_out(f, "quant_sums", FUZZ_BYTES, scales, sizeof(int32_t), NULL);
    if (!fuzz_chance(f, 4))
        fuzz_add_out(f, "low_sums", FUZZ_BYTES, scales, sizeof(int32_t), NULL);
    f->call = call_quantize;
}

/* acts' blocks, by the reference. */
static void quantize_all(fuzz *f, kern_acts *acts, uint32_t rows, bool low_sums)
{
    size_t count = (size_t)rows * acts->cols, scales = count / KERN_BLOCK * sizeof(float);

    acts->quants = fuzz_bytes(f, count, 1, 0xff);
    acts->scales = fuzz_bytes(f, scales, sizeof(float), 0xff);
    acts->sums = fuzz_bytes(f, scales, sizeof(float), 0xff);
    acts->quant_sums = fuzz_bytes(f, scales, sizeof(int32_t), 0xff);
    acts->low_sums = low_sums ? fuzz_bytes(f, scales, sizeof(int32_t), 0xff) : NULL;
    for (uint32_t row = 0; row < rows; row++)
        kern_ops_at(0)->quantize(acts, row, 0, acts->cols);
}

static void call_residual(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    kern_acts acts = blocks.acts;

    acts.values = f->outs[0].side[side];
    ops->residual(&acts, blocks.row, blocks.col_first, blocks.cols, blocks.residual_row);
}

void fuzz_make_residual(fuzz *f)
{
    uint32_t rows = fuzz_between(f, 2, 4);

    pick_range(f, rows);
    blocks.residual_row = (blocks.row + fuzz_between(f, 1, rows - 1)) % rows;
    quantize_all(f, &blocks.acts, rows, true);
    fuzz_add_out(f, "values", FUZZ_FLOATS, (size_t)rows * blocks.acts.cols * sizeof(float),
                 sizeof(float), blocks.acts.values);
    f->call = call_residual;
}

/* ---- products ---- */

static struct {
    kern_matrix matrix; /* data: the file's rows */
    kern_acts acts;
    uint32_t row_first, rows, acts_first, acts_rows, stride;
    bool add, backwards;
    fuzz *f;
} product;

static void call_matmul(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    kern_matrix matrix = product.matrix;
    size_t packed_bytes = ops->pack_bytes(matrix.dtype, matrix.rows, matrix.cols);
    float *places[ACTS_ROWS_MAX];

    for (uint32_t n = 0; n < product.acts_rows; n++) {
        uint32_t at = product.backwards ? product.acts_rows - 1 - n : n;
        places[n] = (float *)f->outs[0].side[side] + (size_t)at * product.stride;
    }
    if (packed_bytes > 0) {
        void *packed = fuzz_bytes(product.f, packed_bytes, 64, 0xff);
        ops->pack(matrix.dtype, matrix.rows, matrix.cols, matrix.data, packed);
        matrix.data = packed;
    }
    ops->matmul(&matrix, product.row_first, product.rows, &product.acts, product.acts_first,
                product.acts_rows, places, product.add);
}

/* Sound blocks, or any bytes: scales of any f16, NaN and infinities among them. */
static void fill_weights(fuzz *f, const kern_matrix *m, size_t bytes, uint8_t *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(m->dtype);
    bool any = fuzz_chance(f, 3);

    tiny_fill(m->dtype, f->random, m->rows, m->cols, out);
    for (size_t at = 0; any && at < bytes; at += info->block_bytes)
        for (size_t i = 0; fuzz_chance(f, 6) && i < info->block_bytes; i++)
            out[at + i] = (uint8_t)fuzz_below(f, 256);
}

static void pick_matrix(fuzz *f)
{
    pd_dtype dtype = (pd_dtype)fuzz_below(f, PD_Q6_K + 1);
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint32_t unit = info->block_weights, units = unit == 256 ? 5 : unit == 32 ? 24 : 9;
    kern_matrix m = {.dtype = dtype, .rows = fuzz_between(f, 1, fuzz_chance(f, 2) ? 20 : 80)};

    m.segments = unit == 1 ? fuzz_between(f, 1, fuzz_chance(f, 2) ? 2 : 64) : 1;
    m.cols = unit == 1 ? m.segments * fuzz_between(f, 1, fuzz_chance(f, 2) ? units : 70)
                       : unit * fuzz_between(f, 1, units);
    if (unit > 1) /* runs of whole blocks of 32 */
        for (m.segments = min_of(fuzz_between(f, 1, 64), m.cols / KERN_BLOCK);
             m.cols / KERN_BLOCK % m.segments != 0;)
            m.segments--;
    if (fuzz_chance(f, 2)) {
        m.segment_from = fuzz_below(f, m.segments);
        m.segment_count = fuzz_between(f, 1, m.segments - m.segment_from);
    }
    size_t bytes = (size_t)m.rows * (m.cols / unit) * info->block_bytes;
    uint8_t *data = fuzz_bytes(f, bytes, unit == 1 ? info->block_bytes : 2, 0xff);
    fill_weights(f, &m, bytes, data);
    m.data = data;
    product.matrix = m;
}

void fuzz_make_matmul(fuzz *f)
{
    pick_matrix(f);
    const kern_matrix *m = &product.matrix;
    bool quantised = pd_dtype_info_of(m->dtype)->block_weights > 1;
    uint32_t most = min_of(ACTS_ROWS_MAX, 1 + WORK_MAX / (m->rows * m->cols));

    product.f = f;
    product.acts_rows = fuzz_between(f, 1, fuzz_chance(f, 3) ? min_of(most, 5) : most);
    product.acts_first = fuzz_below(f, 3);
    product.row_first = fuzz_below(f, (m->rows + KERN_PANEL_ROWS - 1) / KERN_PANEL_ROWS) * 16;
    product.rows = fuzz_between(f, 1, m->rows - product.row_first);
    product.stride = m->rows + fuzz_below(f, 5);
    product.add = fuzz_chance(f, 2);
    product.backwards = fuzz_chance(f, 3);
    uint32_t rows = product.acts_first + product.acts_rows;
    product.acts = (kern_acts){.cols = m->cols, .values = fuzz_floats(f, (size_t)rows * m->cols)};
    if (quantised)
        quantize_all(f, &product.acts, rows, m->dtype == PD_Q6_K || fuzz_chance(f, 2));
    if (quantised && fuzz_chance(f, 2))
        product.acts.values = NULL; /* is no concern of the product's */
    size_t count = (size_t)product.acts_rows * product.stride;
    float *before = fuzz_floats(f, count);
    fuzz_add_out(f, "out", FUZZ_FLOATS, count * sizeof(float), sizeof(float), before);
    f->call = call_matmul;
    fuzz_describe(f, "%s %u x %u, %u segments (%u from %u), rows %u from %u, %u acts from %u%s",
                  pd_dtype_info_of(m->dtype)->name, m->rows, m->cols, m->segments, m->segment_count,
                  m->segment_from, product.rows, product.row_first, product.acts_rows,
                  product.acts_first, product.add ? ", added" : "");
}

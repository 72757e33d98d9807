/* Cases of tests/unit/kernels/fuzz.h: K and V into the pool, and attention over it. */

#include "tests/unit/kernels/fuzz.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WORK_MAX     1500000 /* multiplications of a case's scores */
#define DIM_MAX      160
#define POSITION_MAX 1100
#define BLOCKS_MAX   96

static struct {
    pd_kv_layout layout;
    uint32_t token; /* of store_kv */
    const float *x;
    kern_attention args;
    const float *parts;
    uint32_t split, splits;
    fuzz *f;
} head;

/* A pool with room for so many positions, and a few blocks more. */
static pd_kv_layout any_layout(fuzz *f, uint32_t positions)
{
    static const pd_dtype dtypes[] = {PD_F16, PD_INT8, PD_FP8_E4M3};
    uint32_t block_tokens = 16 * fuzz_between(f, 1, 4);
    pd_model_shape shape = {.layers = fuzz_between(f, 1, 2),
                            .kv_heads = fuzz_between(f, 1, 2),
                            .head_dim = 16 * fuzz_between(f, 1, DIM_MAX / 16)};
    pd_kv_layout_options options = {.dtype = dtypes[fuzz_below(f, 3)],
                                    .block_tokens = block_tokens,
                                    .group_layers = fuzz_below(f, shape.layers + 1),
                                    .memory_bytes = (uint64_t)1 << 30,
                                    .blocks_max = positions / block_tokens + fuzz_between(f, 1, 4)};
    pd_kv_layout layout;

    if (pd_kv_layout_make(&shape, &options, &layout) != PD_OK || layout.blocks > BLOCKS_MAX)
        abort();
    return layout;
}

static void call_store_kv(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    ops->store_kv(&head.layout, head.x, head.token, f->outs[0].side[side]);
}

void fuzz_make_store_kv(fuzz *f)
{
    head.layout = any_layout(f, 1);
    head.token = fuzz_below(f, head.layout.block_tokens);
    head.x = fuzz_floats(f, head.layout.head_dim);
    /* of f16 a NaN is any NaN; codes and scales are the same bytes */
    fuzz_kind kind = head.layout.dtype == PD_F16 ? FUZZ_HALVES : FUZZ_BYTES;
    fuzz_add_out(f, "half", kind, head.layout.half_bytes, 64, NULL);
    f->call = call_store_kv;
    fuzz_describe(f, "%s, head of %u, token %u of %u", pd_kv_dtype_name(head.layout.dtype),
                  head.layout.head_dim, head.token, head.layout.block_tokens);
}

/* ---- attention ---- */

/* Near the ends of splits as often as anywhere. */
static uint32_t any_position(fuzz *f)
{
    uint32_t kind = fuzz_below(f, 4);

    if (kind == 0)
        return fuzz_below(f, 40);
    if (kind == 1)
        return fuzz_below(f, POSITION_MAX);
    return KERN_SPLIT_TOKENS * fuzz_between(f, 1, 4) - 20 + fuzz_below(f, 40);
}

static void any_row(fuzz *f, bool odd, float scale, float *x)
{
    if (odd && fuzz_chance(f, 60)) {
        fuzz_fill(f, x, head.layout.head_dim);
        return;
    }
    for (uint32_t d = 0; d < head.layout.head_dim; d++)
        x[d] = tiny_random(&f->random) * scale;
}

/* K and V of positions below `positions` in the pool, in blocks in any order, NaN elsewhere. The
 * table ends with the last block that they need. */
static void fill_pool(fuzz *f, uint32_t positions)
{
    const pd_kv_layout *layout = &head.layout;
    uint32_t needed = (positions - 1) / layout->block_tokens + 1, any[BLOCKS_MAX];
    uint8_t *pool = fuzz_bytes(f, layout->pool_bytes, 64, 0xff);
    pd_block *table = fuzz_bytes(f, needed * sizeof *table, sizeof *table, 0xff);
    float scale = fuzz_chance(f, 4) ? 10.0f : 0.3f, row[DIM_MAX];
    bool odd = fuzz_chance(f, 4);

    for (uint32_t i = 0; i < layout->blocks; i++)
        any[i] = i;
    for (uint32_t i = 0; i < needed; i++) {
        uint32_t other = fuzz_between(f, i, layout->blocks - 1);
        table[i] = any[other];
        any[other] = any[i];
    }
    for (uint32_t p = 0; p < positions; p++) {
        uint8_t *half =
            pool + pd_kv_layout_k_offset(layout, head.args.layer, table[p / layout->block_tokens],
                                         head.args.kv_head);
        for (uint32_t h = 0; h < 2; h++) {
            any_row(f, odd, h == 0 ? scale : 1, row);
            kern_ops_at(0)->store_kv(layout, row, p % layout->block_tokens,
                                     half + h * layout->half_bytes);
        }
    }
    head.args.pool = pool;
    head.args.blocks = table;
}

/* All of args but outputs and scratch. at_split: tokens are of any sequences, and see the split
 * `split` whole. */
static void make_args(fuzz *f, bool single, bool at_split)
{
    uint32_t position = any_position(f), heads = fuzz_between(f, 1, 9);
    uint32_t tokens = single || fuzz_chance(f, 2) ? 1 : fuzz_between(f, 1, 16);

    if (at_split && tokens > 1)
        position =
            KERN_SPLIT_TOKENS * fuzz_between(f, 1, 3) - 1 + fuzz_below(f, 2) * fuzz_below(f, 40);
    uint32_t seen = at_split ? position + 1 : position + tokens;
    head.layout = any_layout(f, seen);
    uint32_t dim = head.layout.head_dim;
    while (heads > 1 && (uint64_t)heads * tokens * seen * dim > WORK_MAX)
        heads--;
    while (tokens > (at_split ? 2 : 1) && (uint64_t)heads * tokens * seen * dim > WORK_MAX)
        tokens--;
    head.f = f;
    head.split = at_split && tokens > 1 ? fuzz_below(f, (position + 1) / KERN_SPLIT_TOKENS)
                                        : fuzz_below(f, position / KERN_SPLIT_TOKENS + 1);
    head.splits = position / KERN_SPLIT_TOKENS + 1;
    head.args = (kern_attention){.layout = &head.layout,
                                 .layer = fuzz_below(f, head.layout.layers),
                                 .kv_head = fuzz_below(f, head.layout.kv_heads),
                                 .heads = heads,
                                 .tokens = tokens,
                                 .position = position,
                                 .scale = fuzz_chance(f, 4) ? 1.5f : 1 / sqrtf((float)dim),
                                 .query_stride = heads * dim + fuzz_below(f, 20),
                                 .out_stride = heads * dim + fuzz_below(f, 20)};
    fill_pool(f, seen);
    head.args.query = fuzz_floats(f, (tokens - 1) * head.args.query_stride + heads * dim);
    fuzz_describe(f, "%s, %u tokens from %u, %u heads of %u, blocks of %u, split %u",
                  pd_kv_dtype_name(head.layout.dtype), tokens, position, heads, dim,
                  head.layout.block_tokens, head.split);
}

static size_t out_bytes(void)
{
    const kern_attention *args = &head.args;

    return ((args->tokens - 1) * args->out_stride + (size_t)args->heads * head.layout.head_dim) *
           sizeof(float);
}

static size_t part_bytes(uint32_t rows)
{
    return kern_attention_part_floats(rows, head.layout.head_dim) * sizeof(float);
}

static kern_attention with_scratch(const kern_ops *ops)
{
    kern_attention args = head.args;
    size_t bytes = ops->attention_scratch_bytes(args.heads, head.layout.head_dim);

    args.scratch = fuzz_bytes(head.f, bytes, 64, 0xff);
    return args;
}

/* The first `splits` splits of rows that see them whole, by the reference. */
static const float *make_parts(fuzz *f, uint32_t splits, bool whole)
{
    kern_attention args = with_scratch(kern_ops_at(0));
    uint32_t rows = args.tokens * args.heads;
    float *parts = fuzz_bytes(f, splits * part_bytes(rows), sizeof(float), 0xff);

    for (uint32_t split = 0; split < splits; split++) {
        if (whole)
            args.position = (split + 1) * KERN_SPLIT_TOKENS - 1;
        kern_ops_at(0)->attention_part(
            &args, split, parts + split * kern_attention_part_floats(rows, head.layout.head_dim));
    }
    return parts;
}

static void call_attention(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    kern_attention args = with_scratch(ops), next = head.args;

    args.out = f->outs[0].side[side];
    if (head.split % 2 == 0)
        args.next = &next;
    ops->attention(&args);
}

void fuzz_make_attention(fuzz *f)
{
    make_args(f, false, false);
    uint32_t whole = (head.args.position + 1) / KERN_SPLIT_TOKENS;
    if (whole > 0 && fuzz_chance(f, 2)) {
        uint32_t splits = fuzz_between(f, 1, whole);
        head.args.parts = make_parts(f, splits, true);
        head.args.parts_splits = splits;
    }
    fuzz_add_out(f, "out", FUZZ_FLOATS, out_bytes(), sizeof(float), NULL);
    f->call = call_attention;
}

static void call_part(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    kern_attention args = with_scratch(ops);

    ops->attention_part(&args, head.split, f->outs[0].side[side]);
}

void fuzz_make_part(fuzz *f)
{
    make_args(f, false, true);
    fuzz_add_out(f, "part", FUZZ_FLOATS, part_bytes(head.args.tokens * head.args.heads),
                 sizeof(float), NULL);
    f->call = call_part;
}

static void call_join(const fuzz *f, const kern_ops *ops, uint32_t side)
{
    kern_attention args = with_scratch(ops);

    args.out = f->outs[0].side[side];
    ops->attention_join(&args, head.splits, head.parts);
}

void fuzz_make_join(fuzz *f)
{
    make_args(f, true, false);
    head.parts = make_parts(f, head.splits, false);
    fuzz_add_out(f, "out", FUZZ_FLOATS, out_bytes(), sizeof(float), NULL);
    f->call = call_join;
}

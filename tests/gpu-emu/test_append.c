/* K and V reach the pool as the reference places them, and the tables for seals say what
 * pd_seal_tiles_wrote says: after every step the whole pool and all counts are compared. */
#include "common/base/mem.h"
#include "common/kv/seal.h"
#include "common/kv/tile_sum.h"
#include "kernels/cuda/launch.h"
#include "kernels/number.h"
#include "kernels/ref/ops.h"
#include "tests/gpu-emu/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define ROWS_MAX 64
#define CONTEXT  160

/* Rows of a step: `count` rows of sequence `sequence` from `position` on; NONE: padding rows. */
typedef struct some_rows {
    uint32_t sequence, position, count;
} some_rows;
#define NONE   UINT32_MAX
#define SLICES 6
typedef struct one_step {
    some_rows slices[SLICES]; /* count 0 ends */
} one_step;

typedef struct shape {
    uint32_t head_dim, rope_dims, heads, kv_heads, layers, group_layers, block_tokens;
    bool seals;
} shape;

/* --- a pool here and one there --- */

typedef struct world {
    shape shape;
    pd_kv_layout layout;
    pd_seal_tiling tiling;
    uint64_t units, random;
    unsigned char *pool; /* what it must be */
    pd_seal_tiles *tiles;
    pd_block *tables; /* [sequences][blocks of CONTEXT] */
    uint32_t sequences, table_blocks;
    float *rope;
    cu_kv kv;                 /* device */
    const float *device_rope; /* device */
    const pd_block *device_tables;
} world;

static void make_tables(world *w)
{
    w->table_blocks = CONTEXT / w->shape.block_tokens;
    w->tables = test_malloc(w->sequences * w->table_blocks * sizeof *w->tables);
    for (uint32_t i = 0; i < w->sequences * w->table_blocks; i++)
        w->tables[i] = i;
    for (uint32_t i = w->sequences * w->table_blocks - 1; i > 0; i--) { /* in no order */
        uint32_t other = device_random(&w->random) % (i + 1);
        pd_block swapped = w->tables[i];
        w->tables[i] = w->tables[other];
        w->tables[other] = swapped;
    }
}

static void make_layout(world *w)
{
    const shape *s = &w->shape;
    pd_model_shape model = {.layers = s->layers, .kv_heads = s->kv_heads, .head_dim = s->head_dim};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = s->block_tokens,
                                    .group_layers = s->group_layers,
                                    .memory_bytes = 1 << 30,
                                    .blocks_max = w->sequences * (CONTEXT / s->block_tokens)};

    assert_int_equal(pd_kv_layout_make(&model, &options, &w->layout), PD_OK);
    w->tiling = pd_seal_tiling_of(w->layout.token_bytes, w->layout.block_tokens);
    w->units = w->layout.pool_bytes / w->layout.layer_bytes;
}

static void make_device(world *w, device *d)
{
    const pd_kv_layout *l = &w->layout;

    w->kv = (cu_kv){
        .layers = l->layers,
        .kv_heads = l->kv_heads,
        .head_dim = l->head_dim,
        .block_tokens = l->block_tokens,
        .group_layers = l->group_layers,
        .blocks = l->blocks,
        .token_bytes = l->token_bytes,
        .half_bytes = l->half_bytes,
        .layer_bytes = l->layer_bytes,
    };
    w->kv.pool = device_upload(d, w->pool, l->pool_bytes);
    if (w->shape.seals) {
        size_t sums_bytes = w->units * 2 * w->tiling.tiles * sizeof(uint64_t);
        w->kv.covered = device_space(d, w->units * sizeof(uint16_t));
        w->kv.tile_sums = device_space(d, sums_bytes);
        w->kv.tile_keys = device_upload(d, pd_tile_keys, sizeof pd_tile_keys);
        assert_int_equal(gpu_fill(d->stream, w->kv.covered, 0, w->units * sizeof(uint16_t)), PD_OK);
        assert_int_equal(gpu_fill(d->stream, w->kv.tile_sums, 0x55, sums_bytes), PD_OK);
    }
    w->device_rope =
        device_upload(d, w->rope, (CONTEXT * w->shape.rope_dims + 4) * sizeof *w->rope);
    w->device_tables =
        device_upload(d, w->tables, w->sequences * w->table_blocks * sizeof *w->tables);
}

static void make_world(world *w, const shape *s, uint32_t sequences, device *d)
{
    *w = (world){.shape = *s, .sequences = sequences, .random = 11};
    make_layout(w);
    make_tables(w);
    w->pool = test_malloc(w->layout.pool_bytes);
    memset(w->pool, 0x3c, w->layout.pool_bytes);
    assert_int_equal(pd_seal_tiles_create(&w->layout, &w->tiles), PD_OK);
    size_t angles = (size_t)CONTEXT * s->rope_dims + 4;
    w->rope = test_malloc(angles * sizeof *w->rope);
    for (size_t i = 0; i < angles; i++)
        w->rope[i] = device_float(&w->random);
    make_device(w, d);
}

static void end_world(world *w)
{
    pd_seal_tiles_destroy(w->tiles);
    test_free(w->pool);
    test_free(w->rope);
    test_free(w->tables);
}

/* --- what must be --- */

typedef struct rows {
    uint32_t count, sequence[ROWS_MAX], position[ROWS_MAX], table[ROWS_MAX];
    float *qkv;
} rows;

static void make_rows(world *w, const one_step *step, rows *r)
{
    const shape *s = &w->shape;
    size_t floats = (size_t)(s->heads + 2 * s->kv_heads) * s->head_dim;

    r->count = 0;
    for (uint32_t i = 0; i < SLICES && step->slices[i].count > 0; i++) {
        const some_rows *slice = &step->slices[i];
        for (uint32_t t = 0; t < slice->count; t++, r->count++) {
            bool none = slice->sequence == NONE;
            assert_true(r->count < ROWS_MAX);
            r->sequence[r->count] = slice->sequence;
            r->position[r->count] = none ? CU_ROW_NONE : slice->position + t;
            r->table[r->count] = none ? 0 : slice->sequence * w->table_blocks;
        }
    }
    r->qkv = test_malloc(r->count * floats * sizeof *r->qkv);
    for (size_t i = 0; i < r->count * floats; i++)
        r->qkv[i] = 500 * device_float(&w->random); /* outliers are beyond f16 */
}

static void place_row(world *w, const rows *r, uint32_t row, uint32_t layer)
{
    const shape *s = &w->shape;
    float *q = r->qkv + (size_t)row * (s->heads + 2 * s->kv_heads) * s->head_dim;
    float *k = q + (size_t)s->heads * s->head_dim, *v = k + (size_t)s->kv_heads * s->head_dim;
    uint32_t position = r->position[row], token = position % s->block_tokens;
    const float *angles = w->rope + (size_t)position * s->rope_dims;
    pd_block block = w->tables[r->table[row] + position / s->block_tokens];

    for (uint32_t h = 0; h < s->heads; h++)
        kern_ops_ref.rope(q + (size_t)h * s->head_dim, angles, s->rope_dims / 2);
    for (uint32_t h = 0; h < s->kv_heads; h++) {
        unsigned char *at = w->pool + pd_kv_layout_k_offset(&w->layout, layer, block, h) +
                            token * w->layout.token_bytes;
        float key[512];
        memcpy(key, k + (size_t)h * s->head_dim, s->head_dim * sizeof *key);
        kern_ops_ref.rope(key, angles, s->rope_dims / 2);
        kern_ops_ref.store_f16(key, s->head_dim, (uint16_t *)at);
        kern_ops_ref.store_f16(v + (size_t)h * s->head_dim, s->head_dim,
                               (uint16_t *)(at + w->layout.half_bytes));
    }
}

/* pd_seal_tiles_wrote for each run of rows of one sequence in one block. */
static void note_runs(world *w, const rows *r, uint32_t layer)
{
    uint32_t block_tokens = w->shape.block_tokens, count;

    for (uint32_t row = 0; row < r->count; row += count) {
        uint32_t token = r->position[row] % block_tokens;
        for (count = 1; row + count < r->count && token + count < block_tokens &&
                        r->sequence[row + count] == r->sequence[row] && r->sequence[row] != NONE;
             count++)
            ;
        if (r->sequence[row] == NONE)
            continue;
        pd_block block = w->tables[r->table[row] + r->position[row] / block_tokens];
        for (uint32_t h = 0; h < w->shape.kv_heads; h++)
            pd_seal_tiles_wrote(w->tiles, w->pool, layer, block, h, token, token + count);
    }
}

/* --- comparing --- */

static void check_queries(const world *w, const rows *r, const float *got)
{
    size_t cols = (size_t)w->shape.heads * w->shape.head_dim;
    size_t stride = cols + 2 * (size_t)w->shape.kv_heads * w->shape.head_dim;

    for (uint32_t row = 0; row < r->count; row++)
        for (size_t i = 0; i < cols; i++)
            if (kern_bits_of(got[row * stride + i]) != kern_bits_of(r->qkv[row * stride + i]))
                fail_msg("query of row %u, column %zu: %a, not %a", row, i,
                         (double)got[row * stride + i], (double)r->qkv[row * stride + i]);
}

static uint64_t sum_of_tile(const world *w, uint64_t unit, uint32_t half, uint32_t tile,
                            uint32_t covered)
{
    const pd_kv_layout *l = &w->layout;
    uint32_t start = tile * w->tiling.tokens, tokens = covered - start;
    uint32_t left = l->block_tokens - start;

    tokens = tokens < w->tiling.tokens ? tokens : w->tiling.tokens;
    tokens = tokens < left ? tokens : left;
    return pd_tile_sum(w->pool + unit * l->layer_bytes + half * l->half_bytes +
                           start * l->token_bytes,
                       tokens * w->tiling.row_words, 0);
}

static void check_tables(device *d, const world *w)
{
    size_t sums_count = w->units * 2 * w->tiling.tiles;
    uint16_t *covered = test_malloc(w->units * sizeof *covered);
    uint64_t *sums = test_malloc(sums_count * sizeof *sums);

    device_download(d, covered, w->kv.covered, w->units * sizeof *covered);
    device_download(d, sums, w->kv.tile_sums, sums_count * sizeof *sums);
    for (uint32_t layer = 0; layer < w->layout.layers; layer++)
        for (pd_block block = 0; block < w->layout.blocks; block++)
            for (uint32_t head = 0; head < w->layout.kv_heads; head++) {
                uint64_t unit =
                    pd_kv_layout_k_offset(&w->layout, layer, block, head) / w->layout.layer_bytes;
                uint32_t want = pd_seal_tiles_covered(w->tiles, layer, block, head);
                if (covered[unit] != want)
                    fail_msg("layer %u block %u head %u: %u tokens covered, not %u", layer, block,
                             head, covered[unit], want);
                for (uint32_t i = 0; i < 2 * w->tiling.tiles; i++) {
                    uint32_t half = i / w->tiling.tiles, tile = i % w->tiling.tiles;
                    if (tile * w->tiling.tokens < want &&
                        sums[2 * unit * w->tiling.tiles + i] !=
                            sum_of_tile(w, unit, half, tile, want))
                        fail_msg("layer %u block %u head %u half %u: tile %u's hash is wrong",
                                 layer, block, head, half, tile);
                }
            }
    test_free(sums);
    test_free(covered);
}

static void check_pool(device *d, const world *w)
{
    unsigned char *got = test_malloc(w->layout.pool_bytes);

    device_download(d, got, w->kv.pool, w->layout.pool_bytes);
    for (uint64_t i = 0; i < w->layout.pool_bytes; i++)
        if (got[i] != w->pool[i])
            fail_msg("byte %llu of the pool (unit %llu, byte %llu)", (unsigned long long)i,
                     (unsigned long long)(i / w->layout.layer_bytes),
                     (unsigned long long)(i % w->layout.layer_bytes));
    test_free(got);
}

typedef struct buffers { /* device */
    uint32_t *position, *table;
    float *qkv;
} buffers;

static void check_step(device *d, world *w, rows *r, uint32_t layer, const float *qkv)
{
    const shape *s = &w->shape;
    size_t bytes = (size_t)r->count * (s->heads + 2 * s->kv_heads) * s->head_dim * sizeof(float);
    float *got = test_malloc(bytes);

    for (uint32_t row = 0; row < r->count; row++)
        if (r->position[row] != CU_ROW_NONE)
            place_row(w, r, row, layer);
    note_runs(w, r, layer);
    device_download(d, got, qkv, bytes);
    check_queries(w, r, got);
    check_pool(d, w);
    if (s->seals)
        check_tables(d, w);
    test_free(got);
    test_free(r->qkv);
}

static cu_step step_of(const world *w, uint32_t count, const buffers *b)
{
    return (cu_step){
        .rows = count, .position = b->position, .table = b->table, .blocks = w->device_tables};
}

static void make_step(device *d, world *w, const one_step *step, uint32_t layer)
{
    const shape *s = &w->shape;
    rows r;
    buffers b;

    make_rows(w, step, &r);
    b.qkv = device_upload(
        d, r.qkv, (size_t)r.count * (s->heads + 2 * s->kv_heads) * s->head_dim * sizeof *r.qkv);
    b.position = device_upload(d, r.position, r.count * sizeof *r.position);
    b.table = device_upload(d, r.table, r.count * sizeof *r.table);
    cu_step on_device = step_of(w, r.count, &b);
    assert_int_equal(cu_append(d->stream, &on_device, &w->kv, layer, s->heads, s->rope_dims,
                               w->device_rope, b.qkv),
                     PD_OK);
    check_step(d, w, &r, layer, b.qkv);
}

/* --- tests --- */

typedef struct story {
    shape shape;
    uint32_t sequences, count;
    const one_step *steps;
} story;

static void tell(device *d, void *ctx)
{
    const story *s = ctx;
    world w;

    make_world(&w, &s->shape, s->sequences, d);
    for (uint32_t i = 0; i < s->count; i++)
        make_step(d, &w, &s->steps[i], i % s->shape.layers == 1 ? s->shape.layers - 1 : 0);
    end_world(&w);
}

#define STORY(shape, sequences, steps)                                                             \
    (story)                                                                                        \
    {                                                                                              \
        shape, sequences, sizeof(steps) / sizeof *(steps), steps                                   \
    }

/* Prompts cut anywhere, decode, several sequences, padding. All in layer 0, then in the last. */
static const one_step usual[] = {
    {{{0, 0, 21}, {1, 0, 3}, {NONE, 0, 2}}},
    {{{0, 0, 1}, {2, 0, 17}}},
    {{{0, 21, 1}, {1, 3, 1}, {2, 0, 1}, {NONE, 0, 1}}},
    {{{2, 17, 33}}},
    {{{0, 22, 12}, {1, 4, 30}, {2, 1, 2}}},
    {{{2, 50, 1}}},
    {{{1, 34, 1}, {2, 3, 16}, {0, 34, 1}}},
    {{{2, 51, 20}, {1, 1, 1}}},
};

static void heads_of_every_size(void **state)
{
    static const shape shapes[] = {
        {64, 64, 6, 2, 3, 2, 16, true},   {80, 80, 4, 1, 2, 1, 32, true},
        {96, 48, 3, 3, 2, 2, 16, true},   {128, 128, 8, 2, 3, 2, 16, true},
        {16, 16, 2, 2, 2, 5, 48, true},   {32, 32, 2, 1, 2, 1, 16, true},
        {112, 110, 2, 1, 2, 1, 16, true}, {256, 64, 2, 1, 2, 1, 16, true},
        {512, 512, 1, 1, 2, 1, 16, true},
    };

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        story s = STORY(shapes[i], 3, usual);
        device_each(*state, 1, tell, &s);
    }
}

static void nobody_seals(void **state)
{
    story s = STORY(((shape){64, 64, 3, 1, 2, 1, 16, false}), 3, usual);

    device_each(*state, 1, tell, &s);
}

/* Runs longer than a warp's look ahead, in blocks of 80 and of 160 tokens. */
static const one_step long_runs[] = {
    {{{0, 0, 64}}},
    {{{0, 0, 63}, {1, 0, 1}}},
    {{{0, 64, 49}}},
    {{{0, 113, 33}, {1, 1, 31}}},
};

static void runs_longer_than_a_warp(void **state)
{
    story s = STORY(((shape){64, 64, 1, 1, 1, 1, 80, true}), 2, long_runs);

    device_each(*state, 1, tell, &s);
    s.shape.block_tokens = 160;
    device_each(*state, 1, tell, &s);
    s.shape.head_dim = s.shape.rope_dims = 16;
    device_each(*state, 1, tell, &s);
}

/* Blocks that were used before, by rows from their start, from within what is covered and within a
 * tile, from behind it; and what another has written in between stays unknown. */
static const one_step used_before[] = {
    {{{0, 0, 32}}},  {{{0, 0, 5}}},  {{{0, 3, 4}}}, {{{0, 2, 1}}},  {{{0, 5, 3}}},
    {{{0, 3, 9}}},   {{{0, 14, 6}}}, {{{0, 1, 1}}}, {{{0, 11, 4}}}, {{{0, 2, 30}}},
    {{{0, 40, 24}}}, {{{0, 9, 1}}},  {{{0, 9, 3}}}, {{{0, 32, 8}}}, {{{0, 13, 1}}},
};

static void blocks_are_used_again(void **state)
{
    story s = STORY(((shape){64, 64, 1, 1, 1, 1, 32, true}), 1, used_before);

    device_each(*state, 1, tell, &s);
    s.shape.head_dim = s.shape.rope_dims = 80;
    device_each(*state, 1, tell, &s);
    s.shape.head_dim = s.shape.rope_dims = 128;
    s.shape.block_tokens = 16;
    device_each(*state, 1, tell, &s);
}

/* The next row's position follows on, but it is another sequence's. */
static const one_step neighbours[] = {
    {{{0, 0, 6}, {1, 0, 7}, {2, 0, 8}}},
    {{{0, 6, 1}, {1, 7, 1}, {2, 8, 1}}},
    {{{1, 8, 2}, {2, 9, 2}, {0, 7, 2}, {NONE, 0, 3}}},
    {{{NONE, 0, 1}, {0, 9, 1}, {NONE, 0, 1}, {1, 10, 5}, {2, 11, 5}}},
};

static void neighbours_by_position_are_not_one_sequence(void **state)
{
    story s = STORY(((shape){64, 64, 3, 3, 1, 1, 16, true}), 3, neighbours);

    device_each(*state, 2, tell, &s);
}

static const one_step nothing_but_padding[] = {{{{NONE, 0, 3}}}};

static void padding_writes_nothing(void **state)
{
    story s = STORY(((shape){64, 64, 3, 1, 1, 1, 16, true}), 1, nothing_but_padding);

    device_each(*state, 1, tell, &s);
}

/* One graph, recorded before there is any row, takes every step. */
static void replay(device *d, void *ctx)
{
    const story *s = ctx;
    size_t row_floats = (size_t)(s->shape.heads + 2 * s->shape.kv_heads) * s->shape.head_dim;
    gpu_graph *graph;
    world w;
    rows r;

    make_world(&w, &s->shape, s->sequences, d);
    buffers b = {device_space(d, ROWS_MAX * sizeof *b.position),
                 device_space(d, ROWS_MAX * sizeof *b.table),
                 device_space(d, ROWS_MAX * row_floats * sizeof *b.qkv)};
    cu_step on_device = step_of(&w, ROWS_MAX, &b);
    device_finish(d);
    assert_int_equal(gpu_graph_begin(d->stream), PD_OK);
    assert_int_equal(cu_append(d->stream, &on_device, &w.kv, 0, s->shape.heads, s->shape.rope_dims,
                               w.device_rope, b.qkv),
                     PD_OK);
    assert_int_equal(gpu_graph_end(d->stream, &graph), PD_OK);
    for (uint32_t i = 0; i < s->count; i++) {
        make_rows(&w, &s->steps[i], &r);
        for (uint32_t row = r.count; row < ROWS_MAX; row++) {
            r.position[row] = CU_ROW_NONE;
            r.table[row] = 0;
        }
        assert_int_equal(gpu_copy_in(d->stream, b.position, r.position, sizeof r.position), PD_OK);
        assert_int_equal(gpu_copy_in(d->stream, b.table, r.table, sizeof r.table), PD_OK);
        assert_int_equal(gpu_copy_in(d->stream, b.qkv, r.qkv, r.count * row_floats * sizeof *b.qkv),
                         PD_OK);
        assert_int_equal(gpu_graph_launch(graph, d->stream), PD_OK);
        device_finish(d);
        check_step(d, &w, &r, 0, b.qkv);
    }
    gpu_graph_destroy(graph);
    end_world(&w);
}

static void one_graph_takes_every_step(void **state)
{
    story s = STORY(((shape){64, 64, 3, 1, 1, 1, 16, true}), 3, usual);

    device_each(*state, 2, replay, &s);
}

/* As few sectors as hold the bytes of qkv, the pool and the angles, in a prompt and in a decode
 * step; the lists of rows begin anywhere. */
static void accesses_fall_together(void **state)
{
    static const one_step prompt[] = {{{{0, 0, 16}}}}, decode[] = {{{{0, 16, 1}, {1, 3, 1}}}};
    static const uint32_t dims[] = {64, 80, 96, 128};
    device *d = *state;

    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        shape of = {dims[i], dims[i], 4, 1, 1, 1, 16, true};
        story s = STORY(of, 2, prompt);
        device_traffic_clear(d);
        tell(d, &s);
        device_clear(d);
        s.steps = decode;
        tell(d, &s);
        device_clear(d);
        device_traffic t = device_traffic_of(d, "append");
        assert_true(t.sectors <= t.sectors_ideal + 4);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_of_every_size),
        cmocka_unit_test(nobody_seals),
        cmocka_unit_test(runs_longer_than_a_warp),
        cmocka_unit_test(blocks_are_used_again),
        cmocka_unit_test(neighbours_by_position_are_not_one_sequence),
        cmocka_unit_test(padding_writes_nothing),
        cmocka_unit_test(one_graph_takes_every_step),
        cmocka_unit_test(accesses_fall_together),
    };
    return cmocka_run_group_tests_name("gpu-emu-append", tests, device_setup, device_teardown);
}

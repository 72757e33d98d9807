/* What the kernels hash as they write K and V is what a seal from the bytes would hash. */

#include "kernels/model/engine.h"
#include "kernels/model/forward.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"
#include "common/base/queue.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TOKENS    160
#define BLOCKS    128
#define SEQUENCES 8

static pd_model_file *file;
static pd_kv_layout layout;
static uint32_t tokens[TOKENS];

typedef struct rig {
    void *pool;
    pd_seal_tiles *tiles;
    pd_block blocks[BLOCKS];
} rig;

static int set_up(void **state)
{
    uint64_t seed = 7;

    (void)state;
    file = tiny_open();
    layout = tiny_layout(file, BLOCKS);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)(pd_random_next(&seed) % TINY_VOCAB);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    pd_model_file_close(file);
    return pd_mem_live() == 0 ? 0 : -1;
}

static rig rig_make(void)
{
    rig r = {.pool = pd_malloc(layout.pool_bytes)};

    assert_non_null(r.pool);
    memset(r.pool, 0xff, layout.pool_bytes);
    assert_int_equal(pd_seal_tiles_create(&layout, &r.tiles), PD_OK);
    for (uint32_t i = 0; i < BLOCKS; i++)
        r.blocks[i] = i * 101 % BLOCKS;
    return r;
}

static void rig_end(rig *r)
{
    pd_seal_tiles_destroy(r->tiles);
    pd_free(r->pool);
}

static bool usable(const kern_ops *backend)
{
    char reason[128];
    return backend->probe(reason, sizeof reason) > 0;
}

static kern_options options_of(const char *device)
{
    return (kern_options){
        .device = device, .threads = 3, .context_max = 256, .rows_max = 400, .logits_rows_max = 4};
}

/* Every block of the sequence is covered as far as it was written, and the seals made of what was
 * hashed on the way are those of the bytes. */
static void check_tiles(const rig *r, const pd_block *blocks, uint32_t length)
{
    for (uint32_t index = 0; index * layout.block_tokens < length; index++) {
        uint32_t left = length - index * layout.block_tokens;
        uint32_t valid = left < layout.block_tokens ? left : layout.block_tokens;
        for (uint32_t group = 0; group < layout.groups; group++) {
            pd_seal_place place = {.request = 1,
                                   .group = group,
                                   .block_index = index,
                                   .valid_tokens = valid,
                                   .layout_fingerprint = 2};
            uint64_t seal = 0;
            for (uint32_t head = 0; head < layout.kv_heads; head++)
                assert_int_equal(pd_seal_tiles_covered(r->tiles, group * layout.group_layers,
                                                       blocks[index], head),
                                 valid);
            pd_seal_of(&layout, r->pool, r->tiles, blocks[index], &place, 1, &seal);
            assert_true(seal == pd_seal_compute(&layout, r->pool, blocks[index], &place, 0,
                                                layout.kv_heads));
        }
    }
}

/* Sequences grow by random chunks and single tokens, alone and together, and now and then the last
 * tokens are computed once more, as after a cache hit that covers a whole prompt. */
static void tiles_are_hashed_as_they_are_written(void **state)
{
    enum { LENGTH = 100, EACH = 16 };
    uint64_t random = 11;

    (void)state;
    for (uint32_t i = 0; kern_ops_at(i) != NULL; i++) {
        if (!usable(kern_ops_at(i)))
            continue;
        kern_options options = options_of(kern_ops_at(i)->name);
        kern_model *model = NULL;
        uint32_t lengths[SEQUENCES] = {0};
        rig r = rig_make();
        assert_int_equal(kern_model_create(file, &options, &model), PD_OK);
        for (uint32_t round = 0; round < 60; round++) {
            bool singles = pd_random_next(&random) % 2 == 0;
            kern_slice slices[SEQUENCES];
            uint32_t count = 0;
            for (uint32_t s = 0; s < SEQUENCES; s++) {
                uint32_t some = singles ? 1 : 1 + (uint32_t)(pd_random_next(&random) % 40);
                if (pd_random_next(&random) % 3 == 0 || lengths[s] + some > LENGTH)
                    continue;
                uint32_t again = (uint32_t)(pd_random_next(&random) % 12);
                again = again > 2 || again > lengths[s] ? 0 : again;
                slices[count++] = (kern_slice){.tokens = tokens + lengths[s] - again,
                                               .count = some,
                                               .position = lengths[s] - again,
                                               .blocks = r.blocks + EACH * s,
                                               .logits_from = some};
                lengths[s] += some - again;
            }
            kern_step run = {.layout = &layout,
                             .pool = r.pool,
                             .tiles = r.tiles,
                             .slices = slices,
                             .slices_count = count};
            assert_int_equal(kern_model_step(model, &run), PD_OK);
            for (uint32_t s = 0; s < SEQUENCES; s++)
                check_tiles(&r, r.blocks + EACH * s, lengths[s]);
        }
        kern_model_destroy(model);
        rig_end(&r);
    }
}

static void queue_group(void *ctx, uint32_t group)
{
    assert_int_equal(pd_queue_push(ctx, &group), PD_OK);
}

/* As a worker ships: another thread seals each group that was announced while the model computes
 * the next one (the thread sanitizer looks on). */
static void finished_groups_are_sealed_while_the_step_goes_on(void **state)
{
    enum { JOBS = 4, LENGTH = 128 };
    rig r = rig_make();
    pd_queue *announced = NULL;
    kern_job_slice slices[JOBS];
    kern_job jobs[JOBS];

    (void)state;
    assert_int_equal(pd_queue_create(sizeof(uint32_t), JOBS * 16, &announced), PD_OK);
    kern_engine_options options = {
        .device = "cpu", .threads = 3, .context_max = 256, .rows_max = 400, .slices_max = 4};
    kern_engine *engine = NULL;
    assert_int_equal(kern_engine_create(file, &options, &engine), PD_OK);
    assert_int_equal(kern_engine_bind(engine, &layout, r.pool, true), PD_OK);
    pd_sealer sealer = kern_engine_sealer(engine);
    for (uint32_t i = 0; i < JOBS; i++) {
        slices[i] = (kern_job_slice){.slice = {.tokens = tokens,
                                               .count = LENGTH,
                                               .blocks = r.blocks + i * LENGTH / 16,
                                               .logits_from = LENGTH}};
        jobs[i] = (kern_job){.slices = &slices[i],
                             .slices_count = 1,
                             .group_done = queue_group,
                             .group_done_ctx = announced};
        assert_int_equal(kern_engine_submit(engine, &jobs[i]), PD_OK);
    }
    for (uint32_t seen = 0; seen < JOBS * layout.groups; seen++) {
        uint32_t group;
        while (pd_queue_pop(announced, &group) != PD_OK)
            pd_queue_wait(announced, 20000);
        assert_int_equal(group, seen % layout.groups);
        pd_seal_place place = {.request = 1, .group = group, .valid_tokens = layout.block_tokens};
        for (uint32_t i = 0; i < LENGTH / layout.block_tokens; i++) {
            pd_block block = slices[seen / layout.groups].slice.blocks[i];
            uint64_t seal;
            pd_seal_item item = {.block = block, .head_to = layout.kv_heads, .place = place};
            assert_int_equal(sealer.seal(sealer.ctx, &item, 1, &seal), PD_OK);
            assert_true(seal ==
                        pd_seal_compute(&layout, r.pool, block, &place, 0, layout.kv_heads));
        }
    }
    kern_engine_destroy(engine);
    pd_queue_destroy(announced);
    rig_end(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_are_hashed_as_they_are_written),
        cmocka_unit_test(finished_groups_are_sealed_while_the_step_goes_on),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

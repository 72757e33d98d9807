/* Seals are pd_seal_compute's, whether from the bytes or from the tables; blocks come and go as
 * they are. */
#include "common/base/hash.h"
#include "common/kv/seal.h"
#include "common/kv/tile_sum.h"
#include "kernels/cuda/launch.h"
#include "tests/gpu-emu/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

typedef struct shape {
    uint32_t head_dim, kv_heads, layers, group_layers, block_tokens, blocks;
} shape;

static const shape shapes[] = {
    {64, 3, 5, 2, 16, 6}, {128, 2, 4, 2, 16, 4},  {80, 2, 2, 1, 32, 3},  {96, 1, 3, 3, 48, 3},
    {16, 2, 2, 1, 16, 3}, {256, 1, 2, 2, 128, 2}, {512, 2, 1, 1, 48, 2},
};
#define SHAPES (sizeof shapes / sizeof *shapes)

/* A pool here and the same on the device. */
typedef struct world {
    pd_kv_layout layout;
    pd_seal_tiling tiling;
    uint64_t units, random;
    size_t sums_bytes;
    unsigned char *pool;
    cu_kv kv;
} world;

static void make_world(world *w, const shape *s, device *d)
{
    pd_model_shape model = {.layers = s->layers, .kv_heads = s->kv_heads, .head_dim = s->head_dim};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = s->block_tokens,
                                    .group_layers = s->group_layers,
                                    .memory_bytes = 1 << 30,
                                    .blocks_max = s->blocks};

    *w = (world){.random = 31};
    assert_int_equal(pd_kv_layout_make(&model, &options, &w->layout), PD_OK);
    const pd_kv_layout *l = &w->layout;
    w->tiling = pd_seal_tiling_of(l->token_bytes, l->block_tokens);
    w->units = l->pool_bytes / l->layer_bytes;
    w->sums_bytes = w->units * 2 * w->tiling.tiles * sizeof(uint64_t);
    w->pool = test_malloc(l->pool_bytes);
    for (uint64_t i = 0; i < l->pool_bytes; i += 4) {
        uint32_t bits = device_random(&w->random);
        memcpy(w->pool + i, &bits, sizeof bits);
    }
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
    w->kv.tile_keys = device_upload(d, pd_tile_keys, sizeof pd_tile_keys);
}

/* Tables in which nothing is covered. */
static void add_tables(world *w, device *d)
{
    w->kv.covered = device_space(d, w->units * sizeof(uint16_t));
    w->kv.tile_sums = device_space(d, w->sums_bytes);
    assert_int_equal(gpu_fill(d->stream, w->kv.covered, 0, w->units * sizeof(uint16_t)), PD_OK);
    assert_int_equal(gpu_fill(d->stream, w->kv.tile_sums, 0x77, w->sums_bytes), PD_OK);
}

static void end_world(world *w)
{
    test_free(w->pool);
}

/* --- seals --- */

typedef struct seals {
    uint32_t count;
    cu_seal_item items[64];
    uint64_t want[64];
} seals;

static void add_seal(world *w, seals *s, uint32_t group, pd_block block, uint32_t valid,
                     uint32_t head_from, uint32_t head_to)
{
    pd_seal_place place = {
        .request = 0x1234567890 + block,
        .epoch = 3,
        .group = group,
        .block_index = 7 + block,
        .valid_tokens = valid,
        .head_first = 5 * (block % 2),
        .layout_fingerprint = pd_kv_layout_fingerprint(&w->layout),
    };

    assert_true(s->count < 64);
    s->items[s->count] = (cu_seal_item){
        .key = pd_seal_place_key(&place),
        .block = block,
        .group = group,
        .valid_tokens = valid,
        .head_from = head_from,
        .head_to = head_to,
        .head_first = place.head_first,
    };
    s->want[s->count++] = pd_seal_compute(&w->layout, w->pool, block, &place, head_from, head_to);
}

/* Every block of every group, its heads cut somewhere, with 1, 2, all but one, all tokens ... */
static void add_all(world *w, seals *s)
{
    const pd_kv_layout *l = &w->layout;
    uint32_t valids[] = {l->block_tokens, 1, l->block_tokens - 1, w->tiling.tokens,
                         w->tiling.tokens + 1};
    uint32_t n = 0;

    for (uint32_t group = 0; group < l->groups; group++)
        for (pd_block block = 0; block < l->blocks; block++) {
            uint32_t valid = valids[n++ % 5], cut = n % (l->kv_heads + 1);
            valid = valid < l->block_tokens ? valid : l->block_tokens;
            add_seal(w, s, group, block, valid, 0, cut);
            add_seal(w, s, group, block, valid, cut, l->kv_heads);
        }
}

static void check_seals(device *d, const world *w, const seals *s, bool from_bytes)
{
    uint64_t got[64];
    const cu_seal_item *items = device_upload(d, s->items, s->count * sizeof *s->items);
    uint64_t *out = device_space(d, s->count * sizeof *out);

    assert_int_equal(cu_seal(d->stream, &w->kv, s->count, items, from_bytes, out), PD_OK);
    device_download(d, got, out, s->count * sizeof *out);
    for (uint32_t i = 0; i < s->count; i++)
        if (got[i] != s->want[i])
            fail_msg("seal %u (group %u, block %u, %u tokens, heads %u to %u) is %llx, not %llx", i,
                     s->items[i].group, s->items[i].block, s->items[i].valid_tokens,
                     s->items[i].head_from, s->items[i].head_to, (unsigned long long)got[i],
                     (unsigned long long)s->want[i]);
}

static void spoil(device *d, const world *w)
{
    assert_int_equal(gpu_fill(d->stream, w->kv.pool, 0x11, w->layout.pool_bytes), PD_OK);
}

static void seal_bytes_once(device *d, void *ctx)
{
    world w;
    seals s = {0};

    make_world(&w, ctx, d);
    add_all(&w, &s);
    check_seals(d, &w, &s, true);
    check_seals(d, &w, &s, false); /* no tables: from the bytes as well */
    add_tables(&w, d);
    check_seals(d, &w, &s, false); /* nothing is covered */
    check_seals(d, &w, &s, true);
    spoil(d, &w); /* what was hashed is what the tables say, whatever lies in the pool by now */
    check_seals(d, &w, &s, false);
    end_world(&w);
}

static void seals_from_bytes_are_learnt(void **state)
{
    for (size_t i = 0; i < SHAPES; i++)
        device_each(*state, 1, seal_bytes_once, (void *)&shapes[i]);
}

/* Tables that cover some tokens of each unit, with hashes of a pool that has changed since: a tile
 * counts as known exactly where pd_seal_of takes it so. */
static void partly_covered_once(device *d, void *ctx)
{
    world w;
    pd_seal_tiles *tiles;
    seals s = {0};

    make_world(&w, ctx, d);
    add_tables(&w, d);
    const pd_kv_layout *l = &w.layout;
    uint16_t *covered = test_malloc(w.units * sizeof *covered);
    uint64_t *sums = test_malloc(w.sums_bytes);
    memset(sums, 0, w.sums_bytes);
    assert_int_equal(pd_seal_tiles_create(l, &tiles), PD_OK);
    for (uint32_t layer = 0; layer < l->layers; layer++)
        for (pd_block block = 0; block < l->blocks; block++)
            for (uint32_t head = 0; head < l->kv_heads; head++) {
                uint64_t unit = pd_kv_layout_k_offset(l, layer, block, head) / l->layer_bytes;
                uint32_t tokens = device_random(&w.random) % (l->block_tokens + 1);
                covered[unit] = (uint16_t)tokens;
                if (tokens > 0)
                    pd_seal_tiles_wrote(tiles, w.pool, layer, block, head, 0, tokens);
                for (uint32_t i = 0; i < 2 * w.tiling.tiles; i++) {
                    uint32_t start = i % w.tiling.tiles * w.tiling.tokens;
                    uint32_t some = tokens > start ? tokens - start : 0;
                    some = some < w.tiling.tokens ? some : w.tiling.tokens;
                    if (some > 0)
                        sums[2 * unit * w.tiling.tiles + i] = pd_tile_sum(
                            w.pool + unit * l->layer_bytes + i / w.tiling.tiles * l->half_bytes +
                                start * l->token_bytes,
                            some * w.tiling.row_words, 0);
                }
            }
    memset(w.pool, 0x11, l->pool_bytes);
    spoil(d, &w);
    assert_int_equal(gpu_copy_in(d->stream, w.kv.covered, covered, w.units * sizeof *covered),
                     PD_OK);
    assert_int_equal(gpu_copy_in(d->stream, w.kv.tile_sums, sums, w.sums_bytes), PD_OK);
    device_finish(d);
    add_all(&w, &s);
    for (uint32_t i = 0; i < s.count; i++) { /* from the tables, not from the bytes */
        const cu_seal_item *item = &s.items[i];
        pd_seal_place place = {
            .request = 0x1234567890 + item->block,
            .epoch = 3,
            .group = item->group,
            .block_index = 7 + item->block,
            .valid_tokens = item->valid_tokens,
            .head_first = item->head_first,
            .layout_fingerprint = pd_kv_layout_fingerprint(l),
        };
        uint64_t heads[8];
        pd_seal_of(l, w.pool, tiles, item->block, &place, l->kv_heads, heads);
        s.want[i] = 0;
        for (uint32_t head = item->head_from; head < item->head_to; head++)
            s.want[i] += heads[head];
    }
    check_seals(d, &w, &s, false);
    pd_seal_tiles_destroy(tiles);
    test_free(sums);
    test_free(covered);
    end_world(&w);
}

static void tables_are_used_where_they_cover(void **state)
{
    for (size_t i = 0; i < SHAPES; i++)
        device_each(*state, 1, partly_covered_once, (void *)&shapes[i]);
}

/* So many seals that each is made by one block of threads, in turns. */
static void large_batch_once(device *d, void *ctx)
{
    world w;
    seals learnt = {0}, s = {0};
    uint32_t count = 6 * gpu_info_of(d->gpu)->processors;

    make_world(&w, ctx, d);
    add_tables(&w, d);
    add_seal(&w, &learnt, 0, 0, w.layout.block_tokens, 0, w.layout.kv_heads);
    check_seals(d, &w, &learnt, true);
    for (uint32_t i = 0; i < count && i < 64; i++) /* the last tile is not known in most */
        add_seal(&w, &s, 0, 0, w.layout.block_tokens - i % 4, 0, w.layout.kv_heads);
    check_seals(d, &w, &s, false);
    end_world(&w);
}

static void a_large_batch_is_sealed_in_turns(void **state)
{
    static const shape large = {256, 1, 3, 3, 128, 1}; /* 384 tiles a seal */

    device_each(*state, 1, large_batch_once, (void *)&large);
}

static void flipped_bit_once(device *d, void *ctx)
{
    world w;
    seals s = {0};

    make_world(&w, ctx, d);
    add_tables(&w, d);
    for (uint32_t tile = 0; tile < 4; tile++) { /* one word somewhere in the first block */
        uint64_t at = device_random(&w.random) % (w.layout.half_bytes / 8) * 8;
        uint64_t *out = device_space(d, sizeof *out), got;
        s.count = 0;
        add_seal(&w, &s, 0, 0, w.layout.block_tokens, 0, w.layout.kv_heads);
        unsigned char flipped = w.pool[at] ^ 0x10;
        assert_int_equal(gpu_copy_in(d->stream, (char *)w.kv.pool + at, &flipped, 1), PD_OK);
        const cu_seal_item *item = device_upload(d, s.items, sizeof *s.items);
        assert_int_equal(cu_seal(d->stream, &w.kv, 1, item, true, out), PD_OK);
        device_download(d, &got, out, sizeof got);
        assert_true(got != s.want[0]);
        assert_int_equal(gpu_copy_in(d->stream, (char *)w.kv.pool + at, w.pool + at, 1), PD_OK);
        device_finish(d);
    }
    end_world(&w);
}

static void a_flipped_bit_is_another_seal(void **state)
{
    device_each(*state, 1, flipped_bit_once, (void *)&shapes[0]);
}

/* --- blocks to and from a run of bytes --- */

typedef struct copy {
    uint32_t group, head_from, head_to;
} copy;

static void fill_run(const world *w, const copy *c, const pd_block *blocks, uint32_t count,
                     unsigned char *run, size_t part)
{
    for (uint32_t i = 0; i < count; i++)
        memcpy(run + i * part,
               w->pool + pd_kv_layout_k_offset(&w->layout, c->group * w->layout.group_layers,
                                               blocks[i], c->head_from),
               part);
}

static void copy_once(device *d, world *w, const copy *c)
{
    const pd_kv_layout *l = &w->layout;
    size_t part =
        (c->head_to - c->head_from) * l->layer_bytes * pd_kv_layout_group_layers(l, c->group);
    pd_block blocks[3] = {l->blocks - 1, 0, 1};
    uint32_t count = l->blocks < 3 ? 2 : 3;
    const pd_block *on_device = device_upload(d, blocks, sizeof blocks);
    unsigned char *run = device_space(d, count * part), *got = test_malloc(l->pool_bytes);
    unsigned char *want = test_malloc(count * part);

    assert_int_equal(
        cu_kv_gather(d->stream, &w->kv, c->group, count, on_device, c->head_from, c->head_to, run),
        PD_OK);
    device_download(d, got, run, count * part);
    fill_run(w, c, blocks, count, want, part);
    assert_memory_equal(got, want, count * part);

    for (size_t i = 0; i < count * part; i++)
        want[i] = (unsigned char)(want[i] ^ 0x5a);
    for (uint32_t i = 0; i < count; i++)
        memcpy(w->pool +
                   pd_kv_layout_k_offset(l, c->group * l->group_layers, blocks[i], c->head_from),
               want + i * part, part);
    assert_int_equal(gpu_copy_in(d->stream, run, want, count * part), PD_OK);
    assert_int_equal(gpu_fill(d->stream, w->kv.covered, 0x01, w->units * sizeof(uint16_t)), PD_OK);
    assert_int_equal(
        cu_kv_scatter(d->stream, &w->kv, c->group, count, on_device, c->head_from, c->head_to, run),
        PD_OK);
    device_download(d, got, w->kv.pool, l->pool_bytes);
    assert_memory_equal(got, w->pool, l->pool_bytes);

    uint16_t *covered = test_malloc(w->units * sizeof *covered);
    uint16_t *expected = test_malloc(w->units * sizeof *covered);
    memset(expected, 0x01, w->units * sizeof *covered);
    for (uint32_t i = 0; i < count; i++)
        memset(expected +
                   pd_kv_layout_k_offset(l, c->group * l->group_layers, blocks[i], c->head_from) /
                       l->layer_bytes,
               0, part / l->layer_bytes * sizeof *covered);
    device_download(d, covered, w->kv.covered, w->units * sizeof *covered);
    assert_memory_equal(covered, expected, w->units * sizeof *covered);
    test_free(expected);
    test_free(covered);
    test_free(want);
    test_free(got);
}

static void copies_once(device *d, void *ctx)
{
    const shape *s = ctx;
    world w;

    make_world(&w, s, d);
    add_tables(&w, d);
    copy all = {0, 0, s->kv_heads};
    copy_once(d, &w, &all);
    copy last = {w.layout.groups - 1, s->kv_heads - 1, s->kv_heads};
    copy_once(d, &w, &last);
    assert_int_equal(cu_kv_gather(d->stream, &w.kv, 0, 0, NULL, 0, s->kv_heads, NULL), PD_OK);
    assert_int_equal(cu_kv_scatter(d->stream, &w.kv, 0, 1, NULL, 1, 1, NULL), PD_OK);
    end_world(&w);
}

static void blocks_come_and_go_as_they_are(void **state)
{
    for (size_t i = 0; i < SHAPES; i++)
        device_each(*state, 1, copies_once, (void *)&shapes[i]);
}

/* As few sectors as hold the bytes; the counts of covered tokens begin anywhere. */
static void accesses_fall_together(void **state)
{
    static const char *const kernels[] = {"seal_bytes", "gather", "scatter"};
    device *d = *state;

    for (size_t i = 0; i < SHAPES; i++) {
        device_traffic_clear(d);
        seal_bytes_once(d, (void *)&shapes[i]);
        device_clear(d);
        copies_once(d, (void *)&shapes[i]);
        device_clear(d);
        for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++) {
            device_traffic t = device_traffic_of(d, kernels[k]);
            assert_true(t.sectors <= t.sectors_ideal + 4);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seals_from_bytes_are_learnt),
        cmocka_unit_test(tables_are_used_where_they_cover),
        cmocka_unit_test(a_large_batch_is_sealed_in_turns),
        cmocka_unit_test(a_flipped_bit_is_another_seal),
        cmocka_unit_test(blocks_come_and_go_as_they_are),
        cmocka_unit_test(accesses_fall_together),
    };
    return cmocka_run_group_tests_name("gpu-emu-kv", tests, device_setup, device_teardown);
}

/* A seal matches the bytes that it was made for, in their place, and nothing else; however it was
 * made. test_seal [FORMAT]: of KV; f16 when not given. */

#include "common/kv/seal.h"
#include "common/kv/tile_sum.h"
#include "tests/unit/kv/cmocka_all.h"

#include "common/base/mem.h"

static pd_dtype dtype = PD_F16;
static pd_kv_layout layout;
static unsigned char *pool;

static int setup(void **state)
{
    (void)state;
    pd_model_shape shape = {.layers = 5, .kv_heads = 4, .head_dim = 40};
    pd_kv_layout_options options = {.dtype = dtype,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = 1 << 20,
                                    .blocks_max = 6};
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    pool = pd_malloc(layout.pool_bytes);
    assert_non_null(pool);
    uint64_t random = 5;
    for (uint64_t i = 0; i < layout.pool_bytes; i++)
        pool[i] = (unsigned char)pd_random_next(&random);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    pd_free(pool);
    return 0;
}

/* Whether the byte of a half belongs to one of its first tokens. */
static bool is_valid(const pd_kv_layout *l, uint64_t at, uint32_t tokens)
{
    if (at >= l->scales_at)
        return at < l->scales_at + (uint64_t)tokens * l->scale_bytes;
    return at < tokens * l->token_bytes;
}

static pd_seal_place place(void)
{
    return (pd_seal_place){.request = 11,
                           .epoch = 2,
                           .group = 1,
                           .block_index = 3,
                           .valid_tokens = 16,
                           .layout_fingerprint = pd_kv_layout_fingerprint(&layout)};
}

static void a_copy_in_another_block_has_the_same_seal(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t seal = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    memcpy(pool + pd_kv_layout_block_offset(&layout, 1, 4),
           pool + pd_kv_layout_block_offset(&layout, 1, 1), pd_kv_layout_block_bytes(&layout, 1));
    assert_int_equal(pd_seal_verify(&layout, pool, 4, &p, 0, 4, seal), PD_OK);
    assert_int_equal(pd_seal_verify(&layout, pool, 2, &p, 0, 4, seal), PD_E_MISMATCH);
}

static void every_field_of_the_place_counts(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t seal = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    pd_seal_place wrong[7];
    for (int i = 0; i < 7; i++)
        wrong[i] = p;
    wrong[0].request++;
    wrong[1].epoch++;
    wrong[2].block_index++;
    wrong[3].valid_tokens--;
    wrong[4].layout_fingerprint++;
    wrong[5].head_first++;
    wrong[6].group = 0;
    for (int i = 0; i < 7; i++)
        assert_int_equal(pd_seal_verify(&layout, pool, 1, &wrong[i], 0, 4, seal), PD_E_MISMATCH);
    assert_int_equal(pd_seal_verify(&layout, pool, 1, &p, 0, 4, seal), PD_OK);
}

static void every_valid_byte_counts_and_no_other(void **state)
{
    (void)state;
    pd_seal_place p = place();
    p.valid_tokens = 5;
    uint64_t seal = pd_seal_compute(&layout, pool, 2, &p, 0, 4);
    uint64_t start = pd_kv_layout_block_offset(&layout, 1, 2);
    uint64_t bytes = pd_kv_layout_block_bytes(&layout, 1);
    for (uint64_t i = 0; i < bytes; i++) {
        bool valid = is_valid(&layout, i % layout.half_bytes, 5);
        pool[start + i] ^= 1;
        assert_int_equal(pd_seal_verify(&layout, pool, 2, &p, 0, 4, seal),
                         valid ? PD_E_MISMATCH : PD_OK);
        pool[start + i] ^= 1;
    }
}

/* The same heads in pools of other splits: one seal a slice, whoever made it and by whatever. */
static void a_slice_has_one_seal_whatever_the_split(void **state)
{
    enum { SLICES = 4, FROM = 1, TO = 3 };
    static const uint32_t ranks[] = {1, 2, 4};

    (void)state;
    pd_model_shape shape = {.layers = 5, .kv_heads = 4, .head_dim = 40};
    for (int r = 0; r < 3; r++) {
        pd_kv_layout other;
        pd_kv_layout_options options = {.dtype = dtype,
                                        .block_tokens = 16,
                                        .group_layers = 2,
                                        .memory_bytes = 1 << 20,
                                        .blocks_max = 7,
                                        .ranks = ranks[r]};
        assert_int_equal(pd_kv_layout_make(&shape, &options, &other), PD_OK);
        unsigned char *bytes = pd_calloc(1, other.pool_bytes);
        pd_seal_tiles *tiles = NULL;
        assert_non_null(bytes);
        assert_int_equal(pd_seal_tiles_create(&other, &tiles), PD_OK);
        for (uint32_t group = 0; group < other.groups; group++) {
            uint64_t seals[SLICES], theirs[SLICES];
            pd_seal_place p = place();
            p.group = group;
            p.valid_tokens = 13;
            for (uint32_t head = 0; head < 4; head++)
                memcpy(bytes + pd_kv_layout_head_offset(&other, group, TO, head),
                       pool + pd_kv_layout_head_offset(&layout, group, FROM, head),
                       pd_kv_layout_head_bytes(&other, group));
            pd_seal_of(&layout, pool, NULL, FROM, &p, SLICES, seals);
            pd_seal_of(&other, bytes, NULL, TO, &p, SLICES, theirs);
            assert_memory_equal(seals, theirs, sizeof seals);
            assert_int_equal(pd_seal_check(&other, bytes, tiles, TO, &p, SLICES, seals), PD_OK);
            for (uint32_t head = 0; head < 4; head++)
                assert_int_equal(pd_seal_tiles_covered(tiles, 2 * group, TO, head), 13);
            memset(theirs, 0, sizeof theirs);
            pd_seal_of(&other, bytes, tiles, TO, &p, SLICES, theirs); /* by what was learnt */
            assert_memory_equal(seals, theirs, sizeof seals);
            for (uint32_t head = 0; head < 4; head++) { /* the slice that is wrong, no other */
                pd_seal_item item = {
                    .block = TO, .head_from = head, .head_to = head + 1, .place = p};
                unsigned char *byte = bytes + pd_kv_layout_head_offset(&other, group, TO, head) + 3;
                *byte ^= 4;
                for (uint32_t at = 0; at < SLICES; at++) {
                    uint32_t bad;
                    item.head_from = at;
                    item.head_to = at + 1;
                    assert_int_equal(
                        pd_seal_check_items(&other, bytes, NULL, &item, 1, &seals[at], &bad),
                        at == head ? PD_E_MISMATCH : PD_OK);
                }
                *byte ^= 4;
            }
        }
        pd_seal_tiles_destroy(tiles);
        pd_free(bytes);
    }
}

static void equal_halves_may_not_change_places(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t seal = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    unsigned char saved[16 * 40 * 2];
    assert_true(layout.half_bytes <= sizeof saved);
    unsigned char *k = pool + pd_kv_layout_k_offset(&layout, 2, 1, 0);
    memcpy(saved, k, layout.half_bytes);
    memcpy(k, k + layout.half_bytes, layout.half_bytes);
    memcpy(k + layout.half_bytes, saved, layout.half_bytes);
    assert_int_equal(pd_seal_verify(&layout, pool, 1, &p, 0, 4, seal), PD_E_MISMATCH);
    memcpy(k + layout.half_bytes, k, layout.half_bytes);
    memcpy(k, saved, layout.half_bytes);
    assert_int_equal(pd_seal_verify(&layout, pool, 1, &p, 0, 4, seal), PD_OK);
}

static void slices_of_heads_add_up_and_match_a_workers_own_numbering(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t all = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    uint64_t low = pd_seal_compute(&layout, pool, 1, &p, 0, 1);
    uint64_t high = pd_seal_compute(&layout, pool, 1, &p, 1, 4);
    assert_true(all == low + high);
    /* a worker that holds heads 2 and 3 only, as its 0 and 1 */
    pd_kv_layout half = layout;
    half.kv_heads = 2;
    half.block_bytes_all /= 2;
    half.pool_bytes /= 2;
    unsigned char *half_pool = pd_calloc(1, half.pool_bytes);
    assert_non_null(half_pool);
    for (uint32_t layer = 2; layer < 4; layer++) {
        for (uint32_t head = 0; head < 2; head++)
            memcpy(half_pool + pd_kv_layout_k_offset(&half, layer, 0, head),
                   pool + pd_kv_layout_k_offset(&layout, layer, 1, head + 2), half.layer_bytes);
    }
    pd_seal_place shifted = p;
    shifted.head_first = 2;
    uint64_t slice = pd_seal_compute(&layout, pool, 1, &p, 2, 4);
    assert_int_equal(pd_seal_verify(&half, half_pool, 0, &shifted, 0, 2, slice), PD_OK);
    pd_free(half_pool);
}

/* ---- every bit, every split ---- */

#define HEADS 8

typedef struct rig {
    pd_kv_layout layout;
    unsigned char *pool;
    uint64_t random;
} rig;

static rig rig_make(uint32_t head_dim, uint32_t block_tokens, uint32_t kv_heads, uint32_t blocks)
{
    pd_model_shape shape = {.layers = 3, .kv_heads = kv_heads, .head_dim = head_dim};
    pd_kv_layout_options options = {.dtype = dtype,
                                    .block_tokens = block_tokens,
                                    .group_layers = 2,
                                    .memory_bytes = 1 << 26,
                                    .blocks_max = blocks};
    rig r = {.random = head_dim};

    assert_int_equal(pd_kv_layout_make(&shape, &options, &r.layout), PD_OK);
    r.pool = pd_malloc(r.layout.pool_bytes);
    assert_non_null(r.pool);
    for (uint64_t i = 0; i < r.layout.pool_bytes; i++)
        r.pool[i] = (unsigned char)pd_random_next(&r.random);
    return r;
}

static uint32_t below(rig *r, uint32_t limit)
{
    return (uint32_t)(pd_random_next(&r->random) % limit);
}

static unsigned char *half_at(const rig *r, uint32_t layer, pd_block block, uint32_t head,
                              uint32_t half)
{
    return r->pool + pd_kv_layout_k_offset(&r->layout, layer, block, head) +
           half * r->layout.half_bytes;
}

static void every_flipped_bit_is_found(void **state)
{
    rig r = rig_make(40, 16, HEADS, 2);
    pd_seal_place p = {.request = 7, .valid_tokens = 16, .layout_fingerprint = 3};

    (void)state;
    for (uint32_t head = 0; head < HEADS; head++) {
        uint64_t seal = pd_seal_compute(&r.layout, r.pool, 1, &p, head, head + 1);
        unsigned char *bytes = half_at(&r, 0, 1, head, 0);
        for (uint64_t i = 0; i < 2 * r.layout.layer_bytes; i++) {
            for (uint32_t bit = 0; bit < 8; bit++) {
                bytes[i] ^= (unsigned char)(1 << bit);
                if (pd_seal_compute(&r.layout, r.pool, 1, &p, head, head + 1) == seal)
                    fail_msg("head %u byte %u bit %u", head, (uint32_t)i, bit);
                bytes[i] ^= (unsigned char)(1 << bit);
            }
        }
        assert_true(pd_seal_compute(&r.layout, r.pool, 1, &p, head, head + 1) == seal);
    }
    pd_free(r.pool);
}

static void swap(unsigned char *a, unsigned char *b, uint64_t bytes)
{
    unsigned char saved[4096];

    assert_true(bytes <= sizeof saved);
    memcpy(saved, a, bytes);
    memcpy(a, b, bytes);
    memcpy(b, saved, bytes);
}

static void nothing_may_change_places(void **state)
{
    rig r = rig_make(40, 32, HEADS, 2);
    pd_seal_place p = {.request = 7, .valid_tokens = 32, .layout_fingerprint = 3};
    uint64_t row = r.layout.token_bytes, tile = 12 * row;
    struct {
        unsigned char *a, *b;
        uint64_t bytes;
    } pairs[] = {
        {half_at(&r, 0, 0, 0, 0), half_at(&r, 0, 0, 0, 0) + 8, 8},         /* words */
        {half_at(&r, 0, 0, 0, 0), half_at(&r, 0, 0, 0, 0) + 5 * row, row}, /* tokens of a tile */
        {half_at(&r, 0, 0, 0, 0), half_at(&r, 0, 0, 0, 0) + tile, tile},   /* tiles */
        {half_at(&r, 0, 0, 0, 0), half_at(&r, 0, 0, 0, 1), r.layout.half_bytes},
        {half_at(&r, 0, 0, 0, 0), half_at(&r, 1, 0, 0, 0), r.layout.half_bytes}, /* layers */
        {half_at(&r, 0, 0, 2, 0), half_at(&r, 0, 0, 5, 0), r.layout.half_bytes}, /* heads */
        {half_at(&r, 0, 0, 1, 0), half_at(&r, 0, 1, 1, 0), r.layout.half_bytes}, /* blocks */
    };
    uint64_t seal = pd_seal_compute(&r.layout, r.pool, 0, &p, 0, HEADS);

    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        swap(pairs[i].a, pairs[i].b, pairs[i].bytes);
        assert_int_equal(pd_seal_verify(&r.layout, r.pool, 0, &p, 0, HEADS, seal), PD_E_MISMATCH);
        swap(pairs[i].a, pairs[i].b, pairs[i].bytes);
        assert_int_equal(pd_seal_verify(&r.layout, r.pool, 0, &p, 0, HEADS, seal), PD_OK);
    }
    pd_free(r.pool);
}

static uint32_t cut(uint32_t rank, uint32_t ranks)
{
    return rank * HEADS / ranks;
}

/* The pool of one rank: its heads of block 1, as its block 0. */
static rig rank_of(const rig *whole, uint32_t rank, uint32_t ranks)
{
    uint32_t first = cut(rank, ranks), heads = cut(rank + 1, ranks) - first;
    rig r = rig_make(whole->layout.head_dim, whole->layout.block_tokens, heads, 1);

    for (uint32_t layer = 0; layer < whole->layout.layers; layer++)
        for (uint32_t head = 0; head < heads; head++)
            memcpy(half_at(&r, layer, 0, head, 0), half_at(whole, layer, 1, first + head, 0),
                   r.layout.layer_bytes);
    return r;
}

/* Each rank of the senders seals the part of its heads that a receiver's rank has too; the
 * receiver's rank adds those up and compares with what lies in its own pool. */
static void check_splits(const rig *whole, uint32_t senders, uint32_t receivers)
{
    pd_seal_place p = {.request = 9,
                       .epoch = 1,
                       .block_index = 4,
                       .valid_tokens = 11,
                       .layout_fingerprint = pd_kv_layout_fingerprint(&whole->layout)};

    for (uint32_t b = 0; b < receivers; b++) {
        uint32_t from = cut(b, receivers), to = cut(b + 1, receivers);
        rig receiver = rank_of(whole, b, receivers);
        uint64_t seal = 0;
        for (uint32_t a = 0; a < senders; a++) {
            uint32_t first = cut(a, senders), end = cut(a + 1, senders);
            uint32_t low = first > from ? first : from, high = end < to ? end : to;
            rig sender = rank_of(whole, a, senders);
            p.head_first = first;
            if (low < high)
                seal +=
                    pd_seal_compute(&sender.layout, sender.pool, 0, &p, low - first, high - first);
            pd_free(sender.pool);
        }
        p.head_first = from;
        assert_int_equal(pd_seal_verify(&receiver.layout, receiver.pool, 0, &p, 0, to - from, seal),
                         PD_OK);
        receiver.pool[below(&receiver, (uint32_t)receiver.layout.token_bytes)] ^= 4;
        assert_int_equal(pd_seal_verify(&receiver.layout, receiver.pool, 0, &p, 0, to - from, seal),
                         PD_E_MISMATCH);
        pd_free(receiver.pool);
    }
}

static void any_split_verifies_what_any_other_split_sealed(void **state)
{
    static const uint32_t splits[] = {1, 2, 3, 4, 8};
    rig whole = rig_make(64, 16, HEADS, 3);

    (void)state;
    for (int a = 0; a < 5; a++)
        for (int b = 0; b < 5; b++)
            check_splits(&whole, splits[a], splits[b]);
    pd_free(whole.pool);
}

static void the_slices_of_a_seal_add_up(void **state)
{
    rig r = rig_make(64, 16, HEADS, 3);
    pd_seal_place p = {.request = 9, .group = 1, .valid_tokens = 16, .layout_fingerprint = 3};
    uint64_t all = pd_seal_compute(&r.layout, r.pool, 2, &p, 0, HEADS);

    (void)state;
    for (uint32_t slices = 1; slices <= 10; slices++) {
        uint64_t seals[10], sum = 0;
        pd_seal_of(&r.layout, r.pool, NULL, 2, &p, slices, seals);
        for (uint32_t s = 0; s < slices; s++) {
            sum += seals[s];
            assert_true(seals[s] == pd_seal_compute(&r.layout, r.pool, 2, &p, cut(s, slices),
                                                    cut(s + 1, slices)));
        }
        assert_true(sum == all);
        assert_int_equal(pd_seal_check(&r.layout, r.pool, NULL, 2, &p, slices, seals), PD_OK);
        seals[below(&r, slices)] ^= 1ull << below(&r, 64);
        assert_int_equal(pd_seal_check(&r.layout, r.pool, NULL, 2, &p, slices, seals),
                         PD_E_MISMATCH);
    }
    pd_free(r.pool);
}

/* ---- tiles ---- */

static void all_ways_to_sum_a_tile_agree(void **state)
{
    unsigned char bytes[8 * PD_TILE_WORDS + 8];
    uint64_t random = 0x5ea1;

    (void)state;
    for (uint32_t i = 0; i < PD_TILE_WORDS; i++)
        assert_true(pd_tile_keys[i] == pd_random_next(&random));
    assert_non_null(pd_tile_sum_at(0));
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t first = (uint32_t)(pd_random_next(&random) % (PD_TILE_WORDS + 1));
        uint32_t words = (uint32_t)(pd_random_next(&random) % (PD_TILE_WORDS - first + 1));
        size_t shift = pd_random_next(&random) % 8;
        uint64_t dense = pd_random_next(&random) % 3; /* 0: all ones, where sums carry the most */
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = dense == 0 ? 0xff : (unsigned char)pd_random_next(&random);
        uint64_t expected = pd_tile_sum_at(0)(bytes + shift, words, pd_tile_keys + first);
        assert_true(pd_tile_sum(bytes + shift, words, first) == expected);
        for (uint32_t way = 1; pd_tile_sum_at(way) != NULL; way++)
            assert_true(pd_tile_sum_at(way)(bytes + shift, words, pd_tile_keys + first) ==
                        expected);
    }
}

/* Sizes of a token: a part of a word, no whole number of words, tiles that do not divide a block,
 * a tile of one token, and tokens larger than a tile. */
static const uint32_t dims[] = {2, 18, 40, 64, 128, 130, 512, 520, 1090};

static void every_valid_byte_counts_whatever_the_size_of_a_token(void **state)
{
    (void)state;
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        rig r = rig_make(dims[d], 16, 2, 1);
        pd_seal_place p = {.request = 1, .valid_tokens = 13, .layout_fingerprint = 3};
        uint64_t seal = pd_seal_compute(&r.layout, r.pool, 0, &p, 0, 2);
        for (uint32_t i = 0; i < 600; i++) {
            uint64_t at = pd_random_next(&r.random) % pd_kv_layout_block_bytes(&r.layout, 0);
            bool valid = is_valid(&r.layout, at % r.layout.half_bytes, 13);
            r.pool[at] ^= (unsigned char)(1 << below(&r, 8));
            assert_int_equal(pd_seal_verify(&r.layout, r.pool, 0, &p, 0, 2, seal),
                             valid ? PD_E_MISMATCH : PD_OK);
            seal = pd_seal_compute(&r.layout, r.pool, 0, &p, 0, 2);
        }
        pd_free(r.pool);
    }
}

/* Writes tokens [from, to) of every layer and head, as the kernels do. */
static void write_tokens(rig *r, pd_seal_tiles *tiles, pd_block block, uint32_t from, uint32_t to)
{
    for (uint32_t layer = 0; layer < r->layout.layers; layer++) {
        for (uint32_t head = 0; head < r->layout.kv_heads; head++) {
            for (uint32_t half = 0; half < 2; half++) {
                unsigned char *bytes = half_at(r, layer, block, head, half);
                for (uint64_t i = 0; i < r->layout.half_bytes; i++)
                    if (is_valid(&r->layout, i, to) && !is_valid(&r->layout, i, from))
                        bytes[i] = (unsigned char)pd_random_next(&r->random);
            }
            pd_seal_tiles_wrote(tiles, r->pool, layer, block, head, from, to);
        }
    }
}

/* Whatever was written in whatever order: a seal by the tiles is the one of the bytes, for any
 * count of valid tokens. */
static void assert_tiles_tell_the_bytes(rig *r, const pd_seal_tiles *tiles, pd_block block,
                                        uint32_t valid, uint32_t covered)
{
    for (uint32_t group = 0; group < r->layout.groups; group++) {
        pd_seal_place p = {
            .request = 1, .group = group, .valid_tokens = valid, .layout_fingerprint = 3};
        uint64_t seals[2];
        pd_seal_of(&r->layout, r->pool, tiles, block, &p, 2, seals);
        assert_true(seals[0] == pd_seal_compute(&r->layout, r->pool, block, &p, 0, 1));
        assert_true(seals[1] == pd_seal_compute(&r->layout, r->pool, block, &p, 1, 2));
        assert_int_equal(pd_seal_tiles_covered(tiles, group * 2, block, 1), covered);
    }
}

static void tiles_follow_any_sequence_of_writes(void **state)
{
    (void)state;
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        uint32_t block_tokens = d % 2 == 0 ? 32 : 48;
        rig r = rig_make(dims[d], block_tokens, 2, 2);
        pd_seal_tiles *tiles = NULL;
        uint32_t covered = 0;
        assert_int_equal(pd_seal_tiles_create(&r.layout, &tiles), PD_OK);
        for (uint32_t round = 0; round < 150; round++) {
            uint32_t kind = below(&r, 8), from = covered % block_tokens;
            if (kind == 0)
                from = below(&r, block_tokens); /* earlier tokens again, or past a gap */
            else if (kind == 1)
                from = 0; /* the block begins a new life */
            uint32_t room = block_tokens - from;
            uint32_t to = from + 1 + (kind < 5 ? 0 : below(&r, room));
            write_tokens(&r, tiles, 1, from, to);
            covered = from <= covered ? to : covered;
            assert_tiles_tell_the_bytes(&r, tiles, 1, covered > 0 ? covered : 1, covered);
            assert_tiles_tell_the_bytes(&r, tiles, 1, 1 + below(&r, block_tokens), covered);
        }
        pd_seal_tiles_destroy(tiles);
        pd_free(r.pool);
    }
}

static void a_seal_by_tiles_vouches_for_what_was_written_not_for_what_lies_there(void **state)
{
    rig r = rig_make(64, 16, 2, 2);
    pd_seal_place p = {.request = 1, .valid_tokens = 16, .layout_fingerprint = 3};
    pd_seal_tiles *tiles = NULL;
    uint64_t before, after;

    (void)state;
    assert_int_equal(pd_seal_tiles_create(&r.layout, &tiles), PD_OK);
    write_tokens(&r, tiles, 1, 0, 16);
    pd_seal_of(&r.layout, r.pool, tiles, 1, &p, 1, &before);
    *half_at(&r, 0, 1, 0, 1) ^= 1; /* somebody's late write */
    pd_seal_of(&r.layout, r.pool, tiles, 1, &p, 1, &after);
    assert_true(before == after);
    assert_int_equal(pd_seal_verify(&r.layout, r.pool, 1, &p, 0, 2, after), PD_E_MISMATCH);
    pd_seal_tiles_destroy(tiles);
    pd_free(r.pool);
}

static void a_check_looks_at_the_bytes_and_teaches_the_tiles(void **state)
{
    rig r = rig_make(40, 16, 2, 3);
    pd_seal_place p = {.request = 1, .valid_tokens = 7, .layout_fingerprint = 3};
    pd_seal_tiles *tiles = NULL;
    uint64_t seals[2];

    (void)state;
    assert_int_equal(pd_seal_tiles_create(&r.layout, &tiles), PD_OK);
    write_tokens(&r, tiles, 1, 0, 16); /* an earlier life of the block */
    for (uint64_t i = 0; i < r.layout.layer_bytes; i++)
        half_at(&r, 0, 1, 1, 0)[i] ^= 0x55; /* lands from elsewhere */
    pd_seal_of(&r.layout, r.pool, NULL, 1, &p, 2, seals);
    assert_int_equal(pd_seal_check(&r.layout, r.pool, tiles, 1, &p, 2, seals), PD_OK);
    for (uint32_t head = 0; head < 2; head++) {
        assert_int_equal(pd_seal_tiles_covered(tiles, 0, 1, head), 7);
        assert_int_equal(pd_seal_tiles_covered(tiles, 2, 1, head), 16); /* another group */
    }
    for (uint32_t layer = 0; layer < 2; layer++) /* the sequence goes on there */
        for (uint32_t head = 0; head < 2; head++)
            pd_seal_tiles_wrote(tiles, r.pool, layer, 1, head, 7, 9);
    p.valid_tokens = 9;
    uint64_t by_tiles;
    pd_seal_of(&r.layout, r.pool, tiles, 1, &p, 1, &by_tiles);
    assert_true(by_tiles == pd_seal_compute(&r.layout, r.pool, 1, &p, 0, 2));
    seals[1]++;
    assert_int_equal(pd_seal_check(&r.layout, r.pool, tiles, 1, &p, 2, seals), PD_E_MISMATCH);
    assert_int_equal(pd_seal_tiles_covered(tiles, 1, 1, 0), 0);
    pd_seal_tiles_destroy(tiles);
    pd_free(r.pool);
}

static void the_table_takes_less_than_a_hundredth_of_the_pool(void **state)
{
    rig r = rig_make(64, 16, HEADS, 64);
    pd_seal_tiles *tiles = NULL;

    (void)state;
    for (long n = 0; tiles == NULL; n++) {
        pd_mem_fail_at(n);
        pd_status status = pd_seal_tiles_create(&r.layout, &tiles);
        pd_mem_fail_at(-1);
        assert_int_equal(status, tiles == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 10);
    }
    assert_true(pd_seal_tiles_bytes(tiles) * 100 < r.layout.pool_bytes);
    pd_seal_tiles_destroy(tiles);
    pd_seal_tiles_destroy(NULL);
    pd_free(r.pool);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_copy_in_another_block_has_the_same_seal),
        cmocka_unit_test(every_field_of_the_place_counts),
        cmocka_unit_test(every_valid_byte_counts_and_no_other),
        cmocka_unit_test(a_slice_has_one_seal_whatever_the_split),
        cmocka_unit_test(equal_halves_may_not_change_places),
        cmocka_unit_test(slices_of_heads_add_up_and_match_a_workers_own_numbering),
        cmocka_unit_test(every_flipped_bit_is_found),
        cmocka_unit_test(nothing_may_change_places),
        cmocka_unit_test(any_split_verifies_what_any_other_split_sealed),
        cmocka_unit_test(the_slices_of_a_seal_add_up),
        cmocka_unit_test(all_ways_to_sum_a_tile_agree),
        cmocka_unit_test(every_valid_byte_counts_whatever_the_size_of_a_token),
        cmocka_unit_test(tiles_follow_any_sequence_of_writes),
        cmocka_unit_test(a_seal_by_tiles_vouches_for_what_was_written_not_for_what_lies_there),
        cmocka_unit_test(a_check_looks_at_the_bytes_and_teaches_the_tiles),
        cmocka_unit_test(the_table_takes_less_than_a_hundredth_of_the_pool),
    };
    if (argc > 1 && !pd_kv_dtype_of(argv[1], &dtype))
        return 2;
    return cmocka_run_group_tests(tests, setup, teardown);
}

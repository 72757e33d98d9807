/* Landed blocks are compared with their seals beside the loop: every answer comes, in order, and
 * names the first block that does not match. */

#include "common/worker/verifier.h"

#include "common/base/mem.h"
#include "common/kv/seal.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BLOCKS 64

static pd_kv_layout layout;
static unsigned char *pool;
static pd_host_pool host;
static uint64_t seed;

typedef struct sealed {
    pd_check check;
    pd_block blocks[PD_NOTICE_BLOCKS_MAX];
    uint64_t seals[PD_NOTICE_SEALS_MAX];
} sealed;

static int set_up(void **state)
{
    pd_model_shape shape = {.layers = 7, .kv_heads = 6, .head_dim = 24};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 3,
                                    .memory_bytes = 1 << 24,
                                    .blocks_max = BLOCKS};

    (void)state;
    const char *text = getenv("KVFERRY_SEED");
    seed = text == NULL ? 20 : strtoull(text, NULL, 10);
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    pool = pd_malloc(layout.pool_bytes);
    assert_non_null(pool);
    for (uint64_t i = 0; i < layout.pool_bytes; i++)
        pool[i] = (unsigned char)pd_random_next(&seed);
    host = (pd_host_pool){.layout = &layout, .pool = pool};
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    pd_free(pool);
    return pd_mem_live() == 0 ? 0 : -1;
}

static pd_verifier *verifier_make(void)
{
    pd_verifier_options options = {.layout = &layout, .sealer = pd_host_sealer(&host)};
    pd_verifier *verifier = NULL;

    assert_int_equal(pd_verifier_create(&options, &verifier), PD_OK);
    return verifier;
}

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(pd_random_next(&seed) % limit);
}

/* The seals that the check's blocks have, as another worker would make them: slice by slice. */
static void seal_all(sealed *s)
{
    pd_check *check = &s->check;
    uint64_t *out = s->seals;

    for (uint32_t g = 0; g < check->groups; g++) {
        for (uint32_t i = 0; i < check->count; i++) {
            pd_seal_place place = {
                .request = pd_ship_seal_request(&check->key),
                .epoch = check->key.epoch,
                .group = check->group_first + g,
                .block_index = check->first + i,
                .valid_tokens = i + 1 == check->count ? check->valid_tokens : layout.block_tokens,
                .layout_fingerprint = pd_kv_layout_fingerprint(&layout),
            };
            for (uint32_t slice = 0; slice < check->slices; slice++)
                *out++ = pd_seal_compute(&layout, pool, s->blocks[i], &place,
                                         slice * layout.kv_heads / check->slices,
                                         (slice + 1) * layout.kv_heads / check->slices);
        }
    }
    check->blocks = s->blocks;
    check->seals = s->seals;
}

static void make_check(sealed *s, uint64_t ticket, uint32_t groups, uint32_t count, uint32_t slices)
{
    *s = (sealed){
        .check = {.ticket = ticket,
                  .key = {.router = pd_random_next(&seed), .number = 1 + below(100), .epoch = 1},
                  .group_first = below(layout.groups - groups + 1),
                  .groups = groups,
                  .first = below(1000),
                  .count = count,
                  .valid_tokens = 1 + below(layout.block_tokens),
                  .slices = slices}};
    uint32_t start = below(BLOCKS);

    for (uint32_t i = 0; i < count; i++)
        s->blocks[i] = (start + i * 5) % BLOCKS;
    seal_all(s);
}

static pd_checked wait_for(pd_verifier *verifier)
{
    pd_checked checked;

    while (pd_verifier_poll(verifier, &checked) == PD_E_AGAIN) {
        struct pollfd ready = {.fd = pd_verifier_fd(verifier), .events = POLLIN};
        assert_int_equal(poll(&ready, 1, 20000), 1);
    }
    return checked;
}

static void matching_blocks_are_good_for_every_split(void **state)
{
    static const uint32_t splits[] = {1, 2, 3, 4, 6, 8}; /* 8: more slices than heads */
    pd_verifier *verifier = verifier_make();

    (void)state;
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        sealed s;
        make_check(&s, i, layout.groups, 7, splits[i]);
        assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
        memset(&s, 0, sizeof s); /* it has been copied */
        pd_checked checked = wait_for(verifier);
        assert_int_equal(checked.ticket, i);
        assert_true(checked.good);
    }
    pd_verifier_destroy(verifier);
}

static void the_first_mismatch_is_named(void **state)
{
    pd_verifier *verifier = verifier_make();

    (void)state;
    for (uint32_t round = 0; round < 200; round++) {
        sealed s;
        make_check(&s, round, 1 + below(layout.groups), 1 + below(20), 1 + below(3));
        uint32_t seals = s.check.groups * s.check.count * s.check.slices;
        uint32_t bad = below(seals), later = bad + below(seals - bad);
        s.seals[bad] ^= 1ull << below(64);
        if (later != bad)
            s.seals[later]++;
        assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
        pd_checked checked = wait_for(verifier);
        assert_false(checked.good);
        assert_int_equal(checked.unchecked, PD_OK);
        assert_int_equal(checked.bad_group,
                         s.check.group_first + bad / s.check.slices / s.check.count);
        assert_int_equal(checked.bad_block, s.check.first + bad / s.check.slices % s.check.count);
        assert_int_equal(checked.bad_slice, bad % s.check.slices);
    }
    pd_verifier_destroy(verifier);
}

static void what_the_key_says_counts(void **state)
{
    pd_verifier *verifier = verifier_make();

    (void)state;
    for (uint32_t what = 0; what < 7; what++) {
        sealed s;
        make_check(&s, what, 1, 3, 1);
        s.check.valid_tokens = 9;
        s.check.group_first = 0;
        seal_all(&s);
        s.check.key.router += what == 0;
        s.check.key.number += what == 1;
        s.check.key.epoch += what == 2;
        s.check.first += what == 3;
        s.check.valid_tokens += what == 4;
        s.check.group_first += what == 5;
        if (what == 6) {
            pd_block other = s.blocks[0];
            s.blocks[0] = s.blocks[1];
            s.blocks[1] = other;
        }
        assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
        assert_false(wait_for(verifier).good);
    }
    pd_verifier_destroy(verifier);
}

/* A device that fails, between two that compare. */
static pd_status check_fails(void *ctx, const pd_seal_item *items, uint32_t count,
                             const uint64_t *seals, uint32_t *bad_out)
{
    (void)items, (void)seals;
    *bad_out = count; /* whatever it left there is not to be looked at */
    return *(const pd_status *)ctx;
}

static void a_check_that_could_not_be_made_says_so_and_not_that_bytes_are_wrong(void **state)
{
    pd_status fails = PD_E_INTERNAL;
    pd_verifier_options options = {.layout = &layout,
                                   .sealer = {.ctx = &fails, .check = check_fails}};
    pd_verifier *verifier = NULL;
    sealed s;

    (void)state;
    assert_int_equal(pd_verifier_create(&options, &verifier), PD_OK);
    make_check(&s, 1, 1, 2, 1);
    for (int round = 0; round < 2; round++) {
        fails = round == 0 ? PD_E_INTERNAL : PD_E_NOMEM;
        assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
        pd_checked checked = wait_for(verifier);
        assert_false(checked.good);
        assert_int_equal(checked.unchecked, fails);
        assert_true(checked.request == pd_ship_seal_request(&s.check.key));
    }
    pd_verifier_destroy(verifier);
}

static void a_full_queue_refuses_and_every_answer_taken_makes_room(void **state)
{
    pd_verifier *verifier = verifier_make();
    sealed s;
    make_check(&s, 0, 1, 2, 1);

    (void)state;
    for (uint32_t i = 0; i < PD_VERIFIER_CHECKS_MAX; i++) {
        s.check.ticket = i;
        assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
    }
    assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_E_OVERLOAD);
    for (uint32_t i = 0; i < 2 * PD_VERIFIER_CHECKS_MAX; i++) {
        assert_int_equal(wait_for(verifier).ticket, i);
        s.check.ticket = PD_VERIFIER_CHECKS_MAX + i;
        if (i < PD_VERIFIER_CHECKS_MAX) {
            assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
            assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_E_OVERLOAD);
        }
    }
    pd_checked checked;
    assert_int_equal(pd_verifier_poll(verifier, &checked), PD_E_AGAIN);
    pd_verifier_destroy(verifier);
}

static void it_ends_with_work_left(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 20; round++) {
        pd_verifier *verifier = verifier_make();
        sealed s;
        make_check(&s, 0, layout.groups, 100, 1);
        for (uint32_t i = 0; i < below(PD_VERIFIER_CHECKS_MAX); i++)
            assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
        pd_verifier_destroy(verifier);
    }
}

/* Blocks are written, sealed, damaged and handed over while the thread reads others: it must touch
 * nothing but what is in its hands (the thread sanitizer looks on). */
static void random_work_beside_writes_to_other_blocks(void **state)
{
    enum { OPEN_MAX = 24 };
    pd_verifier *verifier = verifier_make();
    bool expected[OPEN_MAX];
    pd_block held[OPEN_MAX];
    uint32_t submitted = 0, answered = 0;

    (void)state;
    while (submitted < 2000) {
        pd_checked checked;
        bool full = submitted - answered == OPEN_MAX;
        if (full)
            checked = wait_for(verifier);
        if (!full && below(3) != 0) {
            /* a block that nobody looks at */
            pd_block block = below(BLOCKS);
            bool busy = false;
            for (uint32_t i = answered; i < submitted; i++)
                busy = busy || held[i % OPEN_MAX] == block;
            if (busy)
                continue;
            sealed s;
            make_check(&s, submitted, 1 + below(layout.groups), 1, 1 + below(2));
            s.blocks[0] = block;
            uint64_t start = pd_kv_layout_block_offset(&layout, s.check.group_first, block);
            for (uint32_t i = 0; i < 64; i++)
                pool[start + below((uint32_t)layout.token_bytes)] ^= (unsigned char)(1 + i);
            seal_all(&s);
            expected[submitted % OPEN_MAX] = below(2) == 0;
            if (!expected[submitted % OPEN_MAX])
                pool[start + below((uint32_t)layout.token_bytes)] ^= 0x40;
            held[submitted % OPEN_MAX] = block;
            assert_int_equal(pd_verifier_submit(verifier, &s.check), PD_OK);
            submitted++;
        } else if (full || pd_verifier_poll(verifier, &checked) == PD_OK) {
            assert_int_equal(checked.ticket, answered);
            assert_int_equal(checked.good, expected[answered % OPEN_MAX]);
            answered++;
        }
    }
    for (; answered < submitted; answered++)
        assert_int_equal(wait_for(verifier).good, expected[answered % OPEN_MAX]);
    pd_verifier_destroy(verifier);
}

static void creation_survives_every_failed_allocation(void **state)
{
    pd_verifier_options options = {.layout = &layout, .sealer = pd_host_sealer(&host)};
    pd_verifier *verifier = NULL;

    (void)state;
    for (long n = 0; verifier == NULL; n++) {
        pd_mem_fail_at(n);
        pd_status status = pd_verifier_create(&options, &verifier);
        pd_mem_fail_at(-1);
        assert_int_equal(status, verifier == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 100);
    }
    pd_verifier_destroy(verifier);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matching_blocks_are_good_for_every_split),
        cmocka_unit_test(a_check_that_could_not_be_made_says_so_and_not_that_bytes_are_wrong),
        cmocka_unit_test(the_first_mismatch_is_named),
        cmocka_unit_test(what_the_key_says_counts),
        cmocka_unit_test(a_full_queue_refuses_and_every_answer_taken_makes_room),
        cmocka_unit_test(it_ends_with_work_left),
        cmocka_unit_test(random_work_beside_writes_to_other_blocks),
        cmocka_unit_test(creation_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

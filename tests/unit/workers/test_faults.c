/* Damage on purpose: only what was asked for, every Nth time, and always one that a seal can see.
 */

#include "common/worker/faults.h"

#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/seal.h"
#include "common/wire/notice.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static pd_kv_layout layout;
static unsigned char *pool, *before;

static int set_up(void **state)
{
    pd_model_shape shape = {.layers = 7, .kv_heads = 2, .head_dim = 16};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 3,
                                    .memory_bytes = 1 << 24,
                                    .blocks_max = 12};
    uint64_t seed = 7;

    (void)state;
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    pool = pd_malloc(layout.pool_bytes);
    before = pd_malloc(layout.pool_bytes);
    assert_true(pool != NULL && before != NULL);
    for (uint64_t i = 0; i < layout.pool_bytes; i++)
        pool[i] = (unsigned char)(pd_random_next(&seed) | 1); /* nowhere zero */
    memcpy(before, pool, layout.pool_bytes);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    pd_free(pool);
    pd_free(before);
    return pd_mem_live() == 0 ? 0 : -1;
}

static bool check_matches(const pd_check *check)
{
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
            if (pd_seal_verify(&layout, pool, check->blocks[i], &place, 0, layout.kv_heads,
                               check->seals[g * check->count + i]) != PD_OK)
                return false;
        }
    }
    return true;
}

static void every_kind_is_seen_by_a_seal_and_only_every_nth_time(void **state)
{
    static const char *const kinds[] = {"flip:3", "foreign:3", "epoch:3", "hole:3", "count:3"};
    static const pd_block blocks[] = {3, 9};

    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        pd_faults *faults = NULL;
        assert_int_equal(pd_faults_create(kinds[k], &layout, pool, &faults), PD_OK);
        for (uint32_t turn = 1; turn <= 60; turn++) {
            uint32_t valid = 1 + turn % layout.block_tokens;
            uint64_t seals[2 * 2];
            pd_check check = {.key = {.router = 5, .number = turn, .epoch = 2},
                              .group_first = 1,
                              .groups = 2,
                              .first = 4,
                              .count = 2,
                              .blocks = blocks,
                              .valid_tokens = valid,
                              .slices = 1,
                              .seals = seals};
            for (uint32_t g = 0; g < 2; g++) {
                for (uint32_t i = 0; i < 2; i++) {
                    pd_seal_place place = {
                        .request = pd_ship_seal_request(&check.key),
                        .epoch = 2,
                        .group = 1 + g,
                        .block_index = 4 + i,
                        .valid_tokens = i == 1 ? valid : layout.block_tokens,
                        .layout_fingerprint = pd_kv_layout_fingerprint(&layout),
                    };
                    seals[g * 2 + i] =
                        pd_seal_compute(&layout, pool, blocks[i], &place, 0, layout.kv_heads);
                }
            }
            pd_faults_on_check(faults, &check);
            assert_true(check.valid_tokens >= 1 && check.valid_tokens <= layout.block_tokens);
            assert_int_equal(check_matches(&check), turn % 3 != 0);
            memcpy(pool, before, layout.pool_bytes);
        }
        pd_faults_destroy(faults);
    }
}

static void a_notice_is_lost_and_a_later_chunk_fails_when_it_is_their_turn(void **state)
{
    unsigned char bytes[PD_TRANSFER_NOTICE_BYTES_MAX];
    pd_notice notice = {
        .kind = PD_NOTICE_BLOCKS, .groups = 1, .count = 1, .valid_tokens = 1, .slices = 1};
    pd_step_slice slice = {.count = 64};
    pd_step step = {.slices = &slice, .slices_count = 1};
    pd_faults *faults = NULL;

    (void)state;
    notice.key = (pd_request_key){.router = 1, .number = 1, .epoch = 1};
    size_t len = pd_notice_pack(&notice, bytes);
    notice.kind = PD_NOTICE_ABORT;
    unsigned char abort[PD_TRANSFER_NOTICE_BYTES_MAX];
    size_t abort_len = pd_notice_pack(&notice, abort);
    assert_int_equal(pd_faults_create("lost:2,step:2", &layout, pool, &faults), PD_OK);
    for (int turn = 1; turn <= 6; turn++) {
        assert_false(pd_faults_on_notice(faults, abort, abort_len)); /* a last word always comes */
        assert_int_equal(pd_faults_on_notice(faults, bytes, len), turn % 2 == 0);
        slice.position = 0;
        pd_faults_on_step(faults, &step);
        assert_int_equal(step.status, PD_OK);
        slice.position = 64;
        pd_faults_on_step(faults, &step);
        assert_int_equal(step.status, turn % 2 == 0 ? PD_E_INTERNAL : PD_OK);
        step.status = PD_OK;
    }
    pd_faults_destroy(faults);
}

static void without_faults_nothing_changes(void **state)
{
    pd_check check = {.valid_tokens = 3}, same = check;
    pd_step step = {.number = 1};

    (void)state;
    pd_faults_on_check(NULL, &check);
    assert_memory_equal(&check, &same, sizeof check);
    assert_false(pd_faults_on_notice(NULL, NULL, 0));
    pd_faults_on_step(NULL, &step);
    assert_int_equal(step.status, PD_OK);
}

static void what_is_no_list_is_refused(void **state)
{
    static const char *const bad[] = {
        "",        "flip",         "flip:",   "flip:0",        ":3", "flop:3", "flip:x",
        "flip:3,", "flip:9999999", "flip:-1", "flip:3;count:4"};
    pd_faults *faults = NULL;

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(pd_faults_create(bad[i], &layout, pool, &faults), PD_E_INVALID);
    pd_mem_fail_at(0);
    assert_int_equal(pd_faults_create("flip:1", &layout, pool, &faults), PD_E_NOMEM);
    pd_mem_fail_at(-1);
    assert_null(faults);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_is_seen_by_a_seal_and_only_every_nth_time),
        cmocka_unit_test(a_notice_is_lost_and_a_later_chunk_fails_when_it_is_their_turn),
        cmocka_unit_test(without_faults_nothing_changes),
        cmocka_unit_test(what_is_no_list_is_refused),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

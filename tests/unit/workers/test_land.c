/* What is asked for again of a landing, and what is not. */
#include "common/base/log.h"
#include "common/worker/land.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { BLOCK_TOKENS = 16, BLOCKS = 3, SENDER = 5, RECEIVER = 6 };

typedef struct bench {
    pd_role_options options;
    pd_role_sink sink;
    pd_lander lander;
    pd_landing landing;
    pd_block blocks[BLOCKS];
    uint32_t refetches;
} bench;

static void on_send(void *ctx, uint64_t router, const pd_message *message)
{
    bench *b = ctx;

    (void)router;
    assert_int_equal(message->kind, PD_MSG_REFETCH);
    b->refetches++;
}

static void begin(bench *b, uint32_t groups)
{
    *b = (bench){.options = {.name = "decode-0", .incarnation = RECEIVER}};
    b->options.layout =
        (pd_kv_layout){.block_tokens = BLOCK_TOKENS, .groups = groups, .blocks = 8, .kv_heads = 1};
    b->sink = (pd_role_sink){.ctx = b, .send = on_send};
    pd_lander_init(&b->lander, &b->options, &b->sink);
    const pd_msg_peer sender = {.name = "prefill-0", .incarnation = SENDER};
    const pd_request_key key = {1, 2, 3};
    assert_int_equal(pd_landing_init(&b->landing, &b->lander, &key, "r", &sender, BLOCKS), PD_OK);
    pd_landing_begin(&b->landing, 0, BLOCKS, BLOCKS * BLOCK_TOKENS, b->blocks);
}

static pd_land_result arrive(bench *b, uint32_t group, uint32_t again)
{
    const pd_notice notice = {.kind = PD_NOTICE_BLOCKS,
                              .key = {1, 2, 3},
                              .sender = SENDER,
                              .receiver = RECEIVER,
                              .group = group,
                              .groups = 1,
                              .slices = 1,
                              .count = BLOCKS,
                              .valid_tokens = BLOCK_TOKENS,
                              .again = again};

    return pd_land_on_notice(&b->lander, &b->landing, &notice);
}

static void end(bench *b)
{
    pd_landing_fini(&b->landing);
    pd_lander_fini(&b->lander);
}

static void what_is_missing_is_asked_for_once(void **state)
{
    (void)state;
    bench b;

    begin(&b, PD_REFETCHES_MAX);
    pd_land_ask_missing(&b.lander, &b.landing);
    pd_land_ask_missing(&b.lander, &b.landing);
    assert_int_equal(b.refetches, PD_REFETCHES_MAX);
    for (uint32_t g = 0; g < PD_REFETCHES_MAX; g++) {
        assert_int_equal(arrive(&b, g, 0), PD_LAND_IGNORED); /* another writing is to come */
        assert_int_equal(arrive(&b, g, 1), g + 1 == PD_REFETCHES_MAX ? PD_LAND_DONE : PD_LAND_PART);
    }
    end(&b);
}

/* Of a model with many layer groups: what nobody would pass on is awaited, not asked for. */
static void more_than_can_be_asked_for_may_still_come(void **state)
{
    (void)state;
    enum { GROUPS = PD_REFETCHES_MAX + 1 };
    bench b;

    begin(&b, GROUPS);
    pd_land_ask_missing(&b.lander, &b.landing);
    assert_int_equal(b.refetches, 0);
    for (uint32_t g = 0; g < GROUPS; g++)
        assert_int_equal(arrive(&b, g, 0), g + 1 == GROUPS ? PD_LAND_DONE : PD_LAND_PART);
    end(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_missing_is_asked_for_once),
        cmocka_unit_test(more_than_can_be_asked_for_may_still_come),
    };

    pd_log_init("test-land", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* A worker says what it holds, of every key and in every state. */
#include "tests/unit/workers/world.h"

#include "common/base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void ask(world *w, world_worker *worker)
{
    pd_message message = {.kind = PD_MSG_AUDIT};

    w->last_audit = (pd_msg_audit_reply){0};
    message.audit.serial = 41;
    world_to(w, worker, &message);
    assert_int_equal(w->last_audit.serial, 41);
    assert_true(w->last_audit.incarnation == worker->options.incarnation);
    pd_ledger ledger = worker->ops->ledger(worker->core);
    assert_memory_equal(&w->last_audit.ledger, &ledger, sizeof ledger);
}

/* The one entry that there is. */
static pd_audit_state only_state(world *w, world_worker *worker, uint32_t blocks)
{
    ask(w, worker);
    assert_int_equal(w->last_audit.entries_count, 1);
    assert_int_equal(w->audit_entries[0].key.number, 1);
    assert_int_equal(w->audit_entries[0].blocks, blocks);
    return w->audit_entries[0].state;
}

static uint32_t entries(world *w, world_worker *worker)
{
    ask(w, worker);
    return w->last_audit.entries_count;
}

static world *one_request(uint32_t max_batch)
{
    world *w = world_create(&(world_setup){.seed = 1, .max_batch = max_batch});
    uint32_t prompt[40] = {3, 4, 5};

    world_ask(w, prompt, 40, 20); /* 3 blocks */
    assert_int_equal(entries(w, &w->prefill), 0);
    assert_int_equal(entries(w, &w->decode), 0);
    assert_true(world_lease_next(w));
    return w;
}

static void every_state_of_a_request_is_named(void **state)
{
    (void)state;
    world *w = one_request(4);

    assert_int_equal(only_state(w, &w->decode, 3), PD_AUDIT_PROMISED);
    assert_true(world_read_letter(w)); /* the promise: the prompt is asked for */
    assert_int_equal(only_state(w, &w->prefill, 3), PD_AUDIT_COMPUTING);
    while (world_read_letter(w)) { /* it has started: bound, and the targets go out */
    }
    assert_int_equal(only_state(w, &w->decode, 3), PD_AUDIT_LANDING);
    while (w->prefill.running != NULL)
        world_end_step(w, &w->prefill);
    assert_int_equal(only_state(w, &w->prefill, 3), PD_AUDIT_HOLDING);
    while (world_deliver(w) || world_end_check(w, &w->decode)) {
    }
    assert_int_equal(only_state(w, &w->decode, 3), PD_AUDIT_LANDED);
    while (world_read_letter(w)) { /* started; and the copies are released */
    }
    assert_int_equal(only_state(w, &w->decode, 3), PD_AUDIT_RUNNING);
    assert_int_equal(entries(w, &w->prefill), 0);
    assert_true(world_settle(w));
    assert_int_equal(entries(w, &w->decode), 0);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void a_quarantine_names_whom_it_waits_for(void **state)
{
    (void)state;
    world *w = one_request(4);
    pd_message cancel = {.kind = PD_MSG_CANCEL};

    assert_true(world_read_letter(w));
    while (world_read_letter(w)) {
    }
    cancel.cancel.key = w->requests[0].key;
    world_to(w, &w->decode, &cancel); /* alone: the prefill worker may write */
    assert_int_equal(only_state(w, &w->decode, 3), PD_AUDIT_QUARANTINED);
    assert_int_equal(w->last_audit.waits_for_count, 1);
    assert_true(w->audit_waits[0] == w->prefill.options.incarnation);
    assert_true(world_settle(w));
    assert_int_equal(entries(w, &w->decode), 0);
    assert_int_equal(w->last_audit.waits_for_count, 0);
    world_destroy(w);
}

static void claims_of_all_keys_cover_the_ledger(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 9, .decode_blocks = 96});
    world_worker *workers[] = {&w->prefill, &w->decode};
    uint32_t held = 0;

    for (int i = 0; i < 60; i++)
        world_ask_random(w);
    for (int turn = 0; turn < 3000; turn++) {
        world_turn(w);
        if (turn % 20 == 0)
            world_tick(w, 1);
        if (turn % 7 != 0)
            continue;
        world_worker *worker = workers[turn % 2];
        ask(w, worker);
        uint64_t blocks = 0;
        for (uint32_t i = 0; i < w->last_audit.entries_count; i++)
            blocks += w->audit_entries[i].blocks;
        const pd_ledger *ledger = &w->last_audit.ledger;
        assert_true(blocks >= ledger->leased + ledger->running + ledger->quarantined);
        held += blocks > 0;
    }
    print_message("# held at %u of the questions\n", held);
    assert_true(held > 20);
    assert_true(world_settle(w));
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_state_of_a_request_is_named),
        cmocka_unit_test(a_quarantine_names_whom_it_waits_for),
        cmocka_unit_test(claims_of_all_keys_cover_the_ledger),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

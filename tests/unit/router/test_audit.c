/* What the router and a worker do not agree on, and last words that are late: made good. */

#include "common/base/log.h"
#include "router/audit_page.h"
#include "router/pages.h"
#include "tests/unit/router/world.h"

#include <stdio.h>

static void patient(router_core_config *config)
{
    config->transfer_ns = config->decode_idle_ns = config->prefill_ns = 60 * PD_NS_PER_S;
    config->total_ns = 200 * PD_NS_PER_S;
}

static void what_a_worker_holds_for_nobody_is_ended(void **state)
{
    (void)state;
    world *w = one_to_one(61);
    fake_worker *decode = &w->fake.workers[1], *prefill = &w->fake.workers[0];
    decode->leases[3] = (fake_lease){.key = {0x77, 12345, 1}, .blocks = 5};
    decode->free -= 5;
    prefill->prompts[prefill->prefills++] = (fake_prompt){.key = {0x77, 99, 2}, .computed = true};
    wait_ms(w, 2300); /* one answer is not believed */
    assert_int_equal(decode->free, 507);
    wait_ms(w, 2300);
    assert_nothing_left(w);
    assert_int_equal(counters_of(w).audit_unknown, 2);
    world_free(w);
}

static void what_a_worker_lost_is_tried_again(void **state)
{
    (void)state;
    for (uint32_t which = 0; which < 2; which++) {
        world *w = world_with(62, patient);
        fake *f = &w->fake;
        fake_add(f, PD_ROLE_PREFILL, 512);
        fake_add(f, PD_ROLE_DECODE, 512);
        wait_ms(w, 200);
        answer *a = ask(w, 40, 100);
        if (which == 1)
            wait_for_token(w, a, 20);
        while (which == 0 && f->workers[0].prefills == 0)
            fake_run(f, f->now_ns + 100000);
        if (which == 0) {
            f->workers[0].prefills = 0;
        } else {
            memset(f->workers[1].leases, 0, sizeof f->workers[1].leases);
            f->workers[1].free = 512;
        }
        wait_ms(w, 7000);
        assert_whole(w, a);
        assert_int_equal(counters_of(w).audit_missing, 1);
        assert_int_equal(counters_of(w).retries[ROUTER_RETRY_MISSING], 1);
        world_free(w);
    }
}

static void a_lost_start_is_said_again(void **state)
{
    (void)state;
    world *w = world_with(63, patient);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    w->fake.lose[PD_MSG_DECODE_START] = 1;
    answer *a = ask(w, 40, 20);
    wait_ms(w, 7000);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).audit_unstarted, 1);
    assert_int_equal(counters_of(w).retried, 0);
    world_free(w);
}

static void impatient(router_core_config *config)
{
    patient(config);
    config->decode_idle_ns = 3 * PD_NS_PER_S;
}

/* What lands slowly holds the room: the worker makes steps, or has none to make. */
static void who_waits_for_a_block_is_not_silent(void **state)
{
    (void)state;
    for (uint32_t hangs = 0; hangs < 2; hangs++) {
        world *w = world_with(67, impatient);
        fake *f = &w->fake;
        fake_add(f, PD_ROLE_PREFILL, 512);
        fake_add(f, PD_ROLE_DECODE, 512);
        wait_ms(w, 200);
        answer *a = ask(w, 40, 100);
        wait_for_token(w, a, 20);
        f->workers[1].leases[0].stalled = true;
        f->workers[1].hangs = hangs != 0;
        wait_ms(w, 12000);
        assert_int_equal(counters_of(w).retries[ROUTER_RETRY_SILENT], hangs);
        f->workers[1].leases[0].stalled = f->workers[1].hangs = false;
        wait_ms(w, 3000);
        assert_whole(w, a);
        assert_int_equal(counters_of(w).retried, hangs);
        world_free(w);
    }
}

static void brief_landings(router_core_config *config)
{
    patient(config);
    config->transfer_ns = 3 * PD_NS_PER_S;
}

/* The worker says that it still awaits the blocks, and knows best when to give up their sender. */
static void who_waits_for_its_blocks_is_not_silent(void **state)
{
    (void)state;
    world *w = world_with(76, brief_landings);
    fake *f = &w->fake;
    fake_add(f, PD_ROLE_PREFILL, 512);
    fake_add(f, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    f->lose[PD_MSG_TARGETS] = UINT32_MAX;
    answer *a = ask(w, 40, 100);
    wait_ms(w, 12000);
    assert_int_equal(a->next, 1);
    f->lose[PD_MSG_TARGETS] = 0;
    wait_ms(w, 3000);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).retried, 0);
    world_free(w);
}

static void a_quarantine_hears_again_of_who_was_given_up(void **state)
{
    (void)state;
    world *w = one_to_one(64);
    fake_worker *decode = &w->fake.workers[1];
    decode->waits_for = w->fake.workers[0].incarnation;
    wait_ms(w, 7000);
    assert_true(decode->waits_for != 0); /* it lives */
    w->fake.lose[PD_MSG_PEER_GONE] = 1;
    fake_kill(&w->fake, 0);
    wait_ms(w, 7000);
    assert_int_equal(decode->waits_for, 0);
    assert_true(counters_of(w).audit_waits > 0);
    world_free(w);
}

typedef struct audits {
    uint32_t count, answered;
    uint32_t running, expected, total;
} audits;

static void on_audit(void *ctx, const router_audit_view *view)
{
    audits *a = ctx;
    a->count++;
    a->answered += view->answered;
    a->running += view->states[PD_AUDIT_RUNNING];
    a->expected += view->expected_decode;
    a->total += view->ledger.total;
    assert_int_equal(view->unknown_count + view->missing_count + view->waits_count, 0);
}

static void an_audit_shows_both_views(void **state)
{
    (void)state;
    world *w = one_to_one(65);
    ask(w, 40, 3500);
    wait_ms(w, 3000);
    audits seen = {0};
    router_core_each_audit(w->fake.core, w->fake.now_ns, on_audit, &seen);
    assert_int_equal(seen.count, 2);
    assert_int_equal(seen.running, 1);
    assert_int_equal(seen.expected, 1);
    assert_int_equal(seen.total, 1024);
    wait_ms(w, 2000);
    assert_nothing_left(w);
    world_free(w);
}

static bool page_has(const world *w, const char *text)
{
    pd_buf page;
    pd_buf_init(&page, 1 << 16);
    audit_page(w->fake.core, w->fake.now_ns, &page);
    assert_int_equal(pd_buf_status(&page), PD_OK);
    bool has = strstr(pd_buf_text(&page), text) != NULL;
    pd_buf_fini(&page);
    return has;
}

/* Nobody differs where nobody has said anything: that is no agreement. */
static void who_has_not_reported_agrees_with_nothing(void **state)
{
    (void)state;
    world *w = world_new(70);
    assert_true(page_has(w, "{\"workers\":[],\"not_reported\":0,\"agree\":null}"));
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    audits seen = {0};
    router_core_each_audit(w->fake.core, w->fake.now_ns, on_audit, &seen);
    assert_int_equal(seen.count, 2);
    assert_int_equal(seen.answered, 0);
    assert_true(page_has(w, "\"reported\":false,\"note\":\"no report yet\"}"));
    assert_true(page_has(w, "],\"not_reported\":2,\"agree\":null}"));
    wait_ms(w, 2200);
    assert_true(page_has(w, "],\"not_reported\":0,\"agree\":true}"));
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    assert_true(page_has(w, "],\"not_reported\":1,\"agree\":null}"));
    w->fake.workers[1].leases[3] = (fake_lease){.key = {0x77, 12345, 1}, .blocks = 5};
    wait_ms(w, 1900); /* it differs, whether or not the new one has answered */
    assert_true(page_has(w, "\"agree\":false}"));
    w->fake.workers[1].leases[3] = (fake_lease){0};
    world_free(w);
}

static void whom_a_quarantine_waits_for_is_named(void **state)
{
    (void)state;
    world *w = one_to_one(71);
    fake *f = &w->fake;
    fake_worker *prefill = &f->workers[0], *decode = &f->workers[1];
    char expected[160];
    decode->waits_for = prefill->incarnation;
    wait_ms(w, 2300);
    snprintf(expected, sizeof expected,
             "\"waits_for\":[{\"incarnation\":\"%016llx\",\"state\":\"lives\",\"name\":\"%s\"}]",
             (unsigned long long)prefill->incarnation, prefill->name);
    assert_true(page_has(w, expected));
    assert_true(page_has(w, "\"agree\":true}")); /* it may well take its time */
    f->lose[PD_MSG_PEER_GONE] = 1;
    fake_kill(f, 0);
    wait_ms(w, 2500);
    snprintf(expected, sizeof expected,
             "\"waits_for\":[{\"incarnation\":\"%016llx\",\"state\":\"gone\",\"name\":\"%s\"}]",
             (unsigned long long)prefill->incarnation, prefill->name);
    assert_true(page_has(w, expected));
    assert_true(page_has(w, "\"agree\":false}"));
    decode->waits_for = 0xabc;
    wait_ms(w, 2500);
    assert_true(page_has(w, "\"waits_for\":[{\"incarnation\":\"0000000000000abc\",\"state\":"
                            "\"unknown\",\"name\":null}]"));
    world_free(w);
}

static bool metrics_have(const world *w, const char *text)
{
    pd_buf page;
    pd_buf_init(&page, 1 << 20);
    pages_metrics(w->fake.core, "m", 0, w->fake.now_ns, &page);
    assert_int_equal(pd_buf_status(&page), PD_OK);
    bool has = strstr(pd_buf_text(&page), text) != NULL;
    pd_buf_fini(&page);
    return has;
}

/* By the workers' own word: a last word on an attempt that is over names no request any more. */
static void what_left_is_counted_whatever_came_of_it(void **state)
{
    (void)state;
    world *w = world_new(72);
    fake *f = &w->fake;
    uint32_t i = fake_add(f, PD_ROLE_PREFILL, 512);
    f->workers[i].counts.shipped_bytes = 5000; /* for a router before this one */
    wait_ms(w, 300);
    assert_int_equal(counters_of(w).shipped_bytes, 0);
    pd_message done = {.kind = PD_MSG_PREFILL_DONE,
                       .prefill_done = {.key = {0x77, 4711, 1}, .shipped_bytes = 5700}};
    router_core_on_message(f->core, f->workers[i].identity, &done, f->now_ns);
    assert_int_equal(counters_of(w).shipped_bytes, 700);
    wait_ms(w, 300); /* an older word takes nothing back */
    assert_int_equal(counters_of(w).shipped_bytes, 700);
    f->workers[i].counts.shipped_bytes = 6000;
    wait_ms(w, 300);
    assert_int_equal(counters_of(w).shipped_bytes, 1000);
    pd_message ship = {.kind = PD_MSG_SHIP_DONE,
                       .ship_done = {.key = {0x77, 4711, 1}, .shipped_bytes = 6001}};
    router_core_on_message(f->core, f->workers[i].identity, &ship, f->now_ns);
    assert_int_equal(counters_of(w).shipped_bytes, 1001);
    fake_kill(f, i);
    wait_ms(w, 3000);
    i = fake_add(f, PD_ROLE_PREFILL, 512);
    wait_ms(w, 300);
    assert_int_equal(counters_of(w).shipped_bytes, 1001);
    f->workers[i].counts.shipped_bytes = 30;
    wait_ms(w, 300);
    assert_int_equal(counters_of(w).shipped_bytes, 1031);
    assert_true(metrics_have(w, "\nkvferry_shipped_bytes_total 1031\n"));
    world_free(w);
}

static void what_workers_count_is_on_the_page(void **state)
{
    (void)state;
    world *w = one_to_one(73);
    fake *f = &w->fake;
    char expected[160];
    f->workers[0].counts = (pd_worker_counts){.shipped_bytes = 1000, .suspended = 9};
    f->workers[1].counts = (pd_worker_counts){.shipped_bytes = 40, 3, 2, 17};
    wait_ms(w, 300);
    const struct {
        const char *name;
        uint32_t worker, value;
    } rows[] = {{"shipped_bytes", 0, 1000},
                {"shipped_bytes", 1, 40},
                {"suspended", 1, 3},
                {"moved", 1, 2},
                {"stalled", 1, 17}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        snprintf(expected, sizeof expected, "\nkvferry_worker_%s_total{worker=\"%s\"} %u\n",
                 rows[i].name, f->workers[rows[i].worker].name, rows[i].value);
        assert_true(metrics_have(w, expected));
    }
    snprintf(expected, sizeof expected, "kvferry_worker_suspended_total{worker=\"%s\"}",
             f->workers[0].name);
    assert_false(metrics_have(w, expected)); /* a prefill worker has no sequences */
    world_free(w);
}

static bool gauge_is(const world *w, const char *name, uint32_t worker, int value)
{
    char expected[160];
    snprintf(expected, sizeof expected, "\nkvferry_kv_%s{worker=\"%s\"} %d\n", name,
             w->fake.workers[worker].name, value);
    return metrics_have(w, expected);
}

/* Elsewhere both are only seen to be 0. */
static void what_a_ledger_lost_is_on_the_page(void **state)
{
    (void)state;
    world *w = one_to_one(75);
    fake_worker *prefill = &w->fake.workers[0], *decode = &w->fake.workers[1];
    prefill->ledger = (pd_ledger){.total = 10, .free = 4, .cached = 4}; /* 2 are nobody's */
    decode->ledger = (pd_ledger){.total = 10, .free = 4, .cached = 3, .leased = 3};
    wait_ms(w, 300);
    assert_true(gauge_is(w, "ledger_imbalance", 0, 2));
    assert_true(gauge_is(w, "ledger_imbalance", 1, 0));
    assert_true(gauge_is(w, "blocks_held_idle", 0, 0));
    assert_true(gauge_is(w, "blocks_held_idle", 1, 3));
    /* each part counts, and so does what is there twice */
    prefill->ledger = (pd_ledger){32, 1, 2, 4, 8, 16};
    decode->ledger = (pd_ledger){10, 1, 2, 4, 8, 16};
    wait_ms(w, 300);
    assert_true(gauge_is(w, "ledger_imbalance", 0, 1));
    assert_true(gauge_is(w, "ledger_imbalance", 1, -21));
    assert_true(gauge_is(w, "blocks_held_idle", 1, 4 + 8 + 16));
    /* who has a request holds blocks for it: told by the worker, or asked by this router */
    decode->running = prefill->waiting = 1;
    wait_ms(w, 300);
    assert_true(gauge_is(w, "blocks_held_idle", 0, 0));
    assert_true(gauge_is(w, "blocks_held_idle", 1, 0));
    decode->running = prefill->waiting = 0;
    wait_ms(w, 300);
    assert_true(gauge_is(w, "blocks_held_idle", 0, 4 + 8 + 16));
    assert_true(gauge_is(w, "blocks_held_idle", 1, 4 + 8 + 16));
    ask(w, 40, 400);
    wait_for_token(w, &w->answers[0], 10);
    assert_true(gauge_is(w, "blocks_held_idle", 1, 0));
    wait_ms(w, 1000);
    assert_true(gauge_is(w, "blocks_held_idle", 1, 4 + 8 + 16));
    world_free(w);
}

/* The last word of a sender may come before the lease is bound, or be lost with a link. */
static void a_quarantine_of_an_attempt_that_is_over_is_asked_about(void **state)
{
    (void)state;
    world *w = one_to_one(67);
    w->fake.workers[1].quarantined = (pd_request_key){0x77, 4711, 1};
    wait_ms(w, 2300);
    assert_int_equal(w->fake.workers[0].cancels, 0); /* one answer is not believed */
    wait_ms(w, 2000);
    assert_int_equal(w->fake.workers[0].cancels, 1);
    assert_int_equal(w->fake.workers[1].cancels, 0);
    assert_int_equal(counters_of(w).audit_quarantined, 1);
    assert_int_equal(counters_of(w).audit_unknown, 0);
    world_free(w);
}

/* A sequence was to move, and the worker that has it never heard so: it has no link to the other.
 * The request is of this router, or of one that is lost. */
static void a_decode_workers_last_word_is_asked_for_and_passed_on(void **state)
{
    (void)state;
    for (uint64_t router = 0x77; router < 0x79; router++) {
        world *w = one_to_one(69);
        fake *f = &w->fake;
        fake_add(f, PD_ROLE_DECODE, 512);
        wait_ms(w, 200);
        f->workers[2].quarantined = (pd_request_key){router, 4711, 2};
        f->workers[2].waits_for = f->workers[1].incarnation;
        wait_ms(w, 4500);
        assert_int_equal(f->sent[PD_MSG_SHIP_AGAIN], 1);
        assert_true(f->workers[1].last_again.receiver == f->workers[2].incarnation);
        assert_int_equal(f->workers[0].cancels, router == 0x77);
        assert_int_equal(f->workers[2].cancels, 0);
        pd_message done = {
            .kind = PD_MSG_SHIP_DONE,
            .ship_done = {.key = f->workers[2].quarantined, .status = PD_E_NOT_FOUND, .again = 1}};
        router_core_on_message(f->core, f->workers[1].identity, &done, f->now_ns);
        wait_ms(w, 20);
        assert_int_equal(f->workers[2].unwritten, 1);
        assert_int_equal(f->workers[2].unwritten_by, f->workers[1].incarnation);
        assert_int_equal(f->workers[1].unwritten, 0);
        world_free(w);
    }
}

/* The request is gone, but the blocks that were fetched for it wait for this word. */
static void the_last_word_on_a_pull_is_passed_on_after_its_request(void **state)
{
    (void)state;
    world *w = one_to_one(68);
    fake *f = &w->fake;
    store_prompt(w, 1, 1, 20);
    answer *a = ask(w, 320, 20);
    while (f->sent[PD_MSG_SHIP_REQUEST] == 0)
        fake_run(f, f->now_ns + 100000);
    pd_message done = {
        .kind = PD_MSG_SHIP_DONE,
        .ship_done = {.key = f->workers[0].last_prefill.key, .status = PD_E_CANCELLED}};
    a->cancelled = true;
    router_core_cancel(f->core, a->handle, f->now_ns);
    wait_ms(w, 20);
    assert_int_equal(f->workers[0].unwritten, 0); /* the source may still write */
    done.ship_done.may_land = true;
    router_core_on_message(f->core, f->workers[1].identity, &done, f->now_ns);
    wait_ms(w, 20);
    assert_int_equal(f->workers[0].unwritten, 0);
    done.ship_done.may_land = false;
    router_core_on_message(f->core, f->workers[1].identity, &done, f->now_ns);
    wait_ms(w, 20);
    assert_int_equal(f->workers[0].unwritten, 1);
    router_core_on_message(f->core, f->workers[1].identity, &done, f->now_ns);
    wait_ms(w, 20);
    assert_int_equal(f->workers[0].unwritten, 1); /* once */
    assert_nothing_left(w);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_worker_holds_for_nobody_is_ended),
        cmocka_unit_test(what_a_worker_lost_is_tried_again),
        cmocka_unit_test(a_lost_start_is_said_again),
        cmocka_unit_test(who_waits_for_a_block_is_not_silent),
        cmocka_unit_test(who_waits_for_its_blocks_is_not_silent),
        cmocka_unit_test(a_quarantine_hears_again_of_who_was_given_up),
        cmocka_unit_test(an_audit_shows_both_views),
        cmocka_unit_test(who_has_not_reported_agrees_with_nothing),
        cmocka_unit_test(whom_a_quarantine_waits_for_is_named),
        cmocka_unit_test(what_left_is_counted_whatever_came_of_it),
        cmocka_unit_test(what_workers_count_is_on_the_page),
        cmocka_unit_test(what_a_ledger_lost_is_on_the_page),
        cmocka_unit_test(a_quarantine_of_an_attempt_that_is_over_is_asked_about),
        cmocka_unit_test(a_decode_workers_last_word_is_asked_for_and_passed_on),
        cmocka_unit_test(the_last_word_on_a_pull_is_passed_on_after_its_request),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* A prefill worker takes blocks from another worker in place of computing them: right, or not at
 * all. */
#include "tests/unit/workers/world.h"

#include "common/base/clock.h"
#include "common/base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { SOURCE = 77, PROMPT = 100, PULLED = 4 };

/* A prompt of 100 tokens of which another worker has 4 blocks; its only token is made here. */
typedef struct pull {
    world *w;
    world_request *r;
    pd_msg_prefill_started started;
    pd_block blocks[64];
} pull;

static pd_ledger ledger(world *w)
{
    return w->prefill.ops->ledger(w->prefill.core);
}

static world_request *ask_pulling_from(world *w, uint64_t source, const uint32_t *prompt,
                                       uint32_t pull_ms)
{
    pd_message message = {.kind = PD_MSG_PREFILL_REQUEST};
    pd_msg_prefill_request *asked = &message.prefill_request;
    world_request *r = world_ask(w, prompt, PROMPT, 1);

    r->lease_asked = true;
    r->phase = WORLD_PREFILLING;
    r->direct = true;
    asked->key = r->key;
    snprintf(asked->id, sizeof asked->id, "%s", r->id);
    asked->tokens = r->prompt;
    asked->tokens_count = asked->prompt_tokens = PROMPT;
    asked->hashes = r->hashes;
    asked->hashes_count = r->hashes_count;
    asked->max_tokens = 1;
    snprintf(asked->pull.name, sizeof asked->pull.name, "source");
    asked->pull.incarnation = source;
    asked->pull_blocks = PULLED;
    asked->pull_ms = pull_ms;
    world_to(w, &w->prefill, &message);
    return r;
}

static world_request *ask_pulling(world *w, const uint32_t *prompt, uint32_t pull_ms)
{
    return ask_pulling_from(w, SOURCE, prompt, pull_ms);
}

static pull begin(uint32_t pull_ms)
{
    pull p = {.w = world_create(&(world_setup){.seed = 1, .seals = true})};
    uint32_t prompt[PROMPT];

    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = i * 3 % WORLD_VOCAB;
    p.r = ask_pulling(p.w, prompt, pull_ms);
    assert_int_equal(p.w->letters_count, 1);
    assert_int_equal(p.w->letters[0].message.kind, PD_MSG_PREFILL_STARTED);
    p.started = p.w->letters[0].message.prefill_started;
    assert_int_equal(p.started.pull_blocks_count, PULLED);
    assert_int_equal(p.started.pull_first, 0);
    memcpy(p.blocks, p.w->letters[0].blocks, sizeof p.blocks);
    p.w->letters_count = 0;
    assert_null(p.w->prefill.running);
    assert_int_equal(ledger(p.w).leased, PULLED);
    return p;
}

static void to_prefill(world *w, const pd_notice *notice)
{
    static pd_transfer_event event;

    event = (pd_transfer_event){.kind = PD_TRANSFER_NOTICE};
    event.notice_len = pd_notice_pack(notice, event.notice);
    w->prefill.ops->on_transfer(w->prefill.core, &event, w->now_ns);
}

/* Blocks from .. from + count - 1 of a group arrive; wrong: the last of them is another's. */
static void arrive(pull *p, uint32_t group, uint32_t from, uint32_t count, uint32_t again,
                   bool wrong)
{
    uint64_t seals[PULLED];
    world_worker *worker = &p->w->prefill;

    for (uint32_t i = 0; i < count; i++) {
        pd_block block = p->blocks[from + i];
        world_put(worker, group, block, p->r->prompt + (from + i) * WORLD_BLOCK_TOKENS,
                  WORLD_BLOCK_TOKENS);
        seals[i] = world_seal(worker, &p->r->key, group, from + i, block, WORLD_BLOCK_TOKENS);
        if (wrong && i + 1 == count)
            world_put(worker, group, block, p->r->prompt + 7, WORLD_BLOCK_TOKENS);
    }
    pd_notice notice = {.kind = PD_NOTICE_BLOCKS,
                        .key = p->r->key,
                        .sender = SOURCE,
                        .receiver = worker->options.incarnation,
                        .group = group,
                        .groups = 1,
                        .first_block = from,
                        .count = count,
                        .valid_tokens = WORLD_BLOCK_TOKENS,
                        .slices = 1,
                        .again = again,
                        .seals = seals};
    to_prefill(p->w, &notice);
}

static void check_all(world *w)
{
    while (world_end_check(w, &w->prefill)) {
    }
}

static void source_aborts(pull *p)
{
    pd_notice notice = {.kind = PD_NOTICE_ABORT,
                        .key = p->r->key,
                        .sender = SOURCE,
                        .receiver = p->w->prefill.options.incarnation};

    to_prefill(p->w, &notice);
}

/* The prompt is answered, with so many tokens from the cache. */
static void finish(pull *p, uint32_t cached)
{
    assert_non_null(p->w->prefill.running);
    assert_int_equal(p->w->prefill.running->slices[0].position, cached);
    assert_true(world_settle(p->w));
    assert_int_equal(p->r->phase, WORLD_FINISHED);
    assert_int_equal(p->r->cached_tokens, cached);
    world_check_nothing_held(p->w);
    world_destroy(p->w);
}

static void what_was_pulled_is_not_computed(void **state)
{
    (void)state;
    pull p = begin(1000);

    for (uint32_t g = 0; g < WORLD_GROUPS; g++) {
        arrive(&p, g, 0, PULLED, 0, false);
        assert_null(p.w->prefill.running);
    }
    check_all(p.w);
    assert_int_equal(p.w->letters_count, 1);
    assert_int_equal(p.w->letters[0].message.kind, PD_MSG_LANDED);
    assert_int_equal(ledger(p.w).leased, 0);
    finish(&p, PULLED * WORLD_BLOCK_TOKENS);
}

static void what_is_here_already_is_not_pulled(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .seals = true});
    uint32_t prompt[PROMPT];

    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = i * 3 % WORLD_VOCAB;
    world_ask(w, prompt, 40, 1); /* leaves two blocks */
    assert_true(world_settle(w));
    ask_pulling(w, prompt, 1000);
    assert_int_equal(w->letters[0].message.prefill_started.pull_first, 2);
    assert_int_equal(w->letters[0].message.prefill_started.pull_blocks_count, PULLED - 2);
    assert_int_equal(ledger(w).running, 2); /* pinned meanwhile */
    world_cancel(w, &w->requests[1]);
    assert_int_equal(ledger(w).quarantined, PULLED - 2);
    w->prefill.ops->peer_dead(w->prefill.core, SOURCE, w->now_ns);
    w->letters_count = 0;

    world_ask(w, prompt, PROMPT, 1); /* now everything is here */
    assert_true(world_settle(w));
    world_request *all = ask_pulling(w, prompt, 1000);
    assert_non_null(w->prefill.running);
    assert_true(world_settle(w));
    assert_int_equal(all->phase, WORLD_FINISHED);
    world_check_nothing_held(w);
    world_destroy(w);
}

/* Whatever it ships is dropped, its last word too. */
static void nothing_is_pulled_from_who_is_fenced_off(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .seals = true});
    uint32_t prompt[PROMPT];

    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = i * 3 % WORLD_VOCAB;
    w->prefill.ops->peer_dead(w->prefill.core, SOURCE, w->now_ns);
    world_request *r = ask_pulling(w, prompt, 1000);
    assert_non_null(w->prefill.running);
    assert_int_equal(ledger(w).leased + ledger(w).quarantined, 0);
    assert_true(world_settle(w));
    assert_int_equal(r->phase, WORLD_FINISHED);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void others_run_while_a_prompt_waits(void **state)
{
    (void)state;
    pull p = begin(1000);
    uint32_t prompt[50] = {9};
    world_request *other = world_ask(p.w, prompt, 50, 1);

    assert_true(world_lease_next(p.w));
    assert_non_null(p.w->prefill.running);
    world_end_step(p.w, &p.w->prefill);
    world_end_step(p.w, &p.w->prefill);
    while (world_read_letter(p.w)) {
    }
    assert_int_equal(other->phase, WORLD_FINISHED);
    for (uint32_t g = 0; g < WORLD_GROUPS; g++)
        arrive(&p, g, 0, PULLED, 0, false);
    check_all(p.w);
    finish(&p, PULLED * WORLD_BLOCK_TOKENS);
}

static void a_bad_block_is_asked_for_once_more(void **state)
{
    (void)state;
    for (int twice = 0; twice < 2; twice++) {
        pull p = begin(1000);

        for (uint32_t g = 0; g < WORLD_GROUPS; g++)
            arrive(&p, g, 0, PULLED, 0, g == 1);
        check_all(p.w);
        assert_int_equal(p.w->letters_count, 1);
        assert_int_equal(p.w->letters[0].message.kind, PD_MSG_REFETCH);
        assert_int_equal(p.w->letters[0].message.refetch.group, 1);
        assert_int_equal(p.w->letters[0].message.refetch.first_block, PULLED - 1);
        assert_int_equal(p.w->letters[0].message.refetch.count, 1);
        assert_null(p.w->prefill.running);
        arrive(&p, 1, PULLED - 1, 1, 0, false); /* the first writing once more: not believed */
        check_all(p.w);
        assert_null(p.w->prefill.running);
        arrive(&p, 1, PULLED - 1, 1, 1, twice != 0);
        check_all(p.w);
        finish(&p, twice ? 0 : PULLED * WORLD_BLOCK_TOKENS);
    }
}

static void without_its_source_a_prompt_is_computed(void **state)
{
    (void)state;
    enum { ENDED, MAY_LAND, LATE, GIVEN_UP, CASES };
    for (int how = 0; how < CASES; how++) {
        pull p = begin(100);
        pd_message message = {.kind = PD_MSG_PULL_END};

        arrive(&p, 0, 0, PULLED, 0, false);
        check_all(p.w);
        if (how == ENDED || how == MAY_LAND) {
            message.pull_end.key = p.r->key;
            message.pull_end.may_land = how == MAY_LAND;
            world_to(p.w, &p.w->prefill, &message);
        } else if (how == LATE) {
            world_tick(p.w, 99);
            assert_null(p.w->prefill.running);
            world_tick(p.w, 1);
        } else {
            message.kind = PD_MSG_PEER_GONE;
            message.peer_gone = (pd_msg_peer_gone){.incarnation = SOURCE, .may_write = true};
            world_to(p.w, &p.w->prefill, &message);
        }
        /* into other blocks: the source may write for as long as it has not said its last word */
        assert_int_equal(ledger(p.w).quarantined, how == ENDED ? 0 : PULLED);
        arrive(&p, 1, 0, PULLED, 0, false);
        assert_int_equal(ledger(p.w).quarantined, how == ENDED ? 0 : PULLED);
        if (how == GIVEN_UP)
            p.w->prefill.ops->peer_dead(p.w->prefill.core, SOURCE, p.w->now_ns);
        else if (how == LATE) /* and was not asked for again: it is not lost */
            for (uint32_t g = 2; g < WORLD_GROUPS; g++)
                arrive(&p, g, 0, PULLED, 0, false);
        else
            source_aborts(&p);
        assert_int_equal(ledger(p.w).quarantined, 0);
        finish(&p, 0);
    }
}

static void a_cancel_leaves_nothing_but_what_may_be_written(void **state)
{
    (void)state;
    pull p = begin(1000);

    arrive(&p, 0, 0, PULLED, 0, false);
    world_cancel(p.w, p.r);
    assert_int_equal(ledger(p.w).quarantined, PULLED);
    source_aborts(&p);
    assert_int_equal(ledger(p.w).quarantined, PULLED); /* still read by a check */
    check_all(p.w);
    assert_int_equal(ledger(p.w).quarantined, 0);
    assert_true(world_settle(p.w));
    world_check_nothing_held(p.w);
    world_destroy(p.w);
}

static uint32_t asked_for_last_words(const world *w, const world_request *r)
{
    uint32_t asked = 0;

    for (uint32_t i = 0; i < w->wire_count; i++) {
        const world_packet *packet = &w->wire[i];
        uint64_t seals[PD_NOTICE_SEALS_MAX];
        pd_notice notice;
        if (packet->notice &&
            pd_notice_unpack(packet->bytes, packet->bytes_len, seals, &notice) == PD_OK)
            asked += notice.kind == PD_NOTICE_ASK && notice.key.number == r->key.number;
    }
    return asked;
}

/* The source's last word is lost: it is asked for after two seconds, and every two seconds. */
static void who_waits_for_a_last_word_asks_for_it(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .seals = true});
    uint64_t source = w->decode.options.incarnation;
    uint32_t prompt[PROMPT];

    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = i * 3 % WORLD_VOCAB;
    world_request *r = ask_pulling_from(w, source, prompt, 1000);
    world_cancel(w, r);
    assert_int_equal(ledger(w).quarantined, PULLED);
    world_tick(w, 1);
    for (uint32_t times = 0; times < 3; times++) {
        world_tick(w, 1999);
        assert_int_equal(asked_for_last_words(w, r), times);
        world_tick(w, 1);
        assert_int_equal(asked_for_last_words(w, r), times + 1);
    }
    assert_int_equal(ledger(w).quarantined, PULLED);
    w->prefill.ops->peer_dead(w->prefill.core, source, w->now_ns);
    assert_int_equal(ledger(w).quarantined, 0);
    w->wire_count = 0;
    world_destroy(w);
}

/* By any router it may hear that its source writes nothing; of another one that says nothing. */
static void another_workers_word_is_no_word_of_the_source(void **state)
{
    (void)state;
    pull p = begin(1000);
    pd_message message = {.kind = PD_MSG_CANCEL,
                          .cancel = {.key = p.r->key, .unwritten = true, .source = SOURCE + 1}};

    world_cancel(p.w, p.r);
    assert_int_equal(ledger(p.w).quarantined, PULLED);
    world_to(p.w, &p.w->prefill, &message);
    assert_int_equal(ledger(p.w).quarantined, PULLED);
    message.cancel.source = SOURCE;
    world_to(p.w, &p.w->prefill, &message);
    assert_int_equal(ledger(p.w).quarantined, 0);
    assert_true(world_settle(p.w));
    world_check_nothing_held(p.w);
    world_destroy(p.w);
}

/* ---- any order ---- */

enum { WRITES_MAX = 4096 };

typedef struct source {
    struct {
        pd_request_key key;
        uint32_t group, index;
        pd_block block;
        uint32_t again;
        bool abort;
    } writes[WRITES_MAX];
    uint32_t count;
    uint32_t wrong;
} source;

static void on_pull(world *w, const pd_msg_prefill_started *started)
{
    source *s = w->on_pull_ctx;

    for (uint32_t g = 0; g < WORLD_GROUPS; g++) {
        for (uint32_t i = 0; i < started->pull_blocks_count; i++) {
            assert_true(s->count < WRITES_MAX);
            s->writes[s->count].key = started->key;
            s->writes[s->count].group = g;
            s->writes[s->count].index = started->pull_first + i;
            s->writes[s->count].again = 0;
            s->writes[s->count].abort = false;
            s->writes[s->count++].block = started->pull_blocks[i];
        }
    }
    s->writes[s->count].key = started->key;
    s->writes[s->count++].abort = true; /* the last word, in any case */
}

/* The next write of the source happens. */
static bool source_turn(world *w, source *s)
{
    if (s->count == 0)
        return false;
    world_request *r = &w->requests[s->writes[0].key.number - 1];
    uint32_t tokens[WORLD_PROMPT_MAX + WORLD_ANSWER_MAX];
    pd_notice notice = {.kind = PD_NOTICE_ABORT,
                        .key = s->writes[0].key,
                        .sender = w->pull_from,
                        .receiver = w->prefill.options.incarnation};
    uint64_t seal;

    memcpy(tokens, r->prompt, r->prompt_count * sizeof *tokens);
    memcpy(tokens + r->prompt_count, r->answer, r->answer_count * sizeof *tokens);
    if (!s->writes[0].abort) {
        uint32_t group = s->writes[0].group, index = s->writes[0].index;
        pd_block block = s->writes[0].block;
        world_put(&w->prefill, group, block, tokens + index * WORLD_BLOCK_TOKENS,
                  WORLD_BLOCK_TOKENS);
        seal = world_seal(&w->prefill, &notice.key, group, index, block, WORLD_BLOCK_TOKENS);
        if (world_random(w, 60) == 0) {
            s->wrong++;
            world_put(&w->prefill, group, block, tokens, 3);
        }
        notice.kind = PD_NOTICE_BLOCKS;
        notice.group = group;
        notice.first_block = index;
        notice.groups = notice.count = notice.slices = 1;
        notice.valid_tokens = WORLD_BLOCK_TOKENS;
        notice.seals = &seal;
    }
    memmove(s->writes, s->writes + 1, --s->count * sizeof *s->writes);
    to_prefill(w, &notice);
    return true;
}

/* The pool's contents are checked at every step: a block that the source wrote into after it was
 * given to somebody else would show. */
static void pulls_of_any_kind_leave_answers_right(void **state)
{
    (void)state;
    uint32_t landed = 0, wrong = 0;

    for (uint64_t seed = 1; seed <= 60; seed++) {
        static source s;
        world *w = world_create(&(world_setup){.seed = seed,
                                               .prefill_blocks = 40 + (uint32_t)seed % 30,
                                               .decode_blocks = 60,
                                               .queue_max = 8,
                                               .seals = true,
                                               .resume = seed % 2 == 0});
        s = (source){0};
        w->pull_from = SOURCE;
        w->on_pull = on_pull;
        w->on_pull_ctx = &s;
        for (uint32_t turn = 0; turn < 3000; turn++) {
            uint32_t what = world_random(w, 1000);
            if (what < 30 && w->requests_count < WORLD_REQUESTS_MAX)
                world_ask_random(w);
            else if (what < 40 && w->requests_count > 0)
                world_cancel(w, &w->requests[world_random(w, w->requests_count)]);
            else if (what < 80)
                world_tick(w, 1 + world_random(w, 20));
            else if (what < 300)
                source_turn(w, &s);
            else
                world_turn(w);
        }
        for (uint32_t i = 0; i < 10000; i++) {
            world_tick(w, 1);
            world_turn(w);
            source_turn(w, &s);
        }
        assert_true(world_settle(w));
        while (source_turn(w, &s)) {
        }
        assert_true(world_settle(w));
        world_check_nothing_held(w);
        landed += w->pulls_landed;
        wrong += s.wrong;
        world_destroy(w);
    }
    assert_true(landed > 100 && wrong > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_pulled_is_not_computed),
        cmocka_unit_test(what_is_here_already_is_not_pulled),
        cmocka_unit_test(nothing_is_pulled_from_who_is_fenced_off),
        cmocka_unit_test(others_run_while_a_prompt_waits),
        cmocka_unit_test(a_bad_block_is_asked_for_once_more),
        cmocka_unit_test(without_its_source_a_prompt_is_computed),
        cmocka_unit_test(a_cancel_leaves_nothing_but_what_may_be_written),
        cmocka_unit_test(who_waits_for_a_last_word_asks_for_it),
        cmocka_unit_test(another_workers_word_is_no_word_of_the_source),
        cmocka_unit_test(pulls_of_any_kind_leave_answers_right),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include "tests/unit/router/world.h"

#include <stdio.h>

static answer *find(world *w, router_handle handle)
{
    for (uint32_t i = w->count; i-- > 0;) {
        if (w->answers[i].handle == handle)
            return &w->answers[i];
    }
    fail_msg("an action about a request that nobody made");
    return NULL;
}

static void on_token(void *ctx, router_handle request, uint32_t index, uint32_t token,
                     pd_finish finish)
{
    world *w = ctx;
    answer *a = find(w, request);
    assert_int_equal(a->ends, 0);
    assert_false(a->cancelled);
    assert_int_equal(index, a->next);
    assert_int_equal(token, fake_token(a->first, index));
    assert_int_equal(a->last, PD_FINISH_NONE); /* nothing after the last */
    a->next++;
    a->last = finish;
    if (index == a->cancel_at) {
        a->cancelled = true;
        router_core_cancel(w->fake.core, request, w->fake.now_ns);
    }
}

static void on_finish(void *ctx, router_handle request, const router_finish *finish)
{
    answer *a = find(ctx, request);
    assert_false(a->cancelled);
    assert_int_not_equal(a->last, PD_FINISH_NONE);
    assert_int_equal(finish->reason, a->last);
    assert_int_equal(finish->completion_tokens, a->next);
    assert_int_equal(a->next, a->end_first ? 1 : a->max);
    a->finish = *finish;
    a->ends++;
}

static void on_error(void *ctx, router_handle request, const router_error *error)
{
    answer *a = find(ctx, request);
    assert_false(a->cancelled);
    a->status = error->http_status;
    a->retry_after = error->retry_after_s;
    snprintf(a->code, sizeof a->code, "%s", error->code);
    memcpy(a->message, error->message, sizeof a->message);
    assert_true(error->message[0] != '\0');
    a->ends++;
}

world *world_with(uint64_t seed, void (*change)(router_core_config *config))
{
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    const router_sink sink = {w, NULL, on_token, on_finish, on_error};
    fake_init_with(&w->fake, seed, &sink, change);
    return w;
}

world *world_new(uint64_t seed)
{
    return world_with(seed, NULL);
}

void world_free(world *w)
{
    fake_fini(&w->fake);
    free(w);
}

answer *ask_with(world *w, uint32_t prompt, uint32_t max, int32_t priority)
{
    static uint32_t tokens[4096];
    static pd_hash128 hashes[256];
    fake *f = &w->fake;
    router_error error = {0};
    answer *a = &w->answers[w->count];
    uint32_t first = 1 + w->count;
    for (uint32_t i = 0; i < prompt; i++)
        tokens[i] = i == 0 ? first : i;
    for (uint32_t i = 0; i < prompt / FAKE_BLOCK; i++)
        hashes[i] = (pd_hash128){first, i + 1};
    router_request_in in = {.tokens = tokens,
                            .tokens_count = prompt,
                            .hashes = hashes,
                            .hashes_count = prompt / FAKE_BLOCK,
                            .max_tokens = max,
                            .priority = priority};
    snprintf(in.id, sizeof in.id, "r%u", first);
    *a = (answer){.first = first,
                  .max = max,
                  .end_first = first % 1000 < f->end_first,
                  .cancel_at = UINT32_MAX};
    w->count++; /* actions may come before the call returns */
    pd_status status = router_core_on_request(f->core, &in, f->now_ns, &a->handle, &error);
    if (status != PD_OK) {
        w->count--;
        a->status = error.http_status;
        snprintf(a->code, sizeof a->code, "%s", error.code);
        a->handle = 0;
    }
    return a;
}

void wait_ms(world *w, uint64_t ms)
{
    fake_run(&w->fake, w->fake.now_ns + ms * PD_NS_PER_MS);
}

void assert_nothing_left(const world *w)
{
    router_core_counters counters = router_core_counters_of(w->fake.core);
    assert_int_equal(counters.active, 0);
    assert_int_equal(counters.queued, 0);
    for (uint32_t i = 0; i < w->count; i++) {
        const answer *a = &w->answers[i];
        assert_int_equal(a->ends + a->cancelled, 1);
    }
    for (uint32_t i = 0; i < w->fake.workers_count; i++) {
        const fake_worker *worker = &w->fake.workers[i];
        if (!worker->alive)
            continue;
        assert_int_equal(worker->free, worker->blocks);
        assert_int_equal(worker->prefills, 0);
    }
}

answer *ask(world *w, uint32_t prompt, uint32_t max)
{
    return ask_with(w, prompt, max, 0);
}

router_core_counters counters_of(const world *w)
{
    return router_core_counters_of(w->fake.core);
}

world *one_to_one(uint64_t seed)
{
    world *w = world_new(seed);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    return w;
}

void wait_for_token(world *w, const answer *a, uint32_t index)
{
    for (int i = 0; i < 5000 && a->next <= index; i++)
        wait_ms(w, 1);
    assert_true(a->next > index);
}

void assert_whole(const world *w, const answer *a)
{
    if (a->status != 0)
        fail_msg("%d %s: %s", a->status, a->code, a->message);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->next, a->max);
    assert_nothing_left(w);
}

void store_prompt(world *w, uint32_t worker, uint32_t first, uint32_t blocks)
{
    pd_hash128 hashes[64];
    for (uint32_t i = 0; i < blocks; i++)
        hashes[i] = (pd_hash128){first, i + 1};
    fake_store(&w->fake, worker, hashes, blocks);
    wait_ms(w, 20);
}

/* ---- workers that die, or fall silent ---- */

bool has_lease(const fake_worker *w, const answer *a)
{
    for (uint32_t n = 0; w->alive && n < FAKE_LEASES_MAX; n++) {
        if (w->leases[n].blocks != 0 && w->leases[n].prompt_first == a->first)
            return true;
    }
    return false;
}

uint32_t place_of(const world *w, const answer *a)
{
    for (uint32_t i = 0; i < w->fake.workers_count; i++) {
        if (w->fake.workers[i].role == PD_ROLE_DECODE && has_lease(&w->fake.workers[i], a))
            return i;
    }
    return UINT32_MAX;
}

void begin_to_run(world *w, const answer *a)
{
    uint32_t had = a->next;
    for (int i = 0; i < 40000 && a->next <= had + 1; i++)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    assert_in_range(a->next, had + 2, had + 6);
}

void bring_down(world *w, uint32_t worker)
{
    uint64_t lost = counters_of(w).workers_lost;
    fake_kill(&w->fake, worker);
    while (counters_of(w).workers_lost == lost)
        fake_run(&w->fake, w->fake.now_ns + 50000);
}

world *world_of_two_with(uint64_t seed, uint32_t prompt, answer **a, answer **b)
{
    world *w = one_to_one(seed);
    *a = ask(w, prompt, 3000);
    *b = ask(w, prompt, 300);
    begin_to_run(w, *a);
    if ((*b)->next < 2)
        begin_to_run(w, *b);
    assert_in_range((*a)->next, 2, 7);
    assert_in_range((*b)->next, 2, 7);
    bring_down(w, 1);
    return w;
}

world *world_of_two_suspects(uint64_t seed, answer **a, answer **b)
{
    return world_of_two_with(seed, 40, a, b);
}

world *world_of_one(uint64_t seed, uint32_t prefill, uint32_t decode, answer **a)
{
    world *w = world_new(seed);
    for (uint32_t i = 0; i < prefill; i++)
        fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    for (uint32_t i = 0; i < decode; i++)
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    *a = ask(w, 40, 3000);
    return w;
}

void end_process(world *w, uint32_t worker)
{
    uint64_t lost = counters_of(w).workers_lost;
    fake_kill(&w->fake, worker);
    router_core_on_worker_dead(w->fake.core, w->fake.workers[worker].incarnation, w->fake.now_ns);
    for (int i = 0; i < 400 && counters_of(w).workers_lost == lost; i++)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    assert_int_equal(counters_of(w).workers_lost, lost + 1);
}

void stall(world *w, uint32_t worker, bool stalled)
{
    for (uint32_t n = 0; n < FAKE_LEASES_MAX; n++)
        w->fake.workers[worker].leases[n].stalled = stalled;
}

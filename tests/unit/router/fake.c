#include "tests/unit/router/fake.h"
#include "common/base/buf.h"
#include "common/wire/bus.h"
#include "common/wire/unpack.h"

#include <stdio.h>

enum {
    TO_ROUTER,
    TO_ROUTER_BARE,
    TO_WORKER,
    HEARTBEAT,
    STEP,
    PREFILLED,
    SHIPPED,
    SAY_STARTED,
    SENT
};
enum { STARTED_AGAIN_MS = 500 };

uint32_t fake_below(fake *f, uint32_t bound)
{
    return (uint32_t)(pd_random_next(&f->random) % bound);
}

uint32_t fake_token(uint32_t prompt_first, uint32_t index)
{
    return (uint32_t)(pd_mix64(prompt_first * 1000003ull + index) % 900);
}

static fake_event *push(fake *f, uint64_t due_ns, int kind, uint32_t worker)
{
    if (f->count == f->size) {
        f->size = f->size == 0 ? 1024 : f->size * 2;
        f->events = realloc(f->events, f->size * sizeof *f->events);
        assert_non_null(f->events);
    }
    fake_event *e = &f->events[f->count++];
    *e = (fake_event){.due_ns = due_ns,
                      .order = f->order++,
                      .kind = kind,
                      .worker = worker,
                      .incarnation = f->workers[worker].incarnation};
    return e;
}

static bool before(const fake_event *a, const fake_event *b)
{
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->order < b->order;
}

static fake_event pop(fake *f)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < f->count; i++) {
        if (before(&f->events[i], &f->events[best]))
            best = i;
    }
    fake_event e = f->events[best];
    f->events[best] = f->events[--f->count];
    return e;
}

static uint64_t delay(fake *f)
{
    return 10000 + (uint64_t)fake_below(f, f->delay_max_us) * 1000;
}

static bool about_request(const pd_message *message)
{
    switch (message->kind) {
    case PD_MSG_HELLO:
    case PD_MSG_HEARTBEAT:
    case PD_MSG_LINK:
    case PD_MSG_BYE:
    case PD_MSG_KV_EVENTS:
    case PD_MSG_WELCOME:
    case PD_MSG_REFUSED:
    case PD_MSG_ROUTER_HEARTBEAT:
    case PD_MSG_PEER_UP:
    case PD_MSG_SNAPSHOT_REQUEST: return false;
    default: return true;
    }
}

static void carry(fake *f, int kind, uint32_t worker, uint64_t *channel_ns,
                  const pd_message *message)
{
    pd_buf buf;
    pd_buf_init(&buf, PD_MESSAGE_BYTES_MAX);
    assert_int_equal(pd_message_pack(message, &buf), PD_OK);
    uint64_t due_ns = f->now_ns + delay(f);
    bool disorder = about_request(message) && fake_below(f, 1000) < f->disorder;
    if (due_ns <= *channel_ns && !disorder)
        due_ns = *channel_ns + 1;
    if (due_ns > *channel_ns)
        *channel_ns = due_ns;
    fake_event *e = push(f, due_ns, kind, worker);
    e->bytes = malloc(buf.len + 1);
    assert_non_null(e->bytes);
    memcpy(e->bytes, pd_buf_text(&buf), buf.len);
    e->len = buf.len;
    pd_buf_fini(&buf);
}

static bool lost(fake *f, const pd_message *message)
{
    if (about_request(message) && fake_below(f, 1000) < f->loss)
        return true;
    if (f->lose[message->kind] == 0)
        return false;
    f->lose[message->kind]--;
    return true;
}

static void say(fake *f, uint32_t worker, const pd_message *message)
{
    fake_worker *w = &f->workers[worker];
    if (!w->alive || w->mute || lost(f, message))
        return;
    bool bare = message->kind == PD_MSG_STEP_TOKENS || message->kind == PD_MSG_KV_EVENTS;
    bool twice = about_request(message) && fake_below(f, 1000) < f->duplicates;
    f->repeated |= twice;
    for (int i = 0; i < 1 + twice; i++)
        carry(f, bare ? TO_ROUTER_BARE : TO_ROUTER, worker, &w->last_ns[bare], message);
}

static bool sink_send(void *ctx, const char *to, const pd_message *message)
{
    fake *f = ctx;
    if (f->refuse[message->kind] > 0) {
        f->refuse[message->kind]--;
        return false;
    }
    f->sent[message->kind]++;
    if (lost(f, message))
        return true;
    for (uint32_t i = 0; i < f->workers_count; i++) {
        fake_worker *w = &f->workers[i];
        if (strcmp(w->identity, to) != 0)
            continue;
        bool twice = about_request(message) && fake_below(f, 1000) < f->duplicates;
        f->repeated |= twice;
        for (int n = 0; n < 1 + twice; n++)
            carry(f, TO_WORKER, i, &w->inbox_ns, message);
        return true;
    }
    return false; /* of an incarnation that ended */
}

/* ---- the sink of the test stands behind ours ---- */

static void sink_token(void *ctx, router_handle request, uint32_t index, uint32_t token,
                       pd_finish finish)
{
    fake *f = ctx;
    f->sink.token(f->sink.ctx, request, index, token, finish);
}

static void sink_finish(void *ctx, router_handle request, const router_finish *finish)
{
    fake *f = ctx;
    f->sink.finish(f->sink.ctx, request, finish);
}

static void sink_error(void *ctx, router_handle request, const router_error *error)
{
    fake *f = ctx;
    f->sink.error(f->sink.ctx, request, error);
}

void fake_config(router_core_config *config)
{
    *config = (router_core_config){.model = "fake",
                                   .model_fingerprint = {1, 2},
                                   .block_tokens = FAKE_BLOCK,
                                   .block_bytes = 1 << 16,
                                   .context_max = 4096,
                                   .vocab = 1000,
                                   .policy = PD_POLICY_KV_AWARE,
                                   .requests_max = 256,
                                   .queue_max = 128,
                                   .queue_ns = 2 * PD_NS_PER_S,
                                   .lease_ns = PD_NS_PER_S / 2,
                                   .prefill_ns = PD_NS_PER_S,
                                   .transfer_ns = PD_NS_PER_S,
                                   .decode_idle_ns = PD_NS_PER_S,
                                   .total_ns = 20 * PD_NS_PER_S,
                                   .heartbeat_ns = 100 * PD_NS_PER_MS,
                                   .lost_after_ns = 500 * PD_NS_PER_MS};
    pd_cost_init(&config->cost);
}

void fake_init(fake *f, uint64_t seed, const router_sink *sink)
{
    fake_init_with(f, seed, sink, NULL);
}

void fake_init_with(fake *f, uint64_t seed, const router_sink *sink,
                    void (*change)(router_core_config *config))
{
    *f = (fake){.random = seed, .now_ns = PD_NS_PER_S, .sink = *sink, .delay_max_us = 2000};
    fake_config(&f->config);
    if (change != NULL)
        change(&f->config);
    const router_sink mine = {f, sink_send, sink_token, sink_finish, sink_error};
    assert_int_equal(router_core_create(&f->config, 0x77, seed, &mine, f->now_ns, &f->core), PD_OK);
}

void fake_fini(fake *f)
{
    router_core_destroy(f->core);
    for (uint32_t i = 0; i < f->count; i++)
        free(f->events[i].bytes);
    free(f->events);
}

void fake_hello(const fake *f, const fake_worker *w, pd_msg_hello *hello)
{
    *hello = (pd_msg_hello){.wire_version = PD_WIRE_VERSION,
                            .role = w->role,
                            .role_epoch = 1,
                            .incarnation = w->incarnation,
                            .model_fingerprint = f->config.model_fingerprint,
                            .layout_fingerprint = 5,
                            .block_tokens = f->config.block_tokens,
                            .context_max = f->config.context_max,
                            .max_batch = 16,
                            .queue_max = 64,
                            .blocks = w->blocks,
                            .transfer_address = w->identity,
                            .transfer_address_len = 8,
                            .pid = 1,
                            .host = 2,
                            .started = 3,
                            .session = w->session,
                            .clock_ns = FAKE_CLOCK_NS + f->now_ns - FAKE_HELLO_NS};
    memcpy(hello->name, w->name, sizeof hello->name);
    snprintf(hello->model, sizeof hello->model, "fake");
    snprintf(hello->layout, sizeof hello->layout, "f16 fake");
    snprintf(hello->backend, sizeof hello->backend, "none");
    snprintf(hello->transfer, sizeof hello->transfer, "none");
}

static void begin(fake *f, uint32_t i)
{
    fake_worker *w = &f->workers[i];
    w->incarnation = ++f->incarnations;
    w->alive = true;
    w->mute = false;
    w->free = w->blocks;
    w->prefills = 0;
    w->sequence = 0;
    memset(w->leases, 0, sizeof w->leases);
    pd_bus_identity(w->name, w->incarnation, w->identity);
    pd_message message = {.kind = PD_MSG_HELLO};
    fake_hello(f, w, &message.hello);
    say(f, i, &message);
    push(f, f->now_ns + PD_NS_PER_MS, HEARTBEAT, i);
    if (w->role == PD_ROLE_DECODE)
        push(f, f->now_ns + PD_NS_PER_MS, STEP, i);
}

uint32_t fake_add(fake *f, pd_role role, uint32_t blocks)
{
    uint32_t i = f->workers_count++;
    fake_worker *w = &f->workers[i];
    assert_true(i < FAKE_WORKERS_MAX);
    *w = (fake_worker){.role = role, .blocks = blocks};
    snprintf(w->name, sizeof w->name, "%s-%u", role == PD_ROLE_PREFILL ? "prefill" : "decode", i);
    begin(f, i);
    return i;
}

void fake_new_session(fake *f, uint32_t i)
{
    fake_worker *w = &f->workers[i];
    w->free = w->blocks;
    w->prefills = 0;
    memset(w->leases, 0, sizeof w->leases);
    w->session++;
    pd_message message = {.kind = PD_MSG_HELLO};
    fake_hello(f, w, &message.hello);
    say(f, i, &message);
}

void fake_store(fake *f, uint32_t i, const pd_hash128 *hashes, uint32_t count)
{
    fake_worker *w = &f->workers[i];
    pd_kv_event events[64];
    pd_message message = {.kind = PD_MSG_KV_EVENTS,
                          .kv_events = {.incarnation = w->incarnation,
                                        .first_sequence = w->sequence + 1,
                                        .events = events,
                                        .events_count = count}};
    assert_true(count <= 64);
    for (uint32_t n = 0; n < count; n++)
        events[n] = (pd_kv_event){PD_KV_STORED, hashes[n]};
    w->sequence += count;
    memcpy(message.kv_events.name, w->name, sizeof w->name);
    say(f, i, &message);
}

void fake_kill(fake *f, uint32_t worker)
{
    f->workers[worker].alive = false;
}

void fake_restart(fake *f, uint32_t worker)
{
    begin(f, worker);
}

/* ---- what a worker does ---- */

static bool same_key(const pd_request_key *a, const pd_request_key *b)
{
    return a->router == b->router && a->number == b->number && a->epoch == b->epoch;
}

static fake_lease *find_lease(fake_worker *w, const pd_request_key *key)
{
    for (uint32_t i = 0; i < FAKE_LEASES_MAX; i++) {
        if (w->leases[i].blocks != 0 && same_key(&w->leases[i].key, key))
            return &w->leases[i];
    }
    return NULL;
}

static void end_lease(fake_worker *w, fake_lease *lease)
{
    w->free += lease->blocks;
    lease->blocks = 0;
}

static void say_bound(fake *f, uint32_t i, const pd_request_key *key)
{
    fake_lease *lease = find_lease(&f->workers[i], key);
    pd_block blocks[512];
    pd_message message = {.kind = PD_MSG_LEASE_REPLY, .lease_reply = {.key = *key, .bound = true}};
    if (lease == NULL) {
        message.lease_reply.status = PD_E_NOT_FOUND;
    } else {
        lease->bound = true;
        for (uint32_t n = 0; n < lease->prompt_blocks; n++)
            blocks[n] = n;
        message.lease_reply.blocks = blocks;
        message.lease_reply.blocks_count = lease->prompt_blocks;
    }
    say(f, i, &message);
}

static void on_lease(fake *f, uint32_t i, const pd_msg_lease_request *request)
{
    fake_worker *w = &f->workers[i];
    uint32_t total = (request->prompt_tokens + request->max_tokens) / FAKE_BLOCK + 1;
    pd_message message = {.kind = PD_MSG_LEASE_REPLY, .lease_reply = {.key = request->key}};
    w->last_lease = *request;
    if (find_lease(w, &request->key) != NULL) {
        assert_true(f->repeated); /* a key is used once */
        return;
    }
    assert_int_equal(request->sender.pid, 1);
    assert_int_equal(request->sender.host, 2);
    assert_int_equal(request->sender.started, 3);
    fake_lease *room = NULL;
    for (uint32_t n = 0; n < FAKE_LEASES_MAX && room == NULL; n++)
        room = w->leases[n].blocks == 0 ? &w->leases[n] : NULL;
    if (w->refuses == request->sender.incarnation && w->refuses != 0) {
        message.lease_reply.status = PD_E_PEER;
    } else if (total > w->blocks) {
        message.lease_reply.status = PD_E_TOO_LARGE;
    } else if (total > w->free || room == NULL) {
        message.lease_reply.status = PD_E_OVERLOAD;
        message.lease_reply.retry_after_ms = 20;
    } else {
        *room =
            (fake_lease){.key = request->key,
                         .blocks = total,
                         .bound = request->bind,
                         .prompt_blocks = (request->prompt_tokens + FAKE_BLOCK - 1) / FAKE_BLOCK};
        w->free -= total;
        if (request->bind) {
            say_bound(f, i, &request->key);
            return;
        }
    }
    message.lease_reply.bound = request->bind;
    say(f, i, &message);
}

static fake_prompt *find_prompt(fake_worker *w, const pd_request_key *key)
{
    for (uint32_t n = 0; n < w->prefills; n++) {
        if (same_key(&w->prompts[n].key, key))
            return &w->prompts[n];
    }
    return NULL;
}

static bool drop_prefill(fake_worker *w, const pd_request_key *key)
{
    fake_prompt *prompt = find_prompt(w, key);
    if (prompt == NULL)
        return false;
    *prompt = w->prompts[--w->prefills];
    return true;
}

static void say_done(fake *f, uint32_t i, const fake_prompt *prompt, pd_status status)
{
    pd_message message = {.kind = PD_MSG_PREFILL_DONE,
                          .prefill_done = {.key = prompt->key,
                                           .status = status,
                                           .cached_tokens = 3,
                                           .computed_tokens = 10,
                                           .compute_ms = 1,
                                           .ship_bytes = 100,
                                           .ship_ms = 1,
                                           .again = prompt->again}};
    say(f, i, &message);
}

static void on_prefill(fake *f, uint32_t i, const pd_msg_prefill_request *request)
{
    fake_worker *w = &f->workers[i];
    uint32_t index = request->tokens_count - request->prompt_tokens;
    for (uint32_t n = 0; n < index; n++) /* the answer so far */
        assert_int_equal(request->tokens[request->prompt_tokens + n],
                         fake_token(request->tokens[0], n));
    w->last_prefill = *request;
    if (request->hashes_count > 0)
        w->last_hash = request->hashes[request->hashes_count - 1];
    if (find_prompt(w, &request->key) != NULL) {
        assert_true(f->repeated); /* a key is used once */
        return;
    }
    const fake_prompt prompt = {.key = request->key,
                                .first = request->tokens[0],
                                .index = index,
                                .pull_blocks = request->pull_blocks,
                                .ship = request->ship};
    if (f->prefill_status != PD_OK) {
        say_done(f, i, &prompt, f->prefill_status);
        return;
    }
    if (fake_below(f, 1000) < f->overload_prefill || w->prefills == FAKE_LEASES_MAX) {
        say_done(f, i, &prompt, PD_E_OVERLOAD);
        return;
    }
    w->prompts[w->prefills++] = prompt;
    push(f, f->now_ns + delay(f), SAY_STARTED, i)->key = request->key;
    /* its patience with a pull, or the time it computes */
    uint64_t ms = request->pull_blocks > 0 ? request->pull_ms : 1;
    push(f, f->now_ns + ms * PD_NS_PER_MS + delay(f), PREFILLED, i)->key = request->key;
}

/* Said until the targets are there. */
static void say_started(fake *f, uint32_t i, const pd_request_key *key)
{
    const fake_prompt *prompt = find_prompt(&f->workers[i], key);
    if (prompt == NULL || !prompt->ship || prompt->targets)
        return;
    pd_block blocks[64];
    pd_message message = {.kind = PD_MSG_PREFILL_STARTED,
                          .prefill_started = {.key = *key,
                                              .pull_blocks = blocks,
                                              .pull_blocks_count = prompt->pull_blocks}};
    assert_true(prompt->pull_blocks <= 64);
    for (uint32_t n = 0; n < prompt->pull_blocks; n++)
        blocks[n] = 100 + n;
    say(f, i, &message);
    push(f, f->now_ns + STARTED_AGAIN_MS * PD_NS_PER_MS, SAY_STARTED, i)->key = *key;
}

static void ship(fake *f, uint32_t i, fake_prompt *prompt)
{
    if (prompt->computed && prompt->targets && !prompt->shipped)
        push(f, f->now_ns + delay(f), SHIPPED, i)->key = prompt->key;
}

static void on_targets(fake *f, uint32_t i, const pd_msg_targets *targets)
{
    fake_prompt *prompt = find_prompt(&f->workers[i], &targets->key);
    if (prompt == NULL || prompt->targets || prompt->source)
        return;
    assert_true(prompt->ship);
    prompt->targets = true;
    ship(f, i, prompt);
}

static void say_tokens(fake *f, uint32_t i, const pd_step_token *tokens, uint32_t count)
{
    fake_worker *w = &f->workers[i];
    pd_message message = {
        .kind = PD_MSG_STEP_TOKENS,
        .step_tokens = {
            .incarnation = w->incarnation, .step_ms = 1, .tokens = tokens, .tokens_count = count}};
    memcpy(message.step_tokens.name, w->name, sizeof w->name);
    say(f, i, &message);
    if (fake_below(f, 1000) < f->duplicate_tokens)
        say(f, i, &message);
}

static void on_prefilled(fake *f, uint32_t i, const fake_event *e)
{
    fake_prompt *prompt = find_prompt(&f->workers[i], &e->key);
    if (prompt == NULL || prompt->computed)
        return; /* cancelled, or it did not have to wait for the pull */
    pd_step_token token = {
        .key = e->key, .index = prompt->index, .token = fake_token(prompt->first, prompt->index)};
    if (prompt->index == 0 && prompt->first % 1000 < f->end_first)
        token.finish = PD_FINISH_STOP;
    else if (!prompt->ship)
        token.finish = PD_FINISH_LENGTH;
    say_tokens(f, i, &token, 1);
    prompt->computed = true;
    if (prompt->ship) {
        ship(f, i, prompt);
    } else {
        say_done(f, i, prompt, PD_OK);
        drop_prefill(&f->workers[i], &e->key);
    }
}

static void say_landed(fake *f, uint32_t i, fake_lease *lease)
{
    pd_message message = {.kind = PD_MSG_LANDED,
                          .landed = {.key = lease->key, .started = lease->decoding}};
    lease->landed = true;
    if (fake_below(f, 1000) >= f->silent_landings)
        say(f, i, &message);
}

/* Everything has landed; now and then a seal does not match. */
static void arrive(fake *f, uint32_t i, fake_lease *lease, const fake_prompt *prompt)
{
    lease->prompt_first = prompt->first;
    if (fake_below(f, 1000) >= f->seal_failures) {
        say_landed(f, i, lease);
    } else if (lease->refetched++ == 0) {
        pd_message message = {.kind = PD_MSG_REFETCH,
                              .refetch = {.key = lease->key, .group = 1, .count = 1}};
        snprintf(message.refetch.reason, sizeof message.refetch.reason, "%s",
                 "a seal does not match");
        say(f, i, &message);
    } else {
        pd_message message = {.kind = PD_MSG_DECODE_FAILED,
                              .decode_failed = {.key = lease->key, .status = PD_E_MISMATCH}};
        snprintf(message.decode_failed.reason, sizeof message.decode_failed.reason, "%s",
                 "a seal does not match again");
        end_lease(&f->workers[i], lease);
        say(f, i, &message);
    }
}

/* A ShipRequest is done: at a prefill worker it was a pull, at a decode worker a move. */
static void on_sent(fake *f, uint32_t i, const fake_event *e)
{
    fake_prompt *source = find_prompt(&f->workers[i], &e->key);
    if (source == NULL)
        return;
    pd_message done = {.kind = PD_MSG_SHIP_DONE,
                       .ship_done = {.key = e->key, .ship_bytes = 10, .ship_ms = 1}};
    done.ship_done.again = source->again;
    if (fake_below(f, 1000) < f->ship_failures) {
        done.ship_done.status = PD_E_PEER;
        snprintf(done.ship_done.reason, sizeof done.ship_done.reason, "%s", "the link was cut");
        drop_prefill(&f->workers[i], &e->key);
        say(f, i, &done);
        return;
    }
    for (uint32_t n = 0; n < f->workers_count; n++) {
        fake_worker *to = &f->workers[n];
        fake_lease *lease = find_lease(to, &e->key);
        fake_prompt *prompt = n == i ? NULL : find_prompt(to, &e->key);
        if (!to->alive)
            continue;
        if (source->source_epoch != 0 && lease != NULL && lease->bound && !lease->landed) {
            lease->prompt_first = source->first;
            say_landed(f, n, lease);
        } else if (source->source_epoch == 0 && prompt != NULL && !prompt->computed) {
            pd_message landed = {.kind = PD_MSG_LANDED, .landed = {.key = e->key}};
            to->pulled++;
            say(f, n, &landed);
            push(f, f->now_ns + PD_NS_PER_MS, PREFILLED, n)->key = e->key;
        }
    }
    say(f, i, &done);
}

static void on_ship_request(fake *f, uint32_t i, const pd_msg_ship_request *request)
{
    fake_worker *w = &f->workers[i];
    w->last_ship = *request;
    assert_int_equal(request->receiver.transfer_address_len, 8);
    if (find_prompt(w, &request->key) != NULL || w->prefills == FAKE_LEASES_MAX)
        return;
    fake_prompt source = {
        .key = request->key, .source = true, .source_epoch = request->source_epoch};
    if (request->source_epoch != 0) {
        pd_request_key key = request->key;
        key.epoch = request->source_epoch;
        const fake_lease *lease = find_lease(w, &key);
        if (lease == NULL || !lease->suspended) {
            pd_message message = {.kind = PD_MSG_SHIP_DONE,
                                  .ship_done = {.key = request->key, .status = PD_E_NOT_FOUND}};
            say(f, i, &message);
            return;
        }
        source.first = lease->prompt_first;
        assert_int_equal(request->kv_tokens, lease->prompt_tokens + lease->next - 1);
    }
    w->prompts[w->prefills++] = source;
    push(f, f->now_ns + delay(f), SENT, i)->key = request->key;
}

static void on_shipped(fake *f, uint32_t i, const fake_event *e)
{
    fake_prompt *prompt = find_prompt(&f->workers[i], &e->key);
    if (prompt == NULL)
        return;
    prompt->shipped = true;
    for (uint32_t n = 0; n < f->workers_count; n++) {
        fake_lease *lease = find_lease(&f->workers[n], &e->key);
        if (lease != NULL && lease->bound && !lease->landed && f->workers[n].alive)
            arrive(f, n, lease, prompt);
    }
    say_done(f, i, prompt, PD_OK); /* its copies stay until they are released */
}

static void on_ship_again(fake *f, uint32_t i, const pd_msg_ship_again *again)
{
    fake_prompt *prompt = find_prompt(&f->workers[i], &again->key);
    f->workers[i].last_again = *again;
    if (prompt == NULL) {
        const fake_prompt unknown = {.key = again->key, .again = 1};
        say_done(f, i, &unknown, PD_E_NOT_FOUND);
        return;
    }
    prompt->again++;
    push(f, f->now_ns + delay(f), prompt->source ? SENT : SHIPPED, i)->key = prompt->key;
}

void fake_cut(fake *f, uint32_t i, bool may_land)
{
    fake_worker *w = &f->workers[i];
    while (w->prefills > 0) {
        pd_message message = {.kind = PD_MSG_PREFILL_DONE,
                              .prefill_done = {.key = w->prompts[0].key,
                                               .status = PD_E_PEER,
                                               .reason = "the link was cut",
                                               .may_land = may_land}};
        drop_prefill(w, &message.prefill_done.key);
        say(f, i, &message);
    }
}

static void on_start(fake *f, uint32_t i, const pd_msg_decode_start *start)
{
    fake_lease *lease = find_lease(&f->workers[i], &start->key);
    if (lease == NULL)
        return; /* it was cancelled */
    fake_worker *w = &f->workers[i];
    uint32_t answered = start->tokens_count - start->prompt_tokens;
    w->last_start = *start;
    assert_true(answered >= 1);
    for (uint32_t n = 0; n < answered; n++)
        assert_int_equal(start->tokens[start->prompt_tokens + n], fake_token(start->tokens[0], n));
    if (lease->decoding) { /* said again */
        w->started_again++;
        return;
    }
    lease->decoding = true;
    lease->next = answered;
    lease->max = start->max_tokens;
    lease->prompt_tokens = start->prompt_tokens;
}

static void say_suspended(fake *f, uint32_t i, fake_lease *lease)
{
    lease->suspended = true;
    pd_message message = {.kind = PD_MSG_SUSPENDED,
                          .suspended = {.key = lease->key,
                                        .answered = lease->next,
                                        .kv_tokens = lease->prompt_tokens + lease->next - 1,
                                        .blocks = lease->blocks}};
    say(f, i, &message);
}

static void say_failed(fake *f, uint32_t i, fake_lease *lease)
{
    pd_message message = {.kind = PD_MSG_DECODE_FAILED,
                          .decode_failed = {.key = lease->key, .status = f->decode_status}};
    snprintf(message.decode_failed.reason, sizeof message.decode_failed.reason, "%s",
             "as it was told");
    end_lease(&f->workers[i], lease);
    say(f, i, &message);
}

static void on_step(fake *f, uint32_t i)
{
    fake_worker *w = &f->workers[i];
    pd_step_token tokens[FAKE_LEASES_MAX];
    uint32_t count = 0;
    for (uint32_t n = 0; n < FAKE_LEASES_MAX; n++) {
        fake_lease *lease = &w->leases[n];
        if (lease->blocks == 0 || !lease->decoding || !lease->landed || lease->suspended ||
            lease->stalled)
            continue;
        if (f->decode_status != PD_OK) {
            say_failed(f, i, lease);
            continue;
        }
        if (fake_below(f, 1000) < f->suspends) {
            say_suspended(f, i, lease);
            continue;
        }
        bool last = lease->next + 1 == lease->max;
        tokens[count++] = (pd_step_token){.key = lease->key,
                                          .index = lease->next,
                                          .token = fake_token(lease->prompt_first, lease->next),
                                          .finish = last ? PD_FINISH_LENGTH : PD_FINISH_NONE};
        lease->next++;
        if (last)
            end_lease(w, lease);
    }
    if (count > 0)
        say_tokens(f, i, tokens, count);
    push(f, f->now_ns + PD_NS_PER_MS, STEP, i);
}

static void on_audit(fake *f, uint32_t i, const pd_msg_audit *audit)
{
    fake_worker *w = &f->workers[i];
    pd_audit_entry entries[2 * FAKE_LEASES_MAX + 1];
    uint32_t count = 0;
    for (uint32_t n = 0; n < w->prefills; n++) {
        const fake_prompt *p = &w->prompts[n];
        entries[count++] = (pd_audit_entry){
            p->key, p->computed || p->source ? PD_AUDIT_HOLDING : PD_AUDIT_COMPUTING, 1};
    }
    if (w->quarantined.number != 0)
        entries[count++] = (pd_audit_entry){w->quarantined, PD_AUDIT_QUARANTINED, 1};
    for (uint32_t n = 0; n < FAKE_LEASES_MAX; n++) {
        const fake_lease *l = &w->leases[n];
        if (l->blocks == 0)
            continue;
        pd_audit_state state = l->suspended ? PD_AUDIT_SUSPENDED
                               : l->stalled ? PD_AUDIT_STALLED
                               : l->landed  ? (l->decoding ? PD_AUDIT_RUNNING : PD_AUDIT_LANDED)
                               : l->bound   ? (l->decoding ? PD_AUDIT_AWAITED : PD_AUDIT_LANDING)
                                            : PD_AUDIT_PROMISED;
        entries[count++] = (pd_audit_entry){l->key, state, l->blocks};
    }
    pd_message message = {.kind = PD_MSG_AUDIT_REPLY,
                          .audit_reply = {.incarnation = w->incarnation,
                                          .serial = audit->serial,
                                          .ledger = {.total = w->blocks, .free = w->free},
                                          .entries = entries,
                                          .entries_count = count,
                                          .waits_for = &w->waits_for,
                                          .waits_for_count = w->waits_for != 0}};
    say(f, i, &message);
}

static void on_pull_end(fake *f, uint32_t i, const pd_msg_pull_end *end)
{
    f->workers[i].pull_ends++;
    f->workers[i].last_pull_end = *end;
    push(f, f->now_ns + PD_NS_PER_MS, PREFILLED, i)->key = end->key;
}

static void on_cancel(fake *f, uint32_t i, const pd_msg_cancel *cancel)
{
    const pd_request_key *key = &cancel->key;
    fake_worker *w = &f->workers[i];
    if (cancel->unwritten && same_key(key, &w->quarantined))
        w->quarantined.number = 0;
    fake_lease *lease = find_lease(w, key);
    if (lease != NULL)
        end_lease(w, lease);
    const fake_prompt *prompt = find_prompt(w, key);
    if (prompt != NULL) {
        say_done(f, i, prompt, PD_E_CANCELLED);
        drop_prefill(w, key);
    }
}

static void on_peer_up(fake *f, uint32_t i, const pd_msg_peer_up *peer)
{
    fake_worker *w = &f->workers[i];
    w->peers_up++;
    if (w->role != PD_ROLE_PREFILL)
        return;
    assert_int_equal(peer->transfer_address_len, 8);
    pd_message message = {.kind = PD_MSG_LINK,
                          .link = {.peer_incarnation = peer->incarnation, .up = true}};
    memcpy(message.link.peer, peer->name, sizeof message.link.peer);
    snprintf(message.link.lane, sizeof message.link.lane, "%s", "fake");
    say(f, i, &message);
}

/* The decode worker is told that a writer died: what has not landed never will. */
static void on_peer_gone(fake *f, uint32_t i, const pd_msg_peer_gone *gone)
{
    fake_worker *w = &f->workers[i];
    w->peers_gone++;
    if (w->waits_for == gone->incarnation)
        w->waits_for = 0;
    for (uint32_t n = 0; n < FAKE_LEASES_MAX; n++) {
        fake_lease *lease = &w->leases[n];
        if (lease->blocks == 0 || lease->landed || !lease->decoding)
            continue;
        bool writer_lives = false;
        for (uint32_t p = 0; p < f->workers_count; p++)
            writer_lives |= f->workers[p].alive && find_prompt(&f->workers[p], &lease->key) != NULL;
        if (writer_lives)
            continue;
        pd_message failed = {.kind = PD_MSG_DECODE_FAILED,
                             .decode_failed = {.key = lease->key, .status = PD_E_PEER}};
        end_lease(w, lease);
        say(f, i, &failed);
    }
}

static void on_snapshot_request(fake *f, uint32_t i)
{
    fake_worker *w = &f->workers[i];
    w->snapshots++;
    pd_message message = {.kind = PD_MSG_KV_EVENTS,
                          .kv_events = {.incarnation = w->incarnation,
                                        .first_sequence = w->sequence,
                                        .snapshot_first = true,
                                        .snapshot = true,
                                        .snapshot_last = true}};
    memcpy(message.kv_events.name, w->name, sizeof w->name);
    say(f, i, &message);
}

static void on_worker_message(fake *f, uint32_t i, const pd_message *message)
{
    fake_worker *w = &f->workers[i];
    w->cancels += message->kind == PD_MSG_CANCEL;
    w->kept += message->kind == PD_MSG_CANCEL && message->cancel.keep;
    w->unwritten += message->kind == PD_MSG_CANCEL && message->cancel.unwritten;
    if (message->kind == PD_MSG_CANCEL) {
        w->unwritten_by = message->cancel.source;
        w->last_cancel = message->cancel;
    }
    if (w->deaf && (message->kind == PD_MSG_LEASE_REQUEST || message->kind == PD_MSG_DECODE_START ||
                    message->kind == PD_MSG_PREFILL_REQUEST))
        return;
    switch (message->kind) {
    case PD_MSG_WELCOME: w->welcomed++; break;
    case PD_MSG_REFUSED:
        w->refused++;
        memcpy(w->refusal, message->refused.reason, sizeof w->refusal);
        break;
    case PD_MSG_PEER_UP: on_peer_up(f, i, &message->peer_up); break;
    case PD_MSG_PEER_GONE: on_peer_gone(f, i, &message->peer_gone); break;
    case PD_MSG_LEASE_REQUEST: on_lease(f, i, &message->lease_request); break;
    case PD_MSG_PREFILL_REQUEST: on_prefill(f, i, &message->prefill_request); break;
    case PD_MSG_BIND: say_bound(f, i, &message->bind.key); break;
    case PD_MSG_SHIP_REQUEST: on_ship_request(f, i, &message->ship_request); break;
    case PD_MSG_PULL_END: on_pull_end(f, i, &message->pull_end); break;
    case PD_MSG_AUDIT: on_audit(f, i, &message->audit); break;
    case PD_MSG_TARGETS: on_targets(f, i, &message->targets); break;
    case PD_MSG_RELEASE: drop_prefill(w, &message->release.key); break;
    case PD_MSG_SHIP_AGAIN: on_ship_again(f, i, &message->ship_again); break;
    case PD_MSG_DECODE_START: on_start(f, i, &message->decode_start); break;
    case PD_MSG_CANCEL: on_cancel(f, i, &message->cancel); break;
    case PD_MSG_SNAPSHOT_REQUEST: on_snapshot_request(f, i); break;
    default: break;
    }
}

static void on_heartbeat(fake *f, uint32_t i)
{
    fake_worker *w = &f->workers[i];
    pd_message message = {
        .kind = PD_MSG_HEARTBEAT,
        .heartbeat = {
            .incarnation = w->incarnation,
            .role_epoch = 1,
            .busy = w->hangs,
            .queue_ms = w->queue_ms,
            .running = w->running,
            .waiting = w->waiting,
            .ledger = {.total = w->blocks, .free = w->free, .leased = w->blocks - w->free},
            .events_sequence = w->sequence,
            .counts = w->counts,
            .warm = true,
            .clock_ns = FAKE_CLOCK_NS + f->now_ns}};
    if (w->ledger.total != 0)
        message.heartbeat.ledger = w->ledger;
    say(f, i, &message);
    push(f, f->now_ns + f->config.heartbeat_ns, HEARTBEAT, i);
}

static void deliver(fake *f, const fake_event *e)
{
    pd_message message;
    pd_message_hold *hold;
    const char *reason = NULL;
    char from[96];
    pd_status status = pd_message_unpack(e->bytes, e->len, &message, &hold, &reason);
    if (status != PD_OK)
        fail_msg("a message does not unpack: %s", reason == NULL ? "?" : reason);
    pd_bus_identity(f->workers[e->worker].name, e->incarnation, from);
    if (e->kind == TO_ROUTER)
        router_core_on_message(f->core, from, &message, f->now_ns);
    else if (e->kind == TO_ROUTER_BARE)
        router_core_on_message(f->core, NULL, &message, f->now_ns);
    else
        on_worker_message(f, e->worker, &message);
    pd_message_hold_free(hold);
}

static void handle(fake *f, fake_event *e)
{
    const fake_worker *w = &f->workers[e->worker];
    bool to_router = e->kind == TO_ROUTER || e->kind == TO_ROUTER_BARE;
    if (to_router && f->now_ns < f->asleep_until_ns) {
        fake_event *later = push(f, f->asleep_until_ns, e->kind, e->worker);
        later->incarnation = e->incarnation;
        later->bytes = e->bytes;
        later->len = e->len;
        return;
    }
    /* What was sent before a death still arrives; nothing else happens at a dead worker. */
    if (to_router || (w->alive && w->incarnation == e->incarnation)) {
        switch (e->kind) {
        case HEARTBEAT: on_heartbeat(f, e->worker); break;
        case STEP: on_step(f, e->worker); break;
        case PREFILLED: on_prefilled(f, e->worker, e); break;
        case SHIPPED: on_shipped(f, e->worker, e); break;
        case SENT: on_sent(f, e->worker, e); break;
        case SAY_STARTED: say_started(f, e->worker, &e->key); break;
        default: deliver(f, e); break;
        }
    }
    free(e->bytes);
}

void fake_run(fake *f, uint64_t until_ns)
{
    for (;;) {
        uint64_t due_ns = router_core_next_due(f->core);
        if (due_ns < f->asleep_until_ns)
            due_ns = f->asleep_until_ns;
        if (due_ns < f->now_ns)
            due_ns = f->now_ns;
        for (uint32_t i = 0; i < f->count; i++)
            due_ns = f->events[i].due_ns < due_ns ? f->events[i].due_ns : due_ns;
        if (due_ns > until_ns)
            break;
        f->now_ns = due_ns > f->now_ns ? due_ns : f->now_ns;
        bool any = false;
        for (uint32_t i = 0; i < f->count && !any; i++)
            any = f->events[i].due_ns <= f->now_ns;
        if (any) {
            fake_event e = pop(f);
            handle(f, &e);
        }
        if (f->now_ns >= f->asleep_until_ns && router_core_next_due(f->core) <= f->now_ns) {
            router_core_on_tick(f->core, f->now_ns);
            assert_true(router_core_next_due(f->core) > f->now_ns); /* no spinning */
        }
    }
    f->now_ns = until_ns;
}

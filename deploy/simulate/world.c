#include "deploy/simulate/world.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"
#include "common/wire/unpack.h"
#include "decode-worker/decode.h"
#include "deploy/simulate/worker.h"
#include "prefill-worker/prefill.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define EVENTS_MAX   20000000ull
#define START_NS     PD_NS_PER_S         /* virtual time does not start at 0 */
#define SETTLE_NS    (120 * PD_NS_PER_S) /* after the last answer, until all is at rest */
#define FIRST_ASK_NS (2 * PD_NS_PER_S)

/* ---- chance, time, links ---- */

uint64_t sim_random(sim_world *world, uint64_t below)
{
    return below == 0 ? 0 : pd_random_next(&world->random) % below;
}

bool sim_chance(sim_world *world, double probability)
{
    return (double)(pd_random_next(&world->random) >> 11) < probability * 9007199254740992.0;
}

void sim_broken(sim_world *world, const char *format, ...)
{
    if (world->fault[0] != '\0')
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(world->fault, sizeof(world->fault), format, arguments);
    va_end(arguments);
}

void sim_schedule(sim_world *world, uint64_t at_ns, sim_event event)
{
    event.at_ns = at_ns < world->now_ns ? world->now_ns : at_ns;
    pd_status status = sim_events_push(&world->events, event);
    if (status != PD_OK)
        world->status = status;
}

void *sim_copy(sim_world *world, const void *bytes, size_t size)
{
    void *copy = pd_malloc(size);
    if (copy == NULL)
        world->status = PD_E_NOMEM;
    else
        memcpy(copy, bytes, size);
    return copy;
}

sim_worker *sim_world_worker(sim_world *world, const char *identity)
{
    for (uint32_t i = 0; i < world->workers_count; i++)
        if (world->workers[i].core != NULL && strcmp(world->workers[i].identity, identity) == 0)
            return &world->workers[i];
    return NULL;
}

static void send(sim_world *world, const pd_message *message, uint64_t *last_ns, sim_event event)
{
    pd_buf buf;
    pd_buf_init(&buf, PD_MESSAGE_BYTES_MAX);
    pd_status status = pd_message_pack(message, &buf);
    if (status != PD_OK) {
        sim_broken(world, "a message of kind %s cannot be packed: %s",
                   pd_message_name(message->kind), pd_status_name(status));
    } else {
        event.bytes = sim_copy(world, buf.bytes, buf.len);
        event.bytes_len = buf.len;
        uint64_t at_ns = world->now_ns + 30000 + sim_random(world, 400000);
        if (sim_chance(world, world->plan.late))
            at_ns += sim_random(world, 20 * PD_NS_PER_MS);
        if (at_ns < *last_ns)
            at_ns = *last_ns; /* never overtakes on its link */
        *last_ns = at_ns;
        if (event.bytes != NULL)
            sim_schedule(world, at_ns, event);
    }
    pd_buf_fini(&buf);
}

void sim_send_to_router(sim_worker *worker, const pd_message *message)
{
    pd_channel channel = message->kind == PD_MSG_STEP_TOKENS ? PD_CHANNEL_TOKENS
                         : message->kind == PD_MSG_KV_EVENTS ? PD_CHANNEL_EVENTS
                                                             : PD_CHANNEL_CONTROL;
    send(worker->world, message, &worker->sent_ns[channel],
         (sim_event){.kind = SIM_TO_ROUTER,
                     .subject = worker->index,
                     .incarnation = worker->incarnation,
                     .a = channel});
}

bool sim_send_to_worker(sim_worker *worker, const pd_message *message)
{
    send(worker->world, message, &worker->received_ns,
         (sim_event){
             .kind = SIM_TO_WORKER, .subject = worker->index, .incarnation = worker->incarnation});
    return true;
}

/* ---- what the router's core asks for ---- */

static void journal(sim_world *world, const void *bytes, size_t len)
{
    world->journal = pd_hash64(bytes, len, world->journal);
}

static bool on_send(void *ctx, const char *to, const pd_message *message)
{
    sim_world *world = ctx;
    sim_worker *worker = sim_world_worker(world, to);
    return worker != NULL && sim_send_to_worker(worker, message);
}

static sim_request *find_request(sim_world *world, router_handle handle)
{
    for (uint32_t i = 0; i < world->plan.requests; i++)
        if (world->requests[i].handle == handle)
            return &world->requests[i];
    sim_broken(world, "the router speaks of request %" PRIu64 ", which nobody made", handle);
    return NULL;
}

static uint32_t number_of(const sim_world *world, const sim_request *request)
{
    return (uint32_t)(request - world->requests);
}

static void on_token(void *ctx, router_handle handle, uint32_t index, uint32_t token,
                     pd_finish finish)
{
    sim_world *world = ctx;
    sim_request *request = find_request(world, handle);
    uint64_t record[] = {handle, index, token, finish};

    if (request == NULL)
        return;
    journal(world, record, sizeof(record));
    uint32_t number = number_of(world, request);
    if (request->ends != 0)
        sim_broken(world, "request %u: a token after its end", number);
    else if (index != request->got)
        sim_broken(world, "request %u: token %u comes where %u was due", number, index,
                   request->got);
    else if (index >= request->answer_count)
        sim_broken(world, "request %u: a token beyond its %u", number, request->answer_count);
    else if (token != request->answer[index])
        sim_broken(world, "request %u: token %u is %u, should be %u", number, index, token,
                   request->answer[index]);
    else if ((finish != PD_FINISH_NONE) != (index + 1 == request->answer_count))
        sim_broken(world, "request %u: token %u of %u has finish %d", number, index,
                   request->answer_count, (int)finish);
    request->got++;
}

static void on_finish(void *ctx, router_handle handle, const router_finish *finish)
{
    sim_world *world = ctx;
    sim_request *request = find_request(world, handle);

    if (request == NULL)
        return;
    uint32_t number = number_of(world, request);
    bool stopped = request->answer_count > 0 && !request->ignore_end &&
                   request->answer[request->answer_count - 1] == SIM_END_TOKEN;
    if (request->got != request->answer_count)
        sim_broken(world, "request %u: finished with %u tokens of %u", number, request->got,
                   request->answer_count);
    else if (finish->reason != (stopped ? PD_FINISH_STOP : PD_FINISH_LENGTH))
        sim_broken(world, "request %u: finish reason %d", number, (int)finish->reason);
    else if (finish->prompt_tokens != request->prompt_count ||
             finish->completion_tokens != request->answer_count)
        sim_broken(world, "request %u: usage %u + %u, should be %u + %u", number,
                   finish->prompt_tokens, finish->completion_tokens, request->prompt_count,
                   request->answer_count);
    request->finished = true;
    request->ends++;
}

static void end_with_error(sim_world *world, sim_request *request, const router_error *error)
{
    uint32_t number = number_of(world, request);
    if (error->message[0] == '\0' || error->type == NULL)
        sim_broken(world, "request %u: an error without a word", number);
    else if (error->http_status != 429 && error->http_status != 503 && error->http_status != 504)
        sim_broken(world, "request %u: error %d: %s", number, error->http_status, error->message);
    request->failed = true;
    request->http_status = error->http_status;
    request->ends++;
    journal(world, error->message, strlen(error->message));
}

static void on_error(void *ctx, router_handle handle, const router_error *error)
{
    sim_world *world = ctx;
    sim_request *request = find_request(world, handle);
    if (request != NULL)
        end_with_error(world, request, error);
}

/* ---- clients ---- */

static void draw_request(sim_world *world, sim_request *request)
{
    static const uint32_t lengths[] = {1, 15, 16, 17, 31, 32, 33, 48, 64, 90, 130, 200};
    uint32_t max_answer = SIM_ANSWER_MAX;
    uint32_t room = world->plan.context_max;
    uint32_t blocks_room = world->plan.layout.blocks * world->plan.layout.block_tokens;

    if (room > blocks_room)
        room = blocks_room;
    request->prompt_count = lengths[sim_random(world, sizeof(lengths) / sizeof(lengths[0]))] +
                            (uint32_t)sim_random(world, 4);
    request->max_tokens = sim_chance(world, 0.15) ? 1 : 1 + (uint32_t)sim_random(world, max_answer);
    while (request->prompt_count + request->max_tokens > room) {
        request->prompt_count = 1 + request->prompt_count / 2;
        request->max_tokens = 1 + request->max_tokens / 2;
    }
    /* a few families of prompts, so that prefixes are shared */
    uint64_t family = 1 + sim_random(world, 4);
    uint32_t own_from = (uint32_t)sim_random(world, request->prompt_count + 1);
    for (uint32_t i = 0; i < request->prompt_count; i++) {
        uint64_t value = i < own_from ? pd_mix64(family * 100000 + i) : sim_random(world, 1u << 30);
        request->prompt[i] = 1 + (uint32_t)(value % (SIM_VOCAB - 1));
    }
    request->ignore_end = sim_chance(world, 0.3);
    request->sampling = (pd_sampling){.temperature = sim_chance(world, 0.5) ? 0 : 0.8f,
                                      .top_p = 1,
                                      .seed = sim_random(world, 1u << 30)};
    request->answer_count = sim_model_answer(
        world->plan.layout.groups, request->prompt, request->prompt_count, &request->sampling,
        request->ignore_end, request->max_tokens, request->answer);
}

static void ask(sim_world *world, uint32_t number)
{
    static const uint32_t end_tokens[] = {SIM_END_TOKEN};
    sim_request *request = &world->requests[number];
    pd_hash128 hashes[SIM_PROMPT_MAX / PD_KV_TILE_TOKENS];
    router_request_in in = {.tokens = request->prompt,
                            .tokens_count = request->prompt_count,
                            .hashes = hashes,
                            .sampling = request->sampling,
                            .end_tokens = end_tokens,
                            .end_tokens_count = request->ignore_end ? 0 : 1,
                            .max_tokens = request->max_tokens};
    router_error error = {0};

    snprintf(in.id, sizeof(in.id), "sim-%u", number);
    uint32_t block_tokens = world->plan.layout.block_tokens;
    pd_hash128 root = pd_prefix_hash_root((pd_hash128){1, 2}, block_tokens, NULL, 0);
    in.hashes_count =
        pd_prefix_hash_fill(root, block_tokens, request->prompt, request->prompt_count, hashes,
                            (uint32_t)(sizeof(hashes) / sizeof(hashes[0])));
    if (router_core_on_request(world->router, &in, world->now_ns, &request->handle, &error) !=
        PD_OK)
        end_with_error(world, request, &error);
    else if (world->plan.faults.hang_up && !world->quiet && sim_chance(world, 0.25))
        sim_schedule(world, world->now_ns + sim_random(world, 600 * PD_NS_PER_MS),
                     (sim_event){.kind = SIM_HANG_UP, .subject = number});
}

static void hang_up(sim_world *world, uint32_t number)
{
    sim_request *request = &world->requests[number];
    if (request->ends != 0)
        return;
    request->cancelled = true;
    request->ends++;
    router_core_cancel(world->router, request->handle, world->now_ns);
}

/* ---- the world ---- */

static void arm_router(sim_world *world)
{
    uint64_t due_ns = router_core_next_due(world->router);
    if (due_ns < world->now_ns)
        due_ns = world->now_ns;
    if (due_ns >= world->router_tick_ns)
        return;
    world->router_tick_ns = due_ns;
    sim_schedule(world, due_ns, (sim_event){.kind = SIM_ROUTER_TICK});
}

static void draw_faults(sim_world *world)
{
    const sim_plan *plan = &world->plan;
    uint64_t span_ns = (uint64_t)(plan->gap_ms * plan->requests * PD_NS_PER_MS) + PD_NS_PER_S;

    for (uint64_t n = plan->faults.crash ? 1 + sim_random(world, 5) : 0; n > 0; n--)
        sim_schedule(world, START_NS + FIRST_ASK_NS / 2 + sim_random(world, span_ns),
                     (sim_event){.kind = SIM_CRASH,
                                 .subject = (uint32_t)sim_random(world, world->workers_count)});
    for (uint64_t n = plan->faults.freeze ? 1 + sim_random(world, 4) : 0; n > 0; n--) {
        uint64_t for_ns =
            sim_random(world, sim_chance(world, 0.3) ? 5 * PD_NS_PER_S : 800 * PD_NS_PER_MS);
        sim_schedule(world, START_NS + FIRST_ASK_NS / 2 + sim_random(world, span_ns),
                     (sim_event){.kind = SIM_FREEZE,
                                 .subject = (uint32_t)sim_random(world, world->workers_count),
                                 .a = for_ns});
    }
}

static pd_status init(sim_world *world, const sim_plan *plan)
{
    world->plan = *plan;
    world->random = pd_mix64(plan->seed ^ 0x5157);
    world->now_ns = START_NS;
    world->router_tick_ns = UINT64_MAX;
    world->journal = plan->seed;
    world->workers_count = plan->prefill + plan->decode;
    pd_cost_init(&world->cost);
    world->requests = pd_calloc(plan->requests, sizeof(*world->requests));
    if (world->requests == NULL)
        return PD_E_NOMEM;

    bool calm = !plan->faults.crash && !plan->faults.freeze && !plan->faults.slow;
    uint64_t patience = calm ? 1000 : 1;
    router_core_config config = {
        .model = "simulated",
        .model_fingerprint = {1, 2},
        .layout_fingerprint = 0,
        .block_tokens = plan->layout.block_tokens,
        .block_bytes = plan->layout.block_bytes_all,
        .context_max = plan->context_max,
        .policy = plan->policy,
        .cost = world->cost,
        .requests_max = plan->requests + 1,
        .queue_max = calm ? plan->requests + 1 : 16,
        .queue_ns = patience * 5 * PD_NS_PER_S,
        .lease_ns = patience * PD_NS_PER_S,
        .prefill_ns = patience * 10 * PD_NS_PER_S,
        .transfer_ns = patience * 5 * PD_NS_PER_S,
        .decode_idle_ns = patience * 5 * PD_NS_PER_S,
        .total_ns = patience * 60 * PD_NS_PER_S,
        .heartbeat_ns = 100 * PD_NS_PER_MS,
        .lost_after_ns = PD_NS_PER_S,
    };
    router_sink sink = {
        .ctx = world, .send = on_send, .token = on_token, .finish = on_finish, .error = on_error};
    world->router_incarnation = pd_random_next(&world->random) | 1;
    pd_status status =
        router_core_create(&config, world->router_incarnation, pd_random_next(&world->random),
                           &sink, world->now_ns, &world->router);
    if (status != PD_OK)
        return status;
    arm_router(world);
    for (uint32_t i = 0; i < world->workers_count; i++) {
        sim_worker *worker = &world->workers[i];
        bool prefill = i < plan->prefill;
        worker->world = world;
        worker->index = i;
        worker->ops = prefill ? &prefill_role : &decode_role;
        snprintf(worker->name, sizeof(worker->name), "%s-%u", prefill ? "prefill" : "decode",
                 prefill ? i : i - plan->prefill);
        sim_schedule(world, START_NS + sim_random(world, 800 * PD_NS_PER_MS),
                     (sim_event){.kind = SIM_START, .subject = i});
    }
    uint64_t at_ns = START_NS + FIRST_ASK_NS;
    for (uint32_t i = 0; i < plan->requests; i++) {
        draw_request(world, &world->requests[i]);
        if (i + 1 < plan->requests) /* the last one comes when all is at rest */
            sim_schedule(world, at_ns, (sim_event){.kind = SIM_ARRIVAL, .subject = i});
        double unit = (double)(1 + sim_random(world, 1000000)) / 1000001;
        at_ns += (uint64_t)(-log(unit) * plan->gap_ms * PD_NS_PER_MS);
    }
    draw_faults(world);
    return world->status;
}

static void fini(sim_world *world)
{
    for (uint32_t i = 0; i < world->workers_count; i++)
        sim_worker_fini(&world->workers[i]);
    router_core_destroy(world->router);
    sim_events_fini(&world->events);
    pd_free(world->requests);
}

static void deliver(sim_world *world, const sim_event *event)
{
    sim_worker *worker = &world->workers[event->subject];
    pd_message_hold *hold = NULL;
    const char *reason = "";
    pd_message message;

    pd_status status = pd_message_unpack(event->bytes, event->bytes_len, &message, &hold, &reason);
    if (status != PD_OK) {
        sim_broken(world, "a message from or to %s cannot be unpacked: %s", worker->name, reason);
        return;
    }
    if (event->kind == SIM_TO_WORKER) {
        sim_worker_on_message(worker, &message);
    } else {
        char identity[PD_IDENTITY_BYTES];
        pd_bus_identity(worker->name, event->incarnation, identity);
        router_core_on_message(world->router, event->a == PD_CHANNEL_CONTROL ? identity : NULL,
                               &message, world->now_ns);
    }
    pd_message_hold_free(hold);
}

static void crash(sim_world *world, sim_worker *worker)
{
    if (worker->core == NULL || world->quiet)
        return;
    world->crashes++;
    sim_worker_crash(worker);
}

static void freeze(sim_world *world, sim_worker *worker, uint64_t for_ns)
{
    if (worker->core == NULL || world->quiet)
        return;
    world->freezes++;
    /* never earlier: what waits for the end of the first must not be overtaken */
    if (world->now_ns + for_ns > worker->frozen_until_ns)
        worker->frozen_until_ns = world->now_ns + for_ns;
}

/* An event that a worker's own process has to see; false: it never will. */
static bool for_worker(const sim_event *event)
{
    return event->kind == SIM_TO_WORKER || event->kind == SIM_BEAT ||
           event->kind == SIM_GROUP_DONE || event->kind == SIM_STEP_DONE ||
           event->kind == SIM_TRANSFER;
}

static void happen(sim_world *world, sim_event *event)
{
    sim_worker *worker = &world->workers[event->subject < SIM_WORKERS_MAX ? event->subject : 0];
    bool alive = worker->core != NULL && worker->incarnation == event->incarnation;

    if (for_worker(event)) {
        if (!alive)
            return;
        if (worker->frozen_until_ns > world->now_ns) {
            sim_event later = *event;
            event->bytes = NULL;
            sim_schedule(world, worker->frozen_until_ns, later);
            return;
        }
    }
    uint64_t record[] = {event->at_ns,       event->kind, event->subject,
                         event->incarnation, event->a,    event->b};
    journal(world, record, sizeof(record));
    if (event->kind == SIM_TO_ROUTER || event->kind == SIM_TO_WORKER)
        journal(world, event->bytes, event->bytes_len);
    switch (event->kind) {
    case SIM_ARRIVAL: ask(world, event->subject); break;
    case SIM_HANG_UP: hang_up(world, event->subject); break;
    case SIM_TO_ROUTER:
    case SIM_TO_WORKER: deliver(world, event); break;
    case SIM_ROUTER_TICK:
        world->router_tick_ns = UINT64_MAX;
        router_core_on_tick(world->router, world->now_ns);
        break;
    case SIM_START:
        if (worker->core == NULL)
            sim_worker_start(worker);
        break;
    case SIM_BEAT: sim_worker_on_beat(worker); break;
    case SIM_GROUP_DONE: sim_worker_on_group_done(worker, (uint32_t)event->a, event->b); break;
    case SIM_STEP_DONE: sim_worker_on_step_done(worker, event->b); break;
    case SIM_LANDED: sim_worker_on_landed(world, alive ? worker : NULL, event); break;
    case SIM_TRANSFER: sim_worker_on_transfer(worker, event->bytes); break;
    case SIM_CRASH: crash(world, worker); break;
    case SIM_FREEZE: freeze(world, worker, event->a); break;
    }
    if (for_worker(event) && worker->core != NULL)
        sim_worker_check(worker);
    arm_router(world);
}

/* What keeps the cluster from being at rest; "" when nothing does. */
static void held(const sim_world *world, char *text, size_t size)
{
    router_core_counters counters = router_core_counters_of(world->router);
    router_ready ready = router_core_ready(world->router);

    text[0] = '\0';
    for (uint32_t i = 0; i < world->workers_count && text[0] == '\0'; i++)
        sim_worker_held(&world->workers[i], text, size);
    if (text[0] == '\0' && (counters.queued != 0 || counters.active != 0))
        snprintf(text, size, "the router holds queued %u active %u", counters.queued,
                 counters.active);
    if (text[0] == '\0' &&
        (ready.prefill != world->plan.prefill || ready.decode != world->plan.decode ||
         ready.links != world->plan.prefill * world->plan.decode))
        snprintf(text, size, "the router sees prefill %u decode %u links %u ready", ready.prefill,
                 ready.decode, ready.links);
}

static bool all_ended(const sim_world *world, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (world->requests[i].ends == 0)
            return false;
    return true;
}

/* Lets all events happen until every request has ended, everything is at rest, and one more
 * request, asked then, has been answered. */
static void run(sim_world *world)
{
    uint32_t asked = world->plan.requests - 1;
    uint64_t rest_by_ns = UINT64_MAX;
    bool probed = false;
    char text[200];
    sim_event event;

    while (world->status == PD_OK && world->fault[0] == '\0') {
        if (!sim_events_pop(&world->events, &event)) {
            sim_broken(world, "nothing will ever happen again");
            return;
        }
        world->now_ns = event.at_ns;
        happen(world, &event);
        bool beat = event.kind == SIM_ROUTER_TICK;
        pd_free(event.bytes);
        if (++world->events_done > EVENTS_MAX) {
            sim_broken(world, "no end after %llu events", EVENTS_MAX);
            return;
        }
        if (!beat || !all_ended(world, asked))
            continue;
        if (!world->quiet || rest_by_ns == UINT64_MAX) {
            world->quiet = true;
            rest_by_ns = world->now_ns + SETTLE_NS;
        }
        held(world, text, sizeof(text));
        if (text[0] == '\0' && probed)
            return;
        if (text[0] == '\0') {
            probed = true;
            rest_by_ns = UINT64_MAX;
            asked = world->plan.requests;
            ask(world, asked - 1);
        } else if (world->now_ns > rest_by_ns) {
            sim_broken(world, "not at rest %llu s after the last answer: %s",
                       SETTLE_NS / PD_NS_PER_S, text);
        }
    }
}

static void judge(sim_world *world, sim_result *result)
{
    const sim_plan *plan = &world->plan;
    bool calm =
        !plan->faults.crash && !plan->faults.freeze && !plan->faults.slow && !plan->faults.corrupt;

    for (uint32_t i = 0; i < plan->requests; i++) {
        const sim_request *request = &world->requests[i];
        result->finished += request->finished;
        result->cancelled += request->cancelled;
        result->failed += request->failed;
        if (world->fault[0] == '\0' && request->ends != 1)
            sim_broken(world, "request %u ended %u times", i, request->ends);
        if (request->failed && (calm || i + 1 == plan->requests))
            sim_broken(world, "request %u failed with %d though nothing had gone wrong", i,
                       request->http_status);
    }
    result->journal = world->journal;
    result->events = world->events_done;
    result->crashes = world->crashes;
    result->freezes = world->freezes;
    result->corrupted = world->corrupted;
    result->virtual_s = (double)(world->now_ns - START_NS) / PD_NS_PER_S;
    result->good = world->fault[0] == '\0';
    memcpy(result->fault, world->fault, sizeof(result->fault));
}

pd_status sim_world_run(const sim_plan *plan, sim_result *result_out)
{
    sim_world *world = pd_calloc(1, sizeof(*world));
    if (world == NULL)
        return PD_E_NOMEM;
    pd_status status = init(world, plan);
    if (status == PD_OK) {
        sim_result result = {0};
        run(world);
        status = world->status;
        judge(world, &result);
        if (status == PD_OK)
            *result_out = result;
    }
    fini(world);
    pd_free(world);
    return status;
}

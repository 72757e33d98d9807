#include "deploy/simulate/clients.h"

#include "common/base/clock.h"
#include "common/kv/prefix_hash.h"
#include "deploy/simulate/net.h"
#include "deploy/simulate/plan.h"
#include "deploy/simulate/reasons.h"
#include "deploy/simulate/router.h"
#include "deploy/simulate/suspects.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define ASK_AGAIN_NS (100 * PD_NS_PER_MS)
#define ANSWER_USUAL 64 /* tokens, at most */
/* What a router may make of one request (router/retry.h): so many attempts without a new token in
 * between, and in all; refusals for want of room are none. */
#define ATTEMPTS_IN_ROW_MAX 4
/* In company: a first death, one that another's conviction explained before it, two with other
 * suspects, from which it moves further away each time, and the one that convicts it. */
#define KILLED_MAX   5
#define ATTEMPTS_MAX 17

static uint32_t number_of(const sim_world *world, const sim_request *request)
{
    return (uint32_t)(request - world->requests);
}

sim_request *sim_clients_find(sim_router *router, router_handle handle)
{
    sim_world *world = router->world;

    for (uint32_t i = 0; i < world->requests_count; i++)
        if (world->requests[i].handle == handle &&
            world->requests[i].router_incarnation == router->incarnation)
            return &world->requests[i];
    return NULL;
}

uint32_t sim_clients_number(sim_router *router, router_handle handle)
{
    const sim_request *request = sim_clients_find(router, handle);

    return request == NULL ? UINT32_MAX : number_of(router->world, request);
}

static sim_request *must_find(sim_router *router, router_handle handle)
{
    sim_request *request = sim_clients_find(router, handle);

    if (request == NULL)
        sim_broken(router->world, "router %u speaks of request %" PRIu64 ", which nobody made",
                   router->index, handle);
    return request;
}

/* Nothing is late by itself: a router acts at its deadline, or, when it stands still then, as soon
 * as it goes on. */
static void check_in_time(sim_world *world, const sim_request *request)
{
    const sim_router *router = &world->routers[request->router];
    uint64_t due_ns = request->asked_ns + router->total_ns;
    uint64_t last_ns = router->frozen_until_ns > due_ns ? router->frozen_until_ns : due_ns;

    if (world->now_ns > last_ns)
        sim_broken(world, "request %u: %.3f s after it was asked, beyond its deadline of %.0f s",
                   number_of(world, request),
                   (double)(world->now_ns - request->asked_ns) / PD_NS_PER_S,
                   (double)router->total_ns / PD_NS_PER_S);
}

void sim_clients_check_time(sim_world *world)
{
    for (uint32_t i = 0; i < world->requests_count; i++) {
        const sim_request *request = &world->requests[i];
        if (request->handle != 0 && request->ends == 0)
            check_in_time(world, request);
    }
}

/* ---- what comes back ---- */

static bool on_send(void *ctx, const char *to, const pd_message *message)
{
    return sim_net_to_worker(ctx, to, message);
}

static void on_token(void *ctx, router_handle handle, uint32_t index, uint32_t token,
                     pd_finish finish)
{
    sim_router *router = ctx;
    sim_world *world = router->world;
    sim_request *request = must_find(router, handle);
    uint64_t record[] = {router->index, handle, index, token, finish};

    if (request == NULL)
        return;
    sim_journal(world, record, sizeof(record));
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
    check_in_time(world, request);
    request->got++;
    request->attempts_in_row = 0;
}

static void on_finish(void *ctx, router_handle handle, const router_finish *finish)
{
    sim_router *router = ctx;
    sim_world *world = router->world;
    sim_request *request = must_find(router, handle);

    if (request == NULL)
        return;
    uint32_t number = number_of(world, request);
    bool stopped = request->answer_count > 0 && !request->ignore_end &&
                   request->answer[request->answer_count - 1] == SIM_END_TOKEN;
    if (request->ends != 0)
        sim_broken(world, "request %u: finished after its end", number);
    else if (request->got != request->answer_count)
        sim_broken(world, "request %u: finished with %u tokens of %u", number, request->got,
                   request->answer_count);
    else if (finish->reason != (stopped ? PD_FINISH_STOP : PD_FINISH_LENGTH))
        sim_broken(world, "request %u: finish reason %d", number, (int)finish->reason);
    else if (finish->prompt_tokens != request->prompt_count ||
             finish->completion_tokens != request->answer_count)
        sim_broken(world, "request %u: usage %u + %u, should be %u + %u", number,
                   finish->prompt_tokens, finish->completion_tokens, request->prompt_count,
                   request->answer_count);
    check_in_time(world, request);
    request->finished = true;
    request->ends++;
}

static void end_with_error(sim_router *router, sim_request *request, const router_error *error)
{
    sim_world *world = router->world;
    uint32_t number = number_of(world, request);

    if (request->ends != 0)
        sim_broken(world, "request %u: an error after its end: %s", number, error->message);
    else if (error->message[0] == '\0' || error->type == NULL)
        sim_broken(world, "request %u: an error without a word", number);
    else
        sim_reasons_judge(router, request, error);
    check_in_time(world, request);
    request->failed = true;
    request->http_status = error->http_status;
    request->ends++;
    sim_journal(world, error->message, strlen(error->message));
}

static void on_error(void *ctx, router_handle handle, const router_error *error)
{
    sim_router *router = ctx;
    sim_request *request = must_find(router, handle);

    if (request != NULL)
        end_with_error(router, request, error);
}

router_sink sim_clients_sink(sim_router *router)
{
    return (router_sink){
        .ctx = router, .send = on_send, .token = on_token, .finish = on_finish, .error = on_error};
}

/* Of requests that are placed in one go, the more important come first. One that was placed before
 * may have come back to the queue between the two, and at a tick several workers can be lost, one
 * after the other. */
static void see_placed(sim_router *router, const pd_msg_lease_request *asked)
{
    sim_world *world = router->world;
    sim_request *request = sim_clients_find(router, asked->key.number);

    if (request == NULL || asked->bind)
        return;
    bool waited = !request->placed && world->event_kind == SIM_TO_ROUTER;
    request->placed = true;
    if (waited && router->placed_at == world->events_done &&
        request->priority > router->placed_priority)
        sim_broken(world, "router %u: request %u of priority %d is placed after one of %d",
                   router->index, number_of(world, request), request->priority,
                   router->placed_priority);
    router->placed_at = world->events_done;
    router->placed_priority = request->priority;
}

void sim_clients_see(sim_router *router, const pd_message *message)
{
    sim_world *world = router->world;

    if (message->kind == PD_MSG_LEASE_REQUEST)
        see_placed(router, &message->lease_request);
    if (message->kind != PD_MSG_PREFILL_REQUEST)
        return;
    const pd_request_key *key = &message->prefill_request.key;
    sim_request *request = sim_clients_find(router, key->number);
    if (request == NULL) {
        sim_broken(world, "router %u asks for a prefill of request %" PRIu64 ", which nobody made",
                   router->index, key->number);
        return;
    }
    uint32_t number = number_of(world, request);
    if (request->ends != 0)
        sim_broken(world, "request %u: a prefill is asked for after its end", number);
    if (request->attempt_seen >= (uint64_t)key->epoch + 1)
        return; /* said again */
    request->attempt_seen = (uint64_t)key->epoch + 1;
    request->attempts++;
    request->attempts_in_row++;
    if (request->attempts > world->coverage.attempts_max)
        world->coverage.attempts_max = request->attempts;
    if (request->attempts > ATTEMPTS_MAX || request->attempts_in_row > ATTEMPTS_IN_ROW_MAX)
        sim_broken(world, "request %u: attempt %u, %u since its last token: beyond any budget",
                   number, request->attempts, request->attempts_in_row);
}

void sim_clients_see_reply(sim_router *router, const pd_message *message)
{
    if (message->kind != PD_MSG_PREFILL_DONE || message->prefill_done.status != PD_E_OVERLOAD)
        return;
    sim_request *request = sim_clients_find(router, message->prefill_done.key.number);
    if (request == NULL)
        return;
    request->attempts -= request->attempts > 0;
    request->attempts_in_row -= request->attempts_in_row > 0;
}

/* ---- those who ask ---- */

static void draw_request(sim_world *world, sim_request *request, bool crowd)
{
    static const uint32_t lengths[] = {1, 15, 16, 17, 31, 32, 33, 48, 64, 90, 130, 200};
    uint32_t room = world->plan.context_max;
    uint32_t blocks_room = world->plan.layout.blocks * world->plan.layout.block_tokens;

    if (room > blocks_room)
        room = blocks_room;
    request->prompt_count = lengths[sim_random(world, sizeof(lengths) / sizeof(lengths[0]))] +
                            (uint32_t)sim_random(world, 4);
    request->max_tokens =
        sim_chance(world, 0.15) ? 1 : 1 + (uint32_t)sim_random(world, ANSWER_USUAL);
    request->ignore_end = sim_chance(world, 0.3);
    if (crowd) { /* short prompts, answers longer than any before: predictions fail */
        request->prompt_count = 1 + (uint32_t)sim_random(world, 40);
        request->max_tokens = SIM_ANSWER_MAX / 2 + (uint32_t)sim_random(world, SIM_ANSWER_MAX / 2);
        request->ignore_end = true;
    }
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
    request->priority = sim_chance(world, 0.2) ? (int32_t)sim_random(world, 3) - 1 : 0;
    request->sampling = (pd_sampling){.temperature = sim_chance(world, 0.5) ? 0 : 0.8f,
                                      .top_p = 1,
                                      .seed = sim_random(world, 1u << 30)};
    request->answer_count = sim_model_answer(
        world->plan.layout.groups, request->prompt, request->prompt_count, &request->sampling,
        request->ignore_end, request->max_tokens, request->answer);
}

static void schedule_arrival(sim_world *world, uint64_t at_ns, uint32_t number)
{
    uint32_t router = (uint32_t)sim_random(world, world->plan.routers);
    sim_schedule(world, at_ns, (sim_event){.kind = SIM_ARRIVAL, .subject = router, .a = number});
}

uint64_t sim_clients_draw(sim_world *world, uint64_t from_ns)
{
    uint64_t at_ns = from_ns;

    for (uint32_t i = 0; i < world->requests_count; i++) {
        draw_request(world, &world->requests[i], false);
        if (i >= world->plan.requests)
            continue; /* asked when all is at rest */
        schedule_arrival(world, at_ns, i);
        double unit = (double)(1 + sim_random(world, 1000000)) / 1000001;
        at_ns += (uint64_t)(-log(unit) * world->plan.gap_ms * PD_NS_PER_MS);
    }
    return at_ns;
}

void sim_clients_crowd(sim_world *world)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < world->plan.requests && count < 8; i++) {
        if (world->requests[i].handle != 0 || world->requests[i].ends != 0)
            continue;
        draw_request(world, &world->requests[i], true);
        schedule_arrival(world, world->now_ns, i); /* its own time finds it asked already */
        count++;
    }
}

void sim_clients_ask(sim_world *world, uint32_t number, uint32_t at)
{
    static const uint32_t end_tokens[] = {SIM_END_TOKEN};
    sim_request *request = &world->requests[number];
    sim_router *router = &world->routers[at];
    pd_hash128 hashes[SIM_PROMPT_MAX / PD_KV_TILE_TOKENS];
    router_request_in in = {.tokens = request->prompt,
                            .tokens_count = request->prompt_count,
                            .hashes = hashes,
                            .sampling = request->sampling,
                            .end_tokens = end_tokens,
                            .end_tokens_count = request->ignore_end ? 0 : 1,
                            .max_tokens = request->max_tokens};
    router_error error = {0};

    if (request->handle != 0 || request->ends != 0)
        return;                 /* asked with a crowd */
    if (router->core == NULL) { /* no connection: the client tries the next address */
        uint64_t later_ns = world->now_ns + ASK_AGAIN_NS;
        sim_schedule(world, later_ns,
                     (sim_event){.kind = SIM_ARRIVAL,
                                 .subject = (at + 1) % world->plan.routers,
                                 .a = number});
        return;
    }
    snprintf(in.id, sizeof(in.id), "sim-%u", number);
    uint32_t block_tokens = world->plan.layout.block_tokens;
    pd_hash128 root = pd_prefix_hash_root((pd_hash128){1, 2}, block_tokens, NULL, 0);
    in.hashes_count =
        pd_prefix_hash_fill(root, block_tokens, request->prompt, request->prompt_count, hashes,
                            (uint32_t)(sizeof(hashes) / sizeof(hashes[0])));
    in.hash_root = root;
    in.priority = request->priority;
    request->router = at;
    request->router_incarnation = router->incarnation;
    request->asked_ns = world->now_ns;
    if (router_core_on_request(router->core, &in, world->now_ns, &request->handle, &error) != PD_OK)
        end_with_error(router, request, &error);
}

void sim_clients_hang_up(sim_world *world, uint32_t number)
{
    sim_request *request = &world->requests[number];

    if (request->ends != 0)
        return;
    request->cancelled = true;
    request->ends++;
    sim_router *router = &world->routers[request->router];
    pd_assert(router->core != NULL && router->incarnation == request->router_incarnation);
    router_core_cancel(router->core, request->handle, world->now_ns);
}

sim_request *sim_clients_any_active(sim_world *world)
{
    uint32_t from = (uint32_t)sim_random(world, world->plan.requests);

    for (uint32_t i = 0; i < world->plan.requests; i++) {
        sim_request *request = &world->requests[(from + i) % world->plan.requests];
        if (request->handle != 0 && request->ends == 0)
            return request;
    }
    return NULL;
}

void sim_clients_cut(sim_router *router)
{
    sim_world *world = router->world;

    for (uint32_t i = 0; i < world->requests_count; i++) {
        sim_request *request = &world->requests[i];
        if (request->handle == 0 || request->ends != 0 ||
            request->router_incarnation != router->incarnation)
            continue;
        request->cut = true;
        request->ends++;
    }
}

bool sim_clients_all_ended(const sim_world *world, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (world->requests[i].ends == 0)
            return false;
    return true;
}

void sim_clients_judge(sim_world *world, sim_result *result)
{
    bool calm = sim_plan_is_calm(&world->plan);

    for (uint32_t i = 0; i < world->requests_count; i++) {
        const sim_request *request = &world->requests[i];
        result->finished += request->finished;
        result->cancelled += request->cancelled;
        result->failed += request->failed;
        result->cut += request->cut;
        if (world->fault[0] == '\0' && request->ends != 1)
            sim_broken(world, "request %u ended %u times", i, request->ends);
        if (request->failed && (calm || i >= world->plan.requests))
            sim_broken(world, "request %u failed with %d though nothing had gone wrong", i,
                       request->http_status);
        world->coverage.killers += request->killed > 0;
        world->coverage.thirds += request->killed > 2;
        uint32_t deaths = sim_suspects_deaths(world, request);
        if (deaths > 2)
            sim_broken(world, "request %u was given to a third worker when two had died of it (%u)",
                       i, deaths);
        if (request->killed > KILLED_MAX)
            sim_broken(world, "request %u was given to %u workers, and each fell", i,
                       request->killed);
    }
}

#include "deploy/simulate/worker.h"

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/worker/routers.h"
#include "decode-worker/decode.h"
#include "deploy/simulate/net.h"
#include "deploy/simulate/plane.h"
#include "deploy/simulate/router.h"
#include "deploy/simulate/suspects.h"
#include "prefill-worker/prefill.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TICK_NS         (50 * PD_NS_PER_MS)
#define BEAT_TICKS      2
#define LOST_AFTER_NS   PD_NS_PER_S
#define CLOCKS_APART_NS (3600 * PD_NS_PER_S)
#define CHECK_NS        (2 * PD_NS_PER_MS)

/* Blocks being compared with their seals. */
struct sim_check {
    pd_check asked;
    pd_block *blocks;
    uint64_t *seals;
};

/* ---- the sink of the role's core ---- */

static void on_send(void *ctx, uint64_t router, const pd_message *message)
{
    sim_worker *worker = ctx;

    for (uint32_t i = 0; i < worker->world->plan.routers; i++)
        if (router != 0 && worker->views[i].welcomed == router)
            sim_net_to_router(worker, i, message);
}

static double step_ms(sim_worker *worker, const pd_step *step)
{
    sim_world *world = worker->world;
    double ms = 0;
    uint32_t batch = 0;
    uint64_t context = 0;

    for (uint32_t i = 0; i < step->slices_count; i++) {
        const pd_step_slice *slice = &step->slices[i];
        if (slice->count > 1 + slice->drafts) {
            ms += pd_cost_prefill_ms(&world->cost, slice->count, slice->position);
        } else {
            batch++;
            context += slice->position;
        }
    }
    ms += pd_cost_decode_step_ms(&world->cost, batch, context);
    ms *= 0.8 + 0.4 * (double)sim_random(world, 1000) / 1000;
    if (worker->slow && !world->quiet)
        ms *= 50;
    worker->slow = false;
    return ms;
}

/* The request of a slice; NULL: its id is not one of ours, which is broken. */
static sim_request *request_of(sim_world *world, const pd_step_slice *slice)
{
    unsigned number = 0;

    if (sscanf(slice->id, "sim-%u", &number) == 1 && number < world->requests_count)
        return &world->requests[number];
    sim_broken(world, "a step computes \"%s\", which nobody asked for", slice->id);
    return NULL;
}

static void on_run(void *ctx, pd_step *step)
{
    sim_worker *worker = ctx;
    sim_world *world = worker->world;
    uint32_t groups = world->plan.layout.groups;

    if (worker->step != NULL) {
        sim_broken(world, "%s: a step is run while another one is under way", worker->name);
        return;
    }
    if (step->slices_count == 0 || step->slices_count > world->plan.max_batch)
        sim_broken(world, "%s: a step of %u slices, at most %u are allowed", worker->name,
                   step->slices_count, world->plan.max_batch);
    worker->step = step;
    step->started_ns = world->now_ns;
    uint64_t took_ns = (uint64_t)(step_ms(worker, step) * PD_NS_PER_MS);
    sim_event event = {
        .subject = worker->index, .incarnation = worker->incarnation, .b = step->number};
    event.kind = SIM_GROUP_DONE;
    for (event.a = 0; event.a < groups; event.a++)
        sim_schedule(world, world->now_ns + took_ns * (event.a + 1) / groups, event);
    event.kind = SIM_STEP_DONE;
    sim_schedule(world, world->now_ns + took_ns + 1, event);
}

/* Lookahead, for it always has guesses; some of them are right where a text is computed again. */
static pd_speculation speculation_of(const sim_plan *plan, pd_role role)
{
    if (!plan->speculates || role != PD_ROLE_DECODE)
        return (pd_speculation){0};
    return (pd_speculation){.method = PD_SPEC_LOOKAHEAD,
                            .draft_tokens = 6,
                            .ngram_min = 2,
                            .ngram_max = 4,
                            .window = 4};
}

static void free_check(struct sim_check *check)
{
    if (check != NULL) {
        pd_free(check->blocks);
        pd_free(check->seals);
        pd_free(check);
    }
}

static pd_status on_verify(void *ctx, const pd_check *asked)
{
    sim_worker *worker = ctx;
    sim_world *world = worker->world;
    uint32_t place = 0;

    while (place < SIM_CHECKS_MAX && worker->checks[place] != NULL)
        place++;
    if (place == SIM_CHECKS_MAX)
        return PD_E_OVERLOAD;
    struct sim_check *check = pd_calloc(1, sizeof(*check));
    if (check == NULL)
        return PD_E_NOMEM;
    size_t seals = (size_t)asked->groups * asked->count * asked->slices;
    check->asked = *asked;
    check->blocks = sim_copy(world, asked->blocks, asked->count * sizeof(pd_block));
    check->seals = sim_copy(world, asked->seals, seals * sizeof(uint64_t));
    if (check->blocks == NULL || check->seals == NULL) {
        free_check(check);
        return PD_E_NOMEM;
    }
    worker->checks[place] = check;
    sim_schedule(world, world->now_ns + sim_random(world, CHECK_NS),
                 (sim_event){.kind = SIM_CHECKED,
                             .subject = worker->index,
                             .incarnation = worker->incarnation,
                             .a = place});
    return PD_OK;
}

void sim_worker_on_checked(sim_worker *worker, uint64_t index)
{
    struct sim_check *check = worker->checks[index];
    const pd_check *asked = &check->asked;
    pd_checked checked = {.ticket = asked->ticket, .good = true};
    uint32_t block_tokens = worker->world->plan.layout.block_tokens;

    for (uint32_t group = 0; group < asked->groups && checked.good; group++)
        for (uint32_t i = 0; i < asked->count && checked.good; i++) {
            uint32_t valid = i + 1 == asked->count ? asked->valid_tokens : block_tokens;
            uint64_t seal = sim_model_seal(&worker->kv, &asked->key, asked->group_first + group,
                                           asked->first + i, check->blocks[i], valid);
            if (seal == check->seals[((size_t)group * asked->count + i) * asked->slices])
                continue;
            checked.good = false;
            checked.bad_group = asked->group_first + group;
            checked.bad_block = asked->first + i;
        }
    worker->checks[index] = NULL;
    free_check(check);
    worker->ops->on_checked(worker->core, &checked, worker->world->now_ns);
}

/* ---- start and end ---- */

static void forget_process(sim_worker *worker)
{
    memset(worker->links, 0, sizeof(worker->links));
    memset(worker->fences, 0, sizeof(worker->fences));
    memset(worker->newest, 0, sizeof(worker->newest));
    memset(worker->watched, 0, sizeof(worker->watched));
    memset(worker->views, 0, sizeof(worker->views));
    worker->fences_next = worker->watched_next = worker->newest_next = 0;
    worker->step = NULL;
    worker->frozen_until_ns = worker->ticked_ns = 0;
    worker->ticks = worker->killer = 0;
    worker->slow = worker->corrupt = false;
}

void sim_worker_start(sim_worker *worker)
{
    sim_world *world = worker->world;
    const sim_plan *plan = &world->plan;

    if (worker->down_until_ns > world->now_ns) {
        sim_schedule(world, worker->down_until_ns + sim_random(world, 100 * PD_NS_PER_MS),
                     (sim_event){.kind = SIM_START, .subject = worker->index});
        return;
    }
    worker->incarnation = pd_random_next(&world->random) | 1;
    pd_bus_identity(worker->name, worker->incarnation, worker->identity);
    pd_role_options options = {
        .name = worker->name,
        .incarnation = worker->incarnation,
        .layout = plan->layout,
        .vocab = SIM_VOCAB,
        .context_max = plan->context_max,
        .max_batch = plan->max_batch,
        .queue_max = plan->queue_max,
        .chunk_tokens = plan->chunk_tokens,
        .peers_max = SIM_LINKS_MAX / 2,
        .prefix_cache = plan->prefix_cache,
        .seals = plan->seals,
        .lost_after_ns = LOST_AFTER_NS,
        .speculation = speculation_of(plan, worker->ops->role),
    };
    pd_role_sink sink = {.ctx = worker, .send = on_send, .run = on_run, .verify = on_verify};
    sim_plane_fill_sink(&sink);
    forget_process(worker);
    pd_status status = sim_kv_init(&worker->kv, &plan->layout, worker->incarnation);
    if (status == PD_OK)
        status = worker->ops->create(&options, &sink, &worker->core);
    if (status != PD_OK) {
        world->status = status;
        sim_kv_fini(&worker->kv);
        worker->core = NULL;
        return;
    }
    sim_worker_on_beat(worker);
}

void sim_worker_fini(sim_worker *worker)
{
    if (worker->core != NULL)
        worker->ops->destroy(worker->core);
    worker->core = NULL;
    sim_plane_fini(worker);
    for (uint32_t i = 0; i < SIM_CHECKS_MAX; i++) {
        free_check(worker->checks[i]);
        worker->checks[i] = NULL;
    }
    sim_kv_fini(&worker->kv);
}

void sim_worker_crash(sim_worker *worker)
{
    sim_world *world = worker->world;
    uint64_t delay_ns = 200 * PD_NS_PER_MS + sim_random(world, 1300 * PD_NS_PER_MS);

    worker->deaths++;
    sim_suspects_see_death(worker);
    sim_router_lose_worker(world, worker, true);
    sim_plane_crash(worker); /* takes what is on the wire out of its memory */
    sim_worker_fini(worker);
    sim_schedule(world, world->now_ns + delay_ns,
                 (sim_event){.kind = SIM_START, .subject = worker->index});
}

void sim_worker_freeze(sim_worker *worker, uint64_t for_ns)
{
    uint64_t until_ns = worker->world->now_ns + for_ns;

    /* never earlier: what waits for the end of the first must not be overtaken */
    if (until_ns > worker->frozen_until_ns)
        worker->frozen_until_ns = until_ns;
}

/* ---- what reaches a worker ---- */

/* Monotonic clocks begin when their hosts do: the routers' have been up for the shortest time. */
static uint64_t clock_of(const sim_worker *worker)
{
    return worker->world->now_ns + (worker->host + 1) * CLOCKS_APART_NS;
}

static void say_hello(sim_worker *worker, uint32_t router)
{
    sim_world *world = worker->world;
    const sim_plan *plan = &world->plan;
    sim_address address = {worker->index, worker->incarnation};
    pd_message message = {.kind = PD_MSG_HELLO};
    pd_msg_hello *hello = &message.hello;

    *hello = (pd_msg_hello){
        .wire_version = PD_WIRE_VERSION,
        .role = worker->ops->role,
        .role_epoch = 1,
        .incarnation = worker->incarnation,
        .model_fingerprint = {1, 2},
        .layout_fingerprint = pd_kv_layout_fingerprint(&plan->layout),
        .block_tokens = plan->layout.block_tokens,
        .context_max = plan->context_max,
        .max_batch = plan->max_batch,
        .queue_max = plan->queue_max,
        .blocks = plan->layout.blocks,
        .transfer_address = &address,
        .transfer_address_len = sizeof(address),
        .pid = worker->index + 1,
        .host = worker->host + 1,
        .session = worker->views[router].session,
        .clock_ns = clock_of(worker),
    };
    snprintf(hello->name, sizeof(hello->name), "%s", worker->name);
    snprintf(hello->model, sizeof(hello->model), "simulated");
    snprintf(hello->backend, sizeof(hello->backend), "simulated");
    snprintf(hello->transfer, sizeof(hello->transfer), "simulated");
    pd_kv_layout_describe(&plan->layout, hello->layout, sizeof(hello->layout));
    sim_net_to_router(worker, router, &message);
}

static void say_heartbeat(sim_worker *worker, uint32_t router)
{
    pd_message message = {.kind = PD_MSG_HEARTBEAT};

    pd_role_heartbeat(worker->ops, worker->core, &message.heartbeat);
    message.heartbeat.incarnation = worker->incarnation;
    message.heartbeat.role_epoch = 1;
    message.heartbeat.warm = true;
    message.heartbeat.clock_ns = clock_of(worker);
    sim_net_to_router(worker, router, &message);
}

void sim_worker_on_beat(sim_worker *worker)
{
    sim_world *world = worker->world;
    uint64_t pause_ns = pd_own_pause_ns(&worker->ticked_ns, world->now_ns);
    bool beat = worker->ticks++ % BEAT_TICKS == 0;

    worker->ops->on_tick(worker->core, world->now_ns);
    for (uint32_t i = 0; i < world->plan.routers; i++) {
        sim_view *view = &worker->views[i];
        view->heard_ns += pause_ns;
        if (view->heard_ns > world->now_ns)
            view->heard_ns = world->now_ns;
        if (view->welcomed != 0 && world->now_ns > view->heard_ns + LOST_AFTER_NS) {
            view->welcomed = 0; /* the core has done the same sum, and dropped what it had here */
            view->session++;
        }
        if (beat && view->welcomed == 0)
            say_hello(worker, i);
        else if (beat)
            say_heartbeat(worker, i);
    }
    sim_schedule(world, world->now_ns + TICK_NS,
                 (sim_event){.kind = SIM_BEAT,
                             .subject = worker->index,
                             .incarnation = worker->incarnation});
}

void sim_worker_on_peer_dead(sim_worker *worker, uint64_t incarnation, bool fenced)
{
    sim_world *world = worker->world;

    if (!fenced) {
        if (sim_plane_has_ended(worker, incarnation) && worker->ops->peer_ended != NULL)
            worker->ops->peer_ended(worker->core, incarnation);
        sim_plane_fence(worker, incarnation);
        sim_schedule(world, world->now_ns + PD_NS_PER_MS,
                     (sim_event){.kind = SIM_PEER_DEAD,
                                 .subject = worker->index,
                                 .incarnation = worker->incarnation,
                                 .a = incarnation,
                                 .b = true});
    } else if (worker->ops->peer_dead != NULL) {
        worker->ops->peer_dead(worker->core, incarnation, world->now_ns);
    }
}

/* Each message that names who may write here says who it is. */
static void watch_writers(sim_worker *worker, const pd_message *message)
{
    const pd_msg_peer *peer = NULL;

    if (message->kind == PD_MSG_PEER_UP)
        sim_plane_watch(worker, message->peer_up.incarnation, message->peer_up.host);
    else if (message->kind == PD_MSG_LEASE_REQUEST)
        peer = &message->lease_request.sender;
    else if (message->kind == PD_MSG_PREFILL_REQUEST)
        peer = &message->prefill_request.pull;
    if (peer != NULL && peer->incarnation != 0)
        sim_plane_watch(worker, peer->incarnation, peer->host);
}

void sim_worker_on_message(sim_worker *worker, uint32_t router, uint64_t from,
                           const pd_message *message)
{
    sim_world *world = worker->world;
    sim_view *view = &worker->views[router];
    pd_message gone;

    if (message->kind == PD_MSG_REFUSED) {
        sim_worker_crash(worker); /* the process ends, and is started again */
        return;
    }
    if (message->kind == PD_MSG_WELCOME && message->welcome.session == view->session)
        view->welcomed = from; /* a late one is of a session whose requests were dropped */
    if (message->kind == PD_MSG_ROUTER_HEARTBEAT && view->welcomed != from) {
        view->welcomed = 0; /* another process answers at this address: hello at the next beat */
        return;
    }
    if (view->welcomed != from)
        return;
    view->heard_ns = world->now_ns;
    watch_writers(worker, message);
    if (message->kind == PD_MSG_PEER_GONE) {
        gone = *message;
        gone.peer_gone.may_write = true; /* until it is known to be dead, or fenced off */
        message = &gone;
        sim_plane_given_up(worker, gone.peer_gone.incarnation);
    }
    worker->ops->on_message(worker->core, from, message, world->now_ns);
}

void sim_worker_on_group_done(sim_worker *worker, uint32_t group, uint64_t number)
{
    pd_step *step = worker->step;

    pd_assert(step != NULL && step->number == number);
    for (uint32_t i = 0; i < step->slices_count; i++)
        sim_model_write(&worker->kv, group, &step->slices[i]);
    if (worker->ops->on_group != NULL)
        worker->ops->on_group(worker->core, step, group, worker->world->now_ns);
}

/* The step that has just been made ends the process. */
static bool is_deadly(const sim_worker *worker, sim_request *request)
{
    if (request->poison == SIM_POISON_NONE || worker->world->quiet)
        return false;
    if (worker->ops->role == PD_ROLE_PREFILL)
        return request->poison == SIM_POISON_PREFILL;
    if (request->steps_at != worker->incarnation)
        request->steps = 0;
    request->steps_at = worker->incarnation;
    return request->poison == SIM_POISON_DECODE && ++request->steps >= request->poison_step;
}

/* After the last row, and before each draft. */
static void draw_tokens(sim_worker *worker, pd_step_slice *slice)
{
    pd_step_slice part = *slice;

    for (uint32_t draft = 0; draft < slice->drafts; draft++) {
        part.count = slice->count - slice->drafts + draft;
        slice->drafts_out[draft] = sim_model_token(&worker->kv, &part);
    }
    slice->token_out = sim_model_token(&worker->kv, slice);
}

void sim_worker_on_step_done(sim_worker *worker, uint64_t number)
{
    sim_world *world = worker->world;
    pd_step *step = worker->step;

    pd_assert(step != NULL && step->number == number);
    for (uint32_t i = 0; i < step->slices_count; i++) {
        sim_request *request = request_of(world, &step->slices[i]);
        if (request != NULL && is_deadly(worker, request)) {
            request->killed++;
            worker->killer = (uint32_t)(request - world->requests) + 1;
            sim_worker_crash(worker);
            return;
        }
        if (step->slices[i].want_token)
            draw_tokens(worker, &step->slices[i]);
    }
    step->status = PD_OK;
    step->finished_ns = world->now_ns;
    worker->step = NULL;
    worker->ops->on_step_done(worker->core, step, world->now_ns);
}

/* ---- what must hold ---- */

void sim_worker_check(sim_worker *worker)
{
    pd_ledger held = worker->ops->ledger(worker->core);
    uint32_t sum = held.free + held.cached + held.leased + held.running + held.quarantined;

    if (held.total != worker->world->plan.layout.blocks || sum != held.total)
        sim_broken(worker->world,
                   "%s: %u blocks: free %u cached %u leased %u running %u quarantined %u",
                   worker->name, held.total, held.free, held.cached, held.leased, held.running,
                   held.quarantined);
}

void sim_worker_held(const sim_worker *worker, char *text, size_t size)
{
    if (worker->core == NULL) {
        snprintf(text, size, "%s is dead", worker->name);
        return;
    }
    pd_ledger held = worker->ops->ledger(worker->core);
    bool welcome = true;
    for (uint32_t i = 0; i < worker->world->plan.routers; i++)
        welcome = welcome && worker->views[i].welcomed != 0;
    if (!worker->ops->idle(worker->core) || held.free + held.cached != held.total)
        snprintf(text, size, "%s holds leased %u running %u quarantined %u%s", worker->name,
                 held.leased, held.running, held.quarantined,
                 worker->ops->idle(worker->core) ? "" : ", and requests");
    else if (!welcome || worker->frozen_until_ns > worker->world->now_ns)
        snprintf(text, size, "%s is frozen or not registered", worker->name);
}

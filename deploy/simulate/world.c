#include "deploy/simulate/world.h"

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "decode-worker/decode.h"
#include "deploy/simulate/clients.h"
#include "deploy/simulate/faults.h"
#include "deploy/simulate/net.h"
#include "deploy/simulate/plan.h"
#include "deploy/simulate/plane.h"
#include "deploy/simulate/router.h"
#include "deploy/simulate/worker.h"
#include "prefill-worker/prefill.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define EVENTS_MAX   5000000ull
#define INSTANT_MAX  100000              /* events without time passing */
#define START_NS     PD_NS_PER_S         /* virtual time does not start at 0 */
#define SETTLE_NS    (120 * PD_NS_PER_S) /* after the last answer, until all is at rest */
#define FIRST_ASK_NS (2 * PD_NS_PER_S)
#define LATE_NS      (15 * PD_NS_PER_S)  /* pauses of routers and workers, at most */
#define CHECK_NS     (20 * PD_NS_PER_MS) /* between two looks whether the end is there */

/* ---- chance and time ---- */

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
    else if (size > 0)
        memcpy(copy, bytes, size);
    return copy;
}

void sim_journal(sim_world *world, const void *bytes, size_t len)
{
    world->journal = pd_hash64(bytes, len, world->journal);
}

/* ---- the world ---- */

static pd_status init(sim_world *world, const sim_plan *plan)
{
    world->plan = *plan;
    world->random = pd_mix64(plan->seed ^ 0x5157);
    world->now_ns = START_NS;
    world->journal = plan->seed;
    world->coverage.runs = 1;
    world->workers_count = plan->prefill + plan->decode;
    world->requests_count = plan->requests + plan->routers;
    pd_cost_init(&world->cost);
    world->requests = pd_calloc(world->requests_count, sizeof(*world->requests));
    if (world->requests == NULL)
        return PD_E_NOMEM;
    for (uint32_t i = 0; i < world->workers_count; i++) {
        sim_worker *worker = &world->workers[i];
        bool prefill = i < plan->prefill;
        worker->world = world;
        worker->index = i;
        worker->host = plan->two_hosts ? i % 2 : 0;
        worker->ops = prefill ? &prefill_role : &decode_role;
        snprintf(worker->name, sizeof(worker->name), "%s-%u", prefill ? "prefill" : "decode",
                 prefill ? i : i - plan->prefill);
        sim_schedule(world, START_NS + sim_random(world, 800 * PD_NS_PER_MS),
                     (sim_event){.kind = SIM_START, .subject = i});
    }
    for (uint32_t i = 0; i < plan->routers; i++) {
        world->routers[i].world = world;
        world->routers[i].index = i;
        world->routers[i].host = plan->two_hosts ? i % 2 : 0;
        sim_router_start(&world->routers[i]);
    }
    world->first_ask_ns = START_NS + FIRST_ASK_NS;
    world->asked_by_ns = sim_clients_draw(world, START_NS + FIRST_ASK_NS);
    sim_faults_draw(world, START_NS + FIRST_ASK_NS, world->asked_by_ns + PD_NS_PER_S / 2);
    return world->status;
}

static void fini(sim_world *world)
{
    for (uint32_t i = 0; i < world->workers_count; i++)
        sim_worker_fini(&world->workers[i]);
    for (uint32_t i = 0; i < world->plan.routers; i++)
        sim_router_fini(&world->routers[i]);
    sim_events_fini(&world->events);
    pd_free(world->requests);
}

/* ---- events ---- */

static void happen_at_router(sim_world *world, const sim_event *event)
{
    sim_router *router = &world->routers[event->subject];

    switch (event->kind) {
    case SIM_ARRIVAL: sim_clients_ask(world, (uint32_t)event->a, event->subject); break;
    case SIM_HANG_UP: sim_clients_hang_up(world, (uint32_t)event->a); break;
    case SIM_TO_ROUTER: sim_net_deliver(world, event); break;
    case SIM_WORKER_GONE: sim_router_on_worker_gone(router, event); break;
    default: sim_router_on_tick(router); break;
    }
    sim_router_arm(router);
}

static void happen_at_worker(sim_world *world, const sim_event *event)
{
    sim_worker *worker = &world->workers[event->subject];

    switch (event->kind) {
    case SIM_TO_WORKER: sim_net_deliver(world, event); break;
    case SIM_BEAT: sim_worker_on_beat(worker); break;
    case SIM_GROUP_DONE: sim_worker_on_group_done(worker, (uint32_t)event->a, event->b); break;
    case SIM_STEP_DONE: sim_worker_on_step_done(worker, event->b); break;
    case SIM_CHECKED: sim_worker_on_checked(worker, event->a); break;
    case SIM_PEER_DEAD: sim_worker_on_peer_dead(worker, event->a, event->b != 0); break;
    default: sim_plane_on_transfer(worker, event->bytes); break;
    }
    if (worker->core != NULL)
        sim_worker_check(worker);
}

static void happen_to_world(sim_world *world, const sim_event *event)
{
    switch (event->kind) {
    case SIM_LANDED: sim_plane_on_landed(world, event); break;
    case SIM_FAULT_EVENT: sim_faults_on_event(world, event); break;
    case SIM_ROUTER_LEAVE: sim_router_on_leave(&world->routers[event->subject], event); break;
    case SIM_START:
        if (world->workers[event->subject].core == NULL)
            sim_worker_start(&world->workers[event->subject]);
        break;
    default:
        if (world->routers[event->subject].core == NULL)
            sim_router_start(&world->routers[event->subject]);
        break;
    }
}

/* A stopped process sees its events when it goes on, a dead one never. True: it is not to happen
 * now. */
static bool put_off(sim_world *world, sim_event *event)
{
    uint64_t frozen_until_ns;

    if (event->kind > SIM_WORKER_LAST && event->kind != SIM_LANDED)
        return false;
    if (event->kind == SIM_LANDED) {
        frozen_until_ns = sim_plane_waits_until(world, event);
    } else if (event->kind <= SIM_ROUTER_TICK) {
        const sim_router *router = &world->routers[event->subject];
        bool lives = router->core != NULL &&
                     (event->incarnation == 0 || event->incarnation == router->incarnation);
        if (!lives && event->kind != SIM_ARRIVAL)
            return true;
        frozen_until_ns = router->core == NULL ? 0 : router->frozen_until_ns;
    } else {
        const sim_worker *worker = &world->workers[event->subject];
        if (worker->core == NULL || worker->incarnation != event->incarnation)
            return true;
        frozen_until_ns = worker->frozen_until_ns;
    }
    if (frozen_until_ns <= world->now_ns)
        return false;
    sim_event later = *event;
    event->bytes = NULL;
    sim_schedule(world, frozen_until_ns, later);
    return true;
}

static void happen(sim_world *world, sim_event *event)
{
    if (put_off(world, event))
        return;
    world->event_kind = event->kind;
    uint64_t record[] = {event->at_ns,       event->kind, event->subject,
                         event->incarnation, event->a,    event->b};
    sim_journal(world, record, sizeof(record));
    if (event->kind == SIM_TO_ROUTER || event->kind == SIM_TO_WORKER)
        sim_journal(world, event->bytes, event->bytes_len);
    if (event->kind <= SIM_ROUTER_TICK)
        happen_at_router(world, event);
    else if (event->kind <= SIM_WORKER_LAST)
        happen_at_worker(world, event);
    else
        happen_to_world(world, event);
}

/* What keeps the cluster from being at rest; "" when nothing does. */
static void held(const sim_world *world, char *text, size_t size)
{
    text[0] = '\0';
    for (uint32_t i = 0; i < world->workers_count && text[0] == '\0'; i++)
        sim_worker_held(&world->workers[i], text, size);
    for (uint32_t i = 0; i < world->plan.routers && text[0] == '\0'; i++)
        sim_router_held(&world->routers[i], text, size);
}

/* Nobody waits for ever for a router that takes his request: from then on clients.c looks. */
static void check_progress(sim_world *world, uint32_t asked)
{
    if (world->now_ns < world->asked_by_ns + world->plan.total_ns + LATE_NS ||
        sim_plan_is_calm(&world->plan))
        return;
    for (uint32_t i = 0; i < asked; i++)
        if (world->requests[i].ends == 0) {
            sim_broken(world, "request %u has not ended %llu s after the last was asked", i,
                       (world->now_ns - world->asked_by_ns) / PD_NS_PER_S);
            return;
        }
}

/* Lets all events happen until every request has ended, everything is at rest, and one more
 * request at each router, asked then, has been answered. */
static void run(sim_world *world)
{
    uint32_t asked = world->plan.requests;
    uint64_t look_ns = 0, clock_ns = 0, rest_by_ns = UINT64_MAX;
    uint32_t instant = 0;
    char text[200];
    sim_event event;

    while (world->status == PD_OK && world->fault[0] == '\0') {
        if (!sim_events_pop(&world->events, &event)) {
            sim_broken(world, "nothing will ever happen again");
            return;
        }
        instant = event.at_ns > world->now_ns ? 0 : instant + 1;
        world->now_ns = event.at_ns;
        happen(world, &event);
        pd_free(event.bytes);
        if (instant > INSTANT_MAX) {
            sim_broken(world, "time stands still: event of kind %d again and again",
                       (int)event.kind);
            return;
        }
        if (++world->events_done > EVENTS_MAX) {
            sim_broken(world, "no end after %llu events", EVENTS_MAX);
            return;
        }
        if (world->now_ns >= clock_ns) {
            sim_clients_check_time(world);
            clock_ns = world->now_ns + CHECK_NS;
        }
        if (world->now_ns < look_ns || world->faults_left > 0)
            continue;
        look_ns = world->now_ns + CHECK_NS;
        if (!sim_clients_all_ended(world, asked)) {
            check_progress(world, asked);
            continue;
        }
        world->quiet = true;
        if (rest_by_ns == UINT64_MAX)
            rest_by_ns = world->now_ns + SETTLE_NS;
        held(world, text, sizeof(text));
        if (text[0] != '\0') {
            if (world->now_ns > rest_by_ns)
                sim_broken(world, "not at rest %llu s after the last answer: %s",
                           SETTLE_NS / PD_NS_PER_S, text);
            continue;
        }
        if (asked == world->requests_count)
            return;
        rest_by_ns = UINT64_MAX;
        world->asked_by_ns = world->now_ns;
        for (; asked < world->requests_count; asked++)
            sim_schedule(world, world->now_ns,
                         (sim_event){.kind = SIM_ARRIVAL,
                                     .subject = asked - world->plan.requests,
                                     .a = asked});
    }
}

static void judge(sim_world *world, sim_result *result)
{
    const sim_plan *plan = &world->plan;

    sim_clients_judge(world, result);
    for (uint32_t i = 0; i < plan->routers; i++)
        sim_router_fini(&world->routers[i]); /* its counts are taken */
    uint64_t retries = 0;
    for (uint32_t i = 0; i < ROUTER_RETRY_REASONS; i++)
        retries += world->coverage.retries[i];
    if (retries + world->coverage.refetches > 0 && sim_plan_is_calm(plan))
        sim_broken(world,
                   "%" PRIu64 " attempts were made again, and %" PRIu64
                   " times blocks were fetched again, though nothing had gone wrong",
                   retries, world->coverage.refetches);
    if (sim_plan_is_only_slow(plan) &&
        retries + world->coverage.refetches + world->coverage.seal_failures > 0)
        sim_broken(world,
                   "slow links alone: %" PRIu64 " attempts were made again, %" PRIu64
                   " times blocks were fetched again, %" PRIu64 " times that failed",
                   retries, world->coverage.refetches, world->coverage.seal_failures);
    if (plan->allowed == SIM_ALLOW_ALL &&
        (plan->routers < 2 || world->workers_count < 4 || plan->requests < 30 ||
         sim_coverage_faults(&world->coverage) < 10))
        sim_broken(world,
                   "not a standard run: %u routers, %u workers, %u requests, %" PRIu64 " faults",
                   plan->routers, world->workers_count, plan->requests,
                   sim_coverage_faults(&world->coverage));
    result->journal = world->journal;
    result->events = world->events_done;
    result->coverage = world->coverage;
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

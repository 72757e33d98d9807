#include "deploy/simulate/router.h"

#include "common/base/clock.h"
#include "deploy/simulate/clients.h"
#include "deploy/simulate/plan.h"

#include <inttypes.h>
#include <stdio.h>

#define LAST_WORDS_NS  (300 * PD_NS_PER_MS) /* from the end of its requests to that of a router */
#define BUDGET_FILLS_S 60.0                 /* router/retry.h */

void sim_router_start(sim_router *router)
{
    sim_world *world = router->world;
    const sim_plan *plan = &world->plan;
    bool calm = sim_plan_is_calm(plan), only_slow = sim_plan_is_only_slow(plan);
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
        .requests_max = plan->requests + 4,
        .queue_max = calm || only_slow ? plan->requests + 4 : 16,
        .queue_ns = patience * (only_slow ? plan->total_ns : 5 * PD_NS_PER_S),
        .lease_ns = patience * PD_NS_PER_S,
        .prefill_ns = patience * 10 * PD_NS_PER_S,
        .transfer_ns = patience * 5 * PD_NS_PER_S,
        .decode_idle_ns = patience * 5 * PD_NS_PER_S,
        .total_ns = patience * plan->total_ns,
        .heartbeat_ns = 100 * PD_NS_PER_MS,
        .lost_after_ns = PD_NS_PER_S,
    };
    router_sink sink = sim_clients_sink(router);

    router->incarnation = pd_random_next(&world->random) | 1;
    router->tick_ns = UINT64_MAX;
    router->frozen_until_ns = 0;
    router->started_ns = world->now_ns;
    router->leaving = false;
    router->queue_ns = config.queue_ns;
    router->total_ns = config.total_ns;
    router->queue_max = config.queue_max;
    for (uint32_t i = 0; i < world->workers_count; i++)
        world->workers[i].views[router->index].received_ns = 0;
    pd_status status =
        router_core_create(&config, router->incarnation, pd_random_next(&world->random), &sink,
                           world->now_ns, &router->core);
    if (status != PD_OK) {
        world->status = status;
        router->core = NULL;
        return;
    }
    sim_router_arm(router);
}

/* All retries of a router share a budget: a bucket of requests_max that fills within a minute, and
 * by a tenth for each request taken in. */
static void check_budget(const sim_router *router)
{
    sim_world *world = router->world;
    router_core_counters counters = router_core_counters_of(router->core);
    double most = world->plan.requests + 4;
    double lived_s = (double)(world->now_ns - router->started_ns) / PD_NS_PER_S;
    double budget = most + most / BUDGET_FILLS_S * lived_s + 0.1 * (double)counters.accepted;

    /* A lease that was refused for a dead peer is no attempt yet. */
    uint64_t retried = counters.retried - counters.retries[ROUTER_RETRY_PEER];
    if ((double)retried > budget)
        sim_broken(world, "router %u: %" PRIu64 " retries in %.1f s, beyond a budget of %.0f",
                   router->index, retried, lived_s, budget);
}

void sim_router_fini(sim_router *router)
{
    if (router->core != NULL) {
        check_budget(router);
        sim_coverage_add_router(&router->world->coverage, router->core);
    }
    router_core_destroy(router->core);
    router->core = NULL;
}

void sim_router_crash(sim_router *router)
{
    sim_world *world = router->world;
    uint64_t away_ns = 200 * PD_NS_PER_MS + sim_random(world, 1800 * PD_NS_PER_MS);

    sim_clients_cut(router);
    sim_router_fini(router);
    sim_schedule(world, world->now_ns + away_ns,
                 (sim_event){.kind = SIM_ROUTER_START, .subject = router->index});
}

static void schedule_leave(sim_router *router, uint64_t at_ns, uint64_t what)
{
    sim_schedule(router->world, at_ns,
                 (sim_event){.kind = SIM_ROUTER_LEAVE,
                             .subject = router->index,
                             .incarnation = router->incarnation,
                             .a = what});
}

void sim_router_leave(sim_router *router, uint64_t grace_ns)
{
    router_core_stop(router->core);
    router->leaving = true;
    schedule_leave(router, router->world->now_ns + grace_ns, 0);
}

void sim_router_on_leave(sim_router *router, const sim_event *event)
{
    uint64_t now_ns = router->world->now_ns;

    if (router->core == NULL || router->incarnation != event->incarnation)
        return;
    if (router->frozen_until_ns > now_ns) {
        schedule_leave(router, router->frozen_until_ns, event->a);
    } else if (event->a == 0) {
        router_core_end_all(router->core);
        sim_router_arm(router);
        schedule_leave(router, now_ns + LAST_WORDS_NS, 1);
    } else {
        sim_router_crash(router);
    }
}

void sim_router_freeze(sim_router *router, uint64_t for_ns)
{
    uint64_t until_ns = router->world->now_ns + for_ns;

    /* never earlier: what waits for the end of the first must not be overtaken */
    if (until_ns > router->frozen_until_ns)
        router->frozen_until_ns = until_ns;
}

void sim_router_lose_worker(sim_world *world, const sim_worker *worker, bool certain)
{
    for (uint32_t i = 0; i < world->plan.routers; i++) {
        bool seen = certain && world->routers[i].host == worker->host;
        if (!seen && sim_chance(world, 0.3))
            continue; /* a broken connection is not always noticed */
        sim_schedule(world, world->now_ns + PD_NS_PER_MS + sim_random(world, 20 * PD_NS_PER_MS),
                     (sim_event){.kind = SIM_WORKER_GONE,
                                 .subject = i,
                                 .a = worker->index | (uint64_t)seen << 8,
                                 .b = worker->incarnation});
    }
}

void sim_router_on_worker_gone(sim_router *router, const sim_event *event)
{
    sim_world *world = router->world;
    char identity[PD_IDENTITY_BYTES];

    if (event->a >> 8 != 0) { /* a process that the router knew is watched */
        if (router_core_has_worker(router->core, event->b))
            router_core_on_worker_dead(router->core, event->b, world->now_ns);
        return;
    }
    pd_bus_identity(world->workers[event->a & 255].name, event->b, identity);
    router_core_on_worker_cut(router->core, identity, world->now_ns);
}

void sim_router_arm(sim_router *router)
{
    sim_world *world = router->world;

    if (router->core == NULL)
        return;
    uint64_t due_ns = router_core_next_due(router->core);
    if (due_ns < world->now_ns)
        due_ns = world->now_ns;
    if (due_ns >= router->tick_ns)
        return;
    router->tick_ns = due_ns;
    sim_schedule(world, due_ns,
                 (sim_event){.kind = SIM_ROUTER_TICK,
                             .subject = router->index,
                             .incarnation = router->incarnation});
}

void sim_router_on_tick(sim_router *router)
{
    router->tick_ns = UINT64_MAX;
    router_core_on_tick(router->core, router->world->now_ns);
}

void sim_router_held(const sim_router *router, char *text, size_t size)
{
    const sim_plan *plan = &router->world->plan;
    bool cut = false;

    if (router->core == NULL) {
        snprintf(text, size, "router %u is dead", router->index);
        return;
    }
    for (uint32_t i = 0; i < router->world->workers_count && !cut; i++)
        cut = router->cut_until_ns[i] > router->world->now_ns;
    router_core_counters counters = router_core_counters_of(router->core);
    router_ready ready = router_core_ready(router->core);
    if (cut)
        snprintf(text, size, "router %u does not reach a worker", router->index);
    else if (router->leaving)
        snprintf(text, size, "router %u is about to end", router->index);
    else if (router->frozen_until_ns > router->world->now_ns)
        snprintf(text, size, "router %u is frozen", router->index);
    else if (counters.queued != 0 || counters.active != 0)
        snprintf(text, size, "router %u holds queued %u active %u", router->index, counters.queued,
                 counters.active);
    else if (ready.prefill != plan->prefill || ready.decode != plan->decode ||
             ready.links != plan->prefill * plan->decode)
        snprintf(text, size, "router %u sees prefill %u decode %u links %u ready", router->index,
                 ready.prefill, ready.decode, ready.links);
}

#include "deploy/simulate/faults.h"

#include "common/base/clock.h"
#include "deploy/simulate/clients.h"
#include "deploy/simulate/plane.h"
#include "deploy/simulate/router.h"
#include "deploy/simulate/worker.h"

#define AIM_NS (4 * PD_NS_PER_MS)
#define AIMED  0.6
#define TRIES  500 /* for a moment all may be dead already */

/* Of the kinds that are allowed: how often each is drawn. */
static const uint32_t weights[SIM_FAULTS_SINGLE] = {
    [SIM_FAULT_CRASH] = 6,         [SIM_FAULT_FREEZE] = 6,    [SIM_FAULT_POOL] = 1,
    [SIM_FAULT_CUT] = 4,           [SIM_FAULT_PARTITION] = 4, [SIM_FAULT_ROUTER_CRASH] = 2,
    [SIM_FAULT_ROUTER_FREEZE] = 3, [SIM_FAULT_HANG_UP] = 12,  [SIM_FAULT_SLOW] = 3,
    [SIM_FAULT_ROUTER_LEAVE] = 1,  [SIM_FAULT_CORRUPT] = 8,   [SIM_FAULT_SHORT] = 4,
    [SIM_FAULT_POISON] = 1,
};

static bool draw(sim_world *world, sim_fault *fault_out)
{
    uint32_t sum = 0;

    for (uint32_t i = 0; i < SIM_FAULTS_SINGLE; i++)
        sum += (world->plan.allowed >> i & 1) * weights[i];
    if (sum == 0)
        return false;
    uint64_t at = sim_random(world, sum);
    for (uint32_t i = 0; i < SIM_FAULTS_SINGLE; i++) {
        uint32_t weight = (world->plan.allowed >> i & 1) * weights[i];
        if (at < weight) {
            *fault_out = (sim_fault)i;
            return true;
        }
        at -= weight;
    }
    return false;
}

void sim_faults_draw(sim_world *world, uint64_t from_ns, uint64_t to_ns)
{
    sim_fault fault;

    for (uint32_t i = 0; i < world->plan.faults && draw(world, &fault); i++) {
        sim_schedule(world, from_ns + sim_random(world, to_ns - from_ns),
                     (sim_event){.kind = SIM_FAULT_EVENT, .a = fault});
        world->faults_left++;
    }
}

static sim_worker *any_worker(sim_world *world)
{
    uint32_t from = (uint32_t)sim_random(world, world->workers_count);

    for (uint32_t i = 0; i < world->workers_count; i++) {
        sim_worker *worker = &world->workers[(from + i) % world->workers_count];
        if (worker->core != NULL)
            return worker;
    }
    return NULL;
}

static sim_router *any_router(sim_world *world)
{
    uint32_t from = (uint32_t)sim_random(world, world->plan.routers);

    for (uint32_t i = 0; i < world->plan.routers; i++) {
        sim_router *router = &world->routers[(from + i) % world->plan.routers];
        if (router->core != NULL)
            return router;
    }
    return NULL;
}

static uint64_t pause_ns(sim_world *world)
{
    return sim_random(world, sim_chance(world, 0.3) ? 5 * PD_NS_PER_S : 800 * PD_NS_PER_MS);
}

static bool lose_pool(sim_world *world)
{
    bool decode = sim_chance(world, 0.5);
    uint64_t away_ns = PD_NS_PER_S + sim_random(world, 4 * PD_NS_PER_S);
    bool any = false;

    for (uint32_t i = 0; i < world->workers_count; i++) {
        sim_worker *worker = &world->workers[i];
        if ((i >= world->plan.prefill) != decode)
            continue;
        any = any || worker->core != NULL;
        worker->down_until_ns = world->now_ns + away_ns;
        if (worker->core != NULL)
            sim_worker_crash(worker);
    }
    return any;
}

static bool partition(sim_world *world)
{
    sim_router *router = any_router(world);
    uint32_t worker = (uint32_t)sim_random(world, world->workers_count);

    if (router == NULL)
        return false;
    router->cut_until_ns[worker] = world->now_ns + pause_ns(world);
    router->cut_drops[worker] = sim_chance(world, 0.5);
    if (router->cut_drops[worker] && world->workers[worker].core != NULL)
        sim_router_lose_worker(world, &world->workers[worker], false);
    return true;
}

/* Half of those that die of decoding do so at its first step, the others somewhere up to this one.
 */
enum { POISON_STEP_MAX = 40 };

static bool poison(sim_world *world)
{
    for (uint32_t i = 0; i < world->plan.requests; i++) {
        sim_request *request = &world->requests[i];
        if (request->ends != 0 || request->handle != 0 || request->poison != SIM_POISON_NONE)
            continue;
        request->poison = sim_chance(world, 0.6) ? SIM_POISON_DECODE : SIM_POISON_PREFILL;
        request->poison_step =
            sim_chance(world, 0.5) ? 1 : 1 + (uint32_t)sim_random(world, POISON_STEP_MAX);
        return true;
    }
    return false;
}

static bool hang_up(sim_world *world)
{
    sim_request *request = sim_clients_any_active(world);

    if (request == NULL)
        return false;
    sim_schedule(world, world->now_ns,
                 (sim_event){.kind = SIM_HANG_UP,
                             .subject = request->router,
                             .a = (uint64_t)(request - world->requests)});
    return true;
}

/* False: there is nothing that it could befall. */
static bool befall(sim_world *world, sim_fault fault)
{
    sim_worker *worker = any_worker(world);
    sim_router *router = any_router(world);

    switch (fault) {
    case SIM_FAULT_POOL: return lose_pool(world);
    case SIM_FAULT_PARTITION: return partition(world);
    case SIM_FAULT_POISON: return poison(world);
    case SIM_FAULT_HANG_UP: return hang_up(world);
    case SIM_FAULT_CUT: return sim_plane_cut(world);
    case SIM_FAULT_SHORT: sim_clients_crowd(world); return true;
    case SIM_FAULT_CRASH:
        if (worker != NULL)
            sim_worker_crash(worker);
        return worker != NULL;
    case SIM_FAULT_FREEZE:
        if (worker != NULL)
            sim_worker_freeze(worker, pause_ns(world));
        return worker != NULL;
    case SIM_FAULT_SLOW:
        if (worker != NULL)
            worker->slow = true;
        return worker != NULL;
    case SIM_FAULT_CORRUPT:
        if (worker != NULL)
            worker->corrupt = true;
        return worker != NULL;
    case SIM_FAULT_ROUTER_CRASH:
        if (router != NULL)
            sim_router_crash(router);
        return router != NULL;
    case SIM_FAULT_ROUTER_FREEZE:
        if (router != NULL)
            sim_router_freeze(router, pause_ns(world));
        return router != NULL;
    case SIM_FAULT_ROUTER_LEAVE:
        if (router != NULL)
            sim_router_leave(router, sim_random(world, PD_NS_PER_S));
        return router != NULL;
    default: return false;
    }
}

/* ---- where it hurts ---- */

void sim_faults_aim(sim_router *router, const sim_worker *worker, const pd_msg_suspended *said)
{
    static const sim_fault kinds[] = {SIM_FAULT_HANG_UP, SIM_FAULT_CRASH, SIM_FAULT_ROUTER_LEAVE};
    sim_world *world = router->world;
    sim_fault fault = kinds[sim_random(world, sizeof(kinds) / sizeof(kinds[0]))];
    uint64_t at_ns = world->now_ns + sim_random(world, AIM_NS);
    uint32_t request = sim_clients_number(router, said->key.number);
    uint32_t target = fault == SIM_FAULT_HANG_UP ? request
                      : fault == SIM_FAULT_CRASH ? worker->index
                                                 : router->index;

    if (world->quiet || (world->plan.allowed >> fault & 1) == 0 || !sim_chance(world, AIMED) ||
        target == UINT32_MAX)
        return;
    sim_schedule(world, at_ns,
                 (sim_event){.kind = SIM_FAULT_EVENT, .a = fault, .b = (uint64_t)target + 1});
    world->faults_left++;
}

static bool befall_aimed(sim_world *world, sim_fault fault, uint64_t target)
{
    if (fault == SIM_FAULT_HANG_UP) {
        if (world->requests[target].ends != 0)
            return false;
        sim_clients_hang_up(world, (uint32_t)target);
        return true;
    }
    if (fault == SIM_FAULT_CRASH) {
        if (world->workers[target].core == NULL)
            return false;
        sim_worker_crash(&world->workers[target]);
        return true;
    }
    if (world->routers[target].core == NULL)
        return false;
    sim_router_leave(&world->routers[target], 0);
    return true;
}

void sim_faults_on_event(sim_world *world, const sim_event *event)
{
    sim_fault fault = (sim_fault)event->a;

    world->faults_left--;
    if (event->b != 0) {
        world->coverage.faults[fault] += befall_aimed(world, fault, event->b - 1);
        return;
    }
    for (uint32_t tries = 0; tries < TRIES; tries++) {
        if (befall(world, fault)) {
            world->coverage.faults[fault]++;
            return;
        }
        if (!draw(world, &fault))
            return;
    }
}

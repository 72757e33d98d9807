#include "deploy/simulate/reasons.h"

#include "deploy/simulate/plan.h"
#include "deploy/simulate/suspects.h"

#include <string.h>

/* Some worker is named, and when its end is said to be certain it has died. */
static bool names_worker(const sim_world *world, const char *message)
{
    bool ended = strstr(message, "its process has ended") != NULL ||
                 strstr(message, "came back with a new incarnation") != NULL;

    for (uint32_t i = 0; i < world->workers_count; i++)
        if (strstr(message, world->workers[i].name) != NULL &&
            (!ended || world->workers[i].deaths > 0))
            return true;
    return false;
}

static bool nobody_ready(const sim_router *router, const char *message)
{
    router_ready ready = router_core_ready(router->core);

    return (strstr(message, "no prefill") != NULL && ready.prefill == 0) ||
           (strstr(message, "no decode") != NULL && ready.decode == 0);
}

/* Its kind of error, and what must be so then. */
static bool is_true(sim_router *router, const sim_request *request, const router_error *error)
{
    static const char *const of_workers[] = {"worker_lost", "worker_failed", "worker_timeout",
                                             "worker_unavailable"};
    sim_world *world = router->world;
    const char *code = error->code, *message = error->message;
    uint64_t since_ns = world->now_ns - request->asked_ns;

    switch (error->http_status) {
    case 429:
        return strcmp(code, "queue_full") == 0 &&
               router_core_counters_of(router->core).queued >= router->queue_max;
    case 500: return strcmp(code, "request_suspect") == 0; /* and more: suspects.h */
    case 504: return strcmp(code, "deadline_exceeded") == 0 && since_ns >= router->total_ns;
    case 503: break;
    default: return false;
    }
    if (strcmp(code, "shutting_down") == 0)
        return router->leaving;
    if (strcmp(code, "overloaded") == 0)
        return since_ns >= router->queue_ns;
    if (strcmp(code, "no_worker") == 0)
        return since_ns >= router->queue_ns && nobody_ready(router, message);
    if (strcmp(code, "worker_unavailable") == 0 && strstr(message, "refused the prefill") != NULL)
        return since_ns >= router->queue_ns;
    if (strcmp(code, "retry_budget") == 0)
        return names_worker(world, message);
    for (uint32_t i = 0; i < sizeof(of_workers) / sizeof(of_workers[0]); i++)
        if (strcmp(code, of_workers[i]) == 0) /* the last of its attempts */
            return strstr(message, "(attempt ") != NULL && names_worker(world, message);
    return false;
}

void sim_reasons_judge(sim_router *router, const sim_request *request, const router_error *error)
{
    sim_world *world = router->world;
    uint32_t number = (uint32_t)(request - world->requests);
    bool room = error->http_status == 429 || strcmp(error->code, "overloaded") == 0;

    if (!is_true(router, request, error))
        sim_broken(world, "request %u is told what is not so: %d %s: %s", number,
                   error->http_status, error->code, error->message);
    else if (strstr(error->message, "does not match") != NULL &&
             world->coverage.faults[SIM_FAULT_CORRUPT] == 0)
        sim_broken(world, "request %u: blocks are called wrong, and none were: %s", number,
                   error->message);
    else if (sim_plan_is_only_slow(&world->plan) && error->http_status != 504 && !room)
        sim_broken(world, "request %u: slow links alone: %d %s: %s", number, error->http_status,
                   error->code, error->message);
    else if (error->http_status == 500)
        sim_suspects_judge(world, request, error->message);
}

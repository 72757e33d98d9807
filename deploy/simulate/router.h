#pragma once

/* deploy/simulate/router.h - a simulated router: the real core, and what its process would be. One
 * thread. */

#include "common/base/clock.h"
#include "deploy/simulate/world.h"

/* A process starts at the router's address: another incarnation that knows nobody. */
void sim_router_start(sim_router *router);
/* kill -9: its clients' connections are cut; it is started again. */
void sim_router_crash(sim_router *router);
/* SIGTERM: takes nothing more; when the grace is over what is left ends with an error, and soon
 * after it the process ends. It is started again. */
void sim_router_leave(sim_router *router, uint64_t grace_ns);
void sim_router_on_leave(sim_router *router, const sim_event *event);
void sim_router_freeze(sim_router *router, uint64_t for_ns);
void sim_router_fini(sim_router *router);
/* A worker was killed (certain), or its connection broke: routers see it in a moment. */
void sim_router_lose_worker(sim_world *world, const sim_worker *worker, bool certain);
void sim_router_on_worker_gone(sim_router *router, const sim_event *event);
/* After every event: schedules the next tick when it is due earlier than thought. */
void sim_router_arm(sim_router *router);
void sim_router_on_tick(sim_router *router);

/* Why it is not at rest: "" when it holds no request and sees every worker and link. */
void sim_router_held(const sim_router *router, char *text, size_t size);

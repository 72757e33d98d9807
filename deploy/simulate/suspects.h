#pragma once

/* deploy/simulate/suspects.h - which worker processes had which request, why each of them died, and
 * whether a router that ends a request as one that brings workers down (500, request_suspect) may
 * say so. One thread. */

#include "deploy/simulate/world.h"

/* A router says something to a worker, dead or alive: who is given a request, or gives it back. */
void sim_suspects_see_given(sim_router *router, const sim_worker *worker,
                            const pd_message *message);
/* A router hears something from a worker's incarnation: that it computes a request. */
void sim_suspects_see_reply(sim_router *router, const pd_message *message, uint64_t from);
/* It is about to die, of worker->killer or of something else. */
void sim_suspects_see_death(const sim_worker *worker);

/* Workers that died of the request, of those that it was given to of late: two at most. What a
 * router had given up there for another reason before it heard of the death it need not count; nor
 * a death that may as well have been another suspect's. */
uint32_t sim_suspects_deaths(const sim_world *world, const sim_request *request);
/* A request is ended as one that brings workers down: it was given to both that the router names,
 * or twice to one that came anew; and, unless it is one, not both of them died of the same other
 * request of that router, known to be computed there: from that a router is to tell it apart. Of
 * two that each bring workers down, and that it met one after the other, it cannot; nor of what
 * another router has sent there. */
void sim_suspects_judge(sim_world *world, const sim_request *request, const char *message);

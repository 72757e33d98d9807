#pragma once

/* deploy/simulate/clients.h - those who ask: requests whose right answers are known, what comes
 * back for them, and whether it may. One thread. */

#include "deploy/simulate/world.h"

/* What a router's core is created with: where its answers go. */
router_sink sim_clients_sink(sim_router *router);

/* Draws all requests and schedules their arrivals; the last plan.routers ones are not scheduled:
 * sim_clients_ask asks them. Returns when the last one arrives. */
uint64_t sim_clients_draw(sim_world *world, uint64_t from_ns);
/* More requests at once, long ones, from those that are yet to come. */
void sim_clients_crowd(sim_world *world);

/* A client asks; the router named by the event may be dead, then another one is tried. */
void sim_clients_ask(sim_world *world, uint32_t number, uint32_t router);
void sim_clients_hang_up(sim_world *world, uint32_t number);
/* A router's request; NULL: it is not one of its. */
sim_request *sim_clients_find(sim_router *router, router_handle handle);
/* The index of a router's request; UINT32_MAX: it is not one of its. */
uint32_t sim_clients_number(sim_router *router, router_handle handle);
/* A request that a router works on; NULL: none. */
sim_request *sim_clients_any_active(sim_world *world);
/* A router was killed: its clients' connections are cut. */
void sim_clients_cut(sim_router *router);
/* A message is on its way from a router to a worker: attempts are counted. */
void sim_clients_see(sim_router *router, const pd_message *message);
/* One has come from a worker: an attempt that was refused for want of room is none. */
void sim_clients_see_reply(sim_router *router, const pd_message *message);

/* None that a router works on is beyond its own deadline. */
void sim_clients_check_time(sim_world *world);
bool sim_clients_all_ended(const sim_world *world, uint32_t count);
/* After the end: each request ended once, and none failed that must not. */
void sim_clients_judge(sim_world *world, sim_result *result);

#pragma once

/* deploy/simulate/net.h - the control plane: messages packed, delayed, and now and then lost,
 * doubled or out of order. Without such a fault the order on each link is kept. One thread. */

#include "deploy/simulate/world.h"

/* To whoever lives at that router's address when it arrives. */
void sim_net_to_router(sim_worker *worker, uint32_t router, const pd_message *message);
/* To the worker that an identity names. False: not taken, as a socket would say. */
bool sim_net_to_worker(sim_router *router, const char *identity, const pd_message *message);
/* A SIM_TO_ROUTER or SIM_TO_WORKER arrives; whoever it is for lives. */
void sim_net_deliver(sim_world *world, const sim_event *event);

#pragma once

/* tests/unit/workers/world_router.h - the router of tests/unit/workers/world.h: what it does with
 * what workers say. */

#include "tests/unit/workers/world.h"

/* A pd_role_sink's send; ctx: the world_worker. */
void world_sink_send(void *ctx, uint64_t router, const pd_message *message);
void world_welcome(world *w, world_worker *worker);
/* The decode worker, to the prefill worker. */
void world_say_peer_up(world *w);
/* The attempt has failed: cancelled everywhere, and tried again where the world does that. */
void world_fail_request(world *w, world_request *r, pd_status status);

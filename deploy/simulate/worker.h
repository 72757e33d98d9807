#pragma once

/* deploy/simulate/worker.h - a simulated worker: the real core of its role, and around it a made up
 * compute thread and process. What the services' runtime does with sockets and threads is done
 * here, and in plane.h, with events. One thread. */

#include "deploy/simulate/world.h"

/* A process starts: another incarnation with an empty pool, unknown to anyone. */
void sim_worker_start(sim_worker *worker);
/* kill -9: links to it break, what it had under way may still land until its death is known. */
void sim_worker_crash(sim_worker *worker);
void sim_worker_freeze(sim_worker *worker, uint64_t for_ns);
void sim_worker_fini(sim_worker *worker);

/* Events for a living worker; the caller has checked the incarnation. */
void sim_worker_on_message(sim_worker *worker, uint32_t router, uint64_t router_incarnation,
                           const pd_message *message);
void sim_worker_on_beat(sim_worker *worker);
void sim_worker_on_group_done(sim_worker *worker, uint32_t group, uint64_t step);
void sim_worker_on_step_done(sim_worker *worker, uint64_t step);
void sim_worker_on_checked(sim_worker *worker, uint64_t index);
/* A peer's end is known: fenced off at once; told when all that landed before has been told. */
void sim_worker_on_peer_dead(sim_worker *worker, uint64_t incarnation, bool fenced);

/* Why it is not back at rest: "" when idle and every block is free or cached. */
void sim_worker_held(const sim_worker *worker, char *text, size_t size);
/* Checks what must hold after every event. */
void sim_worker_check(sim_worker *worker);

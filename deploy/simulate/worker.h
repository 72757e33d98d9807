#pragma once

/* deploy/simulate/worker.h - a simulated worker: the real core of its role, and around it a made up
 * compute thread and data plane. What the services' runtime does with sockets and threads is done
 * here with events. One thread. */

#include "deploy/simulate/world.h"

/* A process starts: another incarnation with an empty pool, unknown to anyone. */
void sim_worker_start(sim_worker *worker);
/* kill -9: what was in flight from it on the data plane is lost, links to it break. */
void sim_worker_crash(sim_worker *worker);
void sim_worker_fini(sim_worker *worker);

/* Events for a living worker; the caller has checked the incarnation. */
void sim_worker_on_message(sim_worker *worker, const pd_message *message);
void sim_worker_on_beat(sim_worker *worker);
void sim_worker_on_group_done(sim_worker *worker, uint32_t group, uint64_t step);
void sim_worker_on_step_done(sim_worker *worker, uint64_t step);
void sim_worker_on_transfer(sim_worker *worker, const pd_transfer_event *event);
/* The sender of the parcel may have died: sender is NULL then. */
void sim_worker_on_landed(sim_world *world, sim_worker *sender, const sim_event *event);
/* That incarnation's writes can land nowhere any more. */
void sim_worker_cut_off(sim_world *world, uint64_t incarnation, uint32_t target);

/* Why it is not back at rest: "" when idle and every block is free or cached. */
void sim_worker_held(const sim_worker *worker, char *text, size_t size);
/* Checks what must hold after every event. */
void sim_worker_check(sim_worker *worker);

#pragma once

/* deploy/simulate/plane.h - the data plane: links, puts that take time and share a link fairly,
 * notices behind them, bytes that land late, and the proof that none will. One thread. */

#include "deploy/simulate/world.h"

/* What a worker's transfer address is here. */
typedef struct sim_address {
    uint64_t worker, incarnation;
} sim_address;

/* connect, close, notify, ship, unship. */
void sim_plane_fill_sink(pd_role_sink *sink);

void sim_plane_on_transfer(sim_worker *worker, const pd_transfer_event *cut);
/* A message waits in the socket of a receiver that stands still, whose transfer thread copies it;
 * memory can be written meanwhile. 0: it does not wait. */
uint64_t sim_plane_waits_until(const sim_world *world, const sim_event *landed);
/* A parcel is there; its sender may have died since. */
void sim_plane_on_landed(sim_world *world, const sim_event *event);

/* The worker is about to die: its links end, part of what is on the wire lands all the same until
 * its death is known, and those who watch it hear of it. */
void sim_plane_crash(sim_worker *worker);
void sim_plane_fini(sim_worker *worker);
/* A link breaks though both its ends live. False: there is none. */
bool sim_plane_cut(sim_world *world);

/* A peer was announced: on the own host its death will be seen. */
void sim_plane_watch(sim_worker *worker, uint64_t incarnation, uint64_t host);
/* As this host knows: that process ended here. */
bool sim_plane_has_ended(const sim_worker *worker, uint64_t incarnation);
/* A router has given a peer up: what cannot be watched is fenced off. */
void sim_plane_given_up(sim_worker *worker, uint64_t incarnation);
/* Nothing of that incarnation lands here from now on. */
void sim_plane_fence(sim_worker *worker, uint64_t incarnation);

#pragma once

/* deploy/simulate/faults.h - what goes wrong, and when. One thread. */

#include "deploy/simulate/world.h"

/* Schedules the plan's faults between the two times. */
void sim_faults_draw(sim_world *world, uint64_t from_ns, uint64_t to_ns);
/* A fault's time has come. One that finds nothing to break is another one. */
void sim_faults_on_event(sim_world *world, const sim_event *event);
/* A router hears that a request stands still at a worker for want of room: what goes wrong in the
 * few milliseconds until it runs again somewhere would seldom be drawn by chance. */
void sim_faults_aim(sim_router *router, const sim_worker *worker, const pd_msg_suspended *said);

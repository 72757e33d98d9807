#pragma once

/* deploy/simulate/faults.h - what goes wrong, and when. One thread. */

#include "deploy/simulate/world.h"

/* Schedules the plan's faults between the two times. */
void sim_faults_draw(sim_world *world, uint64_t from_ns, uint64_t to_ns);
/* A fault's time has come. One that finds nothing to break is another one. */
void sim_faults_on_event(sim_world *world, sim_fault fault);

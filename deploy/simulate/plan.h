#pragma once

/* deploy/simulate/plan.h - what a seed stands for: the size of a cluster, its load, its faults.
 * With all faults allowed it is a standard run: at least 2 routers, 4 workers, 30 requests and 10
 * single faults. Pure; any thread. */

#include "deploy/simulate/world.h"

/* Draws a run from its seed. allowed: bits of sim_fault. */
void sim_plan_draw(uint64_t seed, uint32_t allowed, sim_plan *plan_out);
/* One line. */
void sim_plan_describe(const sim_plan *plan, char *text, size_t size);

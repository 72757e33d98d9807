#pragma once

/* deploy/simulate/plan.h - what a seed stands for: the size of a cluster, its load, its faults.
 * With all faults allowed it is a standard run: at least 2 routers, 4 workers, 30 requests and 10
 * single faults. Pure; any thread. */

#include "deploy/simulate/world.h"

/* Nothing can go wrong in such a run: no fault, and no link is slow. */
bool sim_plan_is_calm(const sim_plan *plan);
/* Nothing but slow links can: deadlines are a cluster's usual ones, and what is only late must
 * arrive. */
bool sim_plan_is_only_slow(const sim_plan *plan);

/* Draws a run from its seed. allowed: bits of sim_fault. */
void sim_plan_draw(uint64_t seed, uint32_t allowed, sim_plan *plan_out);
/* One line. */
void sim_plan_describe(const sim_plan *plan, char *text, size_t size);

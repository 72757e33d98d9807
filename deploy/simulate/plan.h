#pragma once

/* deploy/simulate/plan.h - what a seed stands for: the size of a cluster, its load, its faults.
 * Pure; any thread. */

#include "deploy/simulate/world.h"

/* Draws a run from its seed. allowed: the faults that may be drawn. */
void sim_plan_draw(uint64_t seed, const sim_faults *allowed, sim_plan *plan_out);
/* One line. */
void sim_plan_describe(const sim_plan *plan, char *text, size_t size);

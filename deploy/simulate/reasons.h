#pragma once

/* deploy/simulate/reasons.h - what a request is told that ends without its answer, and whether that
 * is so. One thread. */

#include "deploy/simulate/world.h"

/* The error has just come from a router's core, which has forgotten the request. What it says must
 * be one of the reasons there are, and true: deadlines have passed, queues are full, workers that
 * are said to be missing are, those that are named exist, and have died when it says so; blocks are
 * called wrong only where some were. In a run whose only trouble is slow links no other reasons are
 * good than the deadline of the whole and want of room. */
void sim_reasons_judge(sim_router *router, const sim_request *request, const router_error *error);

#pragma once

/* common/worker/rank.h - the process of a tensor-parallel worker's rank 1 or above.
 *
 * Loads its part of the model and computes with rank 0 until that one ends it. It has no loop, no
 * links and no router; SIGTERM and SIGINT are not for it. */

#include "common/worker/setup.h"

/* The process' exit status: 0 ended by rank 0; 1 failed; 2 wrong configuration. */
int pd_worker_rank_run(const pd_worker_options *options, const pd_rank_start *start);

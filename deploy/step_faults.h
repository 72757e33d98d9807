#pragma once

/* deploy/step_faults.h - forward steps that fail on purpose, for tests of those who must cope.
 *
 * KVFERRY_STEP_FAULTS=3: each third step that computes a later chunk of a prompt fails, when the
 * chunk before it may have been shipped already. As with common/worker/ship_faults.h, a worker
 * refuses to start with it unless KVFERRY_ALLOW_FAULTS=1 is set too, and logs each fault. */

#include "common/worker/engine.h"

/* The engine to use in place of real: real itself when nothing is to fail. Once a process; loop
 * thread. PD_E_INVALID: not a number from 1, or not allowed (logged). */
PD_CHECKED pd_status step_faults_engine(const pd_worker_engine_ops *real,
                                        const pd_worker_engine_ops **engine_out);

#pragma once

/* kernels/team.h - a team of threads that run one function together.
 *
 * Waiting threads spin briefly and then sleep in the kernel, so that an idle team costs nothing
 * and a disturbed machine is not made worse. When other processes take the cores, so that threads
 * sleep at barriers more than they help, a run has fewer of them for a while. The owner calls
 * create, run and destroy from one thread at a time; barrier and take are for the function being
 * run. */

#include "common/base/status.h"

#include <sched.h>
#include <stdint.h>

#define KERN_THREADS_MAX 256

typedef struct kern_team kern_team;
typedef void kern_team_fn(void *ctx, uint32_t thread);

/* threads includes the caller; 0: one a CPU that this process may use. PD_E_IO: a thread could not
 * be started; PD_E_NOMEM. */
PD_CHECKED pd_status kern_team_create(uint32_t threads, kern_team **team_out);
void kern_team_destroy(kern_team *team);
/* Thread n stays on the n-th of these CPUs (beginning anew where they are fewer), the caller from
 * its next run on. What the system refuses is logged, and done without. */
void kern_team_pin(kern_team *team, const cpu_set_t *cpus);
uint32_t kern_team_threads(const kern_team *team);

/* Of these, how many the next run has. */
uint32_t kern_team_active(const kern_team *team);

/* Runs fn(ctx, thread) on every active thread, 0 .. active - 1, thread 0 being the caller; returns
 * when all are done. */
void kern_team_run(kern_team *team, kern_team_fn *fn, void *ctx);
/* All active threads call it; what they wrote before is seen by all after. Starts the
 * counter of kern_team_take anew. */
void kern_team_barrier(kern_team *team);
/* Hands out 0, 1, 2, ... to whoever asks, since the last barrier. */
uint32_t kern_team_take(kern_team *team);

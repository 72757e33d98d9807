#pragma once

/* common/worker/pinning.h - which CPUs the compute threads of one worker have to themselves.
 *
 * All workers of a deployment are dealt out over the CPUs in their order, each thread a CPU: one a
 * core as long as there are cores, else whole cores one after the other, so that a worker's threads
 * sit together. Every worker comes to the same by itself. Any thread. */

#include "common/config/deployment.h"

#include <sched.h>

typedef struct pd_pinning_options {
    const char *sysfs;     /* "/sys" */
    cpu_set_t cpus;        /* that these workers share */
    const uint32_t *teams; /* [teams_count] compute threads of each worker */
    uint32_t teams_count;
    uint32_t own;         /* which of them asks, */
    uint32_t part, parts; /* for which of so many equal parts: a rank's */
    pd_pin_threads wish;
} pd_pinning_options;

/* The CPUs of the threads that ask: one for each, or with PD_PIN_ALWAYS, where there are not
 * enough, all that come their turn. False: they are not pinned; with PD_PIN_AUTO that is whenever
 * the threads are more than the CPUs, or two workers would meet on one core. */
bool pd_pinning_choose(const pd_pinning_options *options, cpu_set_t *pins_out);

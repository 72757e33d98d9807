#pragma once

/* common/base/process.h - which process a pid means.
 *
 * A pid is given to a stranger some day; pid and start time together are not. Any thread. */

#include "common/base/status.h"

#include <stdint.h>

/* Clock ticks from the host's boot to that process' start, /proc/PID/stat's. PD_E_NOT_FOUND: there
 * is no such process, or only a zombie of it, or /proc hides it. */
PD_CHECKED pd_status pd_process_started(int64_t pid, uint64_t *started_out);

/* Where this process' pid means something: the host and its pid namespace. 0: it cannot be told,
 * which is logged. */
uint64_t pd_process_host(void);

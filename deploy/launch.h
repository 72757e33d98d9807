#pragma once

/* deploy/launch.h - one service's process: which executable, which arguments, where its output
 * goes, why it ended. The supervisor's thread only. */

#include "deploy/state.h"

#define LAUNCH_PATH_MAX 4096

/* What all services of a cluster share on their command lines. */
typedef struct launch_shared {
    const char *file;
    const char *state_dir;
    const char *const *sets; /* the operator's, then the supervisor's */
    size_t sets_count;
} launch_shared;

/* The executable of a role ("router", "prefill", "decode"). PD_E_NOT_FOUND with why. */
PD_CHECKED pd_status launch_find(const char *role, char path_out[LAUNCH_PATH_MAX], char why[512]);

/* Starts the service and fills its process and start time. truncate: begin its log anew.
 * *log_from_out is where this run's part of the log begins. Errors are logged: PD_E_IO, PD_E_NOMEM.
 */
PD_CHECKED pd_status launch_start(const launch_shared *shared, const char *binary, bool truncate,
                                  state_service *service, long *log_from_out);

/* Why a run ended, in one line: its exit, and its last level=error line since log_from. */
void launch_why(const launch_shared *shared, const state_service *service, long log_from,
                int wait_status, char out[STATE_LAST_ERROR_MAX]);

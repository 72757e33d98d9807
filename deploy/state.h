#pragma once

/* deploy/state.h - what a running cluster has written down: STATE_DIR/state.json, and who a process
 * is.
 *
 * The file is written whole and renamed into place by the supervisor alone, so a reader sees one
 * state or the next. A process is named by pid and start time (/proc/PID/stat, clock ticks since
 * boot): a pid that was given to a stranger meanwhile has another start time. Any thread. */

#include "common/config/deployment.h"

#include <sys/types.h>

#define STATE_SERVICES_MAX   (1 + 2 * PD_DEPLOYMENT_WORKERS_MAX)
#define STATE_LAST_ERROR_MAX 512

typedef struct state_process {
    pid_t pid;      /* 0: none */
    uint64_t start; /* ticks */
} state_process;

typedef struct state_service {
    char name[PD_DEPLOYMENT_NAME_BYTES]; /* "router", "prefill-0" */
    char role[16];                       /* "router", "prefill", "decode" */
    char phase[16];                      /* "starting", "running", "waiting" (to be restarted),
                                            "failed", "stopped" */
    state_process process;
    uint32_t restarts;
    int64_t started_unix_ms;
    char last_error[STATE_LAST_ERROR_MAX]; /* why it ended last; "" when it never did */
} state_service;

typedef struct state {
    char cluster[PD_DEPLOYMENT_NAME_BYTES];
    char file[1024];
    char listen[300]; /* HTTP address with its real port */
    state_process supervisor;
    bool ready;
    uint32_t services_count;
    state_service services[STATE_SERVICES_MAX];
} state;

bool state_process_alive(const state_process *process);
/* Sends the signal if it is still that process. True: sent. */
bool state_process_signal(const state_process *process, int signal);
/* Waits until the process is gone, at most timeout_ms. True: gone. */
bool state_process_wait(const state_process *process, int timeout_ms);

/* Errors are logged: PD_E_IO, PD_E_NOMEM. */
PD_CHECKED pd_status state_write(const char *state_dir, const state *s);
/* PD_E_NOT_FOUND: there is none. PD_E_INVALID (why is one line), PD_E_IO (why), PD_E_NOMEM. */
PD_CHECKED pd_status state_read(const char *state_dir, state *s_out, char why[256]);
void state_remove(const char *state_dir);

/* Makes STATE_DIR and STATE_DIR/logs with their parents. PD_E_IO with why. */
PD_CHECKED pd_status state_make_dirs(const char *state_dir, char why[256]);
/* The lock that says a supervisor is at work: an open descriptor, or -1 with PD_E_OVERLOAD (held
 * by another) or PD_E_IO with why. Close ends it, as does the process' end. */
PD_CHECKED pd_status state_lock(const char *state_dir, int *fd_out, char why[256]);

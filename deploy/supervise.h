#pragma once

/* deploy/supervise.h - starts a cluster's services as processes, watches them, ends them.
 *
 * How a service is started (the contract with router/main.c and deploy/worker.c):
 *
 *   router         -f FILE [--set KEY=VALUE ...]
 *   prefill-worker -f FILE --name prefill-0 [--set KEY=VALUE ...]
 *   decode-worker  -f FILE --name decode-0 [--set KEY=VALUE ...]
 *
 * - They read FILE by pd_deployment_load with the --set options in the order given. First come the
 *   operator's own, then what the supervisor chose and all must share: router.listen (a real port),
 *   router.control, router.tokens, router.events (real ports or sockets), prefill.threads and
 *   decode.threads (never auto).
 * - Working directory: that of `kvferry up`; the state directory exists. stdin is /dev/null, stdout
 *   and stderr are STATE_DIR/logs/NAME.log. No other descriptor is open.
 * - The router binds; workers connect, in any order, and keep trying.
 * - SIGTERM: end in order, within 10 seconds; after that comes SIGKILL. SIGINT is not sent, for a
 *   service has its own process group. When the supervisor dies, the kernel kills the service.
 * - Exit status: 0 a normal end, 1 failure (restarted, with back-off), 2 bad usage or configuration
 *   (not restarted). The cause is the last level=error line on stderr.
 * - The router's HTTP port answers GET /ready with 200 once every role has a warm worker, and
 *   GET /workers with {"workers": [{"name", "role", "state", "backend", "transfer", "lanes": "a,b",
 *   "ledger": {"total", "free", "cached", "leased", "running", "quarantined"}, "queue_ms",
 *   "incarnation", ...}, ...]}; `kvferry status` shows it.
 *
 * Where the executables are: KVFERRY_BIN_DIR when set (tests put stand-ins there), else the folder
 * of kvferry itself (installed), else build/router and build/deploy beside it (build tree).
 *
 * One thread; signals SIGCHLD, SIGINT, SIGTERM and SIGHUP are blocked and taken by the supervisor.
 */

#include "common/config/deployment.h"

typedef struct supervise_options {
    const pd_deployment *deployment;
    const char *file;        /* as the services shall open it */
    const char *const *sets; /* the operator's --set options */
    size_t sets_count;
    bool detach;
    uint64_t ready_timeout_ns;
} supervise_options;

/* Starts everything and waits until /ready is 200. In the foreground returns after the cluster has
 * been stopped (SIGINT, SIGTERM); detached, returns when it is ready, or when it failed and no
 * process is left. Every failure has been told on stderr in one line.
 * Errors: PD_E_INVALID (already running, no such model, port in use), PD_E_IO, PD_E_TIMEOUT,
 * PD_E_PEER (a service ended before all were ready), PD_E_NOMEM. */
PD_CHECKED pd_status supervise_up(const supervise_options *options);

/* Ends the cluster whose state lies in state_dir and waits until its processes are gone. A process
 * is only touched when pid and start time are those recorded. *was_running_out tells whether there
 * was something to end. Errors are told: PD_E_IO, PD_E_TIMEOUT, PD_E_NOMEM. */
PD_CHECKED pd_status supervise_down(const char *cluster, const char *state_dir,
                                    bool *was_running_out);

#pragma once

/* common/base/peer_watch.h - which peers' processes on this host are dead, for certain.
 *
 * Silence says little: a process that stood still may go on, and write into memory that it has
 * mapped. Only its death ends that. A pidfd tells of it within a millisecond, whoever its parent
 * is. Peers on other hosts (pd_process_host) are not watched. Loop thread only. */

#include "common/base/loop.h"

typedef struct pd_peer_watch pd_peer_watch;

/* Called from the loop, once for each incarnation added, when its process has ended. */
typedef void pd_peer_dead_fn(void *ctx, uint64_t incarnation);

/* The loop is borrowed. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_peer_watch_create(pd_loop *loop, pd_peer_dead_fn *fn, void *ctx,
                                          pd_peer_watch **watch_out);
void pd_peer_watch_destroy(pd_peer_watch *watch);

/* Watches the process with that pid that started then (pd_process_started; 0: unknown: it must have
 * been alive a moment ago, so that the pid is not another's yet). One that is dead already, or
 * whose pid is another's by now, is told of before this returns. One that cannot be watched is
 * logged. The same incarnation again: nothing. */
void pd_peer_watch_add(pd_peer_watch *watch, uint64_t incarnation, int64_t pid, uint64_t started);
/* It is watched and has not been told dead. */
bool pd_peer_watch_alive(const pd_peer_watch *watch, uint64_t incarnation);

#pragma once

/* common/worker/peer_watch.h - which peers' processes on this host are dead, for certain.
 *
 * A router that has not heard of a worker for a while gives it up; but a process that stood still
 * may go on, and write into memory that it has mapped. Only its death ends that. A pidfd tells of
 * it, whoever its parent is. Peers on other hosts are not watched. Loop thread only. */

#include "common/base/loop.h"

typedef struct pd_peer_watch pd_peer_watch;

/* Called from the loop, once for each incarnation added, when its process has ended. */
typedef void pd_peer_dead_fn(void *ctx, uint64_t incarnation);

/* Where this process's pid means something: the host and its pid namespace. 0: unknown. */
uint64_t pd_peer_watch_host(void);

/* The loop is borrowed. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_peer_watch_create(pd_loop *loop, pd_peer_dead_fn *fn, void *ctx,
                                          pd_peer_watch **watch_out);
void pd_peer_watch_destroy(pd_peer_watch *watch);

/* Watches a process that was alive a moment ago (its router heard from it), so that the pid is not
 * another's yet. One that cannot be watched is logged; one that is dead already is told of too.
 * The same incarnation again: nothing. */
void pd_peer_watch_add(pd_peer_watch *watch, uint64_t incarnation, int64_t pid);
/* It is watched and has not been told dead. */
bool pd_peer_watch_alive(const pd_peer_watch *watch, uint64_t incarnation);

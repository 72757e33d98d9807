#pragma once

/* common/worker/runtime.h - a worker process: registers, drives its role's core, drains, leaves.
 *
 * The core decides; here are its sockets, threads, clock and signals. Registration: HELLO until a
 * router welcomes or refuses; again when another router, or the same one anew, is heard of, or when
 * it was silent. A warm-up step runs before "warm" is said in heartbeats. SIGTERM: no new requests,
 * what runs may finish for GRACE, then everything is cancelled; BYE; status 0. A second SIGTERM
 * shortens the grace to nothing. The calling thread is the loop thread. */

#include "common/worker/setup.h"

/* The process' exit status: 0 left on purpose; 1 failed; 2 wrong usage or configuration, or refused
 * by the router (logged with its reason). */
int pd_worker_run(const pd_worker_options *options);

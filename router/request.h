#pragma once

/* router/request.h - every request's way through the cluster, as a state machine.
 *
 * The states and what leads from one to the next are router/lifecycle.h's table; this module and
 * those beside it (retry, move, pull) do what its rows say. Each state has a deadline, all together
 * another. Cancel works in each and is idempotent. An attempt has its own epoch: what comes of an
 * earlier one is dropped. CLOSING waits a moment for the prefill worker's last word, which says how
 * much of the prompt was cached.
 *
 * Pure: (event, now_ns) in, messages and answers out through the sink. One thread. */

#include "router/cluster.h"
#include "router/index.h"
#include "router/policy.h"

typedef struct router_requests router_requests;

typedef struct router_requests_options {
    const router_core_config *config;
    uint64_t router; /* incarnation */
    uint64_t seed;
    const router_sink *sink;
    router_cluster *cluster;
    const router_index *index;
    router_core_counters *counters;
} router_requests_options;

PD_CHECKED pd_status router_requests_create(const router_requests_options *options,
                                            router_requests **requests_out);
void router_requests_destroy(router_requests *requests);

/* As router_core_on_request. */
PD_CHECKED pd_status router_requests_add(router_requests *requests, const router_request_in *in,
                                         uint64_t now_ns, router_handle *handle_out,
                                         router_error *error_out);
void router_requests_cancel(router_requests *requests, router_handle handle, uint64_t now_ns);

/* slot: of the worker the message came from. */
void router_requests_on_lease_reply(router_requests *requests, uint32_t slot,
                                    const pd_msg_lease_reply *reply, uint64_t now_ns);
void router_requests_on_tokens(router_requests *requests, uint32_t slot,
                               const pd_msg_step_tokens *tokens, uint64_t now_ns);
void router_requests_on_prefill_done(router_requests *requests, uint32_t slot,
                                     const pd_msg_prefill_done *done, uint64_t now_ns);
void router_requests_on_prefill_started(router_requests *requests, uint32_t slot,
                                        const pd_msg_prefill_started *started, uint64_t now_ns);
void router_requests_on_landed(router_requests *requests, uint32_t slot,
                               const pd_msg_landed *landed, uint64_t now_ns);
void router_requests_on_refetch(router_requests *requests, uint32_t slot,
                                const pd_msg_refetch *refetch, uint64_t now_ns);
void router_requests_on_decode_failed(router_requests *requests, uint32_t slot,
                                      const pd_msg_decode_failed *failed, uint64_t now_ns);
void router_requests_on_suspended(router_requests *requests, uint32_t slot,
                                  const pd_msg_suspended *suspended, uint64_t now_ns);
void router_requests_on_ship_done(router_requests *requests, uint32_t slot,
                                  const pd_msg_ship_done *done, uint64_t now_ns);
typedef enum router_gone {
    ROUTER_GONE_LEFT,    /* it said so */
    ROUTER_GONE_DIED,    /* silent, or a new process has its name */
    ROUTER_GONE_SESSION, /* it is there, and has dropped what it had of this router */
} router_gone;
/* With LEFT and DIED the worker is about to be removed from the cluster: nothing is sent to it any
 * more. */
void router_requests_on_worker_gone(router_requests *requests, uint32_t slot, router_gone how,
                                    const char *why, uint64_t now_ns);
/* A worker that was silent for too long, and taken for dead, speaks: nobody brought it down. Who is
 * a suspect for nothing else is none any more. */
void router_requests_not_dead(router_requests *t, uint64_t incarnation);
/* The router is stopping: requests that wait for a worker end with 503 when there is none that
 * takes new work; all: every request ends so. */
void router_requests_on_stopping(router_requests *requests, bool all);
/* Something got better (a worker is ready, room came back): the queue is tried again. */
void router_requests_pump(router_requests *requests, uint64_t now_ns);
void router_requests_on_tick(router_requests *requests, uint64_t now_ns);
uint64_t router_requests_next_due(const router_requests *requests);
uint32_t router_requests_cached_tokens(const router_requests *requests, router_handle handle);
uint32_t router_requests_queued(const router_requests *requests);
const uint64_t *router_requests_transitions(const router_requests *requests);

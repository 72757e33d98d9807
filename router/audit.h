#pragma once

/* router/audit.h - the router's view of what is held for it, against the workers'.
 *
 * Each worker is asked every AUDIT_MS what it holds for this router. Messages are under way while
 * it answers, so only what two answers in a row agree on is believed:
 *
 *   a key that the router does not know there     Cancel (Release for copies of a live request)
 *   a request that it counts on and that is gone  tried again
 *   a landed sequence that was never started      DecodeStart again
 *   quarantine of an attempt that is over          Cancel to the prefill workers, which say then
 * that they write nothing of it quarantine that waits for an incarnation that this router has given
 * up                      PeerGone again
 *
 * So a lost message costs seconds. Memory: AUDIT_UNKNOWN_MAX keys a worker, allocated at its first
 * answer. The inside of router/core.h. One thread. */

#include "router/request.h"

typedef struct router_audit router_audit;

typedef struct router_audit_options {
    router_cluster *cluster;
    router_requests *requests;
    const router_sink *sink;
    router_core_counters *counters;
    uint64_t router; /* incarnation */
} router_audit_options;

PD_CHECKED pd_status router_audit_create(const router_audit_options *options,
                                         router_audit **audit_out);
void router_audit_destroy(router_audit *audit);

/* A worker begins, begins anew, or ends: nothing of an earlier answer counts. */
void router_audit_reset(router_audit *audit, uint32_t slot, uint64_t now_ns);
/* Asks who is due. */
void router_audit_on_tick(router_audit *audit, uint64_t now_ns);
uint64_t router_audit_next_due(const router_audit *audit);
void router_audit_on_reply(router_audit *audit, uint32_t slot, const pd_msg_audit_reply *reply,
                           uint64_t now_ns);
/* Of the worker in that slot, which is used; its pointers live until the next event. */
void router_audit_view_of(const router_audit *audit, uint32_t slot, uint64_t now_ns,
                          router_audit_view *view_out);

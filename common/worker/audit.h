#pragma once

/* common/worker/audit.h - what a worker holds for the router that asks: PD_MSG_AUDIT_REPLY.
 *
 * A role adds every key it has of that router, with its state and the blocks claimed or promised
 * for it. A block that several keys share is counted with each of them, and those of the prefix
 * cache with none: so the sum over all routers' entries is at least the ledger's leased, running
 * and quarantined. Pure. One thread. */

#include "common/worker/role.h"

typedef struct pd_audit {
    uint64_t router;
    pd_audit_entry *entries; /* [entries_max] */
    uint32_t entries_count, entries_max;
    uint64_t *waits_for; /* [waits_max] */
    uint32_t waits_count, waits_max;
    uint32_t left_out; /* entries without a place: the reply is not whole */
} pd_audit;

/* Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_audit_init(pd_audit *audit, uint32_t entries_max, uint32_t waits_max);
void pd_audit_fini(pd_audit *audit);

/* A new question; then the role adds what it has. */
void pd_audit_begin(pd_audit *audit, uint64_t router);
/* Keys of other routers are left out. */
void pd_audit_add(pd_audit *audit, const pd_request_key *key, pd_audit_state state,
                  uint32_t blocks);
/* Quarantined for a router that is lost: any router may ask the sender for its last word. One too
 * many is named in a later reply. */
void pd_audit_add_left(pd_audit *audit, const pd_request_key *key, uint32_t blocks);
/* Blocks are quarantined until the end of that incarnation, whoever they were leased for. */
void pd_audit_wait_for(pd_audit *audit, uint64_t incarnation);
/* The answer. One that is not whole is not sent (logged): what is left out would be taken for
 * lost. */
void pd_audit_send(pd_audit *audit, const pd_role_options *options, const pd_role_sink *sink,
                   uint32_t serial, pd_ledger ledger);

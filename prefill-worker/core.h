#pragma once

/* prefill-worker/core.h - what the modules of this room share: the role's core, which no one else
 * sees inside. One thread. */

#include "common/worker/blocks.h"
#include "common/worker/key_table.h"
#include "common/worker/source.h"
#include "common/worker/token_batch.h"
#include "prefill-worker/pull.h"

struct pd_role_core {
    pd_role_options options;
    pd_role_sink sink;
    pd_blocks blocks;
    pd_routers routers;
    pd_links links;
    pd_cost cost;
    pd_prefill_queue queue;
    pd_key_table *by_key;         /* requests */
    pd_key_table *by_ticket;      /* the same, under {0, ticket, 0} */
    prefill_request *head, *tail; /* of all, oldest first */
    uint64_t ticket_next;
    pd_token_batch tokens;
    pd_step step;
    pd_step_slice *slices;    /* [max_batch] */
    pd_prefill_item **picked; /* [max_batch] */
    bool stepping, draining;
    bool ship_waits; /* the carrier had no room for a shipment */
    uint64_t steps_done;
    pd_last_words words;
    prefill_pulls pulls;
    pd_source source; /* of blocks that others ask for */
    pd_audit audit;
    pd_role_counters counters;
};

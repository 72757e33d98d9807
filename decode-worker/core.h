#pragma once

/* decode-worker/core.h - what the modules of this room share: the role's core, which no one else
 * sees inside. One thread. */

#include "common/worker/blocks.h"
#include "common/worker/source.h"
#include "common/worker/token_batch.h"
#include "common/worker/writers.h"
#include "decode-worker/admit.h"
#include "decode-worker/speculate.h"

struct pd_role_core {
    pd_role_options options;
    pd_role_sink sink;
    pd_blocks blocks;
    pd_routers routers;
    pd_cost cost;
    pd_lease_table *leases;
    decode_admit admit;
    decode_batch batch;
    pd_lander lander;
    decode_sequence *sequences; /* list of all, quarantined ones included */
    uint32_t live;              /* of them, not given up */
    pd_writers writers;
    decode_room room;
    pd_links links; /* to whom blocks are shipped, on demand */
    pd_last_words words;
    pd_source source;
    pd_audit audit;
    pd_token_batch tokens;
    pd_step step;
    pd_step_slice *slices; /* [max_batch] */
    bool stepping, draining;
    decode_spec spec;
    uint64_t drafted_ns; /* when the draft model began for the step under way; 0: it did not */
    uint64_t steps_done;
    pd_role_counters counters;
};

/* The sequence with that key, given up or not; NULL: none. */
decode_sequence *decode_find(const pd_role_core *core, const pd_request_key *key);
/* Neither given up nor about to be. */
bool decode_alive(const decode_sequence *s);
/* The router hears that it failed, and why. */
void decode_say_failed(pd_role_core *core, const pd_request_key *key, const char *id,
                       pd_status status, const char *reason);
/* No further steps; all is given back that can be, now or when the step under way is over. s may be
 * gone afterwards, also after what follows. */
void decode_give_up(pd_role_core *core, decode_sequence *s);
void decode_fail(pd_role_core *core, decode_sequence *s, pd_status status, const char *reason);
/* A quarantine ends when nobody writes and nobody reads. */
void decode_settle(pd_role_core *core, decode_sequence *s);
/* Its KV is whole: it joins the batch. */
void decode_join(pd_role_core *core, decode_sequence *s, uint64_t now_ns);
/* The next step, if none is under way and there is something to run. */
void decode_run_step(pd_role_core *core, uint64_t now_ns);

#pragma once

/* common/kv/lease.h - a decode worker's promises: whose blocks these are, until when, and whether
 * somebody else may still write into them.
 *
 *   granted      a count of blocks is promised; none is bound yet
 *   landing      bound: the held prefix is pinned, the rest is claimed, a sender may write
 *   landed       everything is there (or nobody was to send anything); nobody writes any more
 *   running      the sequence is in the batch
 *   quarantined  given up while landing: the sender may still write, so that the landing blocks
 *                stay taken until it acknowledges or is known to be dead or cut off
 *
 * Time alone never frees a block that is landing. A lease is named by request and epoch (a retry of
 * the same request has another epoch). All memory is taken at creation. Pure: times are arguments.
 * One thread at a time. */

#include "common/kv/prefix_cache.h"

typedef struct pd_lease_table pd_lease_table;

typedef enum pd_lease_state {
    PD_LEASE_GRANTED,
    PD_LEASE_LANDING,
    PD_LEASE_LANDED,
    PD_LEASE_RUNNING,
    PD_LEASE_QUARANTINED,
} pd_lease_state;

/* Read only for users; valid until the lease ends. */
typedef struct pd_lease {
    uint64_t request;
    uint32_t epoch;
    pd_lease_state state;
    uint64_t owner;   /* the router's id */
    uint64_t prefill; /* incarnation of who writes; 0: nobody */
    uint64_t expiry_ns;
    uint32_t promised;     /* blocks, while granted; 0 afterwards */
    uint32_t held;         /* leading blocks that were cached when bound; 0 once quarantined */
    uint32_t blocks_count; /* 0 while granted; once quarantined, the landing ones alone */
    pd_block *blocks;      /* [blocks_count], in the sequence's order */
    void *user;            /* the caller's; NULL when granted */
} pd_lease;

/* cache is borrowed and must live longer; blocks_max bounds the blocks of one lease.
 * Errors: PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status pd_lease_table_create(pd_prefix_cache *cache, uint32_t leases_max,
                                           uint32_t blocks_max, pd_lease_table **table_out);
/* Claims of leases still there are not given back: the pool ends with the table. */
void pd_lease_table_destroy(pd_lease_table *table);

/* Blocks that may still be promised: the cache's room less what is promised already. */
uint32_t pd_lease_room(const pd_lease_table *table);

typedef struct pd_lease_grant_args {
    uint64_t request;
    uint32_t epoch;
    uint64_t owner;
    uint64_t prefill; /* 0: nobody will write */
    uint32_t blocks;  /* in all, held ones included */
    uint64_t expiry_ns;
} pd_lease_grant_args;

/* Errors: PD_E_OVERLOAD (no room, or leases_max), PD_E_TOO_LARGE (blocks_max), PD_E_INVALID (there
 * is a lease of that name, or 0 blocks). */
PD_CHECKED pd_status pd_lease_grant(pd_lease_table *table, const pd_lease_grant_args *args,
                                    pd_lease **lease_out);
/* Granted to landing (landed when prefill is 0): pins what is cached of hashes[hashes_count]
 * (hashes_count <= promised) and claims the rest of the promised blocks. PD_E_OVERLOAD: there is
 * less room than was promised, since blocks were claimed past pd_lease_room; the lease stays
 * granted. */
PD_CHECKED pd_status pd_lease_bind(pd_lease_table *table, pd_lease *lease, const pd_hash128 *hashes,
                                   uint32_t hashes_count);
/* Landing to landed: the sender said that it is done and everything was checked. */
void pd_lease_landed(pd_lease_table *table, pd_lease *lease);
/* Landed to running. */
void pd_lease_run(pd_lease_table *table, pd_lease *lease);
/* Running: adds count blocks, in a run with its last one where that is free. What others were
 * promised is not given away. Errors: PD_E_OVERLOAD (no room now), PD_E_TOO_LARGE (blocks_max). */
PD_CHECKED pd_status pd_lease_grow(pd_lease_table *table, pd_lease *lease, uint32_t count);
/* The caller is done with it, whatever its state. Landing becomes quarantined (held blocks are let
 * go, the lease stays in the table) and true is returned; else all blocks are let go, the lease is
 * gone, and false is returned. A quarantined one is left alone: true. */
bool pd_lease_release(pd_lease_table *table, pd_lease *lease);

/* NULL: there is none. */
pd_lease *pd_lease_find(const pd_lease_table *table, uint64_t request, uint32_t epoch);
/* A later expiry; an earlier one is ignored. */
void pd_lease_renew(pd_lease *lease, uint64_t expiry_ns);
/* All leases: *cursor starts at 0; NULL at the end. The lease just returned may be released. */
pd_lease *pd_lease_next(const pd_lease_table *table, uint32_t *cursor);

/* The sender acknowledged that it will write no more: ends the quarantine, if that is its state.
 * False: it is not quarantined, or there is no such lease. */
bool pd_lease_sender_acked(pd_lease_table *table, uint64_t request, uint32_t epoch);

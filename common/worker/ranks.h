#pragma once

/* common/worker/ranks.h - the other processes of a tensor-parallel worker.
 *
 * Rank 0 is the worker: it has the links, the pool's leases and the router. Ranks 1 .. are further
 * processes of the same executable that compute and nothing else. All map one memory file (memfd):
 * the engine's shared memory and, unless it is the engine's own, the KV pool. Each of them has a
 * line (a socket) to rank 0, on which it says that it is ready, and where it is; it ends when the
 * line does, and the kernel kills it when rank 0 dies. Signals are blocked in them as in rank 0's
 * other threads: rank 0 says when they end.
 *
 * One thread. */

#include "common/base/status.h"
#include "common/worker/placement.h"

#include <stddef.h>
#include <stdint.h>

#define PD_RANKS_MAX 64

typedef struct pd_ranks pd_ranks;

/* What ranks must have in common, besides their executable. */
typedef struct pd_ranks_memory {
    uint32_t ranks;
    uint64_t shared_bytes;
    uint64_t pool_bytes; /* 0: it lies elsewhere */
    uint64_t agreement;  /* a hash of all that they must have read alike */
} pd_ranks_memory;

/* What an engine is given of them. */
typedef struct pd_rank_place {
    uint32_t rank, ranks;
    void *shared; /* [shared_bytes], page-aligned, zeroed before the first came */
    uint64_t shared_bytes;
    const int *pidfds; /* rank 0: [ranks - 1], of ranks 1 ..; else NULL */
} pd_rank_place;

/* ---- rank 0 ---- */

/* Makes the memory and starts the processes, with arguments [count] and then "--rank R/N --leader
 * PID". Errors are logged: PD_E_NOMEM (also: more than the machine has), PD_E_IO. */
PD_CHECKED pd_status pd_ranks_create(const pd_ranks_memory *memory, const char *const *arguments,
                                     size_t count, pd_ranks **ranks_out);
/* Ends those that still run, waits for them. The memory stays until destroy. NULL is fine. */
void pd_ranks_end(pd_ranks *ranks);
void pd_ranks_destroy(pd_ranks *ranks); /* likewise, and ends the memory */

pd_rank_place pd_ranks_place(const pd_ranks *ranks);
void *pd_ranks_pool(const pd_ranks *ranks); /* page-aligned; NULL: it lies elsewhere */
uint32_t pd_ranks_count(const pd_ranks *ranks);
/* Of rank r, 1 .. count - 1. The descriptor is readable once the process has ended. */
int pd_ranks_pidfd(const pd_ranks *ranks, uint32_t rank);
int64_t pd_ranks_pid(const pd_ranks *ranks, uint32_t rank);

/* Waits until all are ready. PD_E_IO: one has ended (logged). */
PD_CHECKED pd_status pd_ranks_wait(pd_ranks *ranks);
/* Where rank r, 1 .. count - 1, runs: as it said when it was ready (pd_ranks_wait was PD_OK). */
const pd_placement *pd_ranks_placement(const pd_ranks *ranks, uint32_t rank);
/* False: all run. True: one has ended, which is logged: its rank, pid, and signal or status. */
bool pd_ranks_ended(pd_ranks *ranks);

/* ---- the others ---- */

typedef struct pd_rank_start {
    uint32_t rank, ranks;
    int64_t leader; /* pid */
} pd_rank_start;

/* "1/4" and "1234", as pd_ranks_create gives them. PD_E_INVALID. */
PD_CHECKED pd_status pd_rank_start_parse(const char *rank, const char *leader,
                                         pd_rank_start *start_out);
/* First of all: from here on this process ends with rank 0. PD_E_IO (logged). */
PD_CHECKED pd_status pd_rank_bind_life(const pd_rank_start *start);
/* Maps the memory, which must be as rank 0 made it; *pool_out as pd_ranks_pool. Errors are logged:
 * PD_E_MISMATCH, PD_E_NOMEM. */
PD_CHECKED pd_status pd_rank_attach(const pd_rank_start *start, const pd_ranks_memory *memory,
                                    pd_rank_place *place_out, void **pool_out);
/* placement: where it runs. PD_E_IO (logged). */
PD_CHECKED pd_status pd_rank_say_ready(const pd_placement *placement);

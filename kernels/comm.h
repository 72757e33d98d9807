#pragma once

/* kernels/comm.h - what the ranks of a tensor-parallel worker on one host share: memory, and a
 * barrier.
 *
 * Each rank is a process with the same zeroed memory mapped. All create a comm over it and take
 * parts of it in the same order, so that what one calls its n-th part is everybody's. A barrier
 * waits for all of them; what each wrote to shared memory before is seen by all after.
 *
 * One thread of a process at a time. Rank 0 watches the others: when one of them has ended, its
 * barriers fail; and one that stands still (stopped, hung) is killed when rank 0 has waited for it
 * too long. Ranks above 0 wait without end; their owner ends them when rank 0 is gone.
 *
 * Too long is still_ns and STILL_TIMES times what this step has cost rank 0 itself so far, in CPU
 * time: all ranks have the same share of it, so that a long step is waited for long. Only time in
 * which rank 0 was awake counts: when all are stopped and go on, whatever the pause, nobody is
 * late.
 *
 * Ranks whose devices exchange by themselves (kernels/cuda/comm) wait for each other there, where
 * no barrier sees it. These say how far each has come, and rank 0 judges by that
 * (kern_comm_come). */

#include "common/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KERN_RANKS_MAX   64
#define KERN_STILL_TIMES 20

typedef struct kern_comm kern_comm;

typedef struct kern_comm_options {
    uint32_t rank, ranks; /* ranks: 2 .. KERN_RANKS_MAX */
    void *memory; /* [bytes], 64-byte aligned, zeroed before the first rank comes; borrowed */
    uint64_t bytes;
    const int *pidfds; /* rank 0: [ranks - 1], of ranks 1 ..; copied. NULL: nobody is watched */
    uint64_t still_ns; /* 0: whoever lives is waited for */
} kern_comm_options;

/* Errors: PD_E_NOMEM. */
PD_CHECKED pd_status kern_comm_create(const kern_comm_options *options, kern_comm **comm_out);
void kern_comm_destroy(kern_comm *comm); /* NULL is fine */

uint32_t kern_comm_rank(const kern_comm *comm);
uint32_t kern_comm_ranks(const kern_comm *comm);

/* The next bytes of the shared memory, 64-byte aligned; they must be there (pd_assert). */
void *kern_comm_take(kern_comm *comm, uint64_t bytes);
/* What takes of such sizes need of the memory in all, the comm's own included: each rounded up. */
#define KERN_COMM_ALIGNMENT 64
static inline uint64_t kern_comm_round(uint64_t bytes)
{
    return (bytes + KERN_COMM_ALIGNMENT - 1) / KERN_COMM_ALIGNMENT * KERN_COMM_ALIGNMENT;
}
uint64_t kern_comm_own_bytes(void);

/* Rank 0, on the thread that will wait in barriers: here a step begins. Before the first nobody is
 * too late. */
void kern_comm_begin(kern_comm *comm);
/* Why no barrier succeeds any more, where a rank stood still; else NULL. Rank 0, any thread; until
 * the comm's end. */
const char *kern_comm_why(const kern_comm *comm);
/* True: all ranks were here, whatever one of them has done since. False, from then on: a rank is
 * gone, or kern_comm_end was called, before that. */
bool kern_comm_barrier(kern_comm *comm);
/* Of exchanges that are no barriers, which all ranks number alike, ever higher: this rank has come
 * to that one, and may have to wait in it. True: all have. Said again and again meanwhile: so
 * rank 0 knows how long it has waited there. Who has not come in still_ns, and as much time again
 * as rank 0 itself took from the step's begin to there, is killed as at a barrier. On the thread of
 * the barriers. */
bool kern_comm_come(kern_comm *comm, uint32_t exchange);
/* No barrier succeeds any more, at any rank: those that wait return. Any thread. */
void kern_comm_end(kern_comm *comm);
/* True: no barrier succeeds any more. Looks, does not wait; on the thread of the barriers. */
bool kern_comm_ended(kern_comm *comm);

/* The calls above for a plugin, which has its own copies of what it uses: a comm is known to the
 * copy alone that made it. */
typedef struct kern_comm_calls {
    void *(*take)(kern_comm *comm, uint64_t bytes);
    bool (*barrier)(kern_comm *comm);
    void (*end)(kern_comm *comm);
    bool (*ended)(kern_comm *comm);
    bool (*come)(kern_comm *comm, uint32_t exchange);
} kern_comm_calls;
extern const kern_comm_calls kern_comm_calls_here;

#pragma once

/* tests/unit/kernels/rank_processes.h - a case of a test whose tensor-parallel ranks are processes.
 *
 * A case is a process that starts the other ranks and is rank 0, so that nothing of a case
 * (devices, threads) is open in a process that forks. In it cmocka is not: NEED ends the process,
 * and the test fails. */

#include "kernels/comm.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define RANK_PROCESSES_MAX 8
#define RANK_SKIPPED                                                                               \
    77 /* rank 0 exits so: there is nothing to test with, and the test exits so                    \
        */

typedef struct rank_process {
    uint32_t rank, ranks;
    kern_comm *comm; /* NULL: it is alone */
    const void *ctx;
    pid_t pids[RANK_PROCESSES_MAX]; /* rank 0: of ranks 1 .. */
} rank_process;

/* What each rank does; its process ends, well, when it returns. */
typedef void rank_process_body(rank_process *process);

/* body in a process for each rank; ends the test unless rank 0 ends well. bytes: of the comm's
 * memory, its own included. name: of the case, for the failure. */
void rank_processes_run(const char *name, uint32_t ranks, uint64_t bytes, rank_process_body *body,
                        const void *ctx);
/* The same; a rank that stands still in a step is killed after that (kern_comm_options.still_ns).
 */
void rank_processes_run_judged(const char *name, uint32_t ranks, uint64_t bytes, uint64_t still_ns,
                               rank_process_body *body, const void *ctx);
/* Rank 0: waits until the others have ended, which they have to well, or by SIGKILL. */
void rank_processes_await(const rank_process *process);

#define NEED(condition) rank_process_need((condition), #condition, __FILE__, __LINE__)
void rank_process_need(bool holds, const char *what, const char *file, int line);

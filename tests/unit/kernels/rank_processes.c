#include "tests/unit/kernels/rank_processes.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

void rank_process_need(bool holds, const char *what, const char *file, int line)
{
    if (holds)
        return;
    fprintf(stderr, "%s:%d: pid %d: %s does not hold\n", file, line, (int)getpid(), what);
    _exit(1);
}

static void run_rank(rank_process *process, kern_comm_options *options, rank_process_body *body)
{
    options->rank = process->rank;
    if (process->ranks > 1)
        NEED(kern_comm_create(options, &process->comm) == PD_OK);
    body(process);
    kern_comm_destroy(process->comm);
    _exit(0);
}

static void run_case(rank_process *process, uint64_t bytes, uint64_t still_ns,
                     rank_process_body *body)
{
    int pidfds[RANK_PROCESSES_MAX];
    kern_comm_options options = {
        .ranks = process->ranks,
        .bytes = bytes,
        .still_ns = still_ns,
        .memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)};

    NEED(options.memory != MAP_FAILED && process->ranks <= RANK_PROCESSES_MAX);
    for (uint32_t rank = 1; rank < process->ranks; rank++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            process->rank = rank;
            run_rank(process, &options, body);
        }
        process->pids[rank] = pid;
        pidfds[rank - 1] = (int)syscall(SYS_pidfd_open, pid, 0);
        NEED(pidfds[rank - 1] >= 0);
    }
    options.pidfds = pidfds;
    run_rank(process, &options, body);
}

void rank_processes_run(const char *name, uint32_t ranks, uint64_t bytes, rank_process_body *body,
                        const void *ctx)
{
    rank_processes_run_judged(name, ranks, bytes, 0, body, ctx);
}

void rank_processes_run_judged(const char *name, uint32_t ranks, uint64_t bytes, uint64_t still_ns,
                               rank_process_body *body, const void *ctx)
{
    rank_process process = {.ranks = ranks, .ctx = ctx};
    int status = -1;

    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        run_case(&process, bytes, still_ns, body);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == RANK_SKIPPED)
        exit(RANK_SKIPPED);
    if (status != 0)
        fail_msg("%s, %u ranks: rank 0 ended with status %x", name, ranks, (unsigned)status);
}

void rank_processes_await(const rank_process *process)
{
    for (uint32_t rank = 1; process->rank == 0 && rank < process->ranks; rank++) {
        int status = -1;
        while (waitpid(process->pids[rank], &status, 0) < 0 && errno == EINTR)
            ;
        NEED((WIFEXITED(status) && WEXITSTATUS(status) == 0) ||
             (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    }
}

#include "common/worker/ranks.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE  4096
#define MAGIC 0x6b765250u /* "kvRP" */

/* The descriptors of a started rank, and from where on rank 0 keeps those that it hands over. */
enum { MEMORY_FD = 3, LINE_FD = 4, HANDED_FD_MIN = 16 };
enum { END_WAIT_MS = 2000, ARGUMENTS_MAX = 320 };

extern char **environ;

/* The memory's first page. */
typedef struct header {
    uint32_t magic, ranks;
    uint64_t shared_bytes, pool_bytes, agreement;
} header;

typedef struct rank_process {
    pid_t pid; /* 0: not started, or waited for */
    int pidfd, line;
    uint32_t said; /* bytes of its place; all: it is ready */
    pd_placement placement;
} rank_process;

struct pd_ranks {
    pd_ranks_memory memory;
    int fd;
    unsigned char *base;
    int pidfds[PD_RANKS_MAX];           /* [ranks - 1]: what an engine is given */
    rank_process process[PD_RANKS_MAX]; /* [rank]; 0 is unused */
};

/* ---- the memory ---- */

static uint64_t pages(uint64_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static uint64_t pool_at(const pd_ranks_memory *memory)
{
    return PAGE + pages(memory->shared_bytes);
}

static uint64_t bytes_of(const pd_ranks_memory *memory)
{
    return pool_at(memory) + pages(memory->pool_bytes);
}

static void *map(int fd, uint64_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED) {
        pd_log_error("msg=\"the ranks' memory cannot be mapped: %m\" bytes=%llu",
                     (unsigned long long)bytes);
        return NULL;
    }
    (void)madvise(base, bytes, MADV_HUGEPAGE); /* slower without, but right */
    return base;
}

static pd_status make_memory(pd_ranks *r)
{
    uint64_t bytes = bytes_of(&r->memory);
    uint64_t machine_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);

    /* the kernel would promise more than there is, and end the process when it is used */
    if (bytes > machine_bytes) {
        pd_log_error("msg=\"no memory for the ranks and their KV pool\" bytes=%llu "
                     "machine_bytes=%llu",
                     (unsigned long long)bytes, (unsigned long long)machine_bytes);
        return PD_E_NOMEM;
    }
    int fd = memfd_create("kvferry-ranks", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        pd_log_error("msg=\"no memory file for the ranks: %m\" bytes=%llu",
                     (unsigned long long)bytes);
        if (fd >= 0)
            close(fd);
        return PD_E_IO;
    }
    r->fd = fcntl(fd, F_DUPFD_CLOEXEC, HANDED_FD_MIN);
    close(fd);
    if (r->fd < 0) {
        pd_log_error("msg=\"no descriptor for the ranks' memory: %m\"");
        return PD_E_IO;
    }
    r->base = map(r->fd, bytes);
    if (r->base == NULL)
        return PD_E_NOMEM;
    *(header *)r->base = (header){.magic = MAGIC,
                                  .ranks = r->memory.ranks,
                                  .shared_bytes = r->memory.shared_bytes,
                                  .pool_bytes = r->memory.pool_bytes,
                                  .agreement = r->memory.agreement};
    return PD_OK;
}

/* ---- starting ---- */

static int spawn(const pd_ranks *r, uint32_t rank, int line, const char *const *arguments,
                 size_t count, pid_t *pid_out)
{
    const char *argv[ARGUMENTS_MAX];
    char number[32], leader[32];
    posix_spawn_file_actions_t actions;
    size_t n = 0;

    pd_assert(count + 5 <= ARGUMENTS_MAX);
    for (; n < count; n++)
        argv[n] = arguments[n];
    snprintf(number, sizeof number, "%u/%u", rank, r->memory.ranks);
    snprintf(leader, sizeof leader, "%lld", (long long)getpid());
    argv[n++] = "--rank";
    argv[n++] = number;
    argv[n++] = "--leader";
    argv[n++] = leader;
    argv[n] = NULL;
    int error = posix_spawn_file_actions_init(&actions);
    if (error != 0)
        return error;
    error = posix_spawn_file_actions_adddup2(&actions, r->fd, MEMORY_FD);
    if (error == 0)
        error = posix_spawn_file_actions_adddup2(&actions, line, LINE_FD);
    /* the argument strings are not written */
    if (error == 0)
        error =
            posix_spawn(pid_out, "/proc/self/exe", &actions, NULL, (char *const *)argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    return error;
}

static pd_status start_rank(pd_ranks *r, uint32_t rank, const char *const *arguments, size_t count)
{
    rank_process *process = &r->process[rank];
    int ends[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        pd_log_error("msg=\"no line to a rank: %m\" rank=%u", rank);
        return PD_E_IO;
    }
    process->line = ends[0];
    int theirs = fcntl(ends[1], F_DUPFD_CLOEXEC, HANDED_FD_MIN);
    int error = theirs < 0 ? errno : spawn(r, rank, theirs, arguments, count, &process->pid);
    close(ends[1]);
    if (theirs >= 0)
        close(theirs);
    if (error == 0) {
        process->pidfd = (int)syscall(SYS_pidfd_open, process->pid, 0);
        error = process->pidfd < 0 ? errno : 0;
    }
    if (error != 0) {
        errno = error;
        pd_log_error("msg=\"a rank cannot be started: %m\" rank=%u", rank);
        return PD_E_IO;
    }
    r->pidfds[rank - 1] = process->pidfd;
    return PD_OK;
}

pd_status pd_ranks_create(const pd_ranks_memory *memory, const char *const *arguments, size_t count,
                          pd_ranks **ranks_out)
{
    pd_assert(memory->ranks >= 2 && memory->ranks <= PD_RANKS_MAX);
    pd_ranks *r = pd_calloc(1, sizeof *r);

    if (r == NULL)
        return PD_E_NOMEM;
    r->memory = *memory;
    r->fd = -1;
    for (uint32_t rank = 1; rank < memory->ranks; rank++)
        r->process[rank].line = r->process[rank].pidfd = -1;
    pd_status status = make_memory(r);
    for (uint32_t rank = 1; status == PD_OK && rank < memory->ranks; rank++)
        status = start_rank(r, rank, arguments, count);
    if (status != PD_OK) {
        pd_ranks_destroy(r);
        return status;
    }
    *ranks_out = r;
    return PD_OK;
}

/* ---- ending ---- */

static void end_rank(rank_process *process)
{
    struct pollfd ended = {.fd = process->pidfd, .events = POLLIN};

    if (process->line >= 0)
        close(process->line); /* by which it hears of it */
    process->line = -1;
    if (process->pid != 0) {
        if (process->pidfd < 0 || poll(&ended, 1, END_WAIT_MS) <= 0)
            kill(process->pid, SIGKILL);
        while (waitpid(process->pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    process->pid = 0;
    if (process->pidfd >= 0)
        close(process->pidfd);
    process->pidfd = -1;
}

void pd_ranks_end(pd_ranks *r)
{
    for (uint32_t rank = 1; r != NULL && rank < r->memory.ranks; rank++)
        end_rank(&r->process[rank]);
}

void pd_ranks_destroy(pd_ranks *r)
{
    if (r == NULL)
        return;
    pd_ranks_end(r);
    if (r->base != NULL)
        munmap(r->base, bytes_of(&r->memory));
    if (r->fd >= 0)
        close(r->fd);
    pd_free(r);
}

pd_rank_place pd_ranks_place(const pd_ranks *r)
{
    return (pd_rank_place){.ranks = r->memory.ranks,
                           .shared = r->base + PAGE,
                           .shared_bytes = r->memory.shared_bytes,
                           .pidfds = r->pidfds};
}

void *pd_ranks_pool(const pd_ranks *r)
{
    return r->memory.pool_bytes == 0 ? NULL : r->base + pool_at(&r->memory);
}

uint32_t pd_ranks_count(const pd_ranks *r)
{
    return r->memory.ranks;
}

int pd_ranks_pidfd(const pd_ranks *r, uint32_t rank)
{
    pd_assert(rank > 0 && rank < r->memory.ranks);
    return r->process[rank].pidfd;
}

int64_t pd_ranks_pid(const pd_ranks *r, uint32_t rank)
{
    pd_assert(rank > 0 && rank < r->memory.ranks);
    return r->process[rank].pid;
}

static bool is_ready(const rank_process *process)
{
    return process->said == sizeof process->placement;
}

/* The same executable wrote it, so it is a placement as this process has it. */
static void listen_to(rank_process *process)
{
    ssize_t n = read(process->line, (char *)&process->placement + process->said,
                     sizeof process->placement - process->said);

    if (n > 0)
        process->said += (uint32_t)n;
}

bool pd_ranks_ended(pd_ranks *r)
{
    for (uint32_t rank = 1; rank < r->memory.ranks; rank++) {
        rank_process *process = &r->process[rank];
        siginfo_t how = {0};
        if (process->pid == 0)
            return true;
        /* it stays a zombie, so that its pid stays its own until destroy */
        if (waitid(P_PID, (id_t)process->pid, &how, WEXITED | WNOHANG | WNOWAIT) != 0 ||
            how.si_pid == 0)
            continue;
        if (how.si_code == CLD_EXITED)
            pd_log_error("msg=\"a tensor-parallel rank ended, and its worker with it\" rank=%u "
                         "pid=%lld exit_status=%d",
                         rank, (long long)process->pid, how.si_status);
        else
            pd_log_error("msg=\"a tensor-parallel rank was killed, and its worker ends with it\" "
                         "rank=%u pid=%lld signal=%d name=\"%s\"",
                         rank, (long long)process->pid, how.si_status, strsignal(how.si_status));
        return true;
    }
    return false;
}

const pd_placement *pd_ranks_placement(const pd_ranks *r, uint32_t rank)
{
    pd_assert(rank > 0 && rank < r->memory.ranks && is_ready(&r->process[rank]));
    return &r->process[rank].placement;
}

pd_status pd_ranks_wait(pd_ranks *r)
{
    for (uint32_t rank = 1; rank < r->memory.ranks; rank++) {
        rank_process *process = &r->process[rank];
        struct pollfd fds[PD_RANKS_MAX + 1] = {{.fd = process->line, .events = POLLIN}};
        while (!is_ready(process)) {
            for (uint32_t i = 1; i < r->memory.ranks; i++)
                fds[i] = (struct pollfd){.fd = r->process[i].pidfd, .events = POLLIN};
            if (poll(fds, r->memory.ranks, -1) < 0 && errno != EINTR) {
                pd_log_error("msg=\"ranks cannot be waited for: %m\"");
                return PD_E_IO;
            }
            if (pd_ranks_ended(r))
                return PD_E_IO;
            if ((fds[0].revents & POLLIN) != 0)
                listen_to(process);
        }
    }
    return PD_OK;
}

/* ---- the others ---- */

pd_status pd_rank_start_parse(const char *rank, const char *leader, pd_rank_start *start_out)
{
    pd_rank_start start = {0};
    long long pid = 0;
    int end = 0;

    if (rank == NULL || leader == NULL ||
        sscanf(rank, "%u/%u%n", &start.rank, &start.ranks, &end) != 2 || rank[end] != '\0' ||
        sscanf(leader, "%lld%n", &pid, &end) != 1 || leader[end] != '\0' || pid <= 0 ||
        start.ranks > PD_RANKS_MAX || start.rank == 0 || start.rank >= start.ranks)
        return PD_E_INVALID;
    start.leader = pid;
    *start_out = start;
    return PD_OK;
}

static void *watch_line(void *arg)
{
    char word;

    (void)arg;
    while (read(LINE_FD, &word, 1) < 0 && errno == EINTR)
        ;
    _exit(0); /* rank 0 says nothing: the line is closed */
}

pd_status pd_rank_bind_life(const pd_rank_start *start)
{
    pthread_t thread;

    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != start->leader) {
        pd_log_error("msg=\"a rank without its leader\" rank=%u leader=%lld", start->rank,
                     (long long)start->leader);
        return PD_E_IO;
    }
    int error = pthread_create(&thread, NULL, watch_line, NULL);
    if (error != 0) {
        errno = error;
        pd_log_error("msg=\"a rank cannot watch its line: %m\" rank=%u", start->rank);
        return PD_E_IO;
    }
    pthread_detach(thread);
    return PD_OK;
}

pd_status pd_rank_attach(const pd_rank_start *start, const pd_ranks_memory *memory,
                         pd_rank_place *place_out, void **pool_out)
{
    uint64_t bytes = bytes_of(memory);
    struct stat file;

    if (fstat(MEMORY_FD, &file) != 0 || (uint64_t)file.st_size != bytes) {
        pd_log_error(
            "msg=\"a rank and its leader do not agree on their memory\" rank=%u bytes=%llu",
            start->rank, (unsigned long long)bytes);
        return PD_E_MISMATCH;
    }
    unsigned char *base = map(MEMORY_FD, bytes);
    if (base == NULL)
        return PD_E_NOMEM;
    header head = *(const header *)base;
    if (head.magic != MAGIC || head.ranks != memory->ranks ||
        head.shared_bytes != memory->shared_bytes || head.pool_bytes != memory->pool_bytes ||
        head.agreement != memory->agreement) {
        pd_log_error("msg=\"a rank and its leader have read another deployment or model\" rank=%u",
                     start->rank);
        munmap(base, bytes);
        return PD_E_MISMATCH;
    }
    *place_out = (pd_rank_place){.rank = start->rank,
                                 .ranks = start->ranks,
                                 .shared = base + PAGE,
                                 .shared_bytes = memory->shared_bytes};
    *pool_out = memory->pool_bytes == 0 ? NULL : base + pool_at(memory);
    return PD_OK;
}

pd_status pd_rank_say_ready(const pd_placement *placement)
{
    /* a new socket has room for so little */
    if (write(LINE_FD, placement, sizeof *placement) == (ssize_t)sizeof *placement)
        return PD_OK;
    pd_log_error("msg=\"a rank cannot say that it is ready: %m\"");
    return PD_E_IO;
}

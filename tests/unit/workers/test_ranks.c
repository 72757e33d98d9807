/* The processes of a tensor-parallel worker: ranks above 0 are this very executable, started with
 * --rank, and do what the word before that says. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/worker/ranks.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/kv/cmocka_all.h"

enum { SHARED = 5000, POOL = 10000, AGREEMENT = 77 };

/* What lies in the shared memory, for ranks to write and rank 0 to read. */
typedef struct board {
    atomic_int pid[PD_RANKS_MAX];
    atomic_int zeroed; /* ranks that found all else zero */
    atomic_int go;
} board;

static const pd_ranks_memory memory_of_three = {
    .ranks = 3, .shared_bytes = SHARED, .pool_bytes = POOL, .agreement = AGREEMENT};

/* ---- the ranks' side ---- */

static int rank_main(const char *what, const char *rank, const char *leader)
{
    pd_ranks_memory memory = memory_of_three;
    pd_rank_start start;
    pd_rank_place place;
    void *pool = NULL;

    if (pd_rank_start_parse(rank, leader, &start) != PD_OK)
        return 40;
    if (strcmp(what, "exits") == 0 && start.rank == 2)
        return 41;
    if (strcmp(what, "orphan") == 0)
        start.leader = 1; /* which did not start it */
    if (pd_rank_bind_life(&start) != PD_OK)
        return 42;
    if (strcmp(what, "differs") == 0)
        memory.agreement++;
    if (strcmp(what, "larger") == 0)
        memory.pool_bytes += 4096;
    pd_status status = pd_rank_attach(&start, &memory, &place, &pool);
    if (status != PD_OK)
        return status == PD_E_MISMATCH ? 43 : 44;
    board *b = place.shared;
    const unsigned char *bytes = pool;
    bool zeroed = place.shared_bytes == SHARED && place.rank == start.rank && place.ranks == 3;
    for (int i = 0; i < POOL; i++)
        zeroed = zeroed && (bytes[i] == 0 || i < 3);
    atomic_fetch_add(&b->zeroed, zeroed);
    atomic_store(&b->pid[start.rank], getpid());
    ((unsigned char *)pool)[start.rank] = (unsigned char)start.rank;
    pd_placement placement = {.numa_node = (int)start.rank, .bound = true};
    snprintf(placement.bus, sizeof placement.bus, "0000:1b:00.%u", start.rank);
    if (pd_rank_say_ready(&placement) != PD_OK)
        return 45;
    for (;;)
        pause(); /* its line ends it */
}

/* ---- rank 0's ---- */

static pd_ranks *start(const char *what)
{
    const char *const arguments[] = {"test_ranks", what};
    pd_ranks *ranks = NULL;

    assert_int_equal(pd_ranks_create(&memory_of_three, arguments, 2, &ranks), PD_OK);
    assert_int_equal(pd_ranks_count(ranks), 3);
    return ranks;
}

static bool has_ended(const pd_ranks *ranks, uint32_t rank, int wait_ms)
{
    struct pollfd fd = {.fd = pd_ranks_pidfd(ranks, rank), .events = POLLIN};

    return poll(&fd, 1, wait_ms) > 0;
}

/* No process of that pid is left, not even a zombie. */
static void assert_gone(pid_t pid)
{
    assert_int_equal(kill(pid, 0), -1);
    assert_int_equal(errno, ESRCH);
}

static void ranks_share_their_memory_and_are_ended(void **state)
{
    pd_ranks *ranks = start("serves");
    pd_rank_place place = pd_ranks_place(ranks);
    board *b = place.shared;
    const unsigned char *pool = pd_ranks_pool(ranks);
    pid_t pids[3] = {0};

    (void)state;
    assert_int_equal(place.rank, 0);
    assert_int_equal(place.ranks, 3);
    assert_int_equal(place.shared_bytes, SHARED);
    assert_int_equal((uintptr_t)b % 4096, 0);
    assert_int_equal((uintptr_t)pool % 4096, 0);
    assert_int_equal(pd_ranks_wait(ranks), PD_OK);
    assert_int_equal(pd_ranks_wait(ranks), PD_OK); /* who was ready is */
    assert_false(pd_ranks_ended(ranks));
    assert_int_equal(atomic_load(&b->zeroed), 2);
    for (uint32_t rank = 1; rank < 3; rank++) {
        pids[rank] = atomic_load(&b->pid[rank]);
        assert_int_equal(pids[rank], pd_ranks_pid(ranks, rank));
        assert_int_equal(pool[rank], rank);
        assert_int_equal(place.pidfds[rank - 1], pd_ranks_pidfd(ranks, rank));
        assert_false(has_ended(ranks, rank, 0));
        const pd_placement *placement = pd_ranks_placement(ranks, rank);
        char bus[32];
        snprintf(bus, sizeof bus, "0000:1b:00.%u", rank);
        assert_string_equal(placement->bus, bus);
        assert_int_equal(placement->numa_node, rank);
        assert_true(placement->bound);
    }
    uint64_t begun_ns = pd_clock_now_ns();
    pd_ranks_destroy(ranks);
    assert_true(pd_clock_now_ns() - begun_ns < 2 * PD_NS_PER_S); /* nobody had to be killed */
    assert_gone(pids[1]);
    assert_gone(pids[2]);
}

static void a_rank_that_ends_before_it_is_ready_is_told(void **state)
{
    (void)state;
    pd_ranks *ranks = start("exits");
    pid_t other = (pid_t)pd_ranks_pid(ranks, 1);
    assert_int_equal(pd_ranks_wait(ranks), PD_E_IO);
    assert_true(has_ended(ranks, 2, 0));
    assert_true(pd_ranks_ended(ranks)); /* and again, whenever it is asked */
    pd_ranks_destroy(ranks);
    assert_gone(other);
}

static void a_rank_that_is_killed_is_told(void **state)
{
    (void)state;
    pd_ranks *ranks = start("serves");
    assert_int_equal(pd_ranks_wait(ranks), PD_OK);
    pid_t pid = (pid_t)pd_ranks_pid(ranks, 1);
    kill(pid, SIGKILL);
    assert_true(has_ended(ranks, 1, 10000));
    assert_true(pd_ranks_ended(ranks));
    assert_int_equal(pd_ranks_pid(ranks, 1), pid); /* its own until the end: it is a zombie */
    assert_int_equal(kill(pid, 0), 0);
    assert_false(has_ended(ranks, 2, 0));
    pd_ranks_destroy(ranks);
    assert_gone(pid);
}

static void a_rank_that_stands_still_is_ended_all_the_same(void **state)
{
    (void)state;
    pd_ranks *ranks = start("serves");
    assert_int_equal(pd_ranks_wait(ranks), PD_OK);
    pid_t pid = (pid_t)pd_ranks_pid(ranks, 2);
    siginfo_t how = {0};
    kill(pid, SIGSTOP);
    assert_int_equal(waitid(P_PID, (id_t)pid, &how, WSTOPPED | WNOWAIT), 0);
    assert_false(pd_ranks_ended(ranks)); /* it lives */
    uint64_t begun_ns = pd_clock_now_ns();
    pd_ranks_destroy(ranks);
    assert_true(pd_clock_now_ns() - begun_ns >= 2 * PD_NS_PER_S); /* it had its time */
    assert_gone(pid);
}

static void what_ranks_do_not_agree_on_ends_them(void **state)
{
    static const char *const whats[] = {"differs", "larger", "orphan"};
    static const int statuses[] = {43, 43, 42};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        pd_ranks *ranks = start(whats[i]);
        siginfo_t how = {0};
        assert_int_equal(pd_ranks_wait(ranks), PD_E_IO);
        for (uint32_t rank = 1; rank < 3; rank++) {
            assert_true(has_ended(ranks, rank, 10000));
            assert_int_equal(
                waitid(P_PID, (id_t)pd_ranks_pid(ranks, rank), &how, WEXITED | WNOWAIT), 0);
            assert_int_equal(how.si_code, CLD_EXITED);
            assert_int_equal(how.si_status, statuses[i]);
        }
        pd_ranks_destroy(ranks);
    }
}

static void ranks_do_not_outlive_their_leader(void **state)
{
    int line[2], pids[2] = {0};

    (void)state;
    assert_int_equal(pipe(line), 0);
    pid_t leader = fork();
    assert_true(leader >= 0);
    if (leader == 0) {
        pd_ranks *ranks = start("serves");
        if (pd_ranks_wait(ranks) != PD_OK)
            _exit(1);
        pids[0] = (int)pd_ranks_pid(ranks, 1);
        pids[1] = (int)pd_ranks_pid(ranks, 2);
        if (write(line[1], pids, sizeof pids) != sizeof pids)
            _exit(1);
        for (;;)
            pause();
    }
    assert_int_equal(read(line[0], pids, sizeof pids), sizeof pids);
    kill(pids[0], SIGSTOP); /* one cannot see that its line ends */
    kill(leader, SIGKILL);
    assert_int_equal(waitpid(leader, NULL, 0), leader);
    for (int i = 0; i < 2; i++) {
        int tries = 0;
        for (; tries < 500; tries++) {
            char path[64], stat[256] = "";
            snprintf(path, sizeof path, "/proc/%d/stat", pids[i]);
            FILE *file = fopen(path, "re");
            if (file == NULL)
                break;
            bool read = fgets(stat, sizeof stat, file) != NULL;
            fclose(file);
            if (!read || strstr(stat, ") Z ") != NULL) /* nobody may be there to reap it */
                break;
            usleep(10000);
        }
        assert_true(tries < 500);
    }
    close(line[0]);
    close(line[1]);
}

static void more_memory_than_the_machine_has_is_refused(void **state)
{
    const char *const arguments[] = {"test_ranks", "serves"};
    pd_ranks_memory memory = memory_of_three;
    pd_ranks *ranks = NULL;

    (void)state;
    memory.pool_bytes = 1ull << 50;
    assert_int_equal(pd_ranks_create(&memory, arguments, 2, &ranks), PD_E_NOMEM);
    assert_null(ranks);
}

static void ranks_and_leaders_are_read_strictly(void **state)
{
    static const char *const bad[] = {"",     "1",    "1/",   "/2",   "0/2",  "2/2", "3/2",
                                      "1/2x", "x1/2", "1/65", "-1/2", "1/-2", "1//2"};
    static const char *const bad_leaders[] = {"", "x", "0", "-1", "12x"};
    pd_rank_start parsed = {0};

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(pd_rank_start_parse(bad[i], "12", &parsed), PD_E_INVALID);
    for (size_t i = 0; i < sizeof bad_leaders / sizeof *bad_leaders; i++)
        assert_int_equal(pd_rank_start_parse("1/2", bad_leaders[i], &parsed), PD_E_INVALID);
    assert_int_equal(pd_rank_start_parse(NULL, "12", &parsed), PD_E_INVALID);
    assert_int_equal(pd_rank_start_parse("1/2", NULL, &parsed), PD_E_INVALID);
    assert_int_equal(parsed.ranks, 0); /* untouched */
    assert_int_equal(pd_rank_start_parse("63/64", "1234567", &parsed), PD_OK);
    assert_int_equal(parsed.rank, 63);
    assert_int_equal(parsed.ranks, 64);
    assert_int_equal(parsed.leader, 1234567);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_share_their_memory_and_are_ended),
        cmocka_unit_test(a_rank_that_ends_before_it_is_ready_is_told),
        cmocka_unit_test(a_rank_that_is_killed_is_told),
        cmocka_unit_test(a_rank_that_stands_still_is_ended_all_the_same),
        cmocka_unit_test(what_ranks_do_not_agree_on_ends_them),
        cmocka_unit_test(ranks_do_not_outlive_their_leader),
        cmocka_unit_test(more_memory_than_the_machine_has_is_refused),
        cmocka_unit_test(ranks_and_leaders_are_read_strictly),
    };

    pd_log_init("test", PD_LOG_ERROR);
    if (argc == 6 && strcmp(argv[2], "--rank") == 0 && strcmp(argv[4], "--leader") == 0)
        return rank_main(argv[1], argv[3], argv[5]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

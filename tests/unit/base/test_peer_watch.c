/* A peer is dead when its process is, and not before. */
#include "common/base/peer_watch.h"

#include "common/base/clock.h"
#include "common/base/process.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct fixture {
    pd_loop *loop;
    pd_loop_timer *timer;
    pd_peer_watch *watch;
    uint64_t dead[4];
    uint32_t dead_count;
} fixture;

static void on_dead(void *ctx, uint64_t incarnation)
{
    fixture *f = ctx;

    assert_true(f->dead_count < 4);
    f->dead[f->dead_count++] = incarnation;
}

static void on_time(void *ctx)
{
    fixture *f = ctx;

    pd_loop_stop(f->loop);
}

static void make(fixture *f)
{
    *f = (fixture){0};
    assert_int_equal(pd_loop_create(&f->loop), PD_OK);
    assert_int_equal(pd_loop_timer_create(f->loop, on_time, f, &f->timer), PD_OK);
    assert_int_equal(pd_peer_watch_create(f->loop, on_dead, f, &f->watch), PD_OK);
}

static void done(fixture *f)
{
    pd_peer_watch_destroy(f->watch);
    pd_loop_destroy(f->loop);
}

static void turn(fixture *f, uint64_t ms)
{
    pd_loop_timer_arm(f->timer, pd_clock_now_ns() + ms * PD_NS_PER_MS);
    assert_int_equal(pd_loop_run(f->loop), PD_OK);
}

static pid_t sleeper(void)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        for (;;)
            pause();
    }
    return pid;
}

static void a_stopped_process_is_not_dead_and_a_killed_one_is(void **state)
{
    (void)state;
    fixture f;
    pid_t pid = sleeper();

    make(&f);
    pd_peer_watch_add(f.watch, 7, pid, 0);
    pd_peer_watch_add(f.watch, 7, pid, 0);
    assert_true(pd_peer_watch_alive(f.watch, 7));
    assert_false(pd_peer_watch_alive(f.watch, 8));
    assert_false(pd_peer_watch_alive(f.watch, 0));
    kill(pid, SIGSTOP);
    turn(&f, 50);
    assert_int_equal(f.dead_count, 0);
    assert_true(pd_peer_watch_alive(f.watch, 7));
    kill(pid, SIGKILL);
    for (int i = 0; i < 200 && f.dead_count == 0; i++)
        turn(&f, 20);
    turn(&f, 20);
    assert_int_equal(f.dead_count, 1);
    assert_int_equal(f.dead[0], 7);
    assert_false(pd_peer_watch_alive(f.watch, 7));
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    done(&f);
}

static void one_that_is_dead_already_is_told_of(void **state)
{
    (void)state;
    fixture f;
    pid_t pid = sleeper();

    make(&f);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    pd_peer_watch_add(f.watch, 9, pid, 0);
    assert_int_equal(f.dead_count, 1);
    assert_false(pd_peer_watch_alive(f.watch, 9));
    pd_peer_watch_add(f.watch, 10, 0, 0); /* a pid that nobody knows */
    assert_false(pd_peer_watch_alive(f.watch, 10));
    done(&f);
}

static void a_pid_that_is_anothers_by_now_is_not_mistaken(void **state)
{
    (void)state;
    fixture f;
    uint64_t started;
    pid_t pid = sleeper();

    make(&f);
    assert_int_equal(pd_process_started(pid, &started), PD_OK);
    assert_true(started > 0);
    pd_peer_watch_add(f.watch, 5, pid, started);
    assert_true(pd_peer_watch_alive(f.watch, 5));
    pd_peer_watch_add(f.watch, 6, pid, started - 1); /* the pid's owner of a tick before */
    assert_int_equal(f.dead_count, 1);
    assert_int_equal(f.dead[0], 6);
    assert_false(pd_peer_watch_alive(f.watch, 6));
    turn(&f, 20);
    assert_int_equal(f.dead_count, 1);
    kill(pid, SIGKILL);
    for (int i = 0; i < 200 && f.dead_count == 1; i++)
        turn(&f, 20);
    assert_int_equal(f.dead[1], 5); /* a zombie: nobody has waited for it yet */
    assert_int_equal(pd_process_started(pid, &started), PD_E_NOT_FOUND);
    pd_peer_watch_add(f.watch, 8, pid, started);
    for (int i = 0; i < 200 && f.dead_count == 2; i++)
        turn(&f, 20);
    assert_int_equal(f.dead[2], 8);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    done(&f);
}

static void more_peers_than_places_are_no_harm(void **state)
{
    (void)state;
    fixture f;
    pid_t pid = sleeper();

    make(&f);
    for (uint64_t i = 1; i <= 1100; i++)
        pd_peer_watch_add(f.watch, i, pid, 0);
    assert_true(pd_peer_watch_alive(f.watch, 1));
    assert_false(pd_peer_watch_alive(f.watch, 1100));
    done(&f); /* with all of them watched */
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void this_host_is_known_and_the_same(void **state)
{
    (void)state;
    uint64_t host = pd_process_host();

    assert_true(host != 0);
    assert_true(host == pd_process_host());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stopped_process_is_not_dead_and_a_killed_one_is),
        cmocka_unit_test(one_that_is_dead_already_is_told_of),
        cmocka_unit_test(a_pid_that_is_anothers_by_now_is_not_mistaken),
        cmocka_unit_test(more_peers_than_places_are_no_harm),
        cmocka_unit_test(this_host_is_known_and_the_same),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

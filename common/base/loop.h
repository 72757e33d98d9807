#pragma once

/* common/base/loop.h - a service's event loop: file descriptors, timers, signals, on one thread.
 *
 * The loop never blocks inside a callback and a callback never computes for more than about a
 * millisecond. Everything here belongs to the thread that calls pd_loop_run, except
 * pd_loop_wake(). */

#include "common/base/status.h"

#include <stdint.h>

typedef struct pd_loop pd_loop;
typedef struct pd_loop_timer pd_loop_timer;

typedef void pd_loop_fd_fn(void *ctx, uint32_t epoll_events);
typedef void pd_loop_fn(void *ctx);
/* True when there is more to do now: the loop then polls instead of sleeping. */
typedef bool pd_loop_prepare_fn(void *ctx);

PD_CHECKED pd_status pd_loop_create(pd_loop **loop_out);
void pd_loop_destroy(pd_loop *loop);

/* Watches fd for epoll_events (EPOLLIN, ...; level-triggered). The fd stays the caller's; remove
 * it before closing. One watch an fd. */
PD_CHECKED pd_status pd_loop_add_fd(pd_loop *loop, int fd, uint32_t epoll_events, pd_loop_fd_fn *fn,
                                    void *ctx);
void pd_loop_remove_fd(pd_loop *loop, int fd);

/* Called each turn before the loop sleeps: edge-triggered sources (ZeroMQ, UCX) are drained and
 * re-checked here. */
PD_CHECKED pd_status pd_loop_add_prepare(pd_loop *loop, pd_loop_prepare_fn *fn, void *ctx);

/* Ends what pd_loop_add_prepare began; unknown pairs are ignored. Not from inside a prepare call.
 */
void pd_loop_remove_prepare(pd_loop *loop, pd_loop_prepare_fn *fn, void *ctx);

/* A timer that is not armed yet; ends with the loop. */
PD_CHECKED pd_status pd_loop_timer_create(pd_loop *loop, pd_loop_fn *fn, void *ctx,
                                          pd_loop_timer **timer_out);
/* Fires once at due_ns (pd_clock_now_ns); re-arming moves it. UINT64_MAX disarms. */
void pd_loop_timer_arm(pd_loop_timer *timer, uint64_t due_ns);

/* Blocks the signals in the whole process from here on and calls fn on the loop when one comes.
 * Call before starting threads. */
PD_CHECKED pd_status pd_loop_add_signal(pd_loop *loop, int signal, pd_loop_fn *fn, void *ctx);

/* Runs until pd_loop_stop; may be run again. */
PD_CHECKED pd_status pd_loop_run(pd_loop *loop);
void pd_loop_stop(pd_loop *loop);
/* Any thread: makes the loop take another turn. */
void pd_loop_wake(pd_loop *loop);

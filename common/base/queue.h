#pragma once

/* common/base/queue.h - a bounded queue of fixed-size items between two threads, with an eventfd.
 *
 * One producer thread, one consumer thread. Items are copied in and out; what a pointer inside an
 * item points to changes owner with it. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct pd_queue pd_queue;

PD_CHECKED pd_status pd_queue_create(size_t item_bytes, uint32_t items_max, pd_queue **queue_out);
void pd_queue_destroy(pd_queue *queue); /* items inside are forgotten, not freed */

/* Producer. PD_E_OVERLOAD when full: nothing was taken. */
PD_CHECKED pd_status pd_queue_push(pd_queue *queue, const void *item);
/* Consumer. PD_E_AGAIN when empty. */
PD_CHECKED pd_status pd_queue_pop(pd_queue *queue, void *item_out);
/* Consumer: readable while items may wait; call pd_queue_drain_fd before popping to empty. */
int pd_queue_fd(const pd_queue *queue);
void pd_queue_drain_fd(pd_queue *queue);
/* Consumer: sleeps until an item may be there or timeout_ms (-1: for ever) has passed. */
void pd_queue_wait(pd_queue *queue, int timeout_ms);

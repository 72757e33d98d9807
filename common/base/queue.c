#include "common/base/queue.h"
#include "common/base/mem.h"

#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct pd_queue {
    size_t item_bytes;
    uint32_t items_max;
    uint32_t mask; /* of the ring's size, a power of two from items_max up */
    int fd;
    unsigned char *items; /* [mask + 1][item_bytes] */
    /* the heap aligns to 16 bytes only: distance keeps the two off each other's cache line */
    char before_head[64];
    atomic_uint head; /* next to pop; written by the consumer */
    char between[64];
    atomic_uint tail; /* next to push; written by the producer */
    char after_tail[64];
};

pd_status pd_queue_create(size_t item_bytes, uint32_t items_max, pd_queue **queue_out)
{
    if (item_bytes == 0 || items_max == 0 || items_max > UINT32_MAX / 2)
        return PD_E_INVALID;
    uint32_t rounded = 1;
    while (rounded < items_max)
        rounded *= 2;
    pd_queue *queue = pd_calloc(1, sizeof *queue);
    if (queue == NULL)
        return PD_E_NOMEM;
    queue->item_bytes = item_bytes;
    queue->items_max = items_max;
    queue->mask = rounded - 1;
    queue->items = pd_calloc(rounded, item_bytes);
    queue->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (queue->items == NULL || queue->fd < 0) {
        pd_status status = queue->items == NULL ? PD_E_NOMEM : PD_E_IO;
        pd_queue_destroy(queue);
        return status;
    }
    *queue_out = queue;
    return PD_OK;
}

void pd_queue_destroy(pd_queue *queue)
{
    if (queue == NULL)
        return;
    if (queue->fd >= 0)
        close(queue->fd);
    pd_free(queue->items);
    pd_free(queue);
}

pd_status pd_queue_push(pd_queue *queue, const void *item)
{
    uint32_t tail = atomic_load_explicit(&queue->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&queue->head, memory_order_acquire) == queue->items_max)
        return PD_E_OVERLOAD;
    memcpy(queue->items + (size_t)(tail & queue->mask) * queue->item_bytes, item,
           queue->item_bytes);
    atomic_store_explicit(&queue->tail, tail + 1, memory_order_release);
    uint64_t one = 1;
    ssize_t written = write(queue->fd, &one, sizeof one);
    (void)written; /* cannot fail but by overflow, which is a wake-up too */
    return PD_OK;
}

pd_status pd_queue_pop(pd_queue *queue, void *item_out)
{
    uint32_t head = atomic_load_explicit(&queue->head, memory_order_relaxed);
    if (head == atomic_load_explicit(&queue->tail, memory_order_acquire))
        return PD_E_AGAIN;
    memcpy(item_out, queue->items + (size_t)(head & queue->mask) * queue->item_bytes,
           queue->item_bytes);
    atomic_store_explicit(&queue->head, head + 1, memory_order_release);
    return PD_OK;
}

int pd_queue_fd(const pd_queue *queue)
{
    return queue->fd;
}

void pd_queue_drain_fd(pd_queue *queue)
{
    uint64_t count;
    ssize_t got = read(queue->fd, &count, sizeof count);
    (void)got; /* EAGAIN: nothing was signalled */
}

void pd_queue_wait(pd_queue *queue, int timeout_ms)
{
    struct pollfd poll_fd = {.fd = queue->fd, .events = POLLIN};
    poll(&poll_fd, 1, timeout_ms);
    pd_queue_drain_fd(queue);
}

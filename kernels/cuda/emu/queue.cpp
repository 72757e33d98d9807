#include "kernels/cuda/emu/queue.h"

#include "kernels/cuda/emu/block.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define QUEUED_MAX 16384u /* items; more than that waits, as it does on a GPU */

enum item_kind { ITEM_KERNEL, ITEM_COPY, ITEM_FILL, ITEM_CALL, ITEM_RECORD, ITEM_WAIT };

struct item { /* something queued */
    item *next;
    size_t bytes_all; /* of this struct and what follows */
    item_kind kind;
    const char *name;
    emu_grid grid;
    void (*call)(const void *arguments);
    void (*fn)(void *ctx);
    void *ctx, *to;
    const void *from; /* NULL: the bytes follow (host memory that is not pinned) */
    uint64_t bytes;
    int byte;
    gpu_event *event;
    uint64_t ticket; /* of the event's records */
    alignas(16) unsigned char arguments[];
};

struct gpu_stream {
    gpu *g;
    gpu_graph *recording;
    gpu_stream *next;
    item *first, **last;
    uint64_t queued, done;
    uint32_t priority;
    uint64_t turn; /* the latest */
    bool running;
    bool ended; /* nobody's any more: gone when it has done what it was told */
};

struct gpu_event {
    gpu *g;
    uint32_t refs; /* the owner's, and of items */
    uint64_t recorded, reached;
    uint64_t at_ns;
};

struct gpu_graph {
    item *first, **last;
};

struct waiter { /* a thread that waits for one of these */
    waiter *next;
    const gpu_stream *stream;
    const gpu_event *event;
    uint64_t target;
};

static struct {
    pthread_mutex_t lock, memory; /* memory: held while a kernel runs; taken after no lock */
    pthread_cond_t work, done, calls;
    pthread_t runner, caller;
    uint32_t opened;
    bool ending;
    gpu_stream *streams;
    waiter *waiters;
    uint32_t queued, budget; /* budget: items that polling has asked for */
    uint64_t turns, random;
    bool late;
    gpu_stream *calling; /* whose first item the second thread runs */
    emu_options options;
    char found[1024];
} q = {PTHREAD_MUTEX_INITIALIZER,
       PTHREAD_MUTEX_INITIALIZER,
       PTHREAD_COND_INITIALIZER,
       PTHREAD_COND_INITIALIZER,
       PTHREAD_COND_INITIALIZER,
       {},
       {},
       0,
       false,
       NULL,
       NULL,
       0,
       0,
       0,
       0,
       false,
       NULL,
       {},
       ""};

/* --- what tests choose --- */

void emu_configure(const emu_options *options)
{
    emu_memory_lock();
    pthread_mutex_lock(&q.lock);
    emu_here.options = *options;
    emu_here.random = options->seed;
    q.random = options->seed + 1;
    q.late = options->late_streams;
    for (gpu_stream *s = q.streams; s != NULL; s = s->next)
        s->priority = emu_random(&q.random);
    pthread_cond_broadcast(&q.work);
    pthread_mutex_unlock(&q.lock);
    emu_memory_unlock();
}

const char *emu_found(void)
{
    return q.found;
}

void emu_forget(void)
{
    pthread_mutex_lock(&q.lock);
    for (gpu_stream *s = q.streams; s != NULL; s = s->next)
        s->g->broken = false;
    q.found[0] = '\0';
    pthread_mutex_unlock(&q.lock);
}

void emu_counts_get(emu_counts *counts_out)
{
    emu_memory_lock();
    *counts_out = emu_counted;
    emu_memory_unlock();
}

void emu_memory_lock(void)
{
    pthread_mutex_lock(&q.memory);
}

void emu_memory_unlock(void)
{
    pthread_mutex_unlock(&q.memory);
}

void emu_remember(gpu *g, const char *text)
{
    pthread_mutex_lock(&q.lock);
    snprintf(g->last, sizeof g->last, "%s", text);
    pthread_mutex_unlock(&q.lock);
}

void gpu_last_error(gpu *g, char *text, size_t text_size)
{
    pthread_mutex_lock(&q.lock);
    snprintf(text, text_size, "%s", g->last);
    pthread_mutex_unlock(&q.lock);
}

pd_status emu_break(gpu *g, const char *format, ...)
{
    char why[sizeof q.found];
    va_list args;
    bool first;

    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    pthread_mutex_lock(&q.lock);
    first = !g->broken;
    if (first)
        memcpy(g->why, why, sizeof g->why);
    snprintf(g->last, sizeof g->last, "%.*s", GPU_ERROR_BYTES - 1, why);
    g->broken = true;
    if (q.found[0] == '\0')
        memcpy(q.found, why, sizeof q.found);
    pthread_mutex_unlock(&q.lock);
    if (first)
        pd_log_error("msg=\"emulated gpu: %s\"", why);
    return PD_E_INTERNAL;
}

/* --- items --- */

static void item_free(item *i)
{
    if (i->event != NULL && --i->event->refs == 0)
        pd_free(i->event);
    pd_free(i);
}

static void run_kernel(gpu *g, const item *i)
{
    char text[256];

    if (!emu_run_launch(i->name, &i->grid, i->call, i->arguments)) {
        (void)emu_break(g, "%s", emu_here.found);
        return;
    }
    emu_memory_check(g->memory, text, sizeof text);
    if (text[0] != '\0')
        (void)emu_break(g, "kernel %s %s", i->name, text);
}

/* Device memory, whole; of a copy the other end may be the host's. */
static bool is_ours(gpu *g, const char *what, const void *at, uint64_t bytes)
{
    if (emu_memory_place(at, bytes) == EMU_DEVICE)
        return true;
    (void)emu_break(g, "%s of %llu bytes that are not device memory", what,
                    (unsigned long long)bytes);
    return false;
}

static void run_item(gpu *g, const item *i)
{
    switch (i->kind) {
    case ITEM_KERNEL: run_kernel(g, i); break;
    case ITEM_COPY:
        /* name: which end must be the device's, "to", "from" or "both" */
        if (i->name[0] != 'f' && !is_ours(g, "gpu_copy to", i->to, i->bytes))
            break;
        if (i->name[0] != 't' && !is_ours(g, "gpu_copy from", i->from, i->bytes))
            break;
        memmove(i->to, i->from != NULL ? i->from : i->arguments, i->bytes);
        break;
    case ITEM_FILL:
        if (is_ours(g, "gpu_fill", i->to, i->bytes))
            memset(i->to, i->byte, i->bytes);
        break;
    case ITEM_CALL: i->fn(i->ctx); break;
    case ITEM_RECORD:
    case ITEM_WAIT: break;
    }
}

/* --- the threads --- */

static bool can_run(const gpu_stream *s)
{
    if (s->first == NULL || s->running || (s->first->kind == ITEM_CALL && q.calling != NULL))
        return false;
    return s->first->kind != ITEM_WAIT || s->first->event->reached >= s->first->ticket;
}

static bool reached(const waiter *w)
{
    return w->stream != NULL ? w->stream->done >= w->target : w->event->reached >= w->target;
}

static bool wanted(void)
{
    if (!q.late || q.budget > 0 || q.queued > QUEUED_MAX / 2)
        return true;
    for (const waiter *w = q.waiters; w != NULL; w = w->next)
        if (!reached(w))
            return true;
    return false;
}

/* Early, streams take turns, as they share a GPU: who seals a block does not wait for all that was
 * queued to compute. */
static gpu_stream *pick(void)
{
    gpu_stream *best = NULL;

    if (!wanted())
        return NULL;
    for (gpu_stream *s = q.streams; s != NULL; s = s->next) {
        if (!can_run(s))
            continue;
        if (emu_random(&q.random) % 4 == 0)
            s->priority = emu_random(&q.random);
        if (best == NULL || (q.late ? s->priority > best->priority : s->turn < best->turn))
            best = s;
    }
    if (best != NULL)
        best->turn = ++q.turns;
    return best;
}

/* The stream's first item is over. The lock is held. */
static void finish_item(gpu_stream *s)
{
    item *i = s->first;

    s->first = i->next;
    if (s->first == NULL)
        s->last = &s->first;
    if (i->kind == ITEM_RECORD) {
        i->event->reached = i->event->reached > i->ticket ? i->event->reached : i->ticket;
        i->event->at_ns = pd_clock_now_ns();
    }
    s->running = false;
    s->done++;
    q.queued--;
    if (q.budget > 0)
        q.budget--;
    item_free(i);
    pthread_cond_broadcast(&q.done);
    pthread_cond_signal(&q.work);
}

static void *caller_main(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&q.lock);
    for (;;) {
        while (q.calling == NULL && !q.ending)
            pthread_cond_wait(&q.calls, &q.lock);
        if (q.calling == NULL)
            break;
        gpu_stream *s = q.calling;
        item *i = s->first;
        pthread_mutex_unlock(&q.lock);
        i->fn(i->ctx);
        pthread_mutex_lock(&q.lock);
        q.calling = NULL;
        finish_item(s);
    }
    pthread_mutex_unlock(&q.lock);
    return NULL;
}

static void *runner_main(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&q.lock);
    for (;;) {
        gpu_stream *s = pick();
        if (s == NULL && q.ending)
            break;
        if (s == NULL) {
            pthread_cond_wait(&q.work, &q.lock);
            continue;
        }
        s->running = true;
        if (s->first->kind == ITEM_CALL) { /* also on a broken device: it frees what others hold */
            q.calling = s;
            pthread_cond_signal(&q.calls);
            continue;
        }
        if (s->first->kind != ITEM_RECORD && s->first->kind != ITEM_WAIT && !s->g->broken) {
            item *i = s->first;
            pthread_mutex_unlock(&q.lock);
            pthread_mutex_lock(&q.memory);
            run_item(s->g, i);
            pthread_mutex_unlock(&q.memory);
            pthread_mutex_lock(&q.lock);
        }
        finish_item(s);
    }
    pthread_mutex_unlock(&q.lock);
    return NULL;
}

pd_status emu_queue_open(void)
{
    pd_status status = PD_OK;

    pthread_mutex_lock(&q.lock);
    if (q.opened == 0) {
        q.ending = false;
        if (pthread_create(&q.runner, NULL, runner_main, NULL) != 0)
            status = PD_E_NOMEM;
        else if (pthread_create(&q.caller, NULL, caller_main, NULL) != 0) {
            status = PD_E_NOMEM;
            q.ending = true;
            pthread_cond_broadcast(&q.work);
            pthread_mutex_unlock(&q.lock);
            pthread_join(q.runner, NULL);
            pthread_mutex_lock(&q.lock);
        }
    }
    if (status == PD_OK)
        q.opened++;
    else
        pd_log_error("msg=\"emulated gpu: cannot start its threads\"");
    pthread_mutex_unlock(&q.lock);
    return status;
}

void emu_queue_close(void)
{
    pthread_mutex_lock(&q.lock);
    bool last = --q.opened == 0;
    if (last) {
        q.ending = true;
        pthread_cond_broadcast(&q.work);
        pthread_cond_broadcast(&q.calls);
    }
    pthread_mutex_unlock(&q.lock);
    if (!last)
        return;
    pthread_join(q.runner, NULL);
    pthread_join(q.caller, NULL);
    emu_stacks_end();
}

/* --- queueing and waiting; the lock is held --- */

static void wait_for(const gpu_stream *stream, const gpu_event *event, uint64_t target)
{
    waiter w = {q.waiters, stream, event, target};
    waiter **at = &q.waiters;

    q.waiters = &w;
    pthread_cond_signal(&q.work);
    while (!reached(&w))
        pthread_cond_wait(&q.done, &q.lock);
    while (*at != &w)
        at = &(*at)->next;
    *at = w.next;
}

static bool is_awaited(const gpu_stream *s)
{
    const waiter *w = q.waiters;

    while (w != NULL && w->stream != s)
        w = w->next;
    return w != NULL;
}

/* Frees ended streams with nothing left to do. */
static void reap(void)
{
    for (gpu_stream **at = &q.streams; *at != NULL;) {
        gpu_stream *s = *at;
        if (s->ended && s->first == NULL && !is_awaited(s)) {
            *at = s->next;
            pd_free(s);
        } else
            at = &s->next;
    }
}

void emu_queue_drain(gpu *g)
{
    pthread_mutex_lock(&q.lock);
    for (gpu_stream *s = q.streams; s != NULL; s = s->next)
        if (s->g == g)
            wait_for(s, NULL, s->queued);
    reap();
    pthread_mutex_unlock(&q.lock);
}

static void append(gpu_stream *stream, item *i)
{
    i->next = NULL;
    *stream->last = i;
    stream->last = &i->next;
    stream->queued++;
    q.queued++;
    pthread_cond_signal(&q.work);
}

/* follows: bytes kept behind the item. */
static pd_status queue(gpu_stream *stream, const item *like, const void *follows, size_t bytes)
{
    item *i;

    if (stream->g->broken)
        return PD_E_INTERNAL;
    i = static_cast<item *>(pd_malloc(sizeof *i + bytes));
    if (i == NULL)
        return PD_E_NOMEM;
    *i = *like;
    i->bytes_all = sizeof *i + bytes;
    i->next = NULL;
    if (bytes > 0)
        memcpy(i->arguments, follows, bytes);
    if (stream->recording != NULL) {
        *stream->recording->last = i;
        stream->recording->last = &i->next;
        return PD_OK;
    }
    pthread_mutex_lock(&q.lock);
    while (q.queued >= QUEUED_MAX)
        pthread_cond_wait(&q.done, &q.lock);
    if (i->kind == ITEM_RECORD)
        i->ticket = ++i->event->recorded;
    if (i->kind == ITEM_WAIT)
        i->ticket = i->event->recorded;
    if (i->event != NULL)
        i->event->refs++;
    append(stream, i);
    pthread_mutex_unlock(&q.lock);
    return PD_OK;
}

pd_status emu_queue_kernel(gpu_stream *stream, const char *name, const emu_grid *grid,
                           void (*call)(const void *arguments), const void *arguments, size_t bytes)
{
    item like = {};
    uint64_t threads = (uint64_t)grid->block_dim.x * grid->block_dim.y * grid->block_dim.z;

    if (threads == 0 || threads > EMU_THREADS_MAX || grid->block_dim.z > 64)
        return emu_break(stream->g, "kernel %s: a block of %llu threads", name,
                         (unsigned long long)threads);
    if (grid->grid_dim.x == 0 || grid->grid_dim.y == 0 || grid->grid_dim.z == 0 ||
        grid->grid_dim.x > 0x7fffffff || grid->grid_dim.y > 65535 || grid->grid_dim.z > 65535)
        return emu_break(stream->g, "kernel %s: a grid of %u x %u x %u", name, grid->grid_dim.x,
                         grid->grid_dim.y, grid->grid_dim.z);
    if (grid->shared_bytes > EMU_SHARED_MAX)
        return emu_break(stream->g, "kernel %s: %llu bytes of shared memory", name,
                         (unsigned long long)grid->shared_bytes);
    like.kind = ITEM_KERNEL;
    like.name = name;
    like.grid = *grid;
    like.call = call;
    return queue(stream, &like, arguments, bytes);
}

/* --- streams --- */

pd_status gpu_stream_create(gpu *g, gpu_stream **stream_out)
{
    gpu_stream *stream = static_cast<gpu_stream *>(pd_calloc(1, sizeof *stream));

    if (stream == NULL)
        return PD_E_NOMEM;
    stream->g = g;
    stream->last = &stream->first;
    pthread_mutex_lock(&q.lock);
    stream->priority = emu_random(&q.random);
    stream->next = q.streams;
    q.streams = stream;
    g->streams++;
    pthread_mutex_unlock(&q.lock);
    *stream_out = stream;
    return PD_OK;
}

/* As cudaStreamDestroy, it does not wait: what is queued runs some time. */
void gpu_stream_destroy(gpu_stream *stream)
{
    if (stream == NULL)
        return;
    gpu_graph_destroy(stream->recording);
    pthread_mutex_lock(&q.lock);
    stream->recording = NULL;
    stream->ended = true;
    stream->g->streams--;
    reap();
    pthread_mutex_unlock(&q.lock);
}

static pd_status recording_refused(gpu_stream *stream, const char *what)
{
    return emu_break(stream->g, "%s while its stream is recorded", what);
}

pd_status gpu_stream_wait(gpu_stream *stream)
{
    if (stream->recording != NULL)
        return recording_refused(stream, "gpu_stream_wait");
    pthread_mutex_lock(&q.lock);
    wait_for(stream, NULL, stream->queued);
    bool broken = stream->g->broken;
    pthread_mutex_unlock(&q.lock);
    return broken ? PD_E_INTERNAL : PD_OK;
}

gpu *gpu_stream_gpu(gpu_stream *stream)
{
    return stream->g;
}

void *gpu_stream_native(gpu_stream *stream)
{
    (void)stream;
    return NULL;
}

/* --- events --- */

pd_status gpu_event_create(gpu *g, gpu_event **event_out)
{
    gpu_event *event = static_cast<gpu_event *>(pd_calloc(1, sizeof *event));

    if (event == NULL)
        return PD_E_NOMEM;
    event->g = g;
    event->refs = 1;
    *event_out = event;
    return PD_OK;
}

void gpu_event_destroy(gpu_event *event)
{
    if (event == NULL)
        return;
    pthread_mutex_lock(&q.lock);
    bool last = --event->refs == 0;
    pthread_mutex_unlock(&q.lock);
    if (last)
        pd_free(event);
}

static pd_status queue_event(gpu_stream *stream, gpu_event *event, item_kind kind)
{
    item like = {};

    if (stream->recording != NULL)
        return recording_refused(stream, "an event");
    like.kind = kind;
    like.event = event;
    return queue(stream, &like, NULL, 0);
}

pd_status gpu_event_record(gpu_event *event, gpu_stream *stream)
{
    return queue_event(stream, event, ITEM_RECORD);
}

pd_status gpu_stream_wait_event(gpu_stream *stream, gpu_event *event)
{
    return queue_event(stream, event, ITEM_WAIT);
}

pd_status gpu_event_wait(gpu_event *event)
{
    pthread_mutex_lock(&q.lock);
    wait_for(NULL, event, event->recorded);
    bool broken = event->g->broken;
    pthread_mutex_unlock(&q.lock);
    return broken ? PD_E_INTERNAL : PD_OK;
}

pd_status gpu_event_poll(gpu_event *event)
{
    pd_status status = PD_OK;

    pthread_mutex_lock(&q.lock);
    if (event->reached < event->recorded) {
        status = PD_E_AGAIN;
        /* who only polls must get there, too */
        if (q.late && q.budget < 8)
            q.budget += emu_random(&q.random) % 3;
        pthread_cond_signal(&q.work);
    }
    if (event->g->broken)
        status = PD_E_INTERNAL;
    pthread_mutex_unlock(&q.lock);
    return status;
}

pd_status gpu_event_ms(gpu_event *from, gpu_event *to, float *ms_out)
{
    pd_status status = PD_E_INVALID;

    pthread_mutex_lock(&q.lock);
    if (from->recorded > 0 && to->recorded > 0 && from->reached == from->recorded &&
        to->reached == to->recorded) {
        *ms_out = (float)(int64_t)(to->at_ns - from->at_ns) * 1e-6f;
        status = PD_OK;
    }
    pthread_mutex_unlock(&q.lock);
    return status;
}

/* --- copies --- */

static bool is_late(void)
{
    pthread_mutex_lock(&q.lock);
    bool late = q.late;
    pthread_mutex_unlock(&q.lock);
    return late;
}

static bool pinned(const void *at, uint64_t bytes)
{
    emu_memory_lock();
    emu_place place = emu_memory_place(at, bytes);
    emu_memory_unlock();
    return place != EMU_NOWHERE;
}

pd_status gpu_copy_in(gpu_stream *stream, void *device, const void *host, uint64_t bytes)
{
    item like = {};
    bool staged = stream->recording == NULL && !pinned(host, bytes);

    like.kind = ITEM_COPY;
    like.name = "to";
    like.to = device;
    like.from = staged ? NULL : host;
    like.bytes = bytes;
    return queue(stream, &like, host, staged ? bytes : 0);
}

/* Into memory that is not pinned it blocks, early; late it does not, for gpu.h does not promise it.
 */
pd_status gpu_copy_out(gpu_stream *stream, void *host, const void *device, uint64_t bytes)
{
    item like = {};

    like.kind = ITEM_COPY;
    like.name = "from";
    like.to = host;
    like.from = device;
    like.bytes = bytes;
    pd_status status = queue(stream, &like, NULL, 0);
    if (status == PD_OK && stream->recording == NULL && !is_late() && !pinned(host, bytes))
        status = gpu_stream_wait(stream);
    return status;
}

pd_status gpu_copy(gpu_stream *stream, void *to, const void *from, uint64_t bytes)
{
    item like = {};

    like.kind = ITEM_COPY;
    like.name = "both";
    like.to = to;
    like.from = from;
    like.bytes = bytes;
    return queue(stream, &like, NULL, 0);
}

pd_status gpu_fill(gpu_stream *stream, void *device, int byte, uint64_t bytes)
{
    item like = {};

    like.kind = ITEM_FILL;
    like.to = device;
    like.byte = byte;
    like.bytes = bytes;
    return queue(stream, &like, NULL, 0);
}

pd_status gpu_call(gpu_stream *stream, void (*fn)(void *ctx), void *ctx)
{
    item like = {};

    like.kind = ITEM_CALL;
    like.fn = fn;
    like.ctx = ctx;
    return queue(stream, &like, NULL, 0);
}

/* --- graphs --- */

pd_status gpu_graph_begin(gpu_stream *stream)
{
    gpu_graph *graph;

    if (stream->recording != NULL)
        return recording_refused(stream, "gpu_graph_begin");
    graph = static_cast<gpu_graph *>(pd_calloc(1, sizeof *graph));
    if (graph == NULL)
        return PD_E_NOMEM;
    graph->last = &graph->first;
    stream->recording = graph;
    return PD_OK;
}

pd_status gpu_graph_end(gpu_stream *stream, gpu_graph **graph_out)
{
    if (stream->recording == NULL)
        return emu_break(stream->g, "gpu_graph_end of a stream that is not recorded");
    *graph_out = stream->recording;
    stream->recording = NULL;
    if (!stream->g->broken)
        return PD_OK;
    gpu_graph_destroy(*graph_out);
    *graph_out = NULL;
    return PD_E_INTERNAL;
}

pd_status gpu_graph_launch(gpu_graph *graph, gpu_stream *stream)
{
    if (stream->recording != NULL)
        return recording_refused(stream, "gpu_graph_launch");
    for (const item *i = graph->first; i != NULL; i = i->next) {
        pd_status status = queue(stream, i, i->arguments, i->bytes_all - sizeof *i);
        if (status != PD_OK)
            return status;
    }
    return PD_OK;
}

void gpu_graph_destroy(gpu_graph *graph)
{
    if (graph == NULL)
        return;
    for (item *i = graph->first, *next; i != NULL; i = next) {
        next = i->next;
        item_free(i);
    }
    pd_free(graph);
}

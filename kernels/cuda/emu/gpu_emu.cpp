/* kernels/cuda/gpu.h on a CPU: device memory is host memory between guard zones, and what is queued
 * runs at once. */

#include "kernels/cuda/emu/block.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define GUARD_BYTES 256u
#define GUARD_WORD  0xffc0deadu /* a NaN */
#define ARGS_MAX    4096u

enum item_kind { ITEM_KERNEL, ITEM_COPY, ITEM_FILL, ITEM_CALL, ITEM_RECORD, ITEM_WAIT };

struct item { /* something queued */
    item *next;
    item_kind kind;
    const char *name;
    emu_grid grid;
    void (*call)(const void *arguments);
    void (*fn)(void *ctx);
    void *ctx, *to;
    const void *from;
    uint64_t bytes;
    int byte;
    gpu_event *event;
    unsigned char arguments[];
};

struct gpu {
    gpu_info info;
};

struct gpu_stream {
    gpu *g;
    gpu_graph *recording;
};

struct gpu_event {
    gpu *g;
    bool recorded;
    uint64_t at_ns;
};

struct gpu_graph {
    item *first, **last;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* whoever runs kernels */
static uint32_t opened;
static char found[1024];

/* --- what tests choose --- */

void emu_configure(const emu_options *options)
{
    pthread_mutex_lock(&lock);
    emu_here.options = *options;
    emu_here.random = options->seed;
    pthread_mutex_unlock(&lock);
}

const char *emu_found(void)
{
    return found;
}

void emu_forget(void)
{
    found[0] = '\0';
}

void emu_counts_get(emu_counts *counts_out)
{
    *counts_out = emu_counted;
}

static pd_status find(const char *what)
{
    if (found[0] == '\0') {
        snprintf(found, sizeof found, "%s", what);
        pd_log_error("msg=\"emulated gpu: %s\"", found);
    }
    return PD_E_INTERNAL;
}

/* --- devices --- */

uint32_t gpu_count(char *reason, size_t reason_size)
{
    snprintf(reason, reason_size, "emulated on this machine's processors");
    return 8;
}

pd_status gpu_open(uint32_t device, gpu **gpu_out)
{
    gpu *g = static_cast<gpu *>(pd_calloc(1, sizeof *g));

    if (g == NULL)
        return PD_E_NOMEM;
    snprintf(g->info.name, sizeof g->info.name, "emulated sm_90, number %u", device);
    g->info.numa_node = -1;
    g->info.arch = 90;
    g->info.processors = 4;
    g->info.memory_bytes = g->info.memory_free_bytes = (uint64_t)4 << 30;
    g->info.shared_bytes_max = EMU_SHARED_MAX;
    g->info.l2_bytes = 32u << 20;
    g->info.emulated = true;
    pthread_mutex_lock(&lock);
    opened++;
    pthread_mutex_unlock(&lock);
    *gpu_out = g;
    return PD_OK;
}

void gpu_close(gpu *g)
{
    if (g == NULL)
        return;
    pthread_mutex_lock(&lock);
    if (--opened == 0)
        emu_stacks_end();
    pthread_mutex_unlock(&lock);
    pd_free(g);
}

void gpu_use(gpu *g)
{
    (void)g;
}

const gpu_info *gpu_info_of(const gpu *g)
{
    return &g->info;
}

const char *gpu_broken(const gpu *g)
{
    (void)g;
    return found[0] != '\0' ? found : NULL;
}

/* --- memory: [head][guard][bytes][guard] --- */

struct allocation {
    allocation *next;
    void *base;
    uint64_t bytes;
    unsigned char *memory;
};

static allocation *allocations;

static void guard_fill(unsigned char *at)
{
    uint32_t word = GUARD_WORD;

    for (unsigned i = 0; i < GUARD_BYTES; i += sizeof word)
        memcpy(at + i, &word, sizeof word);
}

static bool guard_whole(const unsigned char *at)
{
    uint32_t word = GUARD_WORD;

    for (unsigned i = 0; i < GUARD_BYTES; i += sizeof word)
        if (memcmp(at + i, &word, sizeof word) != 0)
            return false;
    return true;
}

static pd_status check_allocation(const allocation *a, const char *when)
{
    char text[256];
    bool before = guard_whole(a->memory - GUARD_BYTES);

    if (before && guard_whole(a->memory + a->bytes))
        return PD_OK;
    snprintf(text, sizeof text, "%s wrote %s an allocation of %llu bytes", when,
             before ? "behind" : "in front of", (unsigned long long)a->bytes);
    return find(text);
}

static pd_status check_allocations(const char *when)
{
    for (const allocation *a = allocations; a != NULL; a = a->next)
        if (check_allocation(a, when) != PD_OK)
            return PD_E_INTERNAL;
    return PD_OK;
}

pd_status gpu_alloc(gpu *g, uint64_t bytes, void **memory_out)
{
    allocation *a = static_cast<allocation *>(pd_malloc(sizeof *a));

    (void)g;
    if (a == NULL)
        return PD_E_NOMEM;
    a->base = pd_malloc(bytes + 3 * GUARD_BYTES);
    if (a->base == NULL) {
        pd_free(a);
        return PD_E_NOMEM;
    }
    uintptr_t at = ((uintptr_t)a->base + GUARD_BYTES + 255) & ~(uintptr_t)255;
    a->memory = (unsigned char *)at;
    a->bytes = bytes;
    guard_fill(a->memory - GUARD_BYTES);
    memset(a->memory, 0xff, bytes);
    guard_fill(a->memory + bytes);
    pthread_mutex_lock(&lock);
    a->next = allocations;
    allocations = a;
    pthread_mutex_unlock(&lock);
    *memory_out = a->memory;
    return PD_OK;
}

void gpu_free(gpu *g, void *memory)
{
    allocation *a, **at = &allocations;

    (void)g;
    if (memory == NULL)
        return;
    pthread_mutex_lock(&lock);
    while (*at != NULL && (*at)->memory != memory)
        at = &(*at)->next;
    a = *at;
    pd_assert(a != NULL);
    *at = a->next;
    (void)!check_allocation(a, "something");
    pthread_mutex_unlock(&lock);
    pd_free(a->base);
    pd_free(a);
}

pd_status gpu_host_alloc(gpu *g, uint64_t bytes, void **memory_out)
{
    return gpu_alloc(g, bytes, memory_out);
}

void gpu_host_free(gpu *g, void *memory)
{
    gpu_free(g, memory);
}

pd_status gpu_export(gpu *g, void *memory, unsigned char handle_out[GPU_HANDLE_BYTES])
{
    (void)g, (void)memory, (void)handle_out;
    return PD_E_UNSUPPORTED;
}

pd_status gpu_import(gpu *g, const unsigned char handle[GPU_HANDLE_BYTES], uint64_t bytes,
                     void **memory_out)
{
    (void)g, (void)handle, (void)bytes, (void)memory_out;
    return PD_E_UNSUPPORTED;
}

void gpu_unimport(gpu *g, void *memory)
{
    (void)g, (void)memory;
}

/* --- what is queued --- */

static pd_status run(const item *i)
{
    char when[200];

    switch (i->kind) {
    case ITEM_KERNEL:
        if (!emu_run_launch(i->name, &i->grid, i->call, i->arguments))
            return find(emu_here.found);
        snprintf(when, sizeof when, "kernel %s", i->name);
        return check_allocations(when);
    case ITEM_COPY: memmove(i->to, i->from, i->bytes); break;
    case ITEM_FILL: memset(i->to, i->byte, i->bytes); break;
    case ITEM_CALL: i->fn(i->ctx); break;
    case ITEM_RECORD:
        i->event->recorded = true;
        i->event->at_ns = pd_clock_now_ns();
        break;
    case ITEM_WAIT: break;
    }
    return PD_OK;
}

static pd_status queue(gpu_stream *stream, const item *like, const void *arguments, size_t bytes)
{
    pd_status status = PD_OK;
    item *i;

    if (found[0] != '\0')
        return PD_E_INTERNAL;
    i = static_cast<item *>(pd_malloc(sizeof *i + bytes));
    if (i == NULL)
        return PD_E_NOMEM;
    *i = *like;
    i->next = NULL;
    if (bytes > 0)
        memcpy(i->arguments, arguments, bytes);
    if (stream->recording != NULL) {
        *stream->recording->last = i;
        stream->recording->last = &i->next;
        return PD_OK;
    }
    pthread_mutex_lock(&lock);
    status = run(i);
    pthread_mutex_unlock(&lock);
    pd_free(i);
    return status;
}

pd_status emu_queue_kernel(gpu_stream *stream, const char *name, const emu_grid *grid,
                           void (*call)(const void *arguments), const void *arguments, size_t bytes)
{
    item like = {};
    uint64_t threads = (uint64_t)grid->block_dim.x * grid->block_dim.y * grid->block_dim.z;
    char text[256];

    if (threads == 0 || threads > EMU_THREADS_MAX || grid->block_dim.z > 64) {
        snprintf(text, sizeof text, "kernel %s: a block of %llu threads", name,
                 (unsigned long long)threads);
        return find(text);
    }
    if (grid->grid_dim.x == 0 || grid->grid_dim.y == 0 || grid->grid_dim.z == 0 ||
        grid->grid_dim.x > 0x7fffffff || grid->grid_dim.y > 65535 || grid->grid_dim.z > 65535) {
        snprintf(text, sizeof text, "kernel %s: a grid of %u x %u x %u", name, grid->grid_dim.x,
                 grid->grid_dim.y, grid->grid_dim.z);
        return find(text);
    }
    if (grid->shared_bytes > EMU_SHARED_MAX) {
        snprintf(text, sizeof text, "kernel %s: %llu bytes of shared memory", name,
                 (unsigned long long)grid->shared_bytes);
        return find(text);
    }
    like.kind = ITEM_KERNEL;
    like.name = name;
    like.grid = *grid;
    like.call = call;
    return queue(stream, &like, arguments, bytes);
}

pd_status gpu_stream_create(gpu *g, gpu_stream **stream_out)
{
    gpu_stream *stream = static_cast<gpu_stream *>(pd_calloc(1, sizeof *stream));

    if (stream == NULL)
        return PD_E_NOMEM;
    stream->g = g;
    *stream_out = stream;
    return PD_OK;
}

void gpu_stream_destroy(gpu_stream *stream)
{
    pd_free(stream);
}

pd_status gpu_stream_wait(gpu_stream *stream)
{
    (void)stream;
    return found[0] != '\0' ? PD_E_INTERNAL : PD_OK;
}

gpu *gpu_stream_gpu(gpu_stream *stream)
{
    return stream->g;
}

void *gpu_stream_native(gpu_stream *stream)
{
    return stream;
}

pd_status gpu_event_create(gpu *g, gpu_event **event_out)
{
    gpu_event *event = static_cast<gpu_event *>(pd_calloc(1, sizeof *event));

    if (event == NULL)
        return PD_E_NOMEM;
    event->g = g;
    *event_out = event;
    return PD_OK;
}

void gpu_event_destroy(gpu_event *event)
{
    pd_free(event);
}

pd_status gpu_event_record(gpu_event *event, gpu_stream *stream)
{
    item like = {};

    like.kind = ITEM_RECORD;
    like.event = event;
    return queue(stream, &like, NULL, 0);
}

pd_status gpu_stream_wait_event(gpu_stream *stream, gpu_event *event)
{
    item like = {};

    like.kind = ITEM_WAIT;
    like.event = event;
    return queue(stream, &like, NULL, 0);
}

pd_status gpu_event_wait(gpu_event *event)
{
    (void)event;
    return found[0] != '\0' ? PD_E_INTERNAL : PD_OK;
}

pd_status gpu_event_poll(gpu_event *event)
{
    return gpu_event_wait(event);
}

pd_status gpu_event_ms(gpu_event *from, gpu_event *to, float *ms_out)
{
    if (!from->recorded || !to->recorded)
        return PD_E_INVALID;
    *ms_out = (float)(to->at_ns - from->at_ns) * 1e-6f;
    return PD_OK;
}

static pd_status copy(gpu_stream *stream, void *to, const void *from, uint64_t bytes)
{
    item like = {};

    like.kind = ITEM_COPY;
    like.to = to;
    like.from = from;
    like.bytes = bytes;
    return queue(stream, &like, NULL, 0);
}

pd_status gpu_copy_in(gpu_stream *stream, void *device, const void *host, uint64_t bytes)
{
    return copy(stream, device, host, bytes);
}

pd_status gpu_copy_out(gpu_stream *stream, void *host, const void *device, uint64_t bytes)
{
    return copy(stream, host, device, bytes);
}

pd_status gpu_copy(gpu_stream *stream, void *to, const void *from, uint64_t bytes)
{
    return copy(stream, to, from, bytes);
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

pd_status gpu_graph_begin(gpu_stream *stream)
{
    gpu_graph *graph = static_cast<gpu_graph *>(pd_calloc(1, sizeof *graph));

    if (graph == NULL)
        return PD_E_NOMEM;
    graph->last = &graph->first;
    stream->recording = graph;
    return PD_OK;
}

pd_status gpu_graph_end(gpu_stream *stream, gpu_graph **graph_out)
{
    *graph_out = stream->recording;
    stream->recording = NULL;
    return PD_OK;
}

pd_status gpu_graph_launch(gpu_graph *graph, gpu_stream *stream)
{
    pd_status status = PD_OK;

    (void)stream;
    pthread_mutex_lock(&lock);
    for (const item *i = graph->first; i != NULL && status == PD_OK; i = i->next)
        status = run(i);
    pthread_mutex_unlock(&lock);
    return status;
}

void gpu_graph_destroy(gpu_graph *graph)
{
    if (graph == NULL)
        return;
    for (item *i = graph->first, *next; i != NULL; i = next) {
        next = i->next;
        pd_free(i);
    }
    pd_free(graph);
}

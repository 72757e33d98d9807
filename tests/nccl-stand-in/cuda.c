/* libcuda.so.1 for tests without a GPU: as much of the driver's interface as NCCL's stand-in and
 * the carriers call. Memory is device 0's unless a test has placed it elsewhere (stand_in_place); a
 * stream is a thread that runs host functions and copies in their order. A copy is refused unless
 * the context of the memory's device is current, as the driver would refuse the stream. */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONTEXT = 201,
    NOT_READY = 600,
    DEVICE_ORDINAL = 9,
    LEGACY_IPC = 10,
    RDMA_FLUSH = 117,
    DMA_BUF = 124,
    DEVICES = 4,
    PLACES = 64,
};

typedef struct job {
    struct job *next;
    void (*run)(void *);
    void *ctx;
} job;

typedef struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    job *head, *tail;
    bool running, stop;
} stream;

typedef struct copy_job {
    void *to;
    const void *from;
    size_t bytes;
} copy_job;

static struct {
    uintptr_t start, end;
    int device;
} places[PLACES];
static int places_count;
static int primary[DEVICES]; /* a context is the address of one */
static _Thread_local void *current;

int stand_in_place(void *memory, size_t bytes, int device);
int cuInit(unsigned flags);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuFlushGPUDirectRDMAWrites(int target, int scope);
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *handle);
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *handle);
int cuStreamSynchronize(void *handle);
int cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxSetCurrent(void *context);
int cuStreamCreate(void **stream_out, unsigned flags);
int cuStreamQuery(void *handle);
int cuStreamDestroy_v2(void *handle);
int cuLaunchHostFunc(void *handle, void (*run)(void *), void *ctx);

EXPORT int cuInit(unsigned flags)
{
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

/* For a test, before the transfer that it is for is made. */
EXPORT int stand_in_place(void *memory, size_t bytes, int device)
{
    if (places_count == PLACES || device >= DEVICES)
        return OUT_OF_MEMORY;
    places[places_count].start = (uintptr_t)memory;
    places[places_count].end = (uintptr_t)memory + bytes;
    places[places_count++].device = device;
    return SUCCESS;
}

/* The latest place counts: memory is given back and mapped anew. */
static int device_of(uintptr_t pointer)
{
    for (int i = places_count - 1; i >= 0; i--) {
        if (pointer >= places[i].start && pointer < places[i].end)
            return places[i].device;
    }
    return 0;
}

EXPORT int cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer)
{
    if ((attribute != DEVICE_ORDINAL && attribute != LEGACY_IPC) || pointer == 0)
        return INVALID_VALUE;
    *(int *)value =
        attribute == DEVICE_ORDINAL ? device_of(pointer) : getenv("CUDA_STAND_IN_FABRIC") == NULL;
    return SUCCESS;
}

/* Nothing is supported but what a test asks for. */
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == DMA_BUF && getenv("CUDA_STAND_IN_DMA_BUF") != NULL;
    if (attribute == RDMA_FLUSH)
        *value = getenv("CUDA_STAND_IN_FLUSH") != NULL;
    return device >= 0 && device < DEVICES ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    (void)target, (void)scope;
    return current == NULL ? INVALID_CONTEXT : SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (device < 0 || device >= DEVICES)
        return INVALID_VALUE;
    *context = &primary[device];
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    return device >= 0 && device < DEVICES ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuCtxSetCurrent(void *context)
{
    current = context;
    return SUCCESS;
}

static void *stream_main(void *ctx)
{
    stream *s = ctx;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->head == NULL && !s->stop)
            pthread_cond_wait(&s->changed, &s->lock);
        if (s->head == NULL)
            break;
        job *j = s->head;
        s->head = j->next;
        s->running = true;
        pthread_mutex_unlock(&s->lock);
        j->run(j->ctx);
        free(j);
        pthread_mutex_lock(&s->lock);
        s->running = false;
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

EXPORT int cuStreamCreate(void **stream_out, unsigned flags)
{
    (void)flags;
    stream *s = calloc(1, sizeof *s);
    if (s == NULL)
        return OUT_OF_MEMORY;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, stream_main, s) != 0) {
        free(s);
        return OUT_OF_MEMORY;
    }
    *stream_out = s;
    return SUCCESS;
}

EXPORT int cuStreamQuery(void *handle)
{
    stream *s = handle;
    pthread_mutex_lock(&s->lock);
    bool busy = s->running || s->head != NULL;
    pthread_mutex_unlock(&s->lock);
    return busy ? NOT_READY : SUCCESS;
}

EXPORT int cuStreamDestroy_v2(void *handle)
{
    stream *s = handle;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
    return SUCCESS;
}

EXPORT int cuLaunchHostFunc(void *handle, void (*run)(void *), void *ctx)
{
    stream *s = handle;
    job *j = calloc(1, sizeof *j);
    if (j == NULL)
        return OUT_OF_MEMORY;
    j->run = run;
    j->ctx = ctx;
    pthread_mutex_lock(&s->lock);
    if (s->head == NULL)
        s->head = j;
    else
        s->tail->next = j;
    s->tail = j;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return SUCCESS;
}

static void run_copy(void *ctx)
{
    copy_job *c = ctx;
    memcpy(c->to, c->from, c->bytes);
    free(c);
}

static int queue_copy(uintptr_t device_memory, void *to, const void *from, size_t bytes,
                      void *handle)
{
    if (handle == NULL || current != &primary[device_of(device_memory)] ||
        device_of(device_memory + bytes - 1) != device_of(device_memory))
        return INVALID_CONTEXT;
    copy_job *c = malloc(sizeof *c);
    if (c == NULL)
        return OUT_OF_MEMORY;
    *c = (copy_job){.to = to, .from = from, .bytes = bytes};
    int result = cuLaunchHostFunc(handle, run_copy, c);
    if (result != SUCCESS)
        free(c);
    return result;
}

EXPORT int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *handle)
{
    return queue_copy(to, (void *)to, from, bytes, handle);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *handle)
{
    return queue_copy(from, to, (const void *)from, bytes, handle);
}

EXPORT int cuStreamSynchronize(void *handle)
{
    struct timespec pause = {.tv_nsec = 20000};
    while (cuStreamQuery(handle) == NOT_READY)
        nanosleep(&pause, NULL);
    return SUCCESS;
}

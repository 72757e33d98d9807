/* libcuda.so.1 for tests without a GPU: as much of the driver's interface as NCCL's stand-in and
 * the carrier call. Any memory is device 0's; a stream is a thread that runs host functions in
 * their order. */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, DEVICE_ORDINAL = 9 };

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

int cuInit(unsigned flags);
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

EXPORT int cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer)
{
    if (attribute != DEVICE_ORDINAL || pointer == 0)
        return INVALID_VALUE;
    *(int *)value = 0;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    static int primary;
    *context = &primary;
    return device == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    return device == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuCtxSetCurrent(void *context)
{
    (void)context;
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

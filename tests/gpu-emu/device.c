#include "tests/gpu-emu/device_body.h"

#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

struct memory {
    struct memory *next;
    void *at;
};

static struct {
    device device;
    struct memory *memory;
} here;

device *device_open(void)
{
    if (gpu_open(0, &here.device.gpu) != PD_OK)
        return NULL;
    gpu_use(here.device.gpu);
    if (gpu_stream_create(here.device.gpu, &here.device.stream) != PD_OK)
        return NULL;
    return &here.device;
}

void device_close(device *d)
{
    device_free_all(d);
    gpu_stream_destroy(d->stream);
    gpu_close(d->gpu);
}

void device_free_all(device *d)
{
    while (here.memory != NULL) {
        struct memory *m = here.memory;
        here.memory = m->next;
        gpu_free(d->gpu, m->at);
        pd_free(m);
    }
}

void *device_space(device *d, size_t bytes)
{
    struct memory *m = pd_malloc(sizeof *m);

    assert_non_null(m);
    pd_status status = gpu_alloc(d->gpu, bytes, &m->at);
    if (status == PD_OK) {
        m->next = here.memory;
        here.memory = m;
    } else
        pd_free(m);
    device_check(d, status, "gpu_alloc");
    device_poison(d, here.memory->at, bytes);
    return here.memory->at;
}

void *device_upload(device *d, const void *host, size_t bytes)
{
    void *memory = device_space(d, bytes);

    device_check(d, gpu_copy_in(d->stream, memory, host, bytes), "gpu_copy_in");
    device_finish(d);
    return memory;
}

void device_download(device *d, void *host, const void *memory, size_t bytes)
{
    device_check(d, gpu_copy_out(d->stream, host, memory, bytes), "gpu_copy_out");
    device_finish(d);
}

void device_finish(device *d)
{
    device_check(d, gpu_stream_wait(d->stream), "gpu_stream_wait");
}

void device_clear(device *d)
{
    device_finish(d);
    device_free_all(d);
    device_check(d, PD_OK, "gpu_free");
}

/* kernels/cuda/gpu.h on a CPU: devices and their memory. Streams are queue.cpp's. */

#include "kernels/cuda/emu/block.h"
#include "kernels/cuda/emu/queue.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES      8u
#define MEMORY_BYTES (8ull << 30) /* sparse: what is not touched costs nothing */

uint32_t gpu_count(char *reason, size_t reason_size)
{
    snprintf(reason, reason_size, "emulated on this machine's processors");
    return DEVICES;
}

pd_status gpu_look(uint32_t device, gpu_info *info_out)
{
    gpu_info info = {};

    if (device >= DEVICES) {
        pd_log_error("msg=\"emulated gpu: there is no device %u\"", device);
        return PD_E_UNSUPPORTED;
    }
    snprintf(info.name, sizeof info.name, "emulated sm_90 (%u)", device);
    info.numa_node = -1;
    info.arch = 90;
    info.processors = 4;
    info.memory_bytes = MEMORY_BYTES;
    info.shared_bytes_max = EMU_SHARED_MAX;
    info.l2_bytes = 32u << 20;
    info.emulated = true;
    *info_out = info;
    return PD_OK;
}

pd_status gpu_open(uint32_t device, gpu **gpu_out)
{
    gpu *g = static_cast<gpu *>(pd_calloc(1, sizeof *g));
    pd_status status;

    if (g == NULL)
        return PD_E_NOMEM;
    status = gpu_look(device, &g->info);
    if (status != PD_OK)
        goto failed;
    status = emu_queue_open();
    if (status != PD_OK)
        goto failed;
    emu_memory_lock();
    status = emu_memory_create(MEMORY_BYTES, &g->memory);
    emu_memory_unlock();
    if (status != PD_OK) {
        emu_queue_close();
        goto failed;
    }
    g->info.memory_free_bytes = MEMORY_BYTES;
    *gpu_out = g;
    return PD_OK;
failed:
    pd_free(g);
    return status;
}

void gpu_close(gpu *g)
{
    if (g == NULL)
        return;
    pd_assert(g->streams == 0);
    emu_queue_drain(g); /* what ended streams were told */
    emu_memory_lock();
    emu_memory_destroy(g->memory);
    emu_memory_unlock();
    emu_queue_close();
    pd_free(g);
}

void gpu_use(gpu *g)
{
    (void)g; /* streams know their device */
}

const gpu_info *gpu_info_of(const gpu *g)
{
    return &g->info;
}

pd_status gpu_met(gpu *g, int error, const char *call)
{
    return error == 0 ? PD_OK : emu_break(g, "%s failed with error %d", call, error);
}

const char *gpu_broken(const gpu *g)
{
    return g->broken ? g->why : NULL;
}

pd_status gpu_memory_free(gpu *g, uint64_t *bytes_out)
{
    emu_memory_lock();
    *bytes_out = emu_memory_free_bytes(g->memory);
    emu_memory_unlock();
    return PD_OK;
}

static pd_status alloc(gpu *g, uint64_t bytes, bool host, void **memory_out)
{
    emu_memory_lock();
    void *memory = emu_memory_alloc(g->memory, bytes, host);
    emu_memory_unlock();
    if (memory == NULL) {
        char text[GPU_ERROR_BYTES];
        snprintf(text, sizeof text, "out of memory (%llu bytes)", (unsigned long long)bytes);
        emu_remember(g, text);
        pd_log_error("msg=\"emulated gpu: %s\"", text);
        return PD_E_NOMEM;
    }
    *memory_out = memory;
    return PD_OK;
}

/* As cudaFree does, waits for everything that could still use it. */
static void release(gpu *g, void *memory)
{
    char text[256];

    if (memory == NULL)
        return;
    emu_queue_drain(g);
    emu_memory_lock();
    emu_memory_check(g->memory, text, sizeof text);
    bool known = emu_memory_free(g->memory, memory);
    emu_memory_unlock();
    if (text[0] != '\0')
        (void)emu_break(g, "something, seen as memory was freed, %s", text);
    if (!known)
        (void)emu_break(g, "memory was freed that is no allocation");
}

pd_status gpu_alloc(gpu *g, uint64_t bytes, void **memory_out)
{
    return alloc(g, bytes, false, memory_out);
}

pd_status gpu_alloc_pool(gpu *g, uint64_t bytes, pd_memory_reach reach, void **memory_out,
                         pd_memory_reach *reach_out)
{
    if (reach == PD_REACH_FABRIC) {
        pd_log_error("msg=\"emulated gpu: no fabric joins it to others\"");
        return PD_E_UNSUPPORTED;
    }
    *reach_out = PD_REACH_HOST;
    return gpu_alloc(g, bytes, memory_out);
}

void gpu_free(gpu *g, void *memory)
{
    release(g, memory);
}

pd_status gpu_host_alloc(gpu *g, uint64_t bytes, void **memory_out)
{
    return alloc(g, bytes, true, memory_out);
}

void gpu_host_free(gpu *g, void *memory)
{
    release(g, memory);
}

pd_status gpu_export(gpu *g, void *memory, unsigned char handle_out[GPU_HANDLE_BYTES])
{
    static_assert(EMU_HANDLE_BYTES <= GPU_HANDLE_BYTES, "a handle fits");
    memset(handle_out, 0, GPU_HANDLE_BYTES);
    emu_memory_lock();
    pd_status status = emu_memory_export(g->memory, memory, handle_out);
    emu_memory_unlock();
    return status;
}

pd_status gpu_import(gpu *g, const unsigned char handle[GPU_HANDLE_BYTES], uint64_t bytes,
                     void **memory_out)
{
    emu_memory_lock();
    pd_status status = emu_memory_import(g->memory, handle, bytes, memory_out);
    emu_memory_unlock();
    return status;
}

void gpu_unimport(gpu *g, void *memory)
{
    if (memory == NULL)
        return;
    emu_queue_drain(g);
    emu_memory_lock();
    bool known = emu_memory_unimport(g->memory, memory);
    emu_memory_unlock();
    if (!known)
        (void)emu_break(g, "memory was given back that was not imported");
}

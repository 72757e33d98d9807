#include "kernels/cuda/gpu.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/cuda/gpu_fabric.h"

#include <atomic>
#include <ctype.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

/* The CUDA runtime behind gpu.h. The driver's library is opened by the runtime itself, so that this
 * file can be loaded, and can say what is missing, where there is none. */

struct gpu {
    gpu_info info;
    int device;
    std::atomic<bool> broken;
    std::atomic<bool> why_taken; /* the first to break it writes why */
    char why[GPU_ERROR_BYTES];
    pthread_mutex_t lock; /* of last */
    char last[GPU_ERROR_BYTES];
};

struct gpu_stream {
    gpu *g;
    cudaStream_t stream;
    const char *last_kernel; /* the latest queued, static text; a hint when a wait fails */
};

struct gpu_event {
    gpu *g;
    cudaEvent_t event;
};

struct gpu_graph {
    gpu *g;
    cudaGraphExec_t exec;
};

/* The unit that the driver gives memory out in. What is smaller shares a unit, and then a handle
 * of it would be one of its neighbours, too. */
#define ALLOCATION_UNIT ((uint64_t)2 << 20)

/* --- errors --- */

/* After one of these the context is lost: every later call returns the same. */
static bool is_sticky(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
    case cudaErrorContextIsDestroyed:
    case cudaErrorCudartUnloading:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnknown: return true;
    default: return false;
    }
}

static pd_status status_of(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation: return PD_E_NOMEM;
    case cudaErrorNotSupported:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorPeerAccessUnsupported: return PD_E_UNSUPPORTED;
    default: return PD_E_INTERNAL;
    }
}

static void remember(gpu *g, const char *text)
{
    pthread_mutex_lock(&g->lock);
    snprintf(g->last, sizeof g->last, "%s", text);
    pthread_mutex_unlock(&g->lock);
}

/* A call failed: one line, unless the device was lost before and the line is written. detail: what
 * the call was about, "" for nothing. */
static pd_status failed(gpu *g, cudaError_t error, const char *call, const char *detail)
{
    char text[GPU_ERROR_BYTES];

    (void)cudaGetLastError(); /* not to be taken for the next call's */
    if (is_sticky(error)) {
        if (g->why_taken.exchange(true)) {
            /* whoever hears of this failure may ask gpu_broken at once */
            while (!g->broken.load(std::memory_order_acquire))
                sched_yield();
            return PD_E_INTERNAL;
        }
        snprintf(g->why, sizeof g->why, "%s (%s, seen by %s%s%s)", cudaGetErrorString(error),
                 cudaGetErrorName(error), call, detail[0] != 0 ? ": " : "", detail);
        remember(g, g->why);
        g->broken.store(true, std::memory_order_release);
        pd_log_error("msg=\"gpu: lost, this process must end: %s\" device=%d bus=%s", g->why,
                     g->device, g->info.bus);
        return PD_E_INTERNAL;
    }
    snprintf(text, sizeof text, "%s failed: %s (%s)%s%s", call, cudaGetErrorString(error),
             cudaGetErrorName(error), detail[0] != 0 ? ": " : "", detail);
    remember(g, text);
    pd_log_error("msg=\"gpu: %s\" device=%d bus=%s", text, g->device, g->info.bus);
    return status_of(error);
}

static bool is_broken(const gpu *g)
{
    return g->broken.load(std::memory_order_acquire);
}

/* The value of a function whose last act is CALL. */
#define RUN(g, call, detail) run((g), (call), #call, (detail))
static pd_status run(gpu *g, cudaError_t error, const char *call, const char *detail)
{
    if (error == cudaSuccess)
        return PD_OK;
    char name[64]; /* the call without its arguments */
    snprintf(name, sizeof name, "%.*s", (int)strcspn(call, "("), call);
    return failed(g, error, name, detail);
}

pd_status gpu_met(gpu *g, int error, const char *call)
{
    cudaError_t met = error != 0 ? (cudaError_t)error : cudaPeekAtLastError();

    return met == cudaSuccess ? PD_OK : failed(g, met, call, "");
}

const char *gpu_broken(const gpu *g)
{
    return is_broken(g) ? g->why : NULL;
}

void gpu_last_error(gpu *g, char *text, size_t text_size)
{
    pthread_mutex_lock(&g->lock);
    snprintf(text, text_size, "%s", g->last);
    pthread_mutex_unlock(&g->lock);
}

/* --- devices --- */

uint32_t gpu_count(char *reason, size_t reason_size)
{
    int count = 0, driver = 0;
    cudaError_t error = cudaGetDeviceCount(&count);

    (void)cudaGetLastError();
    if (error == cudaSuccess && count > 0)
        return (uint32_t)count;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        snprintf(reason, reason_size, "there is no NVIDIA driver on this machine (libcuda.so.1)");
    else if (error == cudaErrorInsufficientDriver)
        snprintf(reason, reason_size,
                 "the NVIDIA driver is too old: it knows CUDA %d.%d, and %d.0 is needed",
                 driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
    else if (error != cudaSuccess)
        snprintf(reason, reason_size, "cudaGetDeviceCount: %s (%s)", cudaGetErrorString(error),
                 cudaGetErrorName(error));
    else
        snprintf(reason, reason_size, "there is no NVIDIA GPU that this process may use");
    return 0;
}

/* Kernels are compiled to machine code of sm_80, sm_90 and sm_100: it runs on later minor versions
 * of the same major one. 0: none of ours does. */
static uint32_t arch_of(int major)
{
    return major == 8 ? 80 : major == 9 ? 90 : major == 10 ? 100 : 0;
}

static int numa_node_of(const char *bus)
{
    char path[96];
    int node = -1;

    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", bus);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return -1; /* a container without sysfs, say */
    if (fscanf(file, "%d", &node) != 1 || node < 0)
        node = -1;
    fclose(file);
    return node;
}

/* What sm_80 has for a block; sm_86 and sm_89 have 99 KiB, too little for the widest tiles. */
enum { SHARED_BYTES_MIN = 163 << 10 };

/* No call here makes a context. */
static pd_status describe(gpu *g)
{
    cudaDeviceProp properties;
    gpu_info *info = &g->info;
    int mode = cudaComputeModeDefault;
    pd_status status = RUN(g, cudaGetDeviceProperties(&properties, g->device), "");

    if (status == PD_OK)
        status = RUN(g, cudaDeviceGetPCIBusId(info->bus, sizeof info->bus, g->device), "");
    if (status == PD_OK)
        status = RUN(g, cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, g->device), "");
    if (status != PD_OK)
        return status;
    for (char *c = info->bus; *c != 0; c++)
        *c = (char)tolower((unsigned char)*c); /* as sysfs spells it */
    snprintf(info->name, sizeof info->name, "%.127s", properties.name);
    info->numa_node = numa_node_of(info->bus);
    info->arch = arch_of(properties.major);
    info->processors = (uint32_t)properties.multiProcessorCount;
    info->memory_bytes = properties.totalGlobalMem;
    info->shared_bytes_max = (uint32_t)properties.sharedMemPerBlockOptin;
    info->l2_bytes = (uint32_t)properties.l2CacheSize;
    info->emulated = false;
    if (info->arch == 0) {
        pd_log_error("msg=\"gpu: %s is sm_%d%d, and there are kernels for sm_8x, sm_9x and "
                     "sm_10x\" device=%d bus=%s",
                     info->name, properties.major, properties.minor, g->device, info->bus);
        return PD_E_UNSUPPORTED;
    }
    if (info->shared_bytes_max < SHARED_BYTES_MIN) {
        pd_log_error("msg=\"gpu: %s (sm_%d%d) has %u bytes of shared memory for a block, and the "
                     "kernels need %d, as sm_80, sm_90 and sm_100 have\" device=%d bus=%s",
                     info->name, properties.major, properties.minor, info->shared_bytes_max,
                     SHARED_BYTES_MIN, g->device, info->bus);
        return PD_E_UNSUPPORTED;
    }
    if (mode == cudaComputeModeProhibited) {
        pd_log_error("msg=\"gpu: nobody may compute on %s (nvidia-smi -c)\" device=%d bus=%s",
                     info->name, g->device, info->bus);
        return PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

pd_status gpu_look(uint32_t device, gpu_info *info_out)
{
    gpu g = {};

    g.lock = PTHREAD_MUTEX_INITIALIZER;

    g.device = (int)device;
    pd_status status = describe(&g);
    if (status == PD_OK)
        *info_out = g.info;
    return status;
}

/* The context; threads that wait for it sleep. */
static pd_status start(gpu *g)
{
    pd_status status = RUN(
        g, cudaInitDevice(g->device, cudaDeviceScheduleBlockingSync, cudaInitDeviceFlagsAreValid),
        "");

    if (status == PD_OK)
        status = RUN(g, cudaSetDevice(g->device), "");
    return status == PD_OK ? gpu_memory_free(g, &g->info.memory_free_bytes) : status;
}

pd_status gpu_open(uint32_t device, gpu **gpu_out)
{
    gpu *g = (gpu *)pd_calloc(1, sizeof *g);

    if (g == NULL)
        return PD_E_NOMEM;
    pthread_mutex_init(&g->lock, NULL); /* on Linux it cannot fail */
    g->device = (int)device;
    pd_status status = describe(g);
    if (status == PD_OK)
        status = start(g);
    if (status != PD_OK) {
        pthread_mutex_destroy(&g->lock);
        pd_free(g);
        return status;
    }
    *gpu_out = g;
    return PD_OK;
}

void gpu_close(gpu *g)
{
    if (g == NULL)
        return;
    pthread_mutex_destroy(&g->lock);
    pd_free(g);
}

void gpu_use(gpu *g)
{
    /* a failure is logged, and met again by the calls that follow */
    (void)RUN(g, cudaSetDevice(g->device), "");
}

const gpu_info *gpu_info_of(const gpu *g)
{
    return &g->info;
}

/* --- memory --- */

pd_status gpu_memory_free(gpu *g, uint64_t *bytes_out)
{
    size_t free_bytes = 0, all_bytes = 0;

    if (is_broken(g))
        return PD_E_INTERNAL;
    pd_status status = RUN(g, cudaMemGetInfo(&free_bytes, &all_bytes), "");
    if (status == PD_OK)
        *bytes_out = free_bytes;
    return status;
}

pd_status gpu_alloc(gpu *g, uint64_t bytes, void **memory_out)
{
    uint64_t rounded = (bytes + ALLOCATION_UNIT - 1) / ALLOCATION_UNIT * ALLOCATION_UNIT;
    char detail[64];
    void *memory = NULL;

    if (is_broken(g))
        return PD_E_INTERNAL;
    snprintf(detail, sizeof detail, "%llu bytes", (unsigned long long)bytes);
    pd_status status = RUN(g, cudaMalloc(&memory, rounded > 0 ? rounded : ALLOCATION_UNIT), detail);
    if (status == PD_OK)
        *memory_out = memory;
    return status;
}

pd_status gpu_alloc_pool(gpu *g, uint64_t bytes, pd_memory_reach reach, void **memory_out,
                         pd_memory_reach *reach_out)
{
    char reason[160] = "";

    if (is_broken(g))
        return PD_E_INTERNAL;
    *reach_out = reach == PD_REACH_HOST ? PD_REACH_HOST : PD_REACH_FABRIC;
    if (reach == PD_REACH_HOST)
        return gpu_alloc(g, bytes, memory_out);
    pd_status status = gpu_fabric_alloc(g->device, bytes, memory_out, reason, sizeof reason);
    if (status == PD_OK)
        return PD_OK;
    if (reach == PD_REACH_AUTO && status == PD_E_UNSUPPORTED) {
        pd_log_info("msg=\"gpu: memory that only this host reaches: %s\" device=%d", reason,
                    g->device);
        *reach_out = PD_REACH_HOST;
        return gpu_alloc(g, bytes, memory_out);
    }
    pd_log_error("msg=\"gpu: no memory with a fabric handle: %s\" bytes=%llu device=%d bus=%s",
                 reason, (unsigned long long)bytes, g->device, g->info.bus);
    return status;
}

static void free_fabric(gpu *g, void *memory)
{
    char reason[160] = "";

    if (!gpu_fabric_free(memory, reason, sizeof reason))
        pd_log_error("msg=\"gpu: memory with a fabric handle cannot be given back: %s\" device=%d",
                     reason, g->device);
}

void gpu_free(gpu *g, void *memory)
{
    if (memory == NULL || is_broken(g))
        return;
    if (gpu_fabric_has(memory))
        free_fabric(g, memory);
    else
        (void)RUN(g, cudaFree(memory), "");
}

pd_status gpu_host_alloc(gpu *g, uint64_t bytes, void **memory_out)
{
    char detail[64];
    void *memory = NULL;

    if (is_broken(g))
        return PD_E_INTERNAL;
    snprintf(detail, sizeof detail, "%llu bytes", (unsigned long long)bytes);
    pd_status status =
        RUN(g, cudaHostAlloc(&memory, bytes > 0 ? bytes : 1, cudaHostAllocPortable), detail);
    if (status == PD_OK)
        *memory_out = memory;
    return status;
}

void gpu_host_free(gpu *g, void *memory)
{
    if (memory != NULL && !is_broken(g))
        (void)RUN(g, cudaFreeHost(memory), "");
}

/* The allocation that memory lies in: its start and bytes. The runtime has no call for it; the
 * driver's is asked for by name, so that nothing links the driver. */
static pd_status range_of(gpu *g, void *memory, void **start_out, uint64_t *bytes_out)
{
    typedef CUresult (*range_function)(CUdeviceptr *, size_t *, CUdeviceptr);
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    CUdeviceptr start = 0;
    size_t bytes = 0;
    pd_status status = RUN(g,
                           cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 12000,
                                                            cudaEnableDefault, &found),
                           "");

    if (status != PD_OK)
        return status;
    if (found != cudaDriverEntryPointSuccess ||
        ((range_function)entry)(&start, &bytes, (CUdeviceptr)memory) != CUDA_SUCCESS) {
        pd_log_error("msg=\"gpu: the driver does not say which allocation %p is of\" device=%d",
                     memory, g->device);
        return PD_E_INTERNAL;
    }
    *start_out = (void *)start;
    *bytes_out = bytes;
    return PD_OK;
}

/* What a handle's bytes are. */
typedef struct handle {
    uint32_t fabric; /* 1: the fabric's; 0: the runtime's */
    uint32_t pad;    /* 0 */
    unsigned char bytes[64];
} handle;
static_assert(sizeof(handle) == GPU_HANDLE_BYTES, "a handle fits exactly");
static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(((handle *)0)->bytes), "and the runtime's");
static_assert(GPU_FABRIC_HANDLE_BYTES == sizeof(((handle *)0)->bytes), "and the fabric's");

static pd_status export_plain(gpu *g, void *memory, handle *out)
{
    cudaIpcMemHandle_t plain;
    void *start = NULL;
    uint64_t bytes = 0;
    pd_status status = range_of(g, memory, &start, &bytes);

    if (status != PD_OK)
        return status;
    if (start != memory) {
        pd_log_error("msg=\"gpu: memory to export is a part of a larger allocation\" device=%d",
                     g->device);
        return PD_E_UNSUPPORTED;
    }
    status = RUN(g, cudaIpcGetMemHandle(&plain, memory), "");
    if (status == PD_OK)
        memcpy(out->bytes, &plain, sizeof plain);
    return status;
}

pd_status gpu_export(gpu *g, void *memory, unsigned char handle_out[GPU_HANDLE_BYTES])
{
    char reason[160] = "";
    handle out = {};

    if (is_broken(g))
        return PD_E_INTERNAL;
    out.fabric = gpu_fabric_has(memory);
    pd_status status = out.fabric != 0 ? gpu_fabric_export(memory, out.bytes, reason, sizeof reason)
                                       : export_plain(g, memory, &out);
    if (status != PD_OK && out.fabric != 0)
        pd_log_error("msg=\"gpu: no fabric handle: %s\" device=%d", reason, g->device);
    if (status == PD_OK)
        memcpy(handle_out, &out, sizeof out);
    return status;
}

static pd_status import_plain(gpu *g, const handle *in, uint64_t bytes, void **memory_out)
{
    cudaIpcMemHandle_t plain;
    void *memory = NULL, *start = NULL;
    uint64_t there = 0;

    memcpy(&plain, in->bytes, sizeof plain);
    pd_status status =
        RUN(g, cudaIpcOpenMemHandle(&memory, plain, cudaIpcMemLazyEnablePeerAccess), "");
    if (status != PD_OK)
        return status;
    status = range_of(g, memory, &start, &there);
    if (status == PD_OK && there < bytes) {
        pd_log_error("msg=\"gpu: imported memory has %llu bytes, %llu were said\" device=%d",
                     (unsigned long long)there, (unsigned long long)bytes, g->device);
        status = PD_E_INTERNAL;
    }
    if (status != PD_OK) {
        gpu_unimport(g, memory);
        return status;
    }
    *memory_out = memory;
    return PD_OK;
}

pd_status gpu_import(gpu *g, const unsigned char handle_in[GPU_HANDLE_BYTES], uint64_t bytes,
                     void **memory_out)
{
    char reason[160] = "";
    handle in;

    if (is_broken(g))
        return PD_E_INTERNAL;
    memcpy(&in, handle_in, sizeof in);
    if (in.fabric == 0)
        return import_plain(g, &in, bytes, memory_out);
    pd_status status =
        gpu_fabric_import(g->device, in.bytes, bytes, memory_out, reason, sizeof reason);
    if (status != PD_OK)
        pd_log_error("msg=\"gpu: memory with a fabric handle cannot be imported: %s\" device=%d",
                     reason, g->device);
    return status;
}

void gpu_unimport(gpu *g, void *memory)
{
    if (memory == NULL || is_broken(g))
        return;
    if (gpu_fabric_has(memory))
        free_fabric(g, memory);
    else
        (void)RUN(g, cudaIpcCloseMemHandle(memory), "");
}

/* --- streams --- */

pd_status gpu_stream_create(gpu *g, gpu_stream **stream_out)
{
    if (is_broken(g))
        return PD_E_INTERNAL;
    gpu_stream *stream = (gpu_stream *)pd_calloc(1, sizeof *stream);
    if (stream == NULL)
        return PD_E_NOMEM;
    stream->g = g;
    stream->last_kernel = "none";
    pd_status status =
        RUN(g, cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking), "");
    if (status != PD_OK) {
        pd_free(stream);
        return status;
    }
    *stream_out = stream;
    return PD_OK;
}

void gpu_stream_destroy(gpu_stream *stream)
{
    if (stream == NULL)
        return;
    if (!is_broken(stream->g))
        (void)RUN(stream->g, cudaStreamDestroy(stream->stream), "");
    pd_free(stream);
}

pd_status gpu_stream_wait(gpu_stream *stream)
{
    char detail[160];

    if (is_broken(stream->g))
        return PD_E_INTERNAL;
    cudaError_t error = cudaStreamSynchronize(stream->stream);
    if (error == cudaSuccess)
        return PD_OK;
    snprintf(detail, sizeof detail,
             "the latest kernel queued was %s; CUDA_LAUNCH_BLOCKING=1 names the right one",
             stream->last_kernel);
    return failed(stream->g, error, "cudaStreamSynchronize", detail);
}

gpu *gpu_stream_gpu(gpu_stream *stream)
{
    return stream->g;
}

void *gpu_stream_native(gpu_stream *stream)
{
    return stream->stream;
}

/* Dynamic shared memory that a kernel was allowed on a device. More than 48 KiB, static included,
 * must be asked for before a launch; what is asked for holds for launches of other threads, too, so
 * it only grows. */
#define ALLOWED_MAX 1024
static struct {
    pthread_mutex_t lock;
    uint32_t count;
    struct {
        const void *kernel;
        int device;
        uint64_t bytes;
    } of[ALLOWED_MAX];
} allowed = {PTHREAD_MUTEX_INITIALIZER, 0, {}};

static cudaError_t allow_shared(const void *kernel, int device, uint64_t bytes)
{
    cudaError_t error = cudaSuccess;
    uint32_t at = 0;

    pthread_mutex_lock(&allowed.lock);
    while (at < allowed.count &&
           (allowed.of[at].kernel != kernel || allowed.of[at].device != device))
        at++;
    if (at == allowed.count) {
        pd_assert(at < ALLOWED_MAX); /* as many kernels as were compiled, on a few devices */
        allowed.of[at] = {kernel, device, 0};
        allowed.count++;
    }
    if (allowed.of[at].bytes < bytes) {
        error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        if (error == cudaSuccess)
            allowed.of[at].bytes = bytes;
    }
    pthread_mutex_unlock(&allowed.lock);
    return error;
}

/* What CU_LAUNCH comes to (words_nvcc.h). */
extern "C" PD_CHECKED pd_status gpu_launch(const char *name, const void *kernel, dim3 grid,
                                           dim3 block, uint64_t shared_bytes, gpu_stream *stream,
                                           void **arguments);
pd_status gpu_launch(const char *name, const void *kernel, dim3 grid, dim3 block,
                     uint64_t shared_bytes, gpu_stream *stream, void **arguments)
{
    cudaError_t error = cudaSuccess;
    char detail[192];

    if (is_broken(stream->g))
        return PD_E_INTERNAL;
    if (shared_bytes > 0)
        error = allow_shared(kernel, stream->g->device, shared_bytes);
    if (error == cudaSuccess)
        error = cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream->stream);
    if (error == cudaSuccess) {
        stream->last_kernel = name;
        return PD_OK;
    }
    snprintf(detail, sizeof detail, "%s, grid %ux%ux%u, block %ux%ux%u, %llu bytes shared", name,
             grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned long long)shared_bytes);
    return failed(stream->g, error, "launch", detail);
}

/* --- events --- */

pd_status gpu_event_create(gpu *g, gpu_event **event_out)
{
    if (is_broken(g))
        return PD_E_INTERNAL;
    gpu_event *event = (gpu_event *)pd_calloc(1, sizeof *event);
    if (event == NULL)
        return PD_E_NOMEM;
    event->g = g;
    pd_status status = RUN(g, cudaEventCreateWithFlags(&event->event, cudaEventBlockingSync), "");
    if (status != PD_OK) {
        pd_free(event);
        return status;
    }
    *event_out = event;
    return PD_OK;
}

void gpu_event_destroy(gpu_event *event)
{
    if (event == NULL)
        return;
    if (!is_broken(event->g))
        (void)RUN(event->g, cudaEventDestroy(event->event), "");
    pd_free(event);
}

pd_status gpu_event_record(gpu_event *event, gpu_stream *stream)
{
    if (is_broken(event->g))
        return PD_E_INTERNAL;
    return RUN(event->g, cudaEventRecord(event->event, stream->stream), "");
}

pd_status gpu_stream_wait_event(gpu_stream *stream, gpu_event *event)
{
    if (is_broken(event->g))
        return PD_E_INTERNAL;
    return RUN(event->g, cudaStreamWaitEvent(stream->stream, event->event, 0), "");
}

pd_status gpu_event_wait(gpu_event *event)
{
    if (is_broken(event->g))
        return PD_E_INTERNAL;
    return RUN(event->g, cudaEventSynchronize(event->event), "");
}

pd_status gpu_event_poll(gpu_event *event)
{
    if (is_broken(event->g))
        return PD_E_INTERNAL;
    cudaError_t error = cudaEventQuery(event->event);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return PD_E_AGAIN;
    }
    return error == cudaSuccess ? PD_OK : failed(event->g, error, "cudaEventQuery", "");
}

pd_status gpu_event_ms(gpu_event *from, gpu_event *to, float *ms_out)
{
    float ms = 0;

    if (is_broken(from->g))
        return PD_E_INTERNAL;
    pd_status status = RUN(from->g, cudaEventElapsedTime(&ms, from->event, to->event), "");
    if (status == PD_OK)
        *ms_out = ms;
    return status;
}

/* --- what is queued --- */

static pd_status copy(gpu_stream *stream, void *to, const void *from, uint64_t bytes,
                      cudaMemcpyKind kind)
{
    char detail[64];

    if (is_broken(stream->g))
        return PD_E_INTERNAL;
    if (bytes == 0)
        return PD_OK;
    snprintf(detail, sizeof detail, "%llu bytes", (unsigned long long)bytes);
    return RUN(stream->g, cudaMemcpyAsync(to, from, bytes, kind, stream->stream), detail);
}

pd_status gpu_copy_in(gpu_stream *stream, void *device, const void *host, uint64_t bytes)
{
    return copy(stream, device, host, bytes, cudaMemcpyHostToDevice);
}

pd_status gpu_copy_out(gpu_stream *stream, void *host, const void *device, uint64_t bytes)
{
    return copy(stream, host, device, bytes, cudaMemcpyDeviceToHost);
}

pd_status gpu_copy(gpu_stream *stream, void *to, const void *from, uint64_t bytes)
{
    return copy(stream, to, from, bytes, cudaMemcpyDeviceToDevice);
}

pd_status gpu_fill(gpu_stream *stream, void *device, int byte, uint64_t bytes)
{
    if (is_broken(stream->g))
        return PD_E_INTERNAL;
    if (bytes == 0)
        return PD_OK;
    return RUN(stream->g, cudaMemsetAsync(device, byte, bytes, stream->stream), "");
}

pd_status gpu_call(gpu_stream *stream, void (*fn)(void *ctx), void *ctx)
{
    if (is_broken(stream->g))
        return PD_E_INTERNAL;
    return RUN(stream->g, cudaLaunchHostFunc(stream->stream, fn, ctx), "");
}

/* --- graphs --- */

pd_status gpu_graph_begin(gpu_stream *stream)
{
    if (is_broken(stream->g))
        return PD_E_INTERNAL;
    /* other threads may allocate meanwhile */
    return RUN(stream->g, cudaStreamBeginCapture(stream->stream, cudaStreamCaptureModeThreadLocal),
               "");
}

pd_status gpu_graph_end(gpu_stream *stream, gpu_graph **graph_out)
{
    cudaGraph_t recorded = NULL;
    gpu *g = stream->g;

    if (is_broken(g))
        return PD_E_INTERNAL;
    pd_status status = RUN(g, cudaStreamEndCapture(stream->stream, &recorded), "");
    if (status != PD_OK)
        return status; /* what failed while recording was logged there, too */
    gpu_graph *graph = (gpu_graph *)pd_calloc(1, sizeof *graph);
    if (graph == NULL) {
        status = PD_E_NOMEM;
    } else {
        graph->g = g;
        status = RUN(g, cudaGraphInstantiate(&graph->exec, recorded, 0), "");
    }
    (void)RUN(g, cudaGraphDestroy(recorded), "");
    if (status != PD_OK) {
        pd_free(graph);
        return status;
    }
    *graph_out = graph;
    return PD_OK;
}

pd_status gpu_graph_launch(gpu_graph *graph, gpu_stream *stream)
{
    if (is_broken(graph->g))
        return PD_E_INTERNAL;
    return RUN(graph->g, cudaGraphLaunch(graph->exec, stream->stream), "");
}

void gpu_graph_destroy(gpu_graph *graph)
{
    if (graph == NULL)
        return;
    if (!is_broken(graph->g))
        (void)RUN(graph->g, cudaGraphExecDestroy(graph->exec), "");
    pd_free(graph);
}

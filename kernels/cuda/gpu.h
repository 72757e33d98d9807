#pragma once

/* kernels/cuda/gpu.h - the little of a GPU's runtime that the backend uses, as plain C.
 *
 * Two bodies, chosen by Meson: gpu_cuda.cu (the CUDA runtime, linked statically) for kv_cuda.so,
 * and emu/gpu_emu.cpp for kv_cuda_emu.so, where streams are queues, device memory is host memory
 * between guard zones, and late mode runs a random legal interleaving only when somebody waits.
 *
 * Every failure is logged once where it is seen, with the runtime's own name of it and the call.
 * PD_E_NOMEM: memory; PD_E_UNSUPPORTED: what this device or driver lacks; PD_E_INTERNAL: anything
 * else, and a *sticky* error makes every later call fail the same way: the worker must end
 * (gpu_broken tells). Any thread, each object by one thread at a time; a thread that works with a
 * gpu calls gpu_use first. */

#include "common/base/memory_kind.h"
#include "common/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpu gpu;
typedef struct gpu_stream gpu_stream;
typedef struct gpu_event gpu_event;
typedef struct gpu_graph gpu_graph;

typedef struct gpu_info {
    char name[128];                           /* "NVIDIA H200", "emulated sm_90" */
    char bus[32];                             /* PCI, "0000:1b:00.0"; "" when there is none */
    int numa_node;                            /* -1: unknown */
    uint32_t arch;                            /* 80, 90, 100 */
    uint32_t processors;                      /* SMs */
    uint64_t memory_bytes, memory_free_bytes; /* free: when it was opened */
    uint32_t shared_bytes_max;                /* of a block, opted in */
    uint32_t l2_bytes;
    bool emulated;
} gpu_info;

/* What a device is, without a context on it: a look costs no device memory and leaves nothing. What
 * is free is not said (0). Errors as gpu_open's, which may find more. */
PD_CHECKED pd_status gpu_look(uint32_t device, gpu_info *info_out);
/* How many devices; 0 with the reason written (driver missing, too old, no device). */
uint32_t gpu_count(char *reason, size_t reason_size);
PD_CHECKED pd_status gpu_open(uint32_t device, gpu **gpu_out);
/* NULL is fine; streams, events, graphs and memory were ended before. The device's context stays
 * until the process ends: it is the process', and others (UCX, say) work in it. */
void gpu_close(gpu *g);
void gpu_use(gpu *g); /* this thread's calls are for that device */
const gpu_info *gpu_info_of(const gpu *g);
/* NULL: fine; else what broke it for good ("an illegal memory access was encountered"). */
const char *gpu_broken(const gpu *g);
/* What failed last, whether or not it broke the device ("cudaMemcpyAsync: out of memory"); "":
 * nothing did. Any thread. */
#define GPU_ERROR_BYTES 192
void gpu_last_error(gpu *g, char *text, size_t text_size);

/* What is free now: other processes take, too. */
PD_CHECKED pd_status gpu_memory_free(gpu *g, uint64_t *bytes_out);
/* Device memory, 256-byte aligned, not cleared. One allocation each, so that it can be exported. */
PD_CHECKED pd_status gpu_alloc(gpu *g, uint64_t bytes, void **memory_out);
/* The same for a KV pool, which other processes write. *reach_out is not AUTO; PD_E_UNSUPPORTED:
 * FABRIC was asked for, and this device, driver or machine gives no such handles (logged). */
PD_CHECKED pd_status gpu_alloc_pool(gpu *g, uint64_t bytes, pd_memory_reach reach,
                                    void **memory_out, pd_memory_reach *reach_out);
void gpu_free(gpu *g, void *memory);
/* Host memory that copies go to and from without staging. */
PD_CHECKED pd_status gpu_host_alloc(gpu *g, uint64_t bytes, void **memory_out);
void gpu_host_free(gpu *g, void *memory);

/* Memory of one process used by another on the same host (tensor-parallel ranks). bytes of an
 * import: as they were allocated. */
#define GPU_HANDLE_BYTES 72 /* which kind of handle it is, then the driver's 64 */
PD_CHECKED pd_status gpu_export(gpu *g, void *memory, unsigned char handle_out[GPU_HANDLE_BYTES]);
PD_CHECKED pd_status gpu_import(gpu *g, const unsigned char handle[GPU_HANDLE_BYTES],
                                uint64_t bytes, void **memory_out);
void gpu_unimport(gpu *g, void *memory);

PD_CHECKED pd_status gpu_stream_create(gpu *g, gpu_stream **stream_out);
void gpu_stream_destroy(gpu_stream *stream); /* does not wait: what is queued runs some time */
/* The calling thread waits for all, asleep, as in gpu_event_wait: waking costs some tens of
 * microseconds of a step's milliseconds, where a thread that spins would cost a core for good. */
PD_CHECKED pd_status gpu_stream_wait(gpu_stream *stream);
gpu *gpu_stream_gpu(gpu_stream *stream);
/* cudaStream_t, for NCCL and cuBLASLt; who calls such a library tells what it met by gpu_met. */
void *gpu_stream_native(gpu_stream *stream);
/* A runtime call beside gpu.h's, or a library's on a device, is over: error is its cudaError_t, 0
 * where the library only said that something failed (then the runtime is asked). PD_OK: nothing is
 * known to be wrong with the device; else logged, and where the device is lost, gpu_broken tells.
 */
PD_CHECKED pd_status gpu_met(gpu *g, int error, const char *call);

PD_CHECKED pd_status gpu_event_create(gpu *g, gpu_event **event_out);
void gpu_event_destroy(gpu_event *event);
PD_CHECKED pd_status gpu_event_record(gpu_event *event, gpu_stream *stream);
/* What is queued to stream from now on waits until the event's latest record is reached. */
PD_CHECKED pd_status gpu_stream_wait_event(gpu_stream *stream, gpu_event *event);
PD_CHECKED pd_status gpu_event_wait(gpu_event *event); /* the calling thread waits */
PD_CHECKED pd_status gpu_event_poll(gpu_event *event); /* PD_E_AGAIN: not yet */
/* Milliseconds between two reached events (timing is on for every event). */
PD_CHECKED pd_status gpu_event_ms(gpu_event *from, gpu_event *to, float *ms_out);

/* In stream order. Host memory that is not gpu_host_alloc's may be staged and block. */
PD_CHECKED pd_status gpu_copy_in(gpu_stream *stream, void *device, const void *host,
                                 uint64_t bytes);
PD_CHECKED pd_status gpu_copy_out(gpu_stream *stream, void *host, const void *device,
                                  uint64_t bytes);
PD_CHECKED pd_status gpu_copy(gpu_stream *stream, void *to, const void *from, uint64_t bytes);
PD_CHECKED pd_status gpu_fill(gpu_stream *stream, void *device, int byte, uint64_t bytes);
/* fn runs on a thread of the runtime when the stream gets there; it calls nothing of gpu.h. */
PD_CHECKED pd_status gpu_call(gpu_stream *stream, void (*fn)(void *ctx), void *ctx);

/* What is queued between begin and end is recorded, not run. A graph is launched as often as
 * wished; the memory that it names must live. */
PD_CHECKED pd_status gpu_graph_begin(gpu_stream *stream);
PD_CHECKED pd_status gpu_graph_end(gpu_stream *stream, gpu_graph **graph_out);
PD_CHECKED pd_status gpu_graph_launch(gpu_graph *graph, gpu_stream *stream);
void gpu_graph_destroy(gpu_graph *graph);

#ifdef __cplusplus
}
#endif

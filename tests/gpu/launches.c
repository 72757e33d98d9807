/* What each operation launches at the shapes of tests/gpu/cases: the launchers run here, on a
 * gpu.h that queues nothing and writes down what CU_LAUNCH comes to (kernels/cuda/words_nvcc.h).
 * No GPU and no driver are needed. A line a launch, fields separated by tabs, for
 * tests/gpu/ladder:
 *   case, bytes, macs, kernel (the address of its stub in this program), blocks, threads, dynamic
 *   shared bytes */

#include "tests/gpu/cases.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static const gpu_case *now;

/* dim3, as CUDA lays it out. */
typedef struct launch_shape {
    unsigned x, y, z;
} launch_shape;

pd_status gpu_launch(const char *name, const void *kernel, launch_shape grid, launch_shape block,
                     uint64_t shared_bytes, gpu_stream *stream, void **arguments);
pd_status gpu_launch(const char *name, const void *kernel, launch_shape grid, launch_shape block,
                     uint64_t shared_bytes, gpu_stream *stream, void **arguments)
{
    (void)name, (void)stream, (void)arguments;
    printf("%s\t%.0f\t%.0f\t%zx\t%llu\t%u\t%llu\n", now->name, now->work.bytes, now->work.macs,
           (size_t)kernel, (unsigned long long)grid.x * grid.y * grid.z,
           block.x * block.y * block.z, (unsigned long long)shared_bytes);
    return PD_OK;
}

pd_status gpu_fill(gpu_stream *stream, void *device, int byte, uint64_t bytes)
{
    (void)stream, (void)device, (void)byte, (void)bytes;
    return PD_OK;
}

/* A launcher may ask what it runs on: the device that the tables are for. */
gpu *gpu_stream_gpu(gpu_stream *stream)
{
    return (gpu *)stream;
}

const gpu_info *gpu_info_of(const gpu *g)
{
    static const gpu_info h200 = {.name = "NVIDIA H200",
                                  .numa_node = -1,
                                  .arch = 90,
                                  .processors = 132,
                                  .shared_bytes_max = 227 * 1024,
                                  .l2_bytes = 50 << 20};

    (void)g;
    return &h200;
}

/* Addresses only: nobody reads what is there. */
static void *get(void *ctx, const void *host, uint64_t bytes)
{
    uintptr_t *next = ctx;
    uintptr_t at = *next;

    (void)host;
    *next += (bytes + 255) / 256 * 256;
    return (void *)at; // NOLINT: an address of no memory
}

int main(void)
{
    uintptr_t next = (uintptr_t)1 << 40;
    case_memory memory = {.get = get, .ctx = &next};
    static int stream;
    uint32_t count = 0;
    const gpu_case *cases = cases_make(&memory, &count);

    for (uint32_t i = 0; i < count; i++) {
        now = &cases[i];
        pd_status status = now->queue((gpu_stream *)&stream, now);
        if (status != PD_OK) {
            fprintf(stderr, "launches: %s: %s\n", now->name, pd_status_name(status));
            return 1;
        }
    }
    return 0;
}

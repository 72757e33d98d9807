#include "common/transfer/gpus.h"

#include "common/base/log.h"

#include <stdio.h>
#include <unistd.h>

static pd_status failed(const char *what, uint32_t piece, int device, int result)
{
    pd_log_error("msg=\"transfer: the GPU of the KV pool cannot be used: %s failed\" piece=%u "
                 "device=%d cuda_error=%d",
                 what, piece, device, result);
    return PD_E_INTERNAL;
}

static pd_status open_piece(pd_gpus *gpus, uint32_t piece, void *memory)
{
    const pd_cuda_driver *d = gpus->driver;
    pd_gpu_piece *p = &gpus->piece[piece];
    int result =
        d->cuda_pointer_attribute(&p->device, PD_CU_POINTER_DEVICE_ORDINAL, (uintptr_t)memory);

    if (result != PD_CU_SUCCESS) {
        pd_log_error("msg=\"transfer: a piece of the KV pool is no GPU's memory\" piece=%u "
                     "memory=%p cuda_error=%d",
                     piece, memory, result);
        return PD_E_UNSUPPORTED;
    }
    result = d->cuda_context_retain(&p->context, p->device);
    if (result != PD_CU_SUCCESS) {
        p->context = NULL;
        (void)failed("cuDevicePrimaryCtxRetain", piece, p->device, result);
        return PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

/* Some platforms let a NIC's writes be seen late by the GPU, and have a call that waits for them.
 */
static bool needs_flush(const pd_gpus *gpus, int device)
{
    int ordering = PD_CU_RDMA_ORDERING_OWNER, options = 0;

    return gpus->driver->cuda_device_attribute(&ordering, PD_CU_DEVICE_RDMA_ORDERING, device) ==
               PD_CU_SUCCESS &&
           gpus->driver->cuda_device_attribute(&options, PD_CU_DEVICE_RDMA_FLUSH, device) ==
               PD_CU_SUCCESS &&
           ordering < PD_CU_RDMA_ORDERING_OWNER && (options & 1) != 0;
}

static bool is_plain(const pd_gpus *gpus, const void *memory)
{
    int plain = 1;

    return gpus->driver->cuda_pointer_attribute(&plain, PD_CU_POINTER_LEGACY_IPC,
                                                (uintptr_t)memory) != PD_CU_SUCCESS ||
           plain != 0;
}

pd_status pd_gpus_open(pd_gpus *gpus, const pd_transfer_options *options)
{
    *gpus = (pd_gpus){0};
    if (options->pool_kind != PD_MEMORY_CUDA)
        return PD_OK;
    pd_status status = pd_cuda_driver_load(&gpus->driver);
    if (status != PD_OK)
        return status;
    int result = gpus->driver->cuda_init(0);
    if (result != PD_CU_SUCCESS) {
        (void)failed("cuInit", 0, -1, result);
        return PD_E_UNSUPPORTED;
    }
    gpus->count = options->pieces;
    for (uint32_t i = 0; status == PD_OK && i < gpus->count; i++) {
        status = open_piece(gpus, i, options->piece_memory[i]);
        if (status != PD_OK)
            break;
        gpus->flush |= needs_flush(gpus, gpus->piece[i].device);
        gpus->fabric |= !is_plain(gpus, options->piece_memory[i]);
    }
    return status == PD_OK ? pd_gpus_use(gpus, 0) : status;
}

void pd_gpus_close(pd_gpus *gpus)
{
    for (uint32_t i = 0; i < gpus->count; i++) {
        pd_gpu_piece *p = &gpus->piece[i];
        if (p->stream != NULL && pd_gpus_use(gpus, i) == PD_OK)
            gpus->driver->cuda_stream_destroy(p->stream);
    }
    if (gpus->current != NULL)
        gpus->driver->cuda_context_set(NULL);
    for (uint32_t i = 0; i < gpus->count; i++) {
        if (gpus->piece[i].context != NULL)
            gpus->driver->cuda_context_release(gpus->piece[i].device);
    }
    *gpus = (pd_gpus){0};
}

pd_status pd_gpus_use(pd_gpus *gpus, uint32_t piece)
{
    if (gpus->count == 0)
        return PD_OK;
    pd_assert(piece < gpus->count);
    pd_gpu_piece *p = &gpus->piece[piece];
    if (gpus->current == p->context)
        return PD_OK;
    int result = gpus->driver->cuda_context_set(p->context);
    if (result != PD_CU_SUCCESS)
        return failed("cuCtxSetCurrent", piece, p->device, result);
    gpus->current = p->context;
    return PD_OK;
}

/* ---- copies ---- */

static pd_status begin_copy(pd_gpus *gpus, uint32_t piece)
{
    pd_gpu_piece *p = &gpus->piece[piece];
    pd_status status = pd_gpus_use(gpus, piece);
    if (status != PD_OK || p->stream != NULL)
        return status;
    int result = gpus->driver->cuda_stream_create(&p->stream, PD_CU_STREAM_NON_BLOCKING);
    if (result == PD_CU_SUCCESS)
        return PD_OK;
    p->stream = NULL;
    return failed("cuStreamCreate", piece, p->device, result);
}

static pd_status end_copy(pd_gpus *gpus, uint32_t piece, int result)
{
    const pd_gpu_piece *p = &gpus->piece[piece];
    if (result == PD_CU_SUCCESS)
        result = gpus->driver->cuda_stream_wait(p->stream);
    return result == PD_CU_SUCCESS ? PD_OK : failed("a copy", piece, p->device, result);
}

pd_status pd_gpus_copy_out(pd_gpus *gpus, uint32_t piece, void *host, const void *from,
                           uint64_t bytes)
{
    pd_status status = begin_copy(gpus, piece);
    if (status != PD_OK)
        return status;
    return end_copy(
        gpus, piece,
        gpus->driver->cuda_copy_out(host, (uintptr_t)from, bytes, gpus->piece[piece].stream));
}

pd_status pd_gpus_copy_in(pd_gpus *gpus, uint32_t piece, void *to, const void *host, uint64_t bytes)
{
    pd_status status = begin_copy(gpus, piece);
    if (status != PD_OK)
        return status;
    return end_copy(
        gpus, piece,
        gpus->driver->cuda_copy_in((uintptr_t)to, host, bytes, gpus->piece[piece].stream));
}

/* ---- NICs ---- */

bool pd_gpus_rdma(pd_gpus *gpus, const char *root)
{
    /* what UCX looks at, too: uct_ib_md_check_gpudirect_driver of its ib_md.c */
    static const char *const modules[] = {"/sys/kernel/mm/memory_peers/nv_mem/version",
                                          "/sys/module/nvidia_peermem/version"};
    char path[4096];

    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
        int len = snprintf(path, sizeof path, "%s%s", root, modules[i]);
        if (len > 0 && (size_t)len < sizeof path && access(path, F_OK) == 0)
            return true;
    }
    for (uint32_t i = 0; i < gpus->count; i++) {
        int supported = 0;
        if (gpus->driver->cuda_device_attribute(&supported, PD_CU_DEVICE_DMA_BUF,
                                                gpus->piece[i].device) != PD_CU_SUCCESS ||
            supported == 0)
            return false;
    }
    return gpus->count != 0;
}

pd_status pd_gpus_see_writes(pd_gpus *gpus)
{
    for (uint32_t i = 0; gpus->flush && i < gpus->count; i++) {
        pd_status status = pd_gpus_use(gpus, i);
        if (status != PD_OK)
            return status;
        int result =
            gpus->driver->cuda_flush_writes(PD_CU_FLUSH_CURRENT_CONTEXT, PD_CU_FLUSH_TO_OWNER);
        if (result != PD_CU_SUCCESS)
            return failed("cuFlushGPUDirectRDMAWrites", i, gpus->piece[i].device, result);
    }
    return PD_OK;
}

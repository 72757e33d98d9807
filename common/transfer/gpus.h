#pragma once

/* common/transfer/gpus.h - the GPUs that the pieces of a pool lie on. Inside common/transfer only.
 *
 * The driver and UCX's modules for GPUs work in the context that is current on the calling thread:
 * pd_gpus_use names the piece whose device's it is to be. The contexts are the devices' primary
 * ones, which the CUDA runtime uses too. Of a pool in host memory there are none, and every call is
 * empty. One thread; the driver is loaded at run time (cuda_driver.h). */

#include "common/transfer/cuda_driver.h"
#include "common/transfer/transfer.h"

typedef struct pd_gpu_piece {
    int device;            /* the driver's number */
    pd_cu_context context; /* NULL: not had */
    pd_cu_stream stream;   /* of our copies; NULL until the first */
} pd_gpu_piece;

typedef struct pd_gpus {
    const pd_cuda_driver *driver;
    uint32_t count; /* 0: host memory */
    bool flush;     /* see pd_gpus_see_writes */
    bool fabric;    /* memory that GPUs of other hosts may reach: not plain (cudaMalloc) */
    pd_cu_context current;
    pd_gpu_piece piece[PD_TRANSFER_PIECES_MAX];
} pd_gpus;

/* Finds the devices of the options' pieces, and makes the first one's context current. Close it in
 * any case. PD_E_UNSUPPORTED, logged: no driver, or memory that is no GPU's. */
PD_CHECKED pd_status pd_gpus_open(pd_gpus *gpus, const pd_transfer_options *options);
void pd_gpus_close(pd_gpus *gpus);
/* PD_E_INTERNAL, logged: the driver would not, as after a device was lost. */
PD_CHECKED pd_status pd_gpus_use(pd_gpus *gpus, uint32_t piece);

/* Between host memory and a piece's, done when it returns: kernels of any stream see the bytes. A
 * copy into a GPU that the driver calls synchronous is not that for memory which is not pinned,
 * hence a stream that is waited for. PD_E_INTERNAL, logged. */
PD_CHECKED pd_status pd_gpus_copy_out(pd_gpus *gpus, uint32_t piece, void *host, const void *from,
                                      uint64_t bytes);
PD_CHECKED pd_status pd_gpus_copy_in(pd_gpus *gpus, uint32_t piece, void *to, const void *host,
                                     uint64_t bytes);

/* May NICs read and write the memory of every piece (GPUDirect RDMA)? By the kernel's module
 * nvidia_peermem, or by dma-buf. root: "" but in tests, where the file system begins. */
bool pd_gpus_rdma(pd_gpus *gpus, const char *root);
/* What NICs wrote before is seen by kernels from here on; where the platform orders that by itself,
 * nothing is done. PD_E_INTERNAL, logged. */
PD_CHECKED pd_status pd_gpus_see_writes(pd_gpus *gpus);

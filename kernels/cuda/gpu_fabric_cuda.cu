#include "kernels/cuda/gpu_fabric.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* --- the driver's calls, by name, so that nothing links it --- */

#define CALLS(CALL)                                                                                \
    CALL(cuGetErrorName)                                                                           \
    CALL(cuDeviceGetAttribute)                                                                     \
    CALL(cuMemGetAllocationGranularity)                                                            \
    CALL(cuMemCreate)                                                                              \
    CALL(cuMemRelease)                                                                             \
    CALL(cuMemAddressReserve)                                                                      \
    CALL(cuMemAddressFree)                                                                         \
    CALL(cuMemMap)                                                                                 \
    CALL(cuMemUnmap)                                                                               \
    CALL(cuMemSetAccess)                                                                           \
    CALL(cuMemRetainAllocationHandle)                                                              \
    CALL(cuMemExportToShareableHandle)                                                             \
    CALL(cuMemImportFromShareableHandle)

static struct {
#define MEMBER(name) decltype(&::name) name;
    CALLS(MEMBER)
#undef MEMBER
} driver;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static bool driver_loaded;

enum { KEPT_MAX = 128 };
static struct {
    CUdeviceptr start;
    uint64_t bytes; /* mapped; 0: the place is free */
} kept[KEPT_MAX];

static bool resolve(const char *name, void *pointer, char *reason, size_t reason_size)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *entry = NULL;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &entry, 12030, cudaEnableDefault, &found);

    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == NULL) {
        (void)cudaGetLastError();
        snprintf(reason, reason_size, "the driver has no %s", name);
        return false;
    }
    memcpy(pointer, &entry, sizeof entry);
    return true;
}

static bool load(char *reason, size_t reason_size)
{
    pthread_mutex_lock(&lock);
    bool all = true;
#define RESOLVE(name)                                                                              \
    all = all && (driver_loaded || resolve(#name, &driver.name, reason, reason_size));
    CALLS(RESOLVE)
#undef RESOLVE
    driver_loaded = all;
    pthread_mutex_unlock(&lock);
    return all;
}

static pd_status status_of(CUresult result)
{
    switch (result) {
    case CUDA_SUCCESS: return PD_OK;
    case CUDA_ERROR_OUT_OF_MEMORY: return PD_E_NOMEM;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED: /* no IMEX channel that this process may use */
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_INVALID_DEVICE: return PD_E_UNSUPPORTED;
    default: return PD_E_INTERNAL;
    }
}

static pd_status told(const char *call, CUresult result, char *reason, size_t reason_size)
{
    const char *name = NULL;

    if (result == CUDA_SUCCESS)
        return PD_OK;
    if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "an unknown error";
    snprintf(reason, reason_size, "%s: %s", call, name);
    return status_of(result);
}

/* --- what is made --- */

static CUmemAllocationProp properties_of(int device)
{
    CUmemAllocationProp properties = {};
    int nics = 0;

    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    /* NICs are to reach it as they reach cudaMalloc's, where they can */
    if (driver.cuDeviceGetAttribute(&nics,
                                    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                    device) == CUDA_SUCCESS)
        properties.allocFlags.gpuDirectRDMACapable = nics != 0;
    return properties;
}

static pd_status round_up(int device, uint64_t *bytes, char *reason, size_t reason_size)
{
    CUmemAllocationProp properties = properties_of(device);
    size_t unit = 0;
    CUresult result = driver.cuMemGetAllocationGranularity(&unit, &properties,
                                                           CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);

    if (result != CUDA_SUCCESS || unit == 0)
        return told("cuMemGetAllocationGranularity",
                    result == CUDA_SUCCESS ? CUDA_ERROR_NOT_SUPPORTED : result, reason,
                    reason_size);
    *bytes = *bytes == 0 ? unit : (*bytes + unit - 1) / unit * unit;
    return PD_OK;
}

static bool keep(CUdeviceptr start, uint64_t bytes)
{
    bool kept_it = false;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < KEPT_MAX && !kept_it; i++) {
        if (kept[i].bytes != 0)
            continue;
        kept[i].start = start;
        kept[i].bytes = bytes;
        kept_it = true;
    }
    pthread_mutex_unlock(&lock);
    return kept_it;
}

/* Its bytes; 0: it is none of ours. forget: it is not from here on. */
static uint64_t bytes_of(const void *memory, bool forget)
{
    uint64_t bytes = 0;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < KEPT_MAX && bytes == 0; i++) {
        if (kept[i].bytes == 0 || kept[i].start != (CUdeviceptr)memory)
            continue;
        bytes = kept[i].bytes;
        if (forget)
            kept[i].bytes = 0;
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Takes the handle over: the mapping alone keeps the memory, or nothing does. */
static pd_status map(int device, CUmemGenericAllocationHandle handle, uint64_t bytes,
                     void **memory_out, char *reason, size_t reason_size)
{
    CUmemAccessDesc access = {};
    CUdeviceptr start = 0;
    bool mapped = false;
    const char *call = "cuMemAddressReserve";
    CUresult result = driver.cuMemAddressReserve(&start, bytes, 0, 0, 0);

    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (result == CUDA_SUCCESS) {
        call = "cuMemMap";
        result = driver.cuMemMap(start, bytes, 0, handle, 0);
        mapped = result == CUDA_SUCCESS;
    }
    if (mapped) {
        call = "cuMemSetAccess";
        result = driver.cuMemSetAccess(start, bytes, &access, 1);
    }
    (void)driver.cuMemRelease(handle);
    if (result == CUDA_SUCCESS && !keep(start, bytes)) {
        call = "keeping it (too many allocations with fabric handles)";
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
        *memory_out = (void *)start;
        return PD_OK;
    }
    if (mapped)
        (void)driver.cuMemUnmap(start, bytes);
    if (start != 0)
        (void)driver.cuMemAddressFree(start, bytes);
    return told(call, result, reason, reason_size);
}

pd_status gpu_fabric_alloc(int device, uint64_t bytes, void **memory_out, char *reason,
                           size_t reason_size)
{
    CUmemGenericAllocationHandle handle;
    unsigned char exported[GPU_FABRIC_HANDLE_BYTES];
    int supported = 0;

    if (!load(reason, reason_size))
        return PD_E_UNSUPPORTED;
    if (driver.cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
                                    device) != CUDA_SUCCESS ||
        supported == 0) {
        snprintf(reason, reason_size, "the device gives no fabric handles");
        return PD_E_UNSUPPORTED;
    }
    CUmemAllocationProp properties = properties_of(device);
    pd_status status = round_up(device, &bytes, reason, reason_size);
    if (status == PD_OK)
        status = told("cuMemCreate", driver.cuMemCreate(&handle, bytes, &properties, 0), reason,
                      reason_size);
    if (status == PD_OK)
        status = map(device, handle, bytes, memory_out, reason, reason_size);
    if (status != PD_OK)
        return status;
    /* the handle itself may be refused although the memory was given, and now is the time to know
     */
    status = gpu_fabric_export(*memory_out, exported, reason, reason_size);
    if (status != PD_OK) {
        char ignored[64];
        (void)gpu_fabric_free(*memory_out, ignored, sizeof ignored);
        return status == PD_E_NOMEM ? status : PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

bool gpu_fabric_has(const void *memory)
{
    return bytes_of(memory, false) != 0;
}

bool gpu_fabric_free(void *memory, char *reason, size_t reason_size)
{
    uint64_t bytes = bytes_of(memory, true);
    CUdeviceptr start = (CUdeviceptr)memory;

    pd_assert(bytes != 0);
    /* cudaFree waits for what may still use memory, and these do not */
    cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) {
        snprintf(reason, reason_size, "cudaDeviceSynchronize: %s", cudaGetErrorName(error));
        return false;
    }
    return told("cuMemUnmap", driver.cuMemUnmap(start, bytes), reason, reason_size) == PD_OK &&
           told("cuMemAddressFree", driver.cuMemAddressFree(start, bytes), reason, reason_size) ==
               PD_OK;
}

pd_status gpu_fabric_export(void *memory, unsigned char handle_out[GPU_FABRIC_HANDLE_BYTES],
                            char *reason, size_t reason_size)
{
    static_assert(sizeof(CUmemFabricHandle) == GPU_FABRIC_HANDLE_BYTES, "a handle fits exactly");
    CUmemGenericAllocationHandle handle;
    CUmemFabricHandle fabric;
    pd_status status =
        told("cuMemRetainAllocationHandle", driver.cuMemRetainAllocationHandle(&handle, memory),
             reason, reason_size);

    if (status != PD_OK)
        return status;
    status =
        told("cuMemExportToShareableHandle",
             driver.cuMemExportToShareableHandle(&fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0),
             reason, reason_size);
    (void)driver.cuMemRelease(handle);
    if (status == PD_OK)
        memcpy(handle_out, &fabric, sizeof fabric);
    return status;
}

pd_status gpu_fabric_import(int device, const unsigned char handle[GPU_FABRIC_HANDLE_BYTES],
                            uint64_t bytes, void **memory_out, char *reason, size_t reason_size)
{
    CUmemGenericAllocationHandle imported;
    CUmemFabricHandle fabric;

    if (!load(reason, reason_size))
        return PD_E_UNSUPPORTED;
    memcpy(&fabric, handle, sizeof fabric);
    pd_status status = round_up(device, &bytes, reason, reason_size);
    if (status == PD_OK)
        status = told(
            "cuMemImportFromShareableHandle",
            driver.cuMemImportFromShareableHandle(&imported, &fabric, CU_MEM_HANDLE_TYPE_FABRIC),
            reason, reason_size);
    return status == PD_OK ? map(device, imported, bytes, memory_out, reason, reason_size) : status;
}

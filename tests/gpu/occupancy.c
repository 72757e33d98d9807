/* Blocks of a kernel that fit one SM at once, by CUDA's own formula (cuda_occupancy.h), which needs
 * no driver. tests/gpu/ladder compiles and runs it: a line "ARCH REGISTERS STATIC DYNAMIC THREADS"
 * of stdin gives a line "BLOCKS", or "-" where the kernel does not fit. */

#include <cuda_occupancy.h>
#include <stdio.h>

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". */
static cudaOccDeviceProp device_of(int arch)
{
    int shared_kib = arch == 80 ? 164 : 228; /* an SM; 1 KiB a block is the driver's */
    cudaOccDeviceProp device = {
        .computeMajor = arch / 10,
        .computeMinor = arch % 10,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiprocessor = 2048,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .sharedMemPerBlock = 48 * 1024,
        .sharedMemPerMultiprocessor = (size_t)shared_kib * 1024,
        .numSms = 1,
        .sharedMemPerBlockOptin = (size_t)(shared_kib - 1) * 1024,
        .reservedSharedMemPerBlock = 1024,
    };
    return device;
}

int main(void)
{
    int arch, registers, fixed, dynamic, threads;

    while (scanf("%d %d %d %d %d", &arch, &registers, &fixed, &dynamic, &threads) == 5) {
        cudaOccDeviceProp device = device_of(arch);
        cudaOccDeviceState state = {.cacheConfig = CACHE_PREFER_NONE,
                                    .carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT};
        cudaOccFuncAttributes kernel = {
            .maxThreadsPerBlock = 1024,
            .numRegs = registers,
            .sharedSizeBytes = (size_t)fixed,
            .partitionedGCConfig = PARTITIONED_GC_OFF,
            .shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN,
            .maxDynamicSharedSizeBytes = (size_t)dynamic,
            .numBlockBarriers = 1,
        };
        cudaOccResult result;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                    (size_t)dynamic) != CUDA_OCC_SUCCESS)
            puts("-");
        else
            printf("%d\n", result.activeBlocksPerMultiprocessor);
    }
    return 0;
}

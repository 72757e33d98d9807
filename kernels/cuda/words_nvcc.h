#pragma once

/* kernels/cuda/words_nvcc.h - the words of kernels/cuda/words.h for nvcc: PTX (the PTX ISA, chapter
 * "Instruction Set") and CUDA's own intrinsics, for sm_80, sm_90 and sm_100. Included by words.h
 * alone, in files compiled with -fmad=false. */

#include <type_traits>

/* --- structure --- */

#ifdef __CUDA_ARCH__
#define CU_ARCH (__CUDA_ARCH__ / 10)
#else
#define CU_ARCH 0 /* host code: bodies of kernels are parsed, never compiled */
#endif

#define CU_KERNEL(threads_max, blocks_min)                                                         \
    __global__ void __launch_bounds__(threads_max, blocks_min)
#define CU_DEVICE static __device__ __forceinline__
#define CU_SHARED __shared__
#define CU_SHARED_DYNAMIC(name)                                                                    \
    extern __shared__ __align__(128) unsigned char cu_shared_dynamic_bytes[];                      \
    unsigned char *name = cu_shared_dynamic_bytes

/* gpu_cuda.cu: arguments[i] points to the kernel's i-th argument. */
extern "C" PD_CHECKED pd_status gpu_launch(const char *name, const void *kernel, dim3 grid,
                                           dim3 block, uint64_t shared_bytes, gpu_stream *stream,
                                           void **arguments);

template <typename... P>
static inline pd_status cu_launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                                  uint64_t shared_bytes, gpu_stream *stream,
                                  std::common_type_t<P>... args)
{
    void *arguments[sizeof...(P) + 1] = {static_cast<void *>(&args)..., nullptr};

    return gpu_launch(name, reinterpret_cast<const void *>(kernel), grid, block, shared_bytes,
                      stream, arguments);
}
#define CU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    cu_launch(#kernel, kernel, grid, block, shared_bytes, stream, ##__VA_ARGS__)

/* --- threads --- */

#define CU_ALL 0xffffffffu

CU_DEVICE void cu_sync()
{
    __syncthreads();
}

CU_DEVICE void cu_sync_warp(uint32_t mask)
{
    __syncwarp(mask);
}

template <typename T> CU_DEVICE T cu_shuffle(uint32_t mask, T v, uint32_t lane)
{
    return __shfl_sync(mask, v, (int)lane);
}

template <typename T> CU_DEVICE T cu_shuffle_xor(uint32_t mask, T v, uint32_t bits)
{
    return __shfl_xor_sync(mask, v, (int)bits);
}

template <typename T> CU_DEVICE T cu_shuffle_down(uint32_t mask, T v, uint32_t by)
{
    return __shfl_down_sync(mask, v, by);
}

template <typename T> CU_DEVICE T cu_shuffle_up(uint32_t mask, T v, uint32_t by)
{
    return __shfl_up_sync(mask, v, by);
}

CU_DEVICE uint32_t cu_ballot(uint32_t mask, bool p)
{
    return __ballot_sync(mask, p);
}

CU_DEVICE bool cu_any(uint32_t mask, bool p)
{
    return __any_sync(mask, p) != 0;
}

CU_DEVICE bool cu_all(uint32_t mask, bool p)
{
    return __all_sync(mask, p) != 0;
}

/* --- matrices --- */

CU_DEVICE void cu_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

CU_DEVICE void cu_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

CU_DEVICE void cu_mma_s8(int32_t c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

CU_DEVICE uint32_t cu_shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

CU_DEVICE void cu_ldmatrix_x1(uint32_t *r, const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(cu_shared_address(shared_row))
                 : "memory");
}

CU_DEVICE void cu_ldmatrix_x2(uint32_t *r, const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(cu_shared_address(shared_row))
                 : "memory");
}

CU_DEVICE void cu_ldmatrix_x4(uint32_t *r, const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(cu_shared_address(shared_row))
                 : "memory");
}

CU_DEVICE void cu_ldmatrix_x2_trans(uint32_t *r, const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(cu_shared_address(shared_row))
                 : "memory");
}

CU_DEVICE void cu_ldmatrix_x4_trans(uint32_t *r, const void *shared_row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(cu_shared_address(shared_row))
                 : "memory");
}

CU_DEVICE int32_t cu_dp4a(uint32_t a, uint32_t b, int32_t c)
{
    return __dp4a((int)a, (int)b, c);
}

/* --- copies into shared memory that go on by themselves --- */

/* A source size of 0 reads nothing and fills with zeros. 16 bytes can pass L1 by (.cg), less
 * cannot. */
CU_DEVICE void cu_async_16(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(cu_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
}

CU_DEVICE void cu_async_8(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(cu_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 8 : 0)
                 : "memory");
}

CU_DEVICE void cu_async_4(void *shared, const void *global, bool valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cu_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
                 : "memory");
}

CU_DEVICE void cu_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> CU_DEVICE void cu_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

typedef uint64_t cu_barrier;

CU_DEVICE void cu_barrier_init(cu_barrier *b, uint32_t count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(cu_shared_address(b)), "r"(count)
                 : "memory");
}

/* Makes the initialised barrier seen by the unit that completes bulk copies, too. */
CU_DEVICE void cu_fence_barrier()
{
#if CU_ARCH >= 90
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    __threadfence_block();
#endif
}

CU_DEVICE void cu_barrier_arrive(cu_barrier *b)
{
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(cu_shared_address(b))
        : "memory");
}

/* Bytes are expected of bulk copies only, which sm_80 has not: coming here there is a kernel's
 * mistake, and ends the launch with an error. */
CU_DEVICE void cu_barrier_expect(cu_barrier *b, uint32_t bytes)
{
#if CU_ARCH >= 90
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                     cu_shared_address(b)),
                 "r"(bytes)
                 : "memory");
#else
    __trap();
#endif
}

CU_DEVICE void cu_barrier_wait(cu_barrier *b, uint32_t parity)
{
    uint32_t done = 0;

    while (done == 0) {
#if CU_ARCH >= 90 /* sleeps in hardware for a while */
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(cu_shared_address(b)), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(cu_shared_address(b)), "r"(parity)
                     : "memory");
#endif
    }
}

CU_DEVICE void cu_bulk_copy(void *shared, const void *global, uint32_t bytes, cu_barrier *b)
{
#if CU_ARCH >= 90
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(cu_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(cu_shared_address(b))
                 : "memory");
#else
    __trap();
#endif
}

/* --- memory --- */

/* One access, as wide as T. nvcc's device compiler draws no conclusions from types (tried: a value
 * stored as float is read again after a store through uint32_t), and has no may_alias. */
template <typename T> CU_DEVICE T cu_load(const void *p)
{
    static_assert(sizeof(T) <= 16, "one access is 16 bytes at most");
    return *static_cast<const T *>(p);
}

template <typename T> CU_DEVICE void cu_store(void *p, T value)
{
    static_assert(sizeof(T) <= 16, "one access is 16 bytes at most");
    *static_cast<T *>(p) = value;
}

/* Global memory that nothing writes while the kernel runs. */
template <typename T> CU_DEVICE T cu_load_once(const void *p)
{
    T value;
    uint64_t at = (uint64_t)__cvta_generic_to_global(p);

    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 ||
                      sizeof(T) == 16,
                  "one access is 1, 2, 4, 8 or 16 bytes");
    if constexpr (sizeof(T) == 16) {
        uint32_t w[4];
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
            : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
            : "l"(at));
        __builtin_memcpy(&value, w, sizeof value);
    } else if constexpr (sizeof(T) == 8) {
        uint32_t w[2];
        asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
            : "=r"(w[0]), "=r"(w[1])
            : "l"(at));
        __builtin_memcpy(&value, w, sizeof value);
    } else if constexpr (sizeof(T) == 4) {
        uint32_t w;
        asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(at));
        __builtin_memcpy(&value, &w, sizeof value);
    } else if constexpr (sizeof(T) == 2) {
        uint16_t w;
        asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(w) : "l"(at));
        __builtin_memcpy(&value, &w, sizeof value);
    } else {
        uint32_t w;
        asm("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(w) : "l"(at));
        uint8_t byte = (uint8_t)w;
        __builtin_memcpy(&value, &byte, sizeof value);
    }
    return value;
}

CU_DEVICE uint32_t cu_atomic_add(uint32_t *p, uint32_t v)
{
    return atomicAdd(p, v);
}

CU_DEVICE int32_t cu_atomic_add(int32_t *p, int32_t v)
{
    return atomicAdd(p, v);
}

CU_DEVICE uint64_t cu_atomic_add(uint64_t *p, uint64_t v)
{
    return atomicAdd((unsigned long long *)p, (unsigned long long)v);
}

CU_DEVICE float cu_atomic_add(float *p, float v)
{
    return atomicAdd(p, v);
}

CU_DEVICE uint32_t cu_atomic_max(uint32_t *p, uint32_t v)
{
    return atomicMax(p, v);
}

CU_DEVICE int32_t cu_atomic_max(int32_t *p, int32_t v)
{
    return atomicMax(p, v);
}

CU_DEVICE uint64_t cu_atomic_max(uint64_t *p, uint64_t v)
{
    return atomicMax((unsigned long long *)p, (unsigned long long)v);
}

CU_DEVICE uint32_t cu_atomic_exchange(uint32_t *p, uint32_t v)
{
    return atomicExch(p, v);
}

CU_DEVICE uint64_t cu_atomic_exchange(uint64_t *p, uint64_t v)
{
    return atomicExch((unsigned long long *)p, (unsigned long long)v);
}

CU_DEVICE uint32_t cu_atomic_cas(uint32_t *p, uint32_t old, uint32_t v)
{
    return atomicCAS(p, old, v);
}

CU_DEVICE uint64_t cu_atomic_cas(uint64_t *p, uint64_t old, uint64_t v)
{
    return atomicCAS((unsigned long long *)p, (unsigned long long)old, (unsigned long long)v);
}

CU_DEVICE void cu_fence()
{
    __threadfence();
}

CU_DEVICE void cu_fence_block()
{
    __threadfence_block();
}

/* --- numbers --- */

CU_DEVICE uint32_t cu_bits(float value)
{
    return __float_as_uint(value);
}

CU_DEVICE float cu_float(uint32_t bits)
{
    return __uint_as_float(bits);
}

CU_DEVICE float cu_f16_to_f32(uint16_t half)
{
    float value;

    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

/* Nearest even gives infinity from 65520 on, one above the largest finite number's pattern. */
CU_DEVICE uint16_t cu_f32_to_f16(float value)
{
    uint16_t half;

    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    if (value != value)
        return (uint16_t)((cu_bits(value) >> 16 & 0x8000) | 0x7e00);
    return (uint16_t)(half - ((half & 0x7fff) == 0x7c00));
}

CU_DEVICE float cu_bf16_to_f32(uint16_t half)
{
    return cu_float((uint32_t)half << 16);
}

CU_DEVICE uint16_t cu_f32_to_bf16(float value)
{
    uint16_t half;

    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

CU_DEVICE uint32_t cu_pack_f16(float lo, float hi)
{
    uint32_t pair;

    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}

/* kern_exp, operation by operation; NaN becomes the lower bound there as here. */
CU_DEVICE float cu_exp(float value)
{
    float x = fminf(fmaxf(value, -87.0f), 88.0f);
    float shifted = fmaf(x, 0x1.715476p+0f, 12582912.0f);
    float n = shifted - 12582912.0f;
    float r = fmaf(n, -0x1.62e4p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.0f / 5040;
    p = fmaf(p, r, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * cu_float((cu_bits(shifted) - 0x4b400000 + 127) << 23);
}

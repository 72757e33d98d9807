#pragma once

/* kernels/cuda/emu/words_emu.h - the words of kernels/cuda/words.h for a C++ compiler: kernels run
 * on fibers, and every word checks what a GPU takes for granted.
 *
 * A word that can wait or fail knows its place in the kernel's source: the default arguments are
 * its caller's file and line. Included by words.h alone. */

#include "kernels/cuda/emu/run.h"
#include "kernels/number.h"

#include <math.h>
#include <string.h>
#include <type_traits>
#include <utility>

#define CU_ARCH 90
#define CU_ALL  0xffffffffu

/* --- structure --- */

#define CU_KERNEL(threads_max, blocks_min) [[maybe_unused]] static void
#define CU_DEVICE                          [[maybe_unused]] static inline
/* Found, poisoned and watched by its name in the module's symbols (symbols.h). */
#define CU_SHARED               static
#define CU_SHARED_DYNAMIC(name) unsigned char *name = emu_dynamic_shared()
#define threadIdx               (emu_self->thread)
#define blockIdx                (emu_grid_here.block)
#define blockDim                (emu_grid_here.block_dim)
#define gridDim                 (emu_grid_here.grid_dim)
#define CU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    emu_launch(#kernel, kernel, grid, block, shared_bytes, stream, ##__VA_ARGS__)

/* Arguments of a kernel, kept until the launch's turn comes; the function lies first, so that the
 * emulator can tell the instances of a template apart. */
template <typename... P> struct emu_function {
    void (*kernel)(P...);
};

template <size_t I, typename T> struct emu_argument {
    T value;
};

template <typename N, typename... P> struct emu_arguments;
template <size_t... I, typename... P>
struct emu_arguments<std::index_sequence<I...>, P...> : emu_function<P...>, emu_argument<I, P>... {

    static void call(const void *self)
    {
        const emu_arguments *all = static_cast<const emu_arguments *>(self);

        all->kernel(static_cast<const emu_argument<I, P> *>(all)->value...);
    }
};

template <typename... P>
PD_CHECKED static inline pd_status emu_launch(const char *name, void (*kernel)(P...), dim3 grid,
                                              dim3 block, uint64_t shared_bytes, gpu_stream *stream,
                                              std::common_type_t<P>... args)
{
    typedef emu_arguments<std::index_sequence_for<P...>, P...> all;
    static_assert(sizeof(all) <= 4096, "a kernel's arguments are 4 KiB at most");
    static_assert(std::is_trivially_copyable<all>::value, "a kernel's arguments are plain values");
    all arguments = {{kernel}, {args}...};
    emu_grid shape = {grid, block, dim3(0, 0, 0), shared_bytes};

    return emu_queue_kernel(stream, name, &shape, all::call, &arguments, sizeof arguments);
}

/* --- threads --- */

#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

CU_DEVICE void cu_sync(EMU_HERE)
{
    emu_sync(file, line);
}

CU_DEVICE uint64_t emu_meet(emu_kind kind, uint32_t mask, uint64_t value, uint32_t number,
                            const char *file, int line)
{
    emu_op op = {kind, mask, number, line, file, value, NULL, NULL, NULL};

    emu_collective(&op);
    return op.value;
}

CU_DEVICE void cu_sync_warp(uint32_t mask, EMU_HERE)
{
    emu_meet(EMU_SYNC_WARP, mask, 0, 0, file, line);
}

template <typename T>
CU_DEVICE T emu_shuffle(emu_kind kind, uint32_t mask, T v, uint32_t number, const char *file,
                        int line)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    uint64_t value = 0;

    memcpy(&value, &v, sizeof v);
    value = emu_meet(kind, mask, value, number, file, line);
    memcpy(&v, &value, sizeof v);
    return v;
}

template <typename T> CU_DEVICE T cu_shuffle(uint32_t mask, T v, uint32_t lane, EMU_HERE)
{
    return emu_shuffle(EMU_SHUFFLE, mask, v, lane, file, line);
}

template <typename T> CU_DEVICE T cu_shuffle_xor(uint32_t mask, T v, uint32_t bits, EMU_HERE)
{
    return emu_shuffle(EMU_SHUFFLE_XOR, mask, v, bits, file, line);
}

template <typename T> CU_DEVICE T cu_shuffle_down(uint32_t mask, T v, uint32_t by, EMU_HERE)
{
    return emu_shuffle(EMU_SHUFFLE_DOWN, mask, v, by, file, line);
}

template <typename T> CU_DEVICE T cu_shuffle_up(uint32_t mask, T v, uint32_t by, EMU_HERE)
{
    return emu_shuffle(EMU_SHUFFLE_UP, mask, v, by, file, line);
}

CU_DEVICE uint32_t cu_ballot(uint32_t mask, bool p, EMU_HERE)
{
    return (uint32_t)emu_meet(EMU_BALLOT, mask, p, 0, file, line);
}

CU_DEVICE bool cu_any(uint32_t mask, bool p, EMU_HERE)
{
    return emu_meet(EMU_BALLOT, mask, p, 0, file, line) != 0;
}

CU_DEVICE bool cu_all(uint32_t mask, bool p, EMU_HERE)
{
    return (uint32_t)emu_meet(EMU_BALLOT, mask, p, 0, file, line) == mask;
}

/* --- matrices --- */

CU_DEVICE void emu_matrix(emu_kind kind, void *out, const void *a, const void *b, const char *file,
                          int line)
{
    emu_op op = {kind, CU_ALL, 0, line, file, 0, out, a, b};

    emu_collective(&op);
}

CU_DEVICE void cu_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2], EMU_HERE)
{
    emu_matrix(EMU_MMA_F16, c, a, b, file, line);
}

CU_DEVICE void cu_mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2], EMU_HERE)
{
    emu_matrix(EMU_MMA_BF16, c, a, b, file, line);
}

CU_DEVICE void cu_mma_s8(int32_t c[4], const uint32_t a[4], const uint32_t b[2], EMU_HERE)
{
    emu_matrix(EMU_MMA_S8, c, a, b, file, line);
}

CU_DEVICE void cu_ldmatrix_x1(uint32_t *r, const void *shared_row, EMU_HERE)
{
    emu_matrix(EMU_LDMATRIX_X1, r, shared_row, NULL, file, line);
}

CU_DEVICE void cu_ldmatrix_x2(uint32_t *r, const void *shared_row, EMU_HERE)
{
    emu_matrix(EMU_LDMATRIX_X2, r, shared_row, NULL, file, line);
}

CU_DEVICE void cu_ldmatrix_x4(uint32_t *r, const void *shared_row, EMU_HERE)
{
    emu_matrix(EMU_LDMATRIX_X4, r, shared_row, NULL, file, line);
}

CU_DEVICE void cu_ldmatrix_x2_trans(uint32_t *r, const void *shared_row, EMU_HERE)
{
    emu_matrix(EMU_LDMATRIX_X2_TRANS, r, shared_row, NULL, file, line);
}

CU_DEVICE void cu_ldmatrix_x4_trans(uint32_t *r, const void *shared_row, EMU_HERE)
{
    emu_matrix(EMU_LDMATRIX_X4_TRANS, r, shared_row, NULL, file, line);
}

CU_DEVICE int32_t cu_dp4a(uint32_t a, uint32_t b, int32_t c)
{
    for (int i = 0; i < 32; i += 8)
        c += (int32_t)(int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}

/* --- copies into shared memory --- */

CU_DEVICE void cu_async_16(void *shared, const void *global, bool valid, EMU_HERE)
{
    emu_async(shared, global, 16, valid, file, line);
}

CU_DEVICE void cu_async_8(void *shared, const void *global, bool valid, EMU_HERE)
{
    emu_async(shared, global, 8, valid, file, line);
}

CU_DEVICE void cu_async_4(void *shared, const void *global, bool valid, EMU_HERE)
{
    emu_async(shared, global, 4, valid, file, line);
}

CU_DEVICE void cu_async_commit()
{
    emu_async_commit();
}

template <int N> CU_DEVICE void cu_async_wait()
{
    static_assert(N >= 0, "groups that may be under way");
    emu_async_wait(N);
}

typedef uint64_t cu_barrier;

CU_DEVICE void cu_barrier_init(cu_barrier *b, uint32_t count, EMU_HERE)
{
    emu_barrier_init(b, count, file, line);
}

CU_DEVICE void cu_fence_barrier()
{
    emu_fence_barrier();
}

CU_DEVICE void cu_barrier_arrive(cu_barrier *b, EMU_HERE)
{
    emu_barrier_arrive(b, 0, file, line);
}

CU_DEVICE void cu_barrier_expect(cu_barrier *b, uint32_t bytes, EMU_HERE)
{
    emu_barrier_arrive(b, bytes, file, line);
}

CU_DEVICE void cu_barrier_wait(cu_barrier *b, uint32_t parity, EMU_HERE)
{
    emu_barrier_wait(b, parity, file, line);
}

CU_DEVICE void cu_bulk_copy(void *shared, const void *global, uint32_t bytes, cu_barrier *b,
                            EMU_HERE)
{
    emu_bulk_copy(shared, global, bytes, b, file, line);
}

/* --- memory: told to the checks by emu_access, not by the compiler as well --- */

#define EMU_MEMORY [[maybe_unused]] __attribute__((no_sanitize("thread"))) static inline

template <typename T> EMU_MEMORY T cu_load(const void *p, EMU_HERE)
{
    static_assert(sizeof(T) <= 16, "16 bytes at most");
    T value;

    emu_access(p, sizeof(T), EMU_READ, file, line);
    memcpy(&value, p, sizeof value);
    return value;
}

template <typename T> EMU_MEMORY T cu_load_once(const void *p, EMU_HERE)
{
    return cu_load<T>(p, file, line);
}

template <typename T> EMU_MEMORY void cu_store(void *p, T value, EMU_HERE)
{
    static_assert(sizeof(T) <= 16, "16 bytes at most");
    emu_access(p, sizeof(T), EMU_WRITE, file, line);
    memcpy(p, &value, sizeof value);
}

/* old value; T: what words.h names. */
template <typename T> EMU_MEMORY T cu_atomic_add(T *p, std::common_type_t<T> v, EMU_HERE)
{
    emu_access(p, sizeof(T), EMU_ATOMIC, file, line);
    T old = *p;
    if constexpr (std::is_same<T, int32_t>::value)
        *p = (int32_t)((uint32_t)old + (uint32_t)v);
    else
        *p = old + v;
    return old;
}

template <typename T> EMU_MEMORY T cu_atomic_max(T *p, std::common_type_t<T> v, EMU_HERE)
{
    emu_access(p, sizeof(T), EMU_ATOMIC, file, line);
    T old = *p;
    *p = old > v ? old : v;
    return old;
}

template <typename T> EMU_MEMORY T cu_atomic_exchange(T *p, std::common_type_t<T> v, EMU_HERE)
{
    emu_access(p, sizeof(T), EMU_ATOMIC, file, line);
    T old = *p;
    *p = v;
    return old;
}

template <typename T>
EMU_MEMORY T cu_atomic_cas(T *p, std::common_type_t<T> was, std::common_type_t<T> v, EMU_HERE)
{
    emu_access(p, sizeof(T), EMU_ATOMIC, file, line);
    T old = *p;
    if (old == was)
        *p = v;
    return old;
}

CU_DEVICE void cu_fence()
{
    emu_fence();
}

CU_DEVICE void cu_fence_block()
{
    emu_fence();
}

/* --- numbers --- */

CU_DEVICE uint32_t cu_bits(float value)
{
    return kern_bits_of(value);
}

CU_DEVICE float cu_float(uint32_t bits)
{
    return kern_float_of(bits);
}

CU_DEVICE float cu_f16_to_f32(uint16_t half)
{
    return kern_f16_to_f32(half);
}

CU_DEVICE uint16_t cu_f32_to_f16(float value)
{
    return kern_f32_to_f16(value);
}

CU_DEVICE float cu_bf16_to_f32(uint16_t half)
{
    return kern_bf16_to_f32(half);
}

CU_DEVICE uint16_t cu_f32_to_bf16(float value)
{
    uint32_t bits = kern_bits_of(value);

    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fff; /* as the hardware's conversion writes a NaN */
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* kern_f32_to_f16, but what is too large is infinite: from halfway past 65504 on. */
CU_DEVICE uint32_t emu_half_of(float value)
{
    uint32_t magnitude = kern_bits_of(value) & 0x7fffffff;

    if (magnitude > 0x7f800000)
        return 0x7fff;
    return kern_f32_to_f16(value) + (magnitude >= 0x477ff000);
}

CU_DEVICE uint32_t cu_pack_f16(float lo, float hi)
{
    return emu_half_of(lo) | emu_half_of(hi) << 16;
}

CU_DEVICE float cu_exp(float value)
{
    return kern_exp(value);
}

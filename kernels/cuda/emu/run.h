#pragma once

/* kernels/cuda/emu/run.h - what the words of emulated kernels call: a block's threads on fibers.
 *
 * One OS thread runs kernels at a time (gpu_emu.cpp sees to it). A function that can wait switches
 * to the next fiber that can run. What is wrong ends the launch: emu_fail does not return. */

#include "kernels/cuda/gpu.h"

#include <stddef.h>
#include <stdint.h>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz)
    {
    }
};

#define EMU_VECTOR(T, name)                                                                        \
    struct alignas(2 * sizeof(T)) name##2                                                          \
    {                                                                                              \
        T x, y;                                                                                    \
    };                                                                                             \
    struct name##3                                                                                 \
    {                                                                                              \
        T x, y, z;                                                                                 \
    };                                                                                             \
    struct alignas(4 * sizeof(T)) name##4                                                          \
    {                                                                                              \
        T x, y, z, w;                                                                              \
    };                                                                                             \
    static inline name##2 make_##name##2(T x, T y)                                                 \
    {                                                                                              \
        return {x, y};                                                                             \
    }                                                                                              \
    static inline name##4 make_##name##4(T x, T y, T z, T w)                                       \
    {                                                                                              \
        return {x, y, z, w};                                                                       \
    }
EMU_VECTOR(int8_t, char)
EMU_VECTOR(uint8_t, uchar)
EMU_VECTOR(int16_t, short)
EMU_VECTOR(uint16_t, ushort)
EMU_VECTOR(int32_t, int)
EMU_VECTOR(uint32_t, uint)
EMU_VECTOR(float, float)
#undef EMU_VECTOR

struct emu_grid {
    dim3 grid_dim, block_dim, block;
    uint64_t shared_bytes;
};

struct emu_thread { /* what a kernel sees of its thread; block.h has the rest */
    dim3 thread;
    unsigned linear; /* x + y * ... */
};

extern emu_thread *emu_self;
extern emu_grid emu_grid_here;

enum emu_kind : uint8_t {
    EMU_SYNC_WARP,
    EMU_SHUFFLE,
    EMU_SHUFFLE_XOR,
    EMU_SHUFFLE_DOWN,
    EMU_SHUFFLE_UP,
    EMU_BALLOT,
    EMU_MMA_F16,
    EMU_MMA_BF16,
    EMU_MMA_S8,
    EMU_LDMATRIX_X1,
    EMU_LDMATRIX_X2,
    EMU_LDMATRIX_X4,
    EMU_LDMATRIX_X2_TRANS,
    EMU_LDMATRIX_X4_TRANS,
};

struct emu_op { /* a lane's part in what its warp does together */
    emu_kind kind;
    uint32_t mask, number;
    int line;
    const char *file;
    uint64_t value; /* in, and then the result */
    void *out;      /* fragments */
    const void *a, *b;
};

enum emu_use : uint8_t { EMU_READ, EMU_WRITE, EMU_ATOMIC };

/* Queues a launch; call(arguments) runs one thread of it. arguments are copied, and begin with the
 * kernel's address. */
PD_CHECKED pd_status emu_queue_kernel(gpu_stream *stream, const char *name, const emu_grid *grid,
                                      void (*call)(const void *arguments), const void *arguments,
                                      size_t bytes);

[[noreturn]] void emu_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

unsigned char *emu_dynamic_shared(void);
void emu_sync(const char *file, int line);
/* The last lane of the mask to come computes every lane's result. */
void emu_collective(emu_op *op);

void emu_async(void *shared, const void *global, unsigned bytes, bool valid, const char *file,
               int line);
void emu_async_commit(void);
void emu_async_wait(unsigned groups);

void emu_barrier_init(uint64_t *barrier, uint32_t count, const char *file, int line);
void emu_fence_barrier(void);
/* bytes: more that this phase waits for. */
void emu_barrier_arrive(uint64_t *barrier, uint32_t bytes, const char *file, int line);
void emu_barrier_wait(uint64_t *barrier, uint32_t parity, const char *file, int line);
void emu_bulk_copy(void *shared, const void *global, uint32_t bytes, uint64_t *barrier,
                   const char *file, int line);

/* Before an access through a word: aligned, and in the checked form where a thread may go. */
#ifndef EMU_CHECKED
#define EMU_CHECKED 0
#endif
void emu_watch(const void *p, unsigned bytes, emu_use use, const char *file, int line);
static inline void emu_access(const void *p, unsigned bytes, emu_use use, const char *file,
                              int line)
{
    if (((uintptr_t)p & (bytes - 1)) != 0)
        emu_fail(file, line, "%u bytes at an address that is no multiple of it", bytes);
    if (EMU_CHECKED)
        emu_watch(p, bytes, use, file, line);
}
void emu_fence(void);

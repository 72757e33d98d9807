/* What code compiled with -fsanitize=thread calls at each access (gcc's and clang's
 * ThreadSanitizer instrumentation; the sanitizer's own library is not linked). Launchers are in the
 * same files as kernels: outside of a fiber nothing is looked at. */

#include "kernels/cuda/emu/block.h"
#include "kernels/cuda/emu/check.h"

#include <string.h>

static void seen(const void *at, size_t bytes, emu_use use, const void *code)
{
    if (emu_running && bytes > 0)
        emu_check_access(at, (unsigned)bytes, use, NULL, 0, code);
}

#define CALLER __builtin_return_address(0)
#define ACCESS(bytes)                                                                              \
    void __tsan_read##bytes(const void *at)                                                        \
    {                                                                                              \
        seen(at, bytes, EMU_READ, CALLER);                                                         \
    }                                                                                              \
    void __tsan_write##bytes(const void *at)                                                       \
    {                                                                                              \
        seen(at, bytes, EMU_WRITE, CALLER);                                                        \
    }                                                                                              \
    void __tsan_unaligned_read##bytes(const void *at)                                              \
    {                                                                                              \
        seen(at, bytes, EMU_READ, CALLER);                                                         \
    }                                                                                              \
    void __tsan_unaligned_write##bytes(const void *at)                                             \
    {                                                                                              \
        seen(at, bytes, EMU_WRITE, CALLER);                                                        \
    }

extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(const void *at, size_t bytes)
{
    seen(at, bytes, EMU_READ, CALLER);
}

void __tsan_write_range(const void *at, size_t bytes)
{
    seen(at, bytes, EMU_WRITE, CALLER);
}

void *__tsan_memcpy(void *to, const void *from, size_t bytes)
{
    seen(from, bytes, EMU_READ, CALLER);
    seen(to, bytes, EMU_WRITE, CALLER);
    return memcpy(to, from, bytes);
}

void *__tsan_memmove(void *to, const void *from, size_t bytes)
{
    seen(from, bytes, EMU_READ, CALLER);
    seen(to, bytes, EMU_WRITE, CALLER);
    return memmove(to, from, bytes);
}

void *__tsan_memset(void *to, int byte, size_t bytes)
{
    seen(to, bytes, EMU_WRITE, CALLER);
    return memset(to, byte, bytes);
}

void __tsan_init(void)
{
    emu_checked = true;
}

void __tsan_func_entry(const void *caller)
{
    (void)caller;
}

void __tsan_func_exit(void)
{
}

void __tsan_vptr_update(void **at, void *value)
{
    (void)at, (void)value;
}
}

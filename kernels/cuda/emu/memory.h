#pragma once

/* kernels/cuda/emu/memory.h - an emulated device's memory, and what may be touched.
 *
 * A device's memory is one sparse memory file, mapped whole, so that another process can map a part
 * of it by the owner's descriptor (gpu_export). Allocations lie between guard zones, filled with a
 * pattern that is NaN as a float; fresh memory is filled with 0xff. Not thread-safe: the caller
 * holds the device's lock. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define EMU_HANDLE_BYTES 64

struct emu_memory;

PD_CHECKED pd_status emu_memory_create(uint64_t bytes, emu_memory **memory_out);
void emu_memory_destroy(emu_memory *memory); /* nothing is allocated */
uint64_t emu_memory_free_bytes(const emu_memory *memory);

/* NULL: no room. host: not device memory to the checks of kernels, but pinned. */
void *emu_memory_alloc(emu_memory *memory, uint64_t bytes, bool host);
/* false: it is no allocation. */
bool emu_memory_free(emu_memory *memory, void *at);
/* What was written to that belongs to nobody, "" when nothing: the first found. */
void emu_memory_check(const emu_memory *memory, char *text, size_t size);

PD_CHECKED pd_status emu_memory_export(const emu_memory *memory, const void *at,
                                       unsigned char handle_out[EMU_HANDLE_BYTES]);
PD_CHECKED pd_status emu_memory_import(emu_memory *memory,
                                       const unsigned char handle[EMU_HANDLE_BYTES], uint64_t bytes,
                                       void **at_out);
bool emu_memory_unimport(emu_memory *memory, void *at);

enum emu_place { EMU_NOWHERE, EMU_DEVICE, EMU_PINNED };
/* Where [at, at + bytes) lies whole, on whatever device of this process. The caller holds no lock
 * that a device's memory is changed under. */
emu_place emu_memory_place(const void *at, uint64_t bytes);

#pragma once

/* kernels/cuda/words.h - the words that kernels are written in.
 *
 * A kernel file (kernels/cuda/NAME.cu) includes this and nothing of CUDA. nvcc compiles it against
 * words_nvcc.h (PTX and native intrinsics); a C++ compiler compiles the same file against
 * emu/words_emu.h, which runs it on fibers with every check in emu/ (docs/decisions/emulation.md).
 *
 * Structure
 *   CU_KERNEL(threads_max, blocks_min) name(args) { }   a kernel; args are plain values, 4 KiB at
 *                              most. threadIdx, blockIdx, blockDim, gridDim as in CUDA
 *   CU_DEVICE                  a function of the device
 *   CU_SHARED type name[..];   static shared memory
 *   CU_SHARED_DYNAMIC(name);   declares unsigned char *name: the launch's dynamic shared memory,
 *                              128-byte aligned
 *   CU_LAUNCH(kernel, grid, block, shared_bytes, stream, args...)  -> pd_status; grid, block: dim3;
 *                              a templated kernel in parentheses. More than 48 KiB of shared memory
 *                              is opted in. stream: gpu_stream *
 *   CU_ARCH                    80, 90, 100 while device code is compiled (the emulator's: 90)
 *
 * Threads: all lanes named by mask must come to the same call.
 *   cu_sync()                  __syncthreads
 *   cu_sync_warp(mask)
 *   cu_shuffle(mask, v, lane)  cu_shuffle_xor(mask, v, bits)  cu_shuffle_down(mask, v, by)
 *   cu_shuffle_up(mask, v, by) v: a 4- or 8-byte number
 *   cu_ballot(mask, p) cu_any(mask, p) cu_all(mask, p)
 *   CU_ALL                     the mask of a whole warp
 *
 * Matrices: all 32 lanes; fragments as the PTX ISA lays them out.
 *   cu_mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])   c += a b, m16n8k16
 *   cu_mma_bf16(...)           likewise
 *   cu_mma_s8(int32_t c[4], const uint32_t a[4], const uint32_t b[2])  m16n8k32, exact
 *   cu_ldmatrix_x1 _x2 _x4 (uint32_t *r, const void *shared_row)  and _x2_trans, _x4_trans
 *   int32_t cu_dp4a(uint32_t a, uint32_t b, int32_t c)  c + the dot of 4 signed bytes
 *
 * Copies into shared memory that go on by themselves
 *   cu_async_16(shared, global, valid)  cu_async_8, cu_async_4: zeros when !valid (global unread)
 *   cu_async_commit()  cu_async_wait<N>()  (then cu_sync before other threads read)
 *   cu_barrier in shared memory: cu_barrier_init(b, count) by one thread, then cu_fence_barrier();
 *   cu_barrier_arrive(b), cu_barrier_expect(b, bytes) (arrives too), cu_barrier_wait(b, parity)
 *   cu_bulk_copy(shared, global, bytes, b)  16-byte multiples; where CU_ARCH >= 90
 *
 * Memory: every access wider than the element's type goes through these (no pointer casts).
 *   cu_load<T>(p)  cu_store<T>(p, v)   T up to 16 bytes: uint32_t, uint2, uint4, float, float2,
 *   float4, ...; p aligned to sizeof(T)
 *   cu_load_once<T>(p)         read once: past L1; global memory that no kernel writes meanwhile
 *   cu_atomic_add(p, v) (u32, s32, u64, f32: use only where order cannot matter)
 *   cu_atomic_max(p, v) cu_atomic_exchange(p, v) cu_atomic_cas(p, old, v)
 *   cu_fence() cu_fence_block()
 *
 * Numbers: equal to kernels/number.h bit for bit. Nothing is contracted (nvcc -fmad=false):
 * a*b+c is two roundings, fmaf one. / and sqrtf are the IEEE ones.
 *   cu_f16_to_f32(uint16_t) (a NaN stays one, its payload is the machine's)
 *   cu_f32_to_f16(float) (saturating, kern_f32_to_f16)
 *   cu_bf16_to_f32(uint16_t) cu_f32_to_bf16(float) (nearest even)
 *   cu_pack_f16(lo, hi) -> uint32_t, two halves, nearest even, not saturating
 *   cu_exp(float)              kern_exp
 *   cu_bits(float) cu_float(uint32_t)
 */

#include "common/base/status.h"
#include "kernels/cuda/gpu.h"

#include <stdint.h>

#ifdef __CUDACC__
#include "kernels/cuda/words_nvcc.h"
#else
#include "kernels/cuda/emu/words_emu.h"
#endif

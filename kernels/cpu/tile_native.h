#pragma once

/* kernels/cpu/tile_native.h - the words on matrix tiles as AMX's instructions.
 *
 * Written out, since the compilers' own forms do not all tell the compiler that memory is read. A
 * thread's tiles are the processor's; TILE_RELEASE leaves nothing in them to be saved when the
 * thread is switched. tile_plain.h says what each does. */

#include "kernels/cpu/tile.h"

typedef struct tile_state {
    uint8_t nothing;
} tile_state;

#define TILE_CONFIGURE(state, config)                                                              \
    ((void)(state), ({ __asm__ volatile("ldtilecfg %0" : : "m"(*(config)) : "memory"); }))
#define TILE_RELEASE(state)    ((void)(state), ({ __asm__ volatile("tilerelease" : : : "memory"); }))
#define TILE_ZERO(state, tile) ((void)(state), ({ __asm__ volatile("tilezero %%tmm" #tile : :); }))
#define TILE_LOAD(state, tile, base, stride)                                                       \
    ((void)(state), ({                                                                             \
         __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                                       \
                          :                                                                        \
                          : "r"(base), "r"((size_t)(stride))                                       \
                          : "memory");                                                             \
     }))
#define TILE_STORE(state, tile, base, stride)                                                      \
    ((void)(state), ({                                                                             \
         __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)"                                   \
                          :                                                                        \
                          : "r"(base), "r"((size_t)(stride))                                       \
                          : "memory");                                                             \
     }))
#define TILE_DOT(state, sums, a, b)                                                                \
    ((void)(state), ({ __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : :); }))
#define TILE_DOT_BF16(state, sums, a, b)                                                           \
    ((void)(state), ({ __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums : :); }))

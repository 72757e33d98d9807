#pragma once

/* common/base/memory_kind.h - which processor's loads and stores reach some memory, and who beside
 * its process reaches a GPU's. */

typedef enum pd_memory_kind {
    PD_MEMORY_HOST,
    PD_MEMORY_CUDA, /* a GPU's own: the host must not touch it */
} pd_memory_kind;

/* How a GPU's memory is made that others are to write: that decides who can. */
typedef enum pd_memory_reach {
    PD_REACH_AUTO,   /* FABRIC where that can be had, else HOST */
    PD_REACH_HOST,   /* plain (cudaMalloc): other processes of this host, and NICs */
    PD_REACH_FABRIC, /* with a fabric handle: GPUs of other hosts, too, that one NVLink fabric joins
                      */
} pd_memory_reach;

static inline const char *pd_memory_reach_name(pd_memory_reach reach)
{
    return reach == PD_REACH_AUTO ? "auto" : reach == PD_REACH_HOST ? "plain" : "fabric";
}

static inline const char *pd_memory_kind_name(pd_memory_kind kind)
{
    return kind == PD_MEMORY_HOST ? "host" : "cuda";
}

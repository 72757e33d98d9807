#pragma once

/* common/base/memory_kind.h - which processor's loads and stores reach some memory. */

typedef enum pd_memory_kind {
    PD_MEMORY_HOST,
    PD_MEMORY_CUDA, /* a GPU's own: the host must not touch it */
} pd_memory_kind;

static inline const char *pd_memory_kind_name(pd_memory_kind kind)
{
    return kind == PD_MEMORY_HOST ? "host" : "cuda";
}

#pragma once

/* common/transfer/shared_file.h - memory of one process mapped by another on the same host, through
 * the file that it is a shared mapping of. Inside common/transfer only.
 *
 * UCX lets peers map only what it allocated itself. A pool that came from outside can be mapped all
 * the same if it is a MAP_SHARED mapping of a file (memfd_create) whose descriptor its process
 * still has: the peer opens /proc/PID/fd/N, and device and inode say whether that is still the
 * file that was meant, whatever became of the numbers (another pid namespace, a successor). The
 * file must not shrink while it is mapped. Any thread. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct pd_shared_file {
    uint32_t pid, fd;
    uint64_t device, inode;
    uint64_t offset; /* of the memory in the file; a multiple of a page */
} pd_shared_file;
_Static_assert(sizeof(pd_shared_file) == 32, "goes over the wire");

/* What a peer needs to map memory [bytes]. PD_E_NOT_FOUND: it is not one shared mapping of a file
 * that is open here. */
PD_CHECKED pd_status pd_shared_file_of(const void *memory, uint64_t bytes,
                                       pd_shared_file *file_out);
/* Maps it, to be read and written; munmap ends it. file is another process' word. PD_E_NOT_FOUND:
 * that file cannot be had from here, or is too short. */
PD_CHECKED pd_status pd_shared_file_map(const pd_shared_file *file, uint64_t bytes,
                                        void **memory_out);

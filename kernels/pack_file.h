#pragma once

/* kernels/pack_file.h - packed weights as a file: the bytes, then one page that tells what they
 * are.
 *
 *   bytes, up to a whole page
 *   trailer (4096 bytes, the rest of it 0): magic, length, layout, the model file's hash, a hash of
 *   the bytes (XXH3, by chunks of 1 MiB), a hash of the trailer
 *
 * In this machine's byte order: the magic of another one does not match. The hashes tell damage
 * from soundness, not a forger's work. Any thread. */

#include "common/base/hash.h"
#include "kernels/big_memory.h"

typedef struct kern_pack_what {
    pd_hash128 model; /* of the model file's bytes */
    uint64_t layout;  /* of all that says where in the bytes a weight is */
    uint64_t bytes;   /* > 0 */
} kern_pack_what;

/* Whole, from fd's beginning, and on its way to the disk before this returns: what was only
 * promised to be written later could come back as zeros. PD_E_IO (errno says why; not logged),
 * PD_E_NOMEM. */
PD_CHECKED pd_status kern_pack_file_write(int fd, const kern_pack_what *what, const void *bytes);

/* Maps a file and checks every byte of it by the hashes, on threads of its own where it is large.
 * *why_out: in words, when it fails: a literal. Errors, not logged: PD_E_MISMATCH (another model,
 * layout or version), PD_E_INVALID (not whole, or damaged), PD_E_IO (cannot be read), PD_E_NOMEM.
 */
PD_CHECKED pd_status kern_pack_file_map(int fd, uint64_t file_bytes, const kern_pack_what *what,
                                        kern_memory *memory_out, const char **why_out);
/* Of the whole file. */
uint64_t kern_pack_file_bytes(uint64_t bytes);

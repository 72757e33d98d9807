#pragma once

/* kernels/packs.h - one copy of a model's packed weights for all workers of a host, and for the
 * next start: files of one folder, mapped by all of them.
 *
 *   MODEL-LAYOUT.pack  by the hash of the model file's bytes and the layout (kernels/pack_file)
 *   MODEL-LAYOUT.tmp   one that is being made: whoever holds its lock makes it, the others wait
 *   ID.seen            the hash of the model file with that identity, so that a file which is
 *                      known needs not be read whole at every start
 *
 * A pack is taken only when it is of this user, of just this model and layout, and every byte of it
 * has been checked; else it is made anew and put in its place whole, by a rename. What no longer
 * serves goes when one is made: of any model what nobody used for 30 days, other layouts of the
 * same model after 7, and the least recently used while all of them are more than bytes_max.
 *
 * Where nothing of this can be (no folder, no room, a read-only disk) the packed weights are in
 * private memory, and a line tells why. What stays possible: the same user, or root, who writes
 * into a pack that is mapped or cuts it short, as with the model file itself. Any thread. */

#include "common/model_file/model_file.h"
#include "kernels/big_memory.h"

#define KERN_PACKS_BYTES_MAX ((uint64_t)16 << 30) /* where nobody says otherwise */

typedef struct kern_packs_place {
    const char *folder; /* made where it is missing; NULL: none, memory is private */
    uint64_t bytes_max; /* that all packs may have together; 0: KERN_PACKS_BYTES_MAX */
} kern_packs_place;

typedef struct kern_packs_want {
    kern_packs_place place;
    const pd_model_file *file;
    uint64_t layout; /* of all that says where in the bytes a weight is */
    size_t bytes;    /* > 0 */
} kern_packs_want;

/* Writes all of it: memory has room for the bytes, and is zeroed. */
typedef pd_status kern_packs_fill(void *ctx, kern_memory *memory);

/* Read-only memory with the bytes, `used` 0; the caller's to unmap. Errors: fill's, PD_E_NOMEM
 * (logged). How long it waits for another process that is making them: 30 seconds and 20 a GiB. */
PD_CHECKED pd_status kern_packs_get(const kern_packs_want *want, kern_packs_fill *fill, void *ctx,
                                    kern_memory *memory_out);

#pragma once

/* kernels/packs_seen.h - the hash of a model file's bytes, kept by the file's identity.
 *
 * Part of kernels/packs. A record is believed when the file is the one it was made for: same
 * device, inode, size, times of change, and fingerprint (header, tensor list, a sample of every
 * tensor, read anew at every start). None is made of a file that was changed in the last two
 * seconds: another change within the clock's grain would not show. */

#include "common/model_file/model_file.h"

/* From the record in the folder, or of the whole file, and then recorded where that can be. */
pd_hash128 kern_packs_model_hash(int folder, const pd_model_file *file);

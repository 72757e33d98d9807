#pragma once

/* kernels/packs_prune.h - what goes from the folder of kernels/packs, so that it does not grow for
 * ever: the rules stand there. A pack that somebody has mapped may go, too: it stays his. */

#include <stdint.h>

/* keep: the name of the pack that has just been made. What cannot be removed stays, silently. */
void kern_packs_prune(int folder, const char *keep, uint64_t bytes_max);

#pragma once

/* kernels/cuda/emu/traffic.h - how well a warp's accesses fall together, in the checked form.
 *
 * The first block of a launch is logged. Accesses of a warp's lanes belong together when they are
 * each lane's k-th visit to a place in the source. Device memory is served in sectors of 32 bytes:
 * ideal is lanes x bytes / 32 from the first byte's sector on. Shared memory has 32 banks of 4
 * bytes, and serves 32 lanes of 4 bytes, 16 of 8 or 8 of 16 at a time in one wavefront, if no bank
 * is asked for two words: ideal is one wavefront a group. Read with emu_traffic_each (emu.h). */

/* The next block is logged, unless there was enough of function. */
void emu_traffic_start(const char *kernel, const void *function);
void emu_traffic_end(void); /* of that block */
void emu_traffic_log(unsigned thread, const void *at, unsigned bytes, bool shared, const char *file,
                     int line, const void *code);

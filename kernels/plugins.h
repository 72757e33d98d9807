#pragma once

/* kernels/plugins.h - which backend a `device:` of the configuration means, here and now.
 *
 *   cpu, cpu-ref, cpu-avx2, ...   the host, built in
 *   cuda, cuda:1                  the plugin kv_cuda.so, its device 0 or 1
 *   cuda-emu, cuda-emu:1          the plugin kv_cuda_emu.so: the same kernels emulated on the host
 *   auto                          whichever scores highest here: the host or cuda
 *
 * A plugin is looked for in the folders of the environment variable KVFERRY_PLUGINS (absolute,
 * separated by colons) where it is set; else where this program's build or installation keeps them.
 * Never in the current folder. The first file of the name is it. It is loaded with its own copies
 * of whatever it uses, must have this build's ABI, and stays loaded. One thread, at start. */

#include "kernels/backend.h"

typedef struct kern_choice {
    const kern_backend *backend;
    uint32_t device;     /* for kern_backend_options */
    const char *variant; /* likewise; borrowed from the text that was given */
} kern_choice;

/* PD_E_UNSUPPORTED: not to be had here; one line is logged that says why (no such file, another
 * ABI, what the probe says). PD_E_INVALID: not such a text (logged). */
PD_CHECKED pd_status kern_backend_choose(const char *device, kern_choice *choice_out);

#pragma once

/* common/worker/weights_folder.h - where this host's workers keep packed weights. Any thread. */

#define PD_WEIGHTS_FOLDER_BYTES 4096

/* cache_dir: the deployment's: a path, "none" or "auto". xdg_cache_home, home: of the environment,
 * NULL where they are not set; only an absolute path counts (XDG Base Directory Specification 0.8).
 * "" where there is no such place: by choice, or with a line in the log. */
void pd_weights_folder_choose(const char *cache_dir, const char *xdg_cache_home, const char *home,
                              char out[PD_WEIGHTS_FOLDER_BYTES]);

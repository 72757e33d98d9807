#include "common/worker/weights_folder.h"

#include "common/base/log.h"

#include <stdio.h>
#include <string.h>

#define BELOW "kvferry/weights"

static bool is_absolute(const char *path)
{
    return path != NULL && path[0] == '/';
}

void pd_weights_folder_choose(const char *cache_dir, const char *xdg_cache_home, const char *home,
                              char out[PD_WEIGHTS_FOLDER_BYTES])
{
    int n = 0;

    out[0] = '\0';
    if (strcmp(cache_dir, "none") == 0)
        return;
    if (strcmp(cache_dir, "auto") != 0) {
        n = snprintf(out, PD_WEIGHTS_FOLDER_BYTES, "%s", cache_dir);
    } else if (is_absolute(xdg_cache_home)) {
        n = snprintf(out, PD_WEIGHTS_FOLDER_BYTES, "%s/" BELOW, xdg_cache_home);
    } else if (is_absolute(home)) {
        n = snprintf(out, PD_WEIGHTS_FOLDER_BYTES, "%s/.cache/" BELOW, home);
    } else {
        pd_log_info("msg=\"neither XDG_CACHE_HOME nor HOME says where packed weights can be kept: "
                    "each worker packs its own; model.cache_dir names a folder\"");
        return;
    }
    if (n < 0 || n >= PD_WEIGHTS_FOLDER_BYTES) {
        pd_log_warn(
            "msg=\"the folder for packed weights has too long a name: each worker packs its "
            "own\" bytes=%d",
            n);
        out[0] = '\0';
    }
}

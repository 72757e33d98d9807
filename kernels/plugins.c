#include "kernels/plugins.h"

#include "common/base/log.h"
#include "kernels/model/host.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REASON_MAX 512

/* Where they lie in an installation (absolute, from Meson), and seen from the folder of a program
 * in the build. */
#define INSTALLED KERN_PLUGINS_INSTALLED
#define BUILT     "../kernels/cuda"

typedef struct plugin {
    const char *device; /* without a number */
    const char *file;
} plugin;

static const plugin plugins[] = {{"cuda", "kv_cuda.so"}, {"cuda-emu", "kv_cuda_emu.so"}};

/* --- finding the file --- */

/* The folder of this process' program. */
static bool program_folder(char *out, size_t size)
{
    ssize_t len = readlink("/proc/self/exe", out, size - 1);

    if (len <= 0 || (size_t)len >= size - 1)
        return false;
    out[len] = '\0';
    char *slash = strrchr(out, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    return true;
}

static bool is_in(const char *folder, int folder_len, const char *file, char path_out[PATH_MAX])
{
    int len = snprintf(path_out, PATH_MAX, "%.*s/%s", folder_len, folder, file);

    return folder_len > 0 && folder[0] == '/' && len > 0 && len < PATH_MAX &&
           access(path_out, F_OK) == 0;
}

static bool find_in_list(const char *list, const char *file, char path_out[PATH_MAX])
{
    for (const char *at = list; *at != '\0';) {
        int len = (int)strcspn(at, ":");
        if (is_in(at, len, file, path_out))
            return true;
        at += len + (at[len] == ':');
    }
    return false;
}

static bool find(const char *file, char path_out[PATH_MAX], char *reason)
{
    const char *list = getenv("KVFERRY_PLUGINS");
    char program[PATH_MAX], built[PATH_MAX + sizeof BUILT + 1];

    if (list != NULL && *list != '\0') {
        if (find_in_list(list, file, path_out))
            return true;
        snprintf(reason, REASON_MAX, "no %s in KVFERRY_PLUGINS=%.300s (absolute folders count)",
                 file, list);
        return false;
    }
    if (!program_folder(program, sizeof program))
        program[0] = '\0';
    snprintf(built, sizeof built, "%s/" BUILT, program);
    if (is_in(built, (int)strlen(built), file, path_out) ||
        is_in(INSTALLED, (int)strlen(INSTALLED), file, path_out))
        return true;
    snprintf(reason, REASON_MAX,
             "no %s in %s nor beside this program: it was not built or installed", file, INSTALLED);
    return false;
}

/* --- loading it --- */

/* What the library shows, if it is a backend of this build. */
static const kern_backend *table_of(void *library, const char *path, char *reason)
{
    const kern_backend *table = dlsym(library, KERN_BACKEND_SYMBOL);

    if (table == NULL) {
        snprintf(reason, REASON_MAX, "%.300s is no backend: it has no symbol %s", path,
                 KERN_BACKEND_SYMBOL);
        return NULL;
    }
    if (table->abi != KERN_BACKEND_ABI || table->struct_bytes != sizeof *table) {
        snprintf(reason, REASON_MAX,
                 "%.300s was built for another kvferry: ABI %u with %u bytes, wanted %u with %zu",
                 path, table->abi, table->struct_bytes, KERN_BACKEND_ABI, sizeof *table);
        return NULL;
    }
    return table;
}

static const kern_backend *load(const char *file, char *reason)
{
    char path[PATH_MAX];

    if (!find(file, path, reason))
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *error = dlerror();
        snprintf(reason, REASON_MAX, "%.480s", error != NULL ? error : path);
        return NULL;
    }
    const kern_backend *table = table_of(library, path, reason);
    if (table == NULL) {
        dlclose(library);
        return NULL;
    }
    if (table->attach != NULL)
        table->attach(pd_log_service(), pd_log_level_set());
    return table;
}

/* --- choosing --- */

/* The number behind the colon of "cuda:1"; 0 without. False: not a number. */
static bool read_number(const char *colon, uint32_t *device_out)
{
    char *end = NULL;

    *device_out = 0;
    if (*colon == '\0')
        return true;
    if (colon[1] < '0' || colon[1] > '9')
        return false;
    unsigned long number = strtoul(colon + 1, &end, 10);
    *device_out = (uint32_t)number;
    return *end == '\0' && number < 1024;
}

static const plugin *plugin_of(const char *device, size_t name_len)
{
    for (size_t i = 0; i < sizeof plugins / sizeof plugins[0]; i++)
        if (strlen(plugins[i].device) == name_len &&
            memcmp(plugins[i].device, device, name_len) == 0)
            return &plugins[i];
    return NULL;
}

static const kern_backend *load_and_probe(const plugin *p, uint32_t device, int *score_out,
                                          char *reason)
{
    const kern_backend *table = load(p->file, reason);

    *score_out = table == NULL ? 0 : table->probe(device, reason, REASON_MAX);
    return *score_out > 0 ? table : NULL;
}

static void choose_best(kern_choice *choice_out)
{
    char reason[REASON_MAX];
    int score, host_score = kern_backend_host.probe(0, reason, sizeof reason);
    const kern_backend *gpu = load_and_probe(&plugins[0], 0, &score, reason);

    if (gpu == NULL)
        pd_log_info("msg=\"no GPU: the host computes\" device=auto reason=\"%s\"", reason);
    *choice_out =
        (kern_choice){.backend = gpu != NULL && score > host_score ? gpu : &kern_backend_host};
}

pd_status kern_backend_choose(const char *device, kern_choice *choice_out)
{
    size_t name_len = strcspn(device, ":");
    const plugin *p = plugin_of(device, name_len);
    char reason[REASON_MAX] = "";
    uint32_t number;
    int score;

    if (strcmp(device, "auto") == 0) {
        choose_best(choice_out);
        return PD_OK;
    }
    if (strncmp(device, "cpu", 3) == 0 && device[name_len] == '\0') {
        *choice_out = (kern_choice){.backend = &kern_backend_host,
                                    .variant = strcmp(device, "cpu") == 0 ? NULL : device};
        return PD_OK;
    }
    if (p == NULL || !read_number(device + name_len, &number)) {
        pd_log_error("msg=\"kernels: not a device\" device=%s", device);
        return PD_E_INVALID;
    }
    const kern_backend *backend = load_and_probe(p, number, &score, reason);
    if (backend == NULL) {
        pd_log_error("msg=\"kernels: device not usable here\" device=%s reason=\"%s\"", device,
                     reason);
        return PD_E_UNSUPPORTED;
    }
    *choice_out = (kern_choice){.backend = backend, .device = number};
    return PD_OK;
}

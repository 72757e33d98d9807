#include "common/transfer/nccl_library.h"

#include "common/base/log.h"
#include "common/transfer/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

/* 2.18: communicators that do not block may send and receive, and are told apart by config */
#define VERSION_LEAST 21800

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pd_nccl_library library;
static bool loaded;

static bool resolve(void *handle, const char *symbol, void *pointer)
{
    void *found = dlsym(handle, symbol);

    if (found == NULL)
        pd_log_error("msg=\"transfer: a library lacks a function that is needed\" function=%s",
                     symbol);
    memcpy(pointer, &found, sizeof found); /* C knows no cast from object to function */
    return found != NULL;
}

static pd_status load(void)
{
    const pd_cuda_driver *driver;
    pd_status status = pd_cuda_driver_load(&driver);

    if (status != PD_OK)
        return status;
    void *nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (nccl == NULL) {
        pd_log_error("msg=\"transfer: nccl cannot be used here: %s\" library=libnccl.so.2",
                     dlerror());
        return PD_E_UNSUPPORTED;
    }
#define RESOLVE(handle, name, symbol, result, arguments)                                           \
    if (!resolve(handle, symbol, &library.handle##_##name))                                        \
        return PD_E_UNSUPPORTED;
    PD_NCCL_CALLS(RESOLVE)
#undef RESOLVE
#define COPY(handle, name, symbol, result, arguments)                                              \
    library.handle##_##name = driver->handle##_##name;
    PD_CUDA_CALLS(COPY)
#undef COPY
    if (library.nccl_get_version(&library.version) != PD_NCCL_SUCCESS ||
        library.version < VERSION_LEAST) {
        pd_log_error("msg=\"transfer: NCCL is too old\" version=%d least=%d", library.version,
                     VERSION_LEAST);
        return PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

pd_status pd_nccl_library_load(const pd_nccl_library **library_out)
{
    pthread_mutex_lock(&lock);
    pd_status status = loaded ? PD_OK : load();
    loaded = status == PD_OK;
    pthread_mutex_unlock(&lock);
    *library_out = &library;
    return status;
}

#include "common/transfer/cuda_driver.h"

#include "common/base/log.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pd_cuda_driver driver;
static bool loaded;

static bool resolve(void *handle, const char *symbol, void *pointer)
{
    void *found = dlsym(handle, symbol);

    if (found == NULL)
        pd_log_error("msg=\"transfer: the CUDA driver lacks a function that is needed\" "
                     "function=%s",
                     symbol);
    memcpy(pointer, &found, sizeof found); /* C knows no cast from object to function */
    return found != NULL;
}

static pd_status load(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

    if (handle == NULL) {
        pd_log_error("msg=\"transfer: the CUDA driver cannot be used here: %s\" "
                     "library=libcuda.so.1",
                     dlerror());
        return PD_E_UNSUPPORTED;
    }
#define RESOLVE(library, name, symbol, result, arguments)                                          \
    if (!resolve(handle, symbol, &driver.library##_##name))                                        \
        return PD_E_UNSUPPORTED;
    PD_CUDA_CALLS(RESOLVE)
#undef RESOLVE
    return PD_OK;
}

pd_status pd_cuda_driver_load(const pd_cuda_driver **driver_out)
{
    pthread_mutex_lock(&lock);
    pd_status status = loaded ? PD_OK : load();
    loaded = status == PD_OK;
    pthread_mutex_unlock(&lock);
    *driver_out = &driver;
    return status;
}

#include "kernels/cuda/nccl.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/nccl_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* 2.18: communicators that do not block, told by config */
#define VERSION_LEAST 21800

_Static_assert(CU_NCCL_ID_BYTES == PD_NCCL_ID_BYTES, "an id goes through as it is");

/* Types as in nccl.h, enumerations as int. */
#define CALLS(CALL)                                                                                \
    CALL(get_version, "ncclGetVersion", int, (int *version))                                       \
    CALL(get_unique_id, "ncclGetUniqueId", int, (pd_nccl_id * id))                                 \
    CALL(comm_init, "ncclCommInitRankConfig", int,                                                 \
         (pd_nccl_comm * comm, int ranks, pd_nccl_id id, int rank, pd_nccl_config *config))        \
    CALL(comm_error, "ncclCommGetAsyncError", int, (pd_nccl_comm comm, int *error))                \
    CALL(comm_abort, "ncclCommAbort", int, (pd_nccl_comm comm))                                    \
    CALL(all_gather, "ncclAllGather", int,                                                         \
         (const void *own, void *all, size_t count, int type, pd_nccl_comm comm,                   \
          pd_cu_stream stream))                                                                    \
    CALL(error_text, "ncclGetErrorString", const char *, (int result))

#define MEMBER(name, symbol, result, arguments) result(*name) arguments;
static struct {
    CALLS(MEMBER)
} library;
static bool loaded;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct cu_nccl {
    pd_nccl_comm comm;
    uint32_t rank, ranks;
};

static bool resolve(void *handle, const char *symbol, void *pointer, char *reason, size_t size)
{
    void *found = dlsym(handle, symbol);

    if (found == NULL)
        snprintf(reason, size, "libnccl.so.2 lacks %s", symbol);
    memcpy(pointer, &found, sizeof found); /* C knows no cast from object to function */
    return found != NULL;
}

static pd_status load(char *reason, size_t size)
{
    int version = 0;
    /* kept: its threads outlive its communicators */
    void *handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

    if (handle == NULL) {
        const char *error = dlerror();
        snprintf(reason, size, "%s", error != NULL ? error : "libnccl.so.2");
        return PD_E_UNSUPPORTED;
    }
#define RESOLVE(name, symbol, result, arguments)                                                   \
    if (!resolve(handle, symbol, &library.name, reason, size))                                     \
        return PD_E_UNSUPPORTED;
    CALLS(RESOLVE)
#undef RESOLVE
    if (library.get_version(&version) != PD_NCCL_SUCCESS || version < VERSION_LEAST) {
        snprintf(reason, size, "NCCL %d is older than %d", version, VERSION_LEAST);
        return PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

pd_status cu_nccl_load(char *reason, size_t reason_size)
{
    pthread_mutex_lock(&lock);
    pd_status status = loaded ? PD_OK : load(reason, reason_size);
    loaded = status == PD_OK;
    pthread_mutex_unlock(&lock);
    return status;
}

static pd_status status_of(int result, const char *call)
{
    if (result == PD_NCCL_SUCCESS)
        return PD_OK;
    if (result == PD_NCCL_IN_PROGRESS)
        return PD_E_AGAIN;
    pd_log_error("msg=\"cuda: nccl: %s\" call=%s result=%d", library.error_text(result), call,
                 result);
    return PD_E_INTERNAL;
}

pd_status cu_nccl_id(unsigned char id_out[CU_NCCL_ID_BYTES])
{
    pd_nccl_id id;
    pd_status status = status_of(library.get_unique_id(&id), "ncclGetUniqueId");

    if (status == PD_OK)
        memcpy(id_out, id.bytes, sizeof id.bytes);
    return status == PD_E_AGAIN ? PD_E_INTERNAL : status;
}

pd_status cu_nccl_create(const unsigned char id[CU_NCCL_ID_BYTES], uint32_t rank, uint32_t ranks,
                         cu_nccl **nccl_out)
{
    pd_nccl_config config = pd_nccl_config_non_blocking();
    cu_nccl *nccl = pd_calloc(1, sizeof *nccl);
    pd_nccl_id copy;

    if (nccl == NULL)
        return PD_E_NOMEM;
    nccl->rank = rank;
    nccl->ranks = ranks;
    memcpy(copy.bytes, id, sizeof copy.bytes);
    pd_status status =
        status_of(library.comm_init(&nccl->comm, (int)ranks, copy, (int)rank, &config),
                  "ncclCommInitRankConfig");
    if ((status != PD_OK && status != PD_E_AGAIN) || nccl->comm == NULL) {
        cu_nccl_destroy(nccl);
        return PD_E_INTERNAL;
    }
    *nccl_out = nccl;
    return PD_OK;
}

pd_status cu_nccl_look(cu_nccl *nccl)
{
    int error = PD_NCCL_SUCCESS;
    pd_status status = status_of(library.comm_error(nccl->comm, &error), "ncclCommGetAsyncError");

    return status == PD_OK ? status_of(error, "of the communicator") : status;
}

pd_status cu_nccl_gather(cu_nccl *nccl, void *stream, const void *own, void *all, uint64_t bytes)
{
    return status_of(library.all_gather(own, all, bytes, PD_NCCL_INT8, nccl->comm, stream),
                     "ncclAllGather");
}

void cu_nccl_destroy(cu_nccl *nccl)
{
    if (nccl == NULL)
        return;
    if (nccl->comm != NULL)
        (void)library.comm_abort(nccl->comm); /* nothing can be done about it */
    pd_free(nccl);
}

#include "deploy/check_split.h"

#include "common/model_file/model_file.h"
#include "kernels/model/split.h"

#include <stdio.h>
#include <unistd.h>

static pd_status check_pool(const pd_model_shape *shape, const char *role,
                            const pd_deployment_pool *pool, char *why, size_t why_size)
{
    char reason[256];
    kern_split split;

    if (kern_split_of(shape, 0, pool->tensor_parallel, &split, reason, sizeof reason))
        return PD_OK;
    snprintf(why, why_size, "%s.tensor_parallel: %s", role, reason);
    return PD_E_INVALID;
}

pd_status check_split(const pd_deployment *deployment, char *why, size_t why_size)
{
    const pd_deployment *d = deployment;
    pd_model_file *file = NULL;

    if ((d->prefill.tensor_parallel == 1 && d->decode.tensor_parallel == 1) ||
        access(d->model.path, R_OK) != 0)
        return PD_OK;
    pd_status status = pd_model_file_open(d->model.path, &file);
    if (status != PD_OK) {
        snprintf(why, why_size, "model.path: %s: no model file", d->model.path);
        return status;
    }
    const pd_model_shape *shape = pd_model_file_shape(file);
    status = check_pool(shape, "prefill", &d->prefill, why, why_size);
    if (status == PD_OK)
        status = check_pool(shape, "decode", &d->decode, why, why_size);
    pd_model_file_close(file);
    return status;
}

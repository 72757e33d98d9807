#include "kernels/cuda/groups.h"

#include "common/base/mem.h"

struct cu_groups {
    uint32_t count;
    gpu_event **events; /* [count] */
    uint32_t recorded, announced;
    /* the group whose event says that group `g` is final: later ones may share one event */
    uint32_t *event_of; /* [count] */
    kern_group_done_fn *done;
    void *ctx;
};

pd_status cu_groups_create(gpu *g, uint32_t count, cu_groups **groups_out)
{
    cu_groups *groups = pd_calloc(1, sizeof *groups);
    pd_status status = PD_OK;

    if (groups == NULL)
        return PD_E_NOMEM;
    groups->count = count;
    groups->events = pd_calloc(count, sizeof(gpu_event *));
    groups->event_of = pd_calloc(count, sizeof *groups->event_of);
    if (groups->events == NULL || groups->event_of == NULL)
        status = PD_E_NOMEM;
    for (uint32_t i = 0; status == PD_OK && i < count; i++)
        status = gpu_event_create(g, &groups->events[i]);
    if (status != PD_OK) {
        cu_groups_destroy(groups);
        return status;
    }
    *groups_out = groups;
    return PD_OK;
}

void cu_groups_destroy(cu_groups *groups)
{
    if (groups == NULL)
        return;
    for (uint32_t i = 0; groups->events != NULL && i < groups->count; i++)
        if (groups->events[i] != NULL)
            gpu_event_destroy(groups->events[i]);
    pd_free(groups->events);
    pd_free(groups->event_of);
    pd_free(groups);
}

void cu_groups_begin(cu_groups *groups, kern_group_done_fn *done, void *ctx)
{
    groups->done = done;
    groups->ctx = ctx;
    groups->recorded = groups->announced = 0;
}

static pd_status record(cu_groups *groups, gpu_stream *stream, uint32_t some)
{
    uint32_t first = groups->recorded;

    pd_assert(some <= groups->count - first);
    if (groups->done == NULL || some == 0)
        return PD_OK;
    pd_status status = gpu_event_record(groups->events[first], stream);
    if (status != PD_OK)
        return status;
    for (; groups->recorded < first + some; groups->recorded++)
        groups->event_of[groups->recorded] = first;
    return PD_OK;
}

pd_status cu_groups_record(cu_groups *groups, gpu_stream *stream)
{
    return record(groups, stream, 1);
}

pd_status cu_groups_record_rest(cu_groups *groups, gpu_stream *stream)
{
    return record(groups, stream, groups->count - groups->recorded);
}

static void announce(cu_groups *groups)
{
    groups->done(groups->ctx, groups->announced++);
}

static gpu_event *next_event(const cu_groups *groups)
{
    return groups->events[groups->event_of[groups->announced]];
}

pd_status cu_groups_poll(cu_groups *groups)
{
    while (groups->announced < groups->recorded) {
        pd_status status = gpu_event_poll(next_event(groups));
        if (status == PD_E_AGAIN)
            return PD_OK;
        if (status != PD_OK)
            return status;
        announce(groups);
    }
    return PD_OK;
}

pd_status cu_groups_wait(cu_groups *groups)
{
    while (groups->announced < groups->recorded) {
        pd_status status = gpu_event_wait(next_event(groups));
        if (status != PD_OK)
            return status;
        announce(groups);
    }
    return PD_OK;
}

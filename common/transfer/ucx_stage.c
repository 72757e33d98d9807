#include "common/transfer/ucx_stage.h"

#include "common/base/mem.h"

pd_ucx_stage *pd_ucx_stage_take(pd_ucx_stages *stages, pd_peer peer)
{
    pd_ucx_stage *stage = stages->free;
    if (stage != NULL)
        stages->free = stage->next;
    else if (stages->count < PD_UCX_STAGES) {
        stage = pd_malloc(sizeof *stage);
        stages->count += stage != NULL;
    }
    if (stage == NULL)
        return NULL;
    stage->stages = stages;
    stage->peer = peer;
    stage->abandoned = false;
    stage->next = stages->used;
    stages->used = stage;
    return stage;
}

void pd_ucx_stage_give(pd_ucx_stage *stage)
{
    pd_ucx_stages *stages = stage->stages;
    pd_ucx_stage **at = &stages->used;
    while (*at != stage) {
        pd_assert(*at != NULL);
        at = &(*at)->next;
    }
    *at = stage->next;
    if (stage->abandoned) {
        pd_free(stage);
        return;
    }
    stage->next = stages->free;
    stages->free = stage;
}

void pd_ucx_stages_abandon(pd_ucx_stages *stages, pd_peer peer)
{
    for (pd_ucx_stage *stage = stages->used; stage != NULL; stage = stage->next) {
        if (stage->peer != peer || stage->abandoned)
            continue;
        stage->abandoned = true;
        stages->count--;
    }
}

static void free_list(pd_ucx_stage *stage)
{
    while (stage != NULL) {
        pd_ucx_stage *next = stage->next;
        pd_free(stage);
        stage = next;
    }
}

void pd_ucx_stages_end(pd_ucx_stages *stages)
{
    free_list(stages->free);
    free_list(stages->used);
    *stages = (pd_ucx_stages){0};
}

#include "kernels/cuda/seals.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

/* Items up, seals down; the same in host and device memory. */
typedef struct exchange {
    cu_seal_item items[CU_SEAL_BATCH];
    uint64_t seals[CU_SEAL_BATCH];
} exchange;

struct cu_sealer {
    gpu *device;
    cu_kv kv;
    gpu_stream *stream;
    exchange *host;   /* pinned */
    exchange *memory; /* the device's */
    pthread_mutex_t turn;
    bool has_turn;
    uint32_t count; /* of the batch under way */
};

static pd_status allocate(cu_sealer *sealer)
{
    int error = pthread_mutex_init(&sealer->turn, NULL);

    if (error != 0) {
        errno = error;
        pd_log_error("msg=\"cuda: cannot make a lock for seals: %m\"");
        return PD_E_IO;
    }
    sealer->has_turn = true;
    pd_status status = gpu_stream_create(sealer->device, &sealer->stream);
    if (status == PD_OK)
        status = gpu_host_alloc(sealer->device, sizeof(exchange), (void **)&sealer->host);
    if (status == PD_OK)
        status = gpu_alloc(sealer->device, sizeof(exchange), (void **)&sealer->memory);
    return status;
}

pd_status cu_sealer_create(gpu *g, const cu_kv *kv, cu_sealer **sealer_out)
{
    cu_sealer *sealer = pd_calloc(1, sizeof *sealer);

    if (sealer == NULL)
        return PD_E_NOMEM;
    sealer->device = g;
    sealer->kv = *kv;
    pd_status status = allocate(sealer);
    if (status != PD_OK) {
        cu_sealer_destroy(sealer);
        return status;
    }
    *sealer_out = sealer;
    return PD_OK;
}

void cu_sealer_destroy(cu_sealer *sealer)
{
    if (sealer == NULL)
        return;
    if (sealer->stream != NULL)
        gpu_stream_destroy(sealer->stream);
    if (sealer->host != NULL)
        gpu_host_free(sealer->device, sealer->host);
    if (sealer->memory != NULL)
        gpu_free(sealer->device, sealer->memory);
    if (sealer->has_turn)
        pthread_mutex_destroy(&sealer->turn);
    pd_free(sealer);
}

static cu_seal_item item_of(const cu_kv *kv, const pd_seal_item *item)
{
    pd_assert(item->block < kv->blocks && item->head_from <= item->head_to &&
              item->head_to <= kv->kv_heads);
    pd_assert(item->place.group * kv->group_layers < kv->layers);
    pd_assert(item->place.valid_tokens > 0 && item->place.valid_tokens <= kv->block_tokens);
    return (cu_seal_item){.key = pd_seal_place_key(&item->place),
                          .block = item->block,
                          .group = item->place.group,
                          .valid_tokens = item->place.valid_tokens,
                          .head_from = item->head_from,
                          .head_to = item->head_to,
                          .head_first = item->place.head_first};
}

pd_status cu_sealer_begin(cu_sealer *sealer, const pd_seal_item *items, uint32_t count,
                          bool from_bytes)
{
    pd_assert(count > 0 && count <= CU_SEAL_BATCH);
    pthread_mutex_lock(&sealer->turn);
    sealer->count = count;
    for (uint32_t i = 0; i < count; i++)
        sealer->host->items[i] = item_of(&sealer->kv, &items[i]);
    gpu_use(sealer->device);
    pd_status status = gpu_copy_in(sealer->stream, sealer->memory->items, sealer->host->items,
                                   count * sizeof *sealer->host->items);
    if (status == PD_OK)
        status = cu_seal(sealer->stream, &sealer->kv, count, sealer->memory->items, from_bytes,
                         sealer->memory->seals);
    if (status == PD_OK)
        status = gpu_copy_out(sealer->stream, sealer->host->seals, sealer->memory->seals,
                              count * sizeof *sealer->host->seals);
    return status;
}

pd_status cu_sealer_end(cu_sealer *sealer, uint64_t *seals_out)
{
    gpu_use(sealer->device);
    /* also after a failure: the buffers are used again */
    pd_status status = gpu_stream_wait(sealer->stream);
    if (status == PD_OK)
        memcpy(seals_out, sealer->host->seals, sealer->count * sizeof *seals_out);
    pthread_mutex_unlock(&sealer->turn);
    return status;
}

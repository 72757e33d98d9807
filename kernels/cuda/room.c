#include "kernels/cuda/room.h"

#include "common/base/log.h"
#include "common/kv/seal.h"

uint64_t cu_room_hashes_most(uint64_t pool_bytes, uint64_t token_bytes)
{
    /* blocks are multiples of so many tokens, and these cut into tiles worst */
    pd_seal_tiling tiling = pd_seal_tiling_of(token_bytes, PD_KV_TILE_TOKENS);
    uint64_t unit_bytes = 2 * PD_KV_TILE_TOKENS * token_bytes;
    uint64_t hash_bytes = 2 * tiling.tiles * sizeof(uint64_t) + sizeof(uint16_t);

    return (pool_bytes + unit_bytes - 1) / unit_bytes * hash_bytes;
}

pd_status cu_room_check(gpu *g, const char *backend, const cu_room *room, uint64_t held)
{
    uint64_t wanted = room->weights + room->steps + room->uploads + room->pool + room->hashes;
    uint64_t free_bytes = 0;
    pd_status status = gpu_memory_free(g, &free_bytes);

    if (status != PD_OK)
        return status;
    if (wanted <= held || wanted - held <= free_bytes)
        return PD_OK;
    pd_log_error("msg=\"%s: this does not fit into the device's memory: take a smaller pool "
                 "(kv: memory), context, chunk_tokens or max_batch\" bus=%s name=\"%s\" "
                 "weights_bytes=%llu step_bytes=%llu upload_bytes=%llu pool_bytes=%llu "
                 "pool_hash_bytes=%llu of_them_held_bytes=%llu free_bytes=%llu device_bytes=%llu",
                 backend, gpu_info_of(g)->bus, gpu_info_of(g)->name,
                 (unsigned long long)room->weights, (unsigned long long)room->steps,
                 (unsigned long long)room->uploads, (unsigned long long)room->pool,
                 (unsigned long long)room->hashes, (unsigned long long)held,
                 (unsigned long long)free_bytes, (unsigned long long)gpu_info_of(g)->memory_bytes);
    return PD_E_NOMEM;
}

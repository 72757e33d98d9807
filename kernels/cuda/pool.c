#include "kernels/cuda/pool.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/tile_sum.h"
#include "kernels/cuda/devices.h"
#include "kernels/cuda/seals.h"
#include "kernels/cuda/stage.h"

#include <string.h>

#define PAGE_BYTES 4096
#define KEYS_BYTES (PD_TILE_WORDS * sizeof(uint64_t))
/* Parts of items at a time, on the stack: 80 KiB. */
#define PARTS_MAX CU_SEAL_BATCH

/* A rank's, on its device. */
typedef struct piece {
    gpu *device;
    void *base; /* the allocation, or what was imported of it */
    uint64_t base_bytes;
    void *memory; /* the pool begins at a page in it */
    void *hashes;
    cu_kv kv;
    cu_sealer *sealing, *checking; /* who ships and who verifies do not wait for each other */
} piece;

struct cu_pool {
    cu_pool_options options;
    uint32_t rank, ranks;
    uint32_t count; /* of pieces: rank 0 has all, others their own */
    uint64_t hashes_bytes;
    cu_room room;  /* of each device; zeros where the pool's memory is not alloc's */
    piece *pieces; /* [count]; the first is on the rank's own device */
};

/* ---- life ---- */

pd_status cu_pool_create(const cu_pool_options *options, cu_pool **pool_out)
{
    cu_pool *pool = pd_calloc(1, sizeof *pool);

    if (pool == NULL)
        return PD_E_NOMEM;
    pool->options = *options;
    pool->rank = options->comm != NULL ? cu_comm_rank(options->comm) : 0;
    pool->ranks = options->comm != NULL ? cu_comm_ranks(options->comm) : 1;
    pool->count = pool->rank == 0 ? pool->ranks : 1;
    pool->pieces = pd_calloc(pool->count, sizeof *pool->pieces);
    if (pool->pieces == NULL) {
        pd_free(pool);
        return PD_E_NOMEM;
    }
    pool->pieces[0].device = options->device;
    *pool_out = pool;
    return PD_OK;
}

static void drop(const cu_pool *pool, piece *p, void *memory)
{
    if (memory == NULL)
        return;
    gpu_use(p->device);
    if (pool->rank == 0)
        gpu_free(p->device, memory);
    else
        gpu_unimport(p->device, memory);
}

void cu_pool_free(cu_pool *pool)
{
    for (uint32_t i = 0; i < pool->count; i++) {
        drop(pool, &pool->pieces[i], pool->pieces[i].base);
        pool->pieces[i].base = NULL;
    }
    gpu_use(pool->options.device);
}

void cu_pool_destroy(cu_pool *pool)
{
    if (pool == NULL)
        return;
    for (uint32_t i = 0; i < pool->count; i++) {
        cu_sealer_destroy(pool->pieces[i].sealing);
        cu_sealer_destroy(pool->pieces[i].checking);
        drop(pool, &pool->pieces[i], pool->pieces[i].hashes);
    }
    cu_pool_free(pool);
    for (uint32_t i = 1; i < pool->count; i++)
        gpu_close(pool->pieces[i].device);
    pd_free(pool->pieces);
    pd_free(pool);
}

uint64_t cu_pool_bytes(const cu_pool *pool)
{
    return pool->rank == 0 ? pool->count * pool->hashes_bytes : 0;
}

const char *cu_pool_broken(const cu_pool *pool)
{
    for (uint32_t i = 0; i < pool->count; i++)
        if (pool->pieces[i].device != NULL && gpu_broken(pool->pieces[i].device) != NULL)
            return gpu_broken(pool->pieces[i].device);
    return NULL;
}

/* ---- memory ---- */

static pd_status clear(gpu *device, void *memory, uint64_t bytes)
{
    gpu_stream *stream = NULL;
    pd_status status = gpu_stream_create(device, &stream);

    if (status != PD_OK)
        return status;
    status = gpu_fill(stream, memory, 0, bytes);
    if (status == PD_OK)
        status = gpu_stream_wait(stream);
    gpu_stream_destroy(stream);
    return status;
}

static pd_status open_device(const cu_pool *pool, uint32_t rank, gpu **device_out)
{
    uint32_t device;
    pd_status status = cu_device_of_rank(pool->options.backend, pool->options.device_first, rank,
                                         pool->ranks, &device);

    return status == PD_OK ? gpu_open(device, device_out) : status;
}

/* Before anything of the pool is made. The ranks have taken their weights, and what steps work in,
 * by now, or will. */
static pd_status check_piece(const cu_pool *pool, uint32_t rank)
{
    piece *p = &pool->pieces[rank];
    pd_status status = p->device == NULL ? open_device(pool, rank, &p->device) : PD_OK;

    if (status != PD_OK)
        return status;
    gpu_use(p->device);
    return cu_room_check(p->device, pool->options.backend, &pool->room,
                         pool->room.weights + pool->room.steps);
}

static pd_status alloc_piece(const cu_pool *pool, uint32_t rank, uint64_t bytes)
{
    piece *p = &pool->pieces[rank];
    pd_memory_reach reach = PD_REACH_AUTO;

    gpu_use(p->device);
    /* where the runtime's own alignment is a page or more, nothing of the slack is used */
    p->base_bytes = bytes + PAGE_BYTES;
    pd_status status =
        gpu_alloc_pool(p->device, p->base_bytes, pool->options.reach, &p->base, &reach);
    if (status == PD_OK)
        status = clear(p->device, p->base, p->base_bytes);
    if (status != PD_OK)
        return status;
    pd_log_info("msg=\"%s: the KV pool\" rank=%u memory=%s bytes=%llu", pool->options.backend, rank,
                pd_memory_reach_name(reach), (unsigned long long)bytes);
    p->memory = (void *)(((uintptr_t)p->base + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    return PD_OK;
}

pd_status cu_pool_alloc(cu_pool *pool, uint64_t piece_bytes, const cu_room *room, void **pieces_out)
{
    pd_status status = PD_OK;

    pd_assert(pool->rank == 0 && pool->pieces[0].base == NULL);
    pool->room = *room;
    for (uint32_t rank = 0; status == PD_OK && rank < pool->ranks; rank++)
        status = check_piece(pool, rank);
    for (uint32_t rank = 0; status == PD_OK && rank < pool->ranks; rank++)
        status = alloc_piece(pool, rank, piece_bytes);
    if (status != PD_OK)
        cu_pool_free(pool);
    gpu_use(pool->options.device);
    for (uint32_t rank = 0; status == PD_OK && rank < pool->ranks; rank++)
        pieces_out[rank] = pool->pieces[rank].memory;
    return status;
}

/* ---- hashes ---- */

static uint64_t units_of(const cu_kv *kv)
{
    return (uint64_t)kv->layers * kv->blocks * kv->kv_heads;
}

static uint64_t sums_bytes_of(const cu_kv *kv)
{
    pd_seal_tiling tiling = pd_seal_tiling_of(kv->token_bytes, kv->block_tokens);

    return units_of(kv) * 2 * tiling.tiles * sizeof(uint64_t);
}

static uint64_t hashes_bytes_of(const cu_kv *kv)
{
    return KEYS_BYTES + sums_bytes_of(kv) + units_of(kv) * sizeof(uint16_t);
}

/* [keys][tile sums][covered] */
static void point_hashes(piece *p)
{
    uint8_t *keys = p->hashes, *sums = keys + KEYS_BYTES;

    p->kv.tile_keys = (const uint64_t *)keys;
    p->kv.tile_sums = (uint64_t *)sums;
    p->kv.covered = (uint16_t *)(sums + sums_bytes_of(&p->kv));
}

/* Cleared: nothing is covered. */
static pd_status make_hashes(piece *p)
{
    uint64_t bytes = hashes_bytes_of(&p->kv);
    cu_stage *stage = NULL;

    pd_status status = gpu_alloc(p->device, bytes, &p->hashes);
    if (status == PD_OK)
        status = clear(p->device, p->hashes, bytes);
    if (status == PD_OK)
        status = cu_stage_create(p->device, KEYS_BYTES, &stage);
    if (status == PD_OK)
        status = cu_stage_copy(stage, p->hashes, pd_tile_keys, KEYS_BYTES);
    if (status == PD_OK)
        status = cu_stage_finish(stage);
    cu_stage_destroy(stage);
    if (status == PD_OK)
        point_hashes(p);
    return status;
}

/* ---- binding ---- */

static cu_kv kv_of(const pd_kv_layout *layout, void *memory)
{
    return (cu_kv){.pool = memory,
                   .layers = layout->layers,
                   .kv_heads = layout->rank_heads,
                   .head_dim = layout->head_dim,
                   .block_tokens = layout->block_tokens,
                   .group_layers = layout->group_layers,
                   .blocks = layout->blocks,
                   .token_bytes = layout->token_bytes,
                   .half_bytes = layout->half_bytes,
                   .layer_bytes = layout->layer_bytes};
}

static pd_status export_piece(const cu_pool *pool, uint32_t rank)
{
    const piece *p = &pool->pieces[rank];
    cu_comm_piece *out = cu_comm_piece_of(pool->options.comm, rank);

    out->allocation_bytes = p->base_bytes;
    out->pool_at = (uint64_t)((uint8_t *)p->memory - (uint8_t *)p->base);
    out->hashes_bytes = p->hashes == NULL ? 0 : pool->hashes_bytes;
    pd_status status = gpu_export(p->device, p->base, out->pool);
    if (status == PD_OK && p->hashes != NULL)
        status = gpu_export(p->device, p->hashes, out->hashes);
    return status;
}

static pd_status bind_all(cu_pool *pool, const pd_kv_layout *layout, void *memory, bool seals)
{
    pd_status status = PD_OK;

    for (uint32_t rank = 0; status == PD_OK && rank < pool->ranks; rank++) {
        piece *p = &pool->pieces[rank];
        pd_assert(p->device != NULL);
        gpu_use(p->device);
        p->kv = kv_of(layout, rank == 0 ? memory : p->memory);
        pool->hashes_bytes = seals ? hashes_bytes_of(&p->kv) : 0;
        pool->room.hashes = pool->hashes_bytes;
        status = cu_room_check(p->device, pool->options.backend, &pool->room,
                               pool->room.weights + pool->room.steps + pool->room.pool);
        if (status == PD_OK && seals)
            status = make_hashes(p);
        if (status == PD_OK)
            status = cu_sealer_create(p->device, &p->kv, &p->sealing);
        if (status == PD_OK)
            status = cu_sealer_create(p->device, &p->kv, &p->checking);
        if (status == PD_OK && rank > 0)
            status = export_piece(pool, rank);
    }
    gpu_use(pool->options.device);
    return status;
}

static pd_status import_piece(cu_pool *pool, const pd_kv_layout *layout, bool seals)
{
    const cu_comm_piece *given = cu_comm_piece_of(pool->options.comm, pool->rank);
    piece *p = &pool->pieces[0];

    p->kv = kv_of(layout, NULL);
    pool->hashes_bytes = seals ? hashes_bytes_of(&p->kv) : 0;
    if (given->pool_at + layout->rank_bytes > given->allocation_bytes ||
        given->hashes_bytes != pool->hashes_bytes) {
        pd_log_error("msg=\"%s: rank 0 has given another pool than this rank needs\" rank=%u "
                     "allocation_bytes=%llu rank_bytes=%llu hashes_bytes=%llu",
                     pool->options.backend, pool->rank, (unsigned long long)given->allocation_bytes,
                     (unsigned long long)layout->rank_bytes,
                     (unsigned long long)given->hashes_bytes);
        return PD_E_INVALID;
    }
    pd_status status = gpu_import(p->device, given->pool, given->allocation_bytes, &p->base);
    if (status != PD_OK)
        return status;
    p->memory = (uint8_t *)p->base + given->pool_at;
    p->kv.pool = p->memory;
    if (seals)
        status = gpu_import(p->device, given->hashes, given->hashes_bytes, &p->hashes);
    if (status == PD_OK && seals)
        point_hashes(p);
    return status;
}

pd_status cu_pool_bind(cu_pool *pool, const pd_kv_layout *layout, void *memory, bool seals,
                       cu_kv *kv_out)
{
    pd_status status = PD_OK;

    if (pool->rank == 0)
        status = bind_all(pool, layout, memory, seals);
    if (status == PD_OK && pool->options.comm != NULL) {
        status = cu_comm_meet(pool->options.comm);
        if (status != PD_OK)
            pd_log_error("msg=\"%s: ranks do not meet: one has ended\" rank=%u ranks=%u",
                         pool->options.backend, pool->rank, pool->ranks);
    }
    if (status == PD_OK && pool->rank > 0)
        status = import_piece(pool, layout, seals);
    if (status == PD_OK)
        *kv_out = pool->pieces[0].kv;
    return status;
}

/* ---- seals ---- */

/* What one rank has of some items. */
typedef struct parts {
    uint32_t count;
    pd_seal_item item[PARTS_MAX];
    uint32_t of[PARTS_MAX]; /* which item */
    uint64_t seal[PARTS_MAX];
} parts;

static void cut(const pd_seal_item *items, uint32_t count, uint32_t rank, uint32_t heads,
                parts *out)
{
    uint32_t first = rank * heads, end = first + heads;

    out->count = 0;
    for (uint32_t i = 0; i < count; i++) {
        pd_seal_item item = items[i];
        uint32_t from = item.head_from > first ? item.head_from : first;
        uint32_t to = item.head_to < end ? item.head_to : end;
        if (from >= to)
            continue;
        item.head_from = from - first;
        item.head_to = to - first;
        item.place.head_first += first;
        out->of[out->count] = i;
        out->item[out->count++] = item;
    }
}

/* The seal of heads a..c is that of a..b plus that of b..c. All devices work at once. count:
 * PARTS_MAX at most. */
static pd_status seal_parts(cu_pool *pool, const pd_seal_item *items, uint32_t count,
                            bool from_bytes, uint64_t *seals_out)
{
    pd_status status = PD_OK;
    uint32_t begun = 0;
    parts some;

    memset(seals_out, 0, count * sizeof *seals_out);
    for (; status == PD_OK && begun < pool->ranks; begun++) {
        piece *p = &pool->pieces[begun];
        cut(items, count, begun, p->kv.kv_heads, &some);
        if (some.count > 0)
            status = cu_sealer_begin(from_bytes ? p->checking : p->sealing, some.item, some.count,
                                     from_bytes);
    }
    for (uint32_t rank = 0; rank < begun; rank++) {
        piece *p = &pool->pieces[rank];
        cut(items, count, rank, p->kv.kv_heads, &some);
        if (some.count == 0)
            continue;
        pd_status ended = cu_sealer_end(from_bytes ? p->checking : p->sealing, some.seal);
        status = status == PD_OK ? ended : status;
        for (uint32_t i = 0; status == PD_OK && i < some.count; i++)
            seals_out[some.of[i]] += some.seal[i];
    }
    return status;
}

static uint32_t batch_of(uint32_t left)
{
    return left < PARTS_MAX ? left : PARTS_MAX;
}

pd_status cu_pool_seal(cu_pool *pool, const pd_seal_item *items, uint32_t count,
                       uint64_t *seals_out)
{
    pd_status status = PD_OK;

    pd_assert(pool->rank == 0);
    for (uint32_t at = 0; status == PD_OK && at < count; at += PARTS_MAX)
        status = seal_parts(pool, items + at, batch_of(count - at), false, seals_out + at);
    return status;
}

pd_status cu_pool_check(cu_pool *pool, const pd_seal_item *items, uint32_t count,
                        const uint64_t *seals, uint32_t *bad_out)
{
    uint64_t found[PARTS_MAX];

    pd_assert(pool->rank == 0);
    for (uint32_t at = 0; at < count; at += PARTS_MAX) {
        uint32_t some = batch_of(count - at);
        pd_status status = seal_parts(pool, items + at, some, true, found);
        if (status != PD_OK)
            return status;
        for (uint32_t i = 0; i < some; i++) {
            if (found[i] == seals[at + i])
                continue;
            *bad_out = at + i;
            return PD_E_MISMATCH;
        }
    }
    return PD_OK;
}

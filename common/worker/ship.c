#include "common/worker/ship.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/seal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { WAIT_NS = 50000 };

struct pd_shipper {
    pd_transfer *transfer;
    const pd_kv_layout *layout;
    uint64_t layout_fingerprint;
    uint64_t incarnation;
    bool seals;
    pthread_mutex_t lock; /* around each call of the transfer */
    uint32_t peers_max;
    _Atomic uint32_t *blocks; /* [peers_max] of the peer's pool */
};

static void ship_destroy(pd_shipper *shipper)
{
    if (shipper == NULL)
        return;
    pthread_mutex_destroy(&shipper->lock);
    pd_free((void *)shipper->blocks);
    pd_free(shipper);
}

static pd_status ship_create(const pd_shipper_options *options, pd_shipper **shipper_out)
{
    pd_shipper *shipper = pd_calloc(1, sizeof *shipper);

    if (shipper == NULL)
        return PD_E_NOMEM;
    shipper->transfer = options->transfer;
    shipper->layout = options->layout;
    shipper->layout_fingerprint = pd_kv_layout_fingerprint(options->layout);
    shipper->incarnation = options->incarnation;
    shipper->seals = options->seals;
    shipper->peers_max = options->peers_max;
    pthread_mutex_init(&shipper->lock, NULL);
    shipper->blocks = pd_calloc(options->peers_max, sizeof *shipper->blocks);
    if (shipper->blocks == NULL) {
        ship_destroy(shipper);
        return PD_E_NOMEM;
    }
    *shipper_out = shipper;
    return PD_OK;
}

static void ship_set_peer(pd_shipper *shipper, pd_peer peer, uint32_t blocks)
{
    pd_assert(peer < shipper->peers_max);
    atomic_store(&shipper->blocks[peer], blocks);
}

/* A put of blocks that are neighbours in both pools. */
static pd_status put_run(pd_shipper *shipper, const pd_ship *ship, uint32_t group, uint32_t from,
                         uint32_t count)
{
    pd_kv_layout theirs = *shipper->layout; /* alike but for the number of blocks */
    theirs.blocks = atomic_load(&shipper->blocks[ship->peer]);
    uint64_t source = pd_kv_layout_block_offset(shipper->layout, group, ship->sources[from]);
    uint64_t bytes = count * pd_kv_layout_block_bytes(shipper->layout, group);
    pd_status status;

    if (ship->targets[from] >= theirs.blocks || count > theirs.blocks - ship->targets[from])
        return PD_E_INVALID;
    uint64_t target = pd_kv_layout_block_offset(&theirs, group, ship->targets[from]);
    for (;;) {
        pthread_mutex_lock(&shipper->lock);
        status =
            pd_transfer_put(shipper->transfer, ship->peer, ship->ticket, source, target, bytes);
        pthread_mutex_unlock(&shipper->lock);
        if (status != PD_E_OVERLOAD)
            return status;
        nanosleep(&(struct timespec){.tv_nsec = WAIT_NS}, NULL);
    }
}

static pd_status put_blocks(pd_shipper *shipper, const pd_ship *ship, uint32_t group, uint32_t from,
                            uint32_t end)
{
    while (from < end) {
        uint32_t count = 1;
        while (from + count < end && ship->sources[from + count] == ship->sources[from] + count &&
               ship->targets[from + count] == ship->targets[from] + count)
            count++;
        pd_status status = put_run(shipper, ship, group, from, count);
        if (status != PD_OK)
            return status;
        from += count;
    }
    return PD_OK;
}

static pd_status post_notice(pd_shipper *shipper, pd_peer peer, uint64_t ticket,
                             const pd_notice *notice, bool wait)
{
    unsigned char bytes[PD_TRANSFER_NOTICE_BYTES_MAX];
    size_t len = pd_notice_pack(notice, bytes);
    pd_status status;

    for (;;) {
        pthread_mutex_lock(&shipper->lock);
        status = pd_transfer_notice(shipper->transfer, peer, ticket, bytes, len);
        pthread_mutex_unlock(&shipper->lock);
        if (status != PD_E_OVERLOAD || !wait)
            return status;
        nanosleep(&(struct timespec){.tv_nsec = WAIT_NS}, NULL);
    }
}

/* Blocks from .. end - 1 of the plan, at most a notice's worth. */
static pd_status ship_part(pd_shipper *shipper, const pd_ship *ship, uint32_t group, uint32_t from,
                           uint32_t end)
{
    uint64_t seals[PD_NOTICE_BLOCKS_MAX];
    uint32_t block_tokens = shipper->layout->block_tokens;
    pd_status status = put_blocks(shipper, ship, group, from, end);

    if (status != PD_OK)
        return status;
    uint32_t last_valid = end == ship->count ? ship->valid_tokens : block_tokens;
    for (uint32_t i = from; shipper->seals && i < end; i++) {
        pd_seal_place place = {
            .request = pd_ship_seal_request(&ship->key),
            .epoch = ship->key.epoch,
            .group = group,
            .block_index = ship->first + i,
            .valid_tokens = i + 1 == end ? last_valid : block_tokens,
            .layout_fingerprint = shipper->layout_fingerprint,
        };
        seals[i - from] = pd_seal_compute(shipper->layout, pd_transfer_pool(shipper->transfer),
                                          ship->sources[i], &place, 0, shipper->layout->kv_heads);
    }
    pd_notice notice = {
        .kind = PD_NOTICE_BLOCKS,
        .key = ship->key,
        .sender = shipper->incarnation,
        .receiver = ship->receiver,
        .group = group,
        .groups = 1,
        .slices = 1,
        .first_block = ship->first + from,
        .count = end - from,
        .valid_tokens = last_valid,
        .seals = shipper->seals ? seals : NULL,
    };
    return post_notice(shipper, ship->peer, ship->ticket, &notice, true);
}

static void ship_slice(pd_shipper *shipper, pd_step_slice *slice, uint32_t group)
{
    const pd_ship *ship = &slice->ship;

    for (uint32_t from = 0; from < ship->count && slice->ship_status == PD_OK;) {
        uint32_t end =
            ship->count - from > PD_NOTICE_BLOCKS_MAX ? from + PD_NOTICE_BLOCKS_MAX : ship->count;
        slice->ship_status = ship_part(shipper, ship, group, from, end);
        if (slice->ship_status == PD_OK)
            slice->notices_posted++;
        else
            pd_log_req_warn(slice->id, "msg=\"blocks cannot be shipped\" status=%s group=%u",
                            pd_status_name(slice->ship_status), group);
        from = end;
    }
}

static void ship_on_group(void *ctx, pd_step *step, uint32_t group)
{
    for (uint32_t i = 0; i < step->slices_count; i++)
        ship_slice(ctx, &step->slices[i], group);
}

static pd_status ship_notify(pd_shipper *shipper, pd_peer peer, const pd_notice *notice)
{
    /* The loop never waits for long: a full queue empties in microseconds, or its link fails. */
    enum { TRIES = 20 };
    pd_status status = PD_E_OVERLOAD;

    for (int i = 0; i < TRIES && status == PD_E_OVERLOAD; i++) {
        if (i > 0)
            nanosleep(&(struct timespec){.tv_nsec = WAIT_NS}, NULL);
        status = post_notice(shipper, peer, 0, notice, false);
    }
    return status;
}

const pd_shipper_ops pd_worker_shipper = {
    .create = ship_create,
    .destroy = ship_destroy,
    .set_peer = ship_set_peer,
    .notify = ship_notify,
    .on_group = ship_on_group,
};

#include "common/worker/blocks.h"

#include <stdio.h>

enum { EVENTS_A_MESSAGE = 512, SLOW_CHECK_TICKS = 64 };

pd_status pd_blocks_init(pd_blocks *blocks, uint32_t count, bool keep)
{
    *blocks = (pd_blocks){.keep = keep};
    pd_status status = pd_kv_pool_create(count, &blocks->pool);
    if (status != PD_OK)
        return status;
    /* A step stores and evicts at most every block once; what is more makes a gap, and a gap is
     * mended by a snapshot. */
    uint32_t events_max = count < UINT32_MAX / 2 ? count * 2 : count;
    status = pd_prefix_cache_create(blocks->pool, events_max, &blocks->cache);
    if (status != PD_OK)
        pd_blocks_fini(blocks);
    return status;
}

void pd_blocks_fini(pd_blocks *blocks)
{
    pd_prefix_cache_destroy(blocks->cache);
    pd_kv_pool_destroy(blocks->pool);
    *blocks = (pd_blocks){0};
}

void pd_blocks_remember(pd_blocks *blocks, const pd_hash128 *hashes, const pd_block *sequence,
                        uint32_t count, uint32_t spare)
{
    if (blocks->keep && count > 0)
        pd_prefix_cache_insert(blocks->cache, PD_BLOCKS_ROOT, hashes, sequence, count, spare);
}

pd_ledger pd_blocks_ledger(const pd_blocks *blocks)
{
    pd_kv_ledger ledger = pd_kv_pool_ledger(blocks->pool);

    return (pd_ledger){
        .total = ledger.total,
        .free = ledger.free,
        .cached = ledger.cached,
        .leased = ledger.leased,
        .running = ledger.running,
        .quarantined = ledger.quarantined,
    };
}

void pd_blocks_tick(pd_blocks *blocks)
{
    pd_ledger ledger = pd_blocks_ledger(blocks);

    pd_assert(ledger.total ==
              ledger.free + ledger.cached + ledger.leased + ledger.running + ledger.quarantined);
    if (++blocks->checked >= SLOW_CHECK_TICKS) {
        blocks->checked = 0;
        pd_assert(pd_kv_pool_check(blocks->pool) == PD_OK);
    }
}

static void begin_message(pd_message *message, const pd_role_options *options)
{
    *message = (pd_message){.kind = PD_MSG_KV_EVENTS};
    message->kv_events.incarnation = options->incarnation;
    snprintf(message->kv_events.name, sizeof message->kv_events.name, "%s", options->name);
}

static pd_kv_event on_the_wire(const pd_cache_event *event)
{
    static const pd_kv_event_kind kinds[] = {
        [PD_CACHE_STORED] = PD_KV_STORED,
        [PD_CACHE_REMOVED] = PD_KV_REMOVED,
    };

    return (pd_kv_event){.kind = kinds[event->kind], .hash = event->hash};
}

void pd_blocks_publish(pd_blocks *blocks, const pd_role_options *options, const pd_role_sink *sink,
                       const pd_routers *routers)
{
    pd_cache_event events[EVENTS_A_MESSAGE];
    pd_kv_event wire[EVENTS_A_MESSAGE];
    pd_message message;
    uint32_t count;

    while ((count = pd_prefix_cache_drain(blocks->cache, events, EVENTS_A_MESSAGE)) > 0) {
        for (uint32_t from = 0, to; from < count; from = to) {
            /* A gap in the numbers begins a new message. */
            for (to = from; to < count && events[to].seq == events[from].seq + (to - from); to++)
                wire[to] = on_the_wire(&events[to]);
            begin_message(&message, options);
            message.kv_events.first_sequence = events[from].seq;
            message.kv_events.events = wire + from;
            message.kv_events.events_count = to - from;
            for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
                const pd_router_seen *router = &routers->entries[i];
                if (router->router != 0 && !router->lost)
                    sink->send(sink->ctx, router->router, &message);
            }
        }
    }
}

void pd_blocks_snapshot(pd_blocks *blocks, const pd_role_options *options, const pd_role_sink *sink,
                        uint64_t router)
{
    pd_cache_event event;
    pd_kv_event wire[EVENTS_A_MESSAGE];
    pd_message message;
    uint32_t cursor = 0;
    bool more = true;

    begin_message(&message, options);
    message.kv_events.first_sequence = pd_prefix_cache_seq(blocks->cache);
    message.kv_events.events = wire;
    message.kv_events.snapshot = true;
    message.kv_events.snapshot_first = true;
    while (more) {
        uint32_t count = 0;
        while (count < EVENTS_A_MESSAGE && more) {
            more = pd_prefix_cache_next(blocks->cache, &cursor, &event);
            if (more)
                wire[count++] = on_the_wire(&event);
        }
        message.kv_events.events_count = count;
        message.kv_events.snapshot_last = !more;
        sink->send(sink->ctx, router, &message);
        message.kv_events.snapshot_first = false;
    }
}

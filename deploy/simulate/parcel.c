#include "deploy/simulate/parcel.h"

#include "common/base/mem.h"
#include "common/wire/notice.h"

#include <string.h>

#define JITTER_NS 100000ull /* notices of a link like shared memory may overtake each other */

void sim_parcel_tell(sim_worker *worker, uint64_t at_ns, const pd_transfer_event *event)
{
    size_t len = offsetof(pd_transfer_event, notice) + event->notice_len;
    void *bytes = sim_copy(worker->world, event, len);

    if (bytes == NULL)
        return;
    sim_schedule(worker->world, at_ns,
                 (sim_event){.kind = SIM_TRANSFER,
                             .subject = worker->index,
                             .incarnation = worker->incarnation,
                             .bytes = bytes,
                             .bytes_len = len});
}

/* ---- what leaves ---- */

sim_parcel *sim_parcel_fill(const sim_worker *sender, sim_parcel *parcel, size_t *bytes)
{
    size_t block = sender->kv.block_tokens * sizeof(uint64_t);
    size_t size = sizeof(*parcel) + (size_t)parcel->groups * parcel->count * block;
    sim_parcel *filled = pd_realloc(parcel, size);

    if (filled == NULL) {
        sender->world->status = PD_E_NOMEM;
        return parcel;
    }
    unsigned char *at = (unsigned char *)(filled + 1);
    for (uint32_t g = 0; g < filled->groups; g++)
        for (uint32_t i = 0; i < filled->count; i++) {
            memcpy(at, sim_kv_block(&sender->kv, filled->group + g, filled->sources[i]), block);
            at += block;
        }
    filled->filled = true;
    *bytes = size;
    return filled;
}

/* What of a socket lands still: the parcels before that number. */
static uint64_t draw_kept(sim_world *world, const sim_link *link)
{
    uint64_t held = link->posted - link->landed;

    return link->landed + (sim_chance(world, 0.5) ? held : sim_random(world, held + 1));
}

void sim_parcel_cut(sim_worker *sender, pd_peer peer)
{
    sim_world *world = sender->world;
    uint64_t kept[SIM_LINKS_MAX] = {0};
    bool ends[SIM_LINKS_MAX] = {0}, any = false;

    for (pd_peer i = 0; i < SIM_LINKS_MAX; i++) {
        const sim_link *link = &sender->links[i];
        ends[i] = (peer == i || peer == SIM_LINKS_MAX) && link->used && link->up &&
                  link->messages && link->posted > link->landed;
        if (ends[i])
            kept[i] = draw_kept(world, link);
        any = any || ends[i];
    }
    for (size_t i = 0; any && i < world->events.count; i++) {
        if (world->events.heap[i].kind != SIM_LANDED)
            continue;
        sim_parcel *parcel = world->events.heap[i].bytes;
        if (!parcel->message || parcel->sender_incarnation != sender->incarnation ||
            !ends[parcel->peer] || sender->links[parcel->peer].generation != parcel->generation ||
            parcel->number < kept[parcel->peer])
            continue;
        parcel->torn = parcel->number == kept[parcel->peer] && (parcel->number & 1) != 0;
        parcel->lost = !parcel->torn;
    }
}

void sim_parcel_orphan(sim_worker *sender)
{
    sim_world *world = sender->world;

    for (size_t i = 0; i < world->events.count; i++) {
        sim_event *event = &world->events.heap[i];
        sim_parcel *parcel = event->kind == SIM_LANDED ? event->bytes : NULL;
        if (parcel == NULL || parcel->message || parcel->sender_incarnation != sender->incarnation)
            continue;
        parcel->orphan = true;
        parcel->lost = sim_chance(world, 0.5);
        if (!parcel->lost)
            event->bytes = sim_parcel_fill(sender, parcel, &event->bytes_len);
    }
}

bool sim_parcel_is_old(sim_worker *target, const sim_parcel *parcel)
{
    for (uint32_t i = 0; i < SIM_FENCES_MAX; i++) {
        if (target->newest[i].sender != parcel->sender_incarnation)
            continue;
        if (parcel->generation > target->newest[i].generation)
            target->newest[i].generation = parcel->generation;
        return parcel->generation < target->newest[i].generation;
    }
    uint32_t at = target->newest_next++ % SIM_FENCES_MAX;
    target->newest[at].sender = parcel->sender_incarnation;
    target->newest[at].generation = parcel->generation;
    return false;
}

/* ---- what lands ---- */

typedef enum sim_damage {
    DAMAGE_NONE,
    DAMAGE_VALID_TOKENS, /* the notice counts other tokens */
    DAMAGE_NO_NOTICE,
    DAMAGE_TWO_NOTICES,
    DAMAGE_BIT, /* from here on: seen by the seals alone */
    DAMAGE_LEFT_OUT,
    DAMAGE_OTHER_BLOCK,
    DAMAGE_OLD_EPOCH,
    DAMAGES,
} sim_damage;

static sim_damage draw_damage(sim_world *world, const sim_parcel *parcel)
{
    sim_worker *sender = &world->workers[parcel->sender];

    if (parcel->count == 0 || world->quiet || !sender->corrupt)
        return DAMAGE_NONE;
    sender->corrupt = false;
    return DAMAGE_NONE + 1 + sim_random(world, world->plan.seals ? DAMAGES - 1 : DAMAGE_BIT - 1);
}

/* The word of a parcel, changed; true when it still is one. */
static void damage_notice(sim_world *world, sim_parcel *parcel, sim_damage damage)
{
    uint64_t seals[PD_NOTICE_SEALS_MAX];
    unsigned char bytes[PD_TRANSFER_NOTICE_BYTES_MAX];
    pd_notice notice;

    pd_status status = pd_notice_unpack(parcel->notice, parcel->notice_len, seals, &notice);
    pd_assert(status == PD_OK);
    if (damage == DAMAGE_VALID_TOKENS)
        notice.valid_tokens = 1 + notice.valid_tokens % world->plan.layout.block_tokens;
    if (damage == DAMAGE_OLD_EPOCH) /* as if sealed for another attempt */
        seals[0] = pd_mix64(seals[0]);
    parcel->notice_len = pd_notice_pack(&notice, bytes);
    memcpy(parcel->notice, bytes, parcel->notice_len);
}

static void write_blocks(sim_world *world, sim_worker *target, const sim_parcel *parcel,
                         sim_damage damage)
{
    sim_worker *sender = &world->workers[parcel->sender];
    size_t bytes = world->plan.layout.block_tokens * sizeof(uint64_t);
    const unsigned char *content = (const unsigned char *)(parcel + 1);

    for (uint32_t g = 0; g < parcel->groups; g++)
        for (uint32_t i = 0; i < parcel->count; i++) {
            if (parcel->targets[i] >= target->kv.blocks) {
                sim_broken(world, "%s: puts into block %u of %s, which has %u", sender->name,
                           parcel->targets[i], target->name, target->kv.blocks);
                return;
            }
            pd_block source = parcel->sources[i];
            uint64_t *to = sim_kv_block(&target->kv, parcel->group + g, parcel->targets[i]);
            size_t at = (size_t)g * parcel->count + i;
            bool hit = at == 0;
            if (hit && damage == DAMAGE_LEFT_OUT)
                continue;
            if (hit && damage == DAMAGE_OTHER_BLOCK && parcel->filled)
                at = 1;
            else if (hit && damage == DAMAGE_OTHER_BLOCK)
                source = (source + 1) % sender->kv.blocks;
            memcpy(to,
                   parcel->filled ? (const void *)(content + at * bytes)
                                  : sim_kv_block(&sender->kv, parcel->group + g, source),
                   bytes);
            if (hit && damage == DAMAGE_BIT)
                to[0] ^= 1ull << sim_random(world, 64);
        }
}

static void deliver_notice(sim_world *world, sim_worker *target, const sim_parcel *parcel)
{
    pd_transfer_event event;

    memset(&event, 0, offsetof(pd_transfer_event, notice));
    event.kind = PD_TRANSFER_NOTICE;
    event.notice_len = parcel->notice_len;
    memcpy(event.notice, parcel->notice, parcel->notice_len);
    uint64_t jitter_ns = parcel->message ? 0 : sim_random(world, JITTER_NS);
    sim_parcel_tell(target, world->now_ns + WIRE_DELAY_NS + jitter_ns, &event);
}

void sim_parcel_land(sim_world *world, sim_worker *target, sim_parcel *parcel, bool noticed)
{
    sim_damage damage = noticed ? draw_damage(world, parcel) : DAMAGE_NONE;

    if (damage == DAMAGE_OTHER_BLOCK && parcel->filled && parcel->groups * parcel->count == 1)
        damage = DAMAGE_BIT; /* it carries no other one */
    write_blocks(world, target, parcel, damage);
    if (!noticed || damage == DAMAGE_NO_NOTICE)
        return;
    if (damage == DAMAGE_VALID_TOKENS || damage == DAMAGE_OLD_EPOCH)
        damage_notice(world, parcel, damage);
    deliver_notice(world, target, parcel);
    if (damage == DAMAGE_TWO_NOTICES)
        deliver_notice(world, target, parcel);
}

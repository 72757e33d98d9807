#include "deploy/simulate/plane.h"

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/wire/notice.h"

#include <stdio.h>
#include <string.h>

#define PIECE_BLOCKS_MAX 64
#define PIECE_SEALS_MAX  64
#define NOTICE_BYTES     1024
#define WIRE_DELAY_NS    20000ull  /* from landed to noticed */
#define JITTER_NS        100000ull /* notices may overtake each other by so much */
#define NO_SHIPMENT      UINT32_MAX
/* What a fast link takes for a byte of a prompt that is shipped, its fixed cost spread over it: of
 * this a slow link is a multiple. */
#define USUAL_BYTE_MS 1.2e-5
#define SLOW_PIECE_MS 25.0 /* as common/worker/ship.c: half of its credit, a block at least */

/* Puts of some blocks, and the notice behind them. */
typedef struct sim_parcel {
    uint32_t sender, target; /* workers */
    uint64_t sender_incarnation, target_incarnation;
    pd_peer peer;
    uint64_t generation; /* of the link */
    uint32_t shipment;   /* of the sender; NO_SHIPMENT: none */
    uint64_t ticket;
    pd_request_key key;
    uint32_t group, groups, first, count;
    pd_block sources[PIECE_BLOCKS_MAX], targets[PIECE_BLOCKS_MAX];
    uint64_t bytes, posted_ns;
    bool orphan;    /* its sender is dead: content, or nothing, is behind this struct */
    bool in_socket; /* an orphan that lands all the same */
    size_t notice_len;
    unsigned char notice[NOTICE_BYTES];
} sim_parcel;

static void schedule_transfer(sim_worker *worker, uint64_t at_ns, const pd_transfer_event *event)
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

static bool fenced(const sim_worker *worker, uint64_t incarnation)
{
    for (uint32_t i = 0; i < SIM_FENCES_MAX; i++)
        if (worker->fences[i] == incarnation)
            return true;
    return false;
}

static bool target_lives(const sim_world *world, const sim_link *link)
{
    const sim_worker *target = &world->workers[link->target];

    return target->core != NULL && target->incarnation == link->target_incarnation;
}

/* ---- shipments ---- */

static void end_shipment(sim_worker *worker, sim_shipment *shipment)
{
    sim_world *world = worker->world;

    schedule_transfer(worker, world->now_ns + WIRE_DELAY_NS,
                      &(pd_transfer_event){.kind = PD_TRANSFER_SENT,
                                           .status = shipment->status,
                                           .peer = shipment->asked.peer,
                                           .tag = worker->links[shipment->asked.peer].tag,
                                           .ticket = shipment->asked.ticket,
                                           .bytes = shipment->bytes,
                                           .wire_ns = shipment->wire_ns});
    pd_free(shipment->memory);
    *shipment = (sim_shipment){0};
}

/* Nothing more of it is posted. */
static void drop_shipment(sim_worker *worker, sim_shipment *shipment, pd_status status)
{
    shipment->dropped = true;
    if (shipment->status == PD_OK)
        shipment->status = status;
    if (shipment->pieces == 0)
        end_shipment(worker, shipment);
}

static void drop_shipments(sim_worker *worker, pd_peer peer, pd_status status)
{
    for (uint32_t i = 0; i < SIM_SHIPMENTS_MAX; i++) {
        sim_shipment *shipment = &worker->shipments[i];
        if (shipment->used && shipment->asked.peer == peer)
            drop_shipment(worker, shipment, status);
    }
}

static bool all_posted(const sim_shipment *shipment)
{
    return shipment->dropped || shipment->group == shipment->asked.groups;
}

/* Milliseconds for a byte on a slow link; 0: this one is not slow now. */
static double slow_byte_ms(const sim_worker *worker, const sim_link *link)
{
    const sim_world *world = worker->world;
    const sim_plan *plan = &world->plan;
    uint64_t from_ns = world->first_ask_ns + plan->slow_from_ns;

    if (plan->slow_factor == 0 || world->quiet || world->now_ns < from_ns ||
        world->now_ns - from_ns >= plan->slow_for_ns ||
        (plan->slow_between_hosts && world->workers[link->target].host == worker->host))
        return 0;
    return plan->slow_factor * USUAL_BYTE_MS;
}

/* Posts a parcel behind all that was posted to that peer before. */
static pd_status post(sim_worker *worker, sim_parcel *parcel, const pd_notice *notice)
{
    sim_world *world = worker->world;
    sim_link *link = &worker->links[parcel->peer];

    if (parcel->peer >= SIM_LINKS_MAX || !link->used || !link->up)
        return PD_E_PEER;
    unsigned char bytes[PD_TRANSFER_NOTICE_BYTES_MAX];
    parcel->notice_len = pd_notice_pack(notice, bytes);
    pd_assert(parcel->notice_len <= NOTICE_BYTES);
    memcpy(parcel->notice, bytes, parcel->notice_len);
    parcel->sender = worker->index;
    parcel->sender_incarnation = worker->incarnation;
    parcel->target = link->target;
    parcel->target_incarnation = link->target_incarnation;
    parcel->generation = link->generation;
    parcel->posted_ns = world->now_ns;
    sim_parcel *copy = sim_copy(world, parcel, sizeof(*parcel));
    if (copy == NULL)
        return PD_E_NOMEM;
    double slow_ms = (double)parcel->bytes * slow_byte_ms(worker, link);
    double ms = pd_cost_ship_ms(&world->cost, parcel->bytes) + 0.02 + slow_ms;
    world->coverage.faults[SIM_FAULT_SLOW_LINK] += slow_ms > 0;
    uint64_t wire_ns = (uint64_t)(ms * PD_NS_PER_MS) + sim_random(world, 50000);
    if (link->free_at_ns < world->now_ns)
        link->free_at_ns = world->now_ns;
    link->free_at_ns += wire_ns;
    sim_schedule(world, link->free_at_ns,
                 (sim_event){.kind = SIM_LANDED, .bytes = copy, .bytes_len = sizeof(*copy)});
    return PD_OK;
}

/* A parcel of count blocks and groups of a request, with its notice and seals. */
static pd_status post_blocks(sim_worker *worker, sim_parcel *parcel, uint64_t receiver,
                             uint32_t again, uint32_t valid_tokens)
{
    const sim_plan *plan = &worker->world->plan;
    uint64_t seals[PIECE_SEALS_MAX];
    pd_notice notice = {.kind = PD_NOTICE_BLOCKS,
                        .key = parcel->key,
                        .sender = worker->incarnation,
                        .receiver = receiver,
                        .group = parcel->group,
                        .groups = parcel->groups,
                        .slices = 1,
                        .first_block = parcel->first,
                        .count = parcel->count,
                        .valid_tokens = valid_tokens,
                        .again = again,
                        .seals = plan->seals ? seals : NULL};

    pd_assert(parcel->groups * parcel->count <= PIECE_SEALS_MAX);
    for (uint32_t g = 0; g < parcel->groups; g++) {
        parcel->bytes += parcel->count * pd_kv_layout_block_bytes(&plan->layout, parcel->group + g);
        for (uint32_t i = 0; plan->seals && i < parcel->count; i++)
            seals[g * parcel->count + i] = sim_model_seal(
                &worker->kv, &parcel->key, parcel->group + g, parcel->first + i, parcel->sources[i],
                i + 1 == parcel->count ? valid_tokens : plan->layout.block_tokens);
    }
    return post(worker, parcel, &notice);
}

/* A word waits for what was asked for before it: of its request, or of all of its router's. */
static bool must_wait(const sim_worker *worker, const sim_shipment *word)
{
    const pd_request_key *key = &word->word.key;

    for (uint32_t i = 0; i < SIM_SHIPMENTS_MAX; i++) {
        const sim_shipment *other = &worker->shipments[i];
        if (other->used && other->serial < word->serial && other->asked.count > 0 &&
            other->asked.peer == word->asked.peer && other->asked.key.router == key->router &&
            (key->number == 0 ||
             (other->asked.key.number == key->number && other->asked.key.epoch == key->epoch)))
            return true;
    }
    return false;
}

static void post_word(sim_worker *worker, sim_shipment *shipment)
{
    sim_parcel parcel = {.peer = shipment->asked.peer,
                         .shipment = (uint32_t)(shipment - worker->shipments)};

    pd_status status = post(worker, &parcel, &shipment->word);
    if (status != PD_OK) {
        drop_shipment(worker, shipment, status);
        return;
    }
    worker->links[shipment->asked.peer].busy = true;
    shipment->pieces++;
    shipment->group = shipment->asked.groups;
}

/* Blocks of a layer group that may go at once: on a slow link as much as keeps others from waiting
 * long for their turn. */
static uint32_t quantum(const sim_worker *worker, const sim_shipment *shipment, uint32_t most)
{
    const pd_kv_layout *layout = &worker->world->plan.layout;
    const pd_shipment *asked = &shipment->asked;
    double block_ms =
        slow_byte_ms(worker, &worker->links[asked->peer]) *
        (double)pd_kv_layout_block_bytes(layout, asked->group_first + shipment->group);

    if (block_ms * most <= SLOW_PIECE_MS)
        return most;
    return block_ms >= SLOW_PIECE_MS ? 1 : (uint32_t)(SLOW_PIECE_MS / block_ms);
}

/* The next piece of a shipment: one layer group, or all of them when they are few blocks. */
static void post_piece(sim_worker *worker, sim_shipment *shipment)
{
    const pd_shipment *asked = &shipment->asked;
    uint32_t index = (uint32_t)(shipment - worker->shipments);
    uint32_t most = quantum(worker, shipment, 1 + (uint32_t)sim_random(worker->world, 16));
    bool whole = shipment->group == 0 && shipment->done == 0 &&
                 asked->groups * asked->count <= quantum(worker, shipment, PIECE_SEALS_MAX) &&
                 sim_chance(worker->world, 0.3);
    uint32_t count = asked->count - shipment->done;

    if (!whole && count > most)
        count = most;
    sim_parcel parcel = {.peer = asked->peer,
                         .shipment = index,
                         .ticket = asked->ticket,
                         .key = asked->key,
                         .group = asked->group_first + shipment->group,
                         .groups = whole ? asked->groups : 1,
                         .first = asked->first + shipment->done,
                         .count = count};
    memcpy(parcel.sources, asked->sources + shipment->done, count * sizeof(pd_block));
    memcpy(parcel.targets, asked->targets + shipment->done, count * sizeof(pd_block));
    bool last = shipment->done + count == asked->count;
    pd_status status =
        post_blocks(worker, &parcel, asked->receiver, asked->again,
                    last ? asked->valid_tokens : worker->world->plan.layout.block_tokens);
    if (status != PD_OK) {
        drop_shipment(worker, shipment, status);
        return;
    }
    worker->links[asked->peer].busy = true;
    shipment->pieces++;
    shipment->done += count;
    if (last) {
        shipment->done = 0;
        shipment->group += parcel.groups;
    }
}

/* One piece of a link's shipments is on the wire at a time; who waited longest is next. */
static void pump(sim_worker *worker, pd_peer peer)
{
    sim_link *link = &worker->links[peer];
    sim_shipment *next = NULL;

    if (link->busy || !link->up)
        return;
    for (uint32_t i = 0; i < SIM_SHIPMENTS_MAX; i++) {
        sim_shipment *shipment = &worker->shipments[i];
        if (!shipment->used || shipment->asked.peer != peer || all_posted(shipment))
            continue;
        if (shipment->asked.count == 0 && must_wait(worker, shipment))
            continue;
        if (next == NULL || shipment->served < next->served)
            next = shipment;
    }
    if (next == NULL)
        return;
    next->served = ++link->turns;
    if (next->asked.count == 0)
        post_word(worker, next);
    else
        post_piece(worker, next);
}

static sim_shipment *take_shipment(sim_worker *worker, pd_peer peer)
{
    sim_shipment *shipment = worker->shipments;

    while (shipment < worker->shipments + SIM_SHIPMENTS_MAX && shipment->used)
        shipment++;
    if (shipment == worker->shipments + SIM_SHIPMENTS_MAX)
        return NULL;
    *shipment = (sim_shipment){.used = true,
                               .serial = ++worker->shipment_serial,
                               .asked.peer = peer,
                               .generation = worker->links[peer].generation,
                               .served = worker->links[peer].turns};
    return shipment;
}

static bool is_sound(const sim_worker *worker, const pd_shipment *asked)
{
    const pd_kv_layout *layout = &worker->world->plan.layout;

    for (uint32_t i = 0; i < asked->count; i++)
        if (asked->sources[i] >= layout->blocks || asked->targets[i] >= layout->blocks)
            return false;
    return asked->count >= 1 && asked->groups >= 1 &&
           asked->group_first + asked->groups <= layout->groups && asked->valid_tokens >= 1 &&
           asked->valid_tokens <= layout->block_tokens && asked->ticket != 0;
}

static pd_status on_ship(void *ctx, const pd_shipment *asked)
{
    sim_worker *worker = ctx;
    sim_world *world = worker->world;

    if (!is_sound(worker, asked)) {
        sim_broken(world, "%s: a shipment of groups %u + %u, blocks %u + %u, %u valid tokens",
                   worker->name, asked->group_first, asked->groups, asked->first, asked->count,
                   asked->valid_tokens);
        return PD_E_INVALID;
    }
    if (asked->peer >= SIM_LINKS_MAX || !worker->links[asked->peer].up)
        return PD_E_PEER;
    size_t bytes = asked->count * sizeof(pd_block);
    pd_block *memory = pd_malloc(2 * bytes);
    if (memory == NULL)
        return PD_E_NOMEM;
    sim_shipment *shipment = sim_chance(world, 0.02) ? NULL : take_shipment(worker, asked->peer);
    if (shipment == NULL) {
        pd_free(memory);
        return PD_E_OVERLOAD;
    }
    memcpy(memory, asked->sources, bytes);
    memcpy(memory + asked->count, asked->targets, bytes);
    shipment->memory = memory;
    shipment->asked = *asked;
    shipment->asked.sources = memory;
    shipment->asked.targets = memory + asked->count;
    pump(worker, asked->peer);
    return PD_OK;
}

static void on_unship(void *ctx, uint64_t ticket)
{
    sim_worker *worker = ctx;

    for (uint32_t i = 0; i < SIM_SHIPMENTS_MAX; i++)
        if (worker->shipments[i].used && worker->shipments[i].asked.ticket == ticket &&
            !all_posted(&worker->shipments[i]))
            drop_shipment(worker, &worker->shipments[i], PD_E_CANCELLED);
}

/* ---- links ---- */

static pd_status on_connect(void *ctx, const void *address, size_t bytes, uint64_t tag,
                            pd_peer *peer_out)
{
    sim_worker *worker = ctx;
    sim_world *world = worker->world;
    sim_address target;
    uint64_t free_at_ns = 0;
    pd_peer peer = 0;

    if (bytes != sizeof(target))
        return PD_E_INVALID;
    memcpy(&target, address, sizeof(target));
    /* A newer link's words come after what an older one may still carry. */
    for (pd_peer i = 0; i < SIM_LINKS_MAX; i++)
        if (worker->links[i].target == target.worker && worker->links[i].free_at_ns > free_at_ns)
            free_at_ns = worker->links[i].free_at_ns;
    while (peer < SIM_LINKS_MAX && worker->links[peer].used)
        peer++;
    if (peer == SIM_LINKS_MAX)
        return PD_E_OVERLOAD;
    worker->links[peer] = (sim_link){.used = true,
                                     .target = (uint32_t)target.worker,
                                     .target_incarnation = target.incarnation,
                                     .tag = tag,
                                     .free_at_ns = free_at_ns,
                                     .generation = ++worker->link_generation};
    pd_transfer_event event = {.kind = PD_TRANSFER_CONNECTED, .peer = peer, .tag = tag};
    snprintf(event.lane, sizeof(event.lane), "simulated");
    schedule_transfer(worker, world->now_ns + 200000 + sim_random(world, 2 * PD_NS_PER_MS), &event);
    *peer_out = peer;
    return PD_OK;
}

static void on_close(void *ctx, pd_peer peer)
{
    sim_worker *worker = ctx;
    sim_world *world = worker->world;

    if (peer >= SIM_LINKS_MAX || !worker->links[peer].used) {
        sim_broken(world, "%s: closes link %u, which is not open", worker->name, peer);
        return;
    }
    sim_link *link = &worker->links[peer];
    link->up = false;
    link->told_down = true;
    drop_shipments(worker, peer, PD_E_CANCELLED);
    uint64_t at_ns = link->free_at_ns > world->now_ns ? link->free_at_ns : world->now_ns;
    schedule_transfer(
        worker, at_ns + 100000,
        &(pd_transfer_event){.kind = PD_TRANSFER_CLOSED, .peer = peer, .tag = link->tag});
}

static pd_status on_notify(void *ctx, pd_peer peer, const pd_notice *notice)
{
    sim_worker *worker = ctx;

    if (peer >= SIM_LINKS_MAX || !worker->links[peer].up)
        return PD_E_PEER;
    sim_shipment *shipment = take_shipment(worker, peer);
    if (shipment == NULL)
        return PD_E_OVERLOAD;
    shipment->word = *notice;
    shipment->word.seals = NULL;
    shipment->asked.groups = 1; /* one piece: itself */
    pump(worker, peer);
    return PD_OK;
}

void sim_plane_fill_sink(pd_role_sink *sink)
{
    sink->connect = on_connect;
    sink->close = on_close;
    sink->notify = on_notify;
    sink->ship = on_ship;
    sink->unship = on_unship;
}

static void tell_down(sim_worker *sender, pd_peer peer)
{
    sim_link *link = &sender->links[peer];

    link->up = false;
    if (link->told_down)
        return;
    link->told_down = true;
    drop_shipments(sender, peer, PD_E_PEER);
    uint64_t delay_ns = PD_NS_PER_MS + sim_random(sender->world, 50 * PD_NS_PER_MS);
    schedule_transfer(
        sender, sender->world->now_ns + delay_ns,
        &(pd_transfer_event){
            .kind = PD_TRANSFER_PEER_DOWN, .status = PD_E_PEER, .peer = peer, .tag = link->tag});
}

bool sim_plane_cut(sim_world *world)
{
    uint32_t from = (uint32_t)sim_random(world, world->workers_count * SIM_LINKS_MAX);

    for (uint32_t i = 0; i < world->workers_count * SIM_LINKS_MAX; i++) {
        uint32_t at = (from + i) % (world->workers_count * SIM_LINKS_MAX);
        sim_worker *sender = &world->workers[at / SIM_LINKS_MAX];
        sim_link *link = &sender->links[at % SIM_LINKS_MAX];
        if (sender->core == NULL || !link->used || !link->up)
            continue;
        tell_down(sender, at % SIM_LINKS_MAX);
        return true;
    }
    return false;
}

/* ---- the dead ---- */

/* Its bytes may lie in a socket: half of what was on the wire lands without it. */
static void orphan(sim_worker *worker, sim_event *event)
{
    sim_parcel *parcel = event->bytes;
    size_t tokens = worker->kv.block_tokens;
    size_t content = (size_t)parcel->groups * parcel->count * tokens * sizeof(uint64_t);

    parcel->orphan = true;
    parcel->in_socket = sim_chance(worker->world, 0.5);
    if (!parcel->in_socket)
        return;
    parcel = pd_realloc(event->bytes, sizeof(*parcel) + content);
    if (parcel == NULL) {
        worker->world->status = PD_E_NOMEM;
        return;
    }
    event->bytes = parcel;
    event->bytes_len = sizeof(*parcel) + content;
    unsigned char *at = (unsigned char *)(parcel + 1);
    for (uint32_t g = 0; g < parcel->groups; g++)
        for (uint32_t i = 0; i < parcel->count; i++) {
            memcpy(at, sim_kv_block(&worker->kv, parcel->group + g, parcel->sources[i]),
                   tokens * sizeof(uint64_t));
            at += tokens * sizeof(uint64_t);
        }
}

static bool watches(const sim_worker *worker, uint64_t incarnation)
{
    for (uint32_t i = 0; i < SIM_FENCES_MAX; i++)
        if (worker->watched[i] == incarnation)
            return true;
    return false;
}

static void schedule_dead(sim_worker *worker, uint64_t incarnation, uint64_t delay_ns)
{
    sim_schedule(worker->world, worker->world->now_ns + delay_ns,
                 (sim_event){.kind = SIM_PEER_DEAD,
                             .subject = worker->index,
                             .incarnation = worker->incarnation,
                             .a = incarnation});
}

void sim_plane_crash(sim_worker *worker)
{
    sim_world *world = worker->world;

    for (size_t i = 0; i < world->events.count; i++) {
        sim_event *event = &world->events.heap[i];
        if (event->kind == SIM_LANDED &&
            ((sim_parcel *)event->bytes)->sender_incarnation == worker->incarnation)
            orphan(worker, event);
    }
    for (uint32_t i = 0; i < world->workers_count; i++) {
        sim_worker *other = &world->workers[i];
        if (other == worker || other->core == NULL)
            continue;
        for (pd_peer peer = 0; peer < SIM_LINKS_MAX; peer++) {
            const sim_link *link = &other->links[peer];
            if (link->used && link->up && link->target_incarnation == worker->incarnation)
                tell_down(other, peer);
        }
        if (watches(other, worker->incarnation))
            schedule_dead(other, worker->incarnation,
                          PD_NS_PER_MS + sim_random(world, 50 * PD_NS_PER_MS));
    }
}

void sim_plane_fini(sim_worker *worker)
{
    for (uint32_t i = 0; i < SIM_SHIPMENTS_MAX; i++) {
        pd_free(worker->shipments[i].memory);
        worker->shipments[i] = (sim_shipment){0};
    }
}

static bool lives(const sim_world *world, uint64_t incarnation)
{
    for (uint32_t i = 0; i < world->workers_count; i++)
        if (world->workers[i].core != NULL && world->workers[i].incarnation == incarnation)
            return true;
    return false;
}

void sim_plane_watch(sim_worker *worker, uint64_t incarnation, uint64_t host)
{
    if (host != worker->host + 1 || watches(worker, incarnation))
        return;
    worker->watched[worker->watched_next++ % SIM_FENCES_MAX] = incarnation;
    if (!lives(worker->world, incarnation))
        schedule_dead(worker, incarnation, PD_NS_PER_MS);
}

void sim_plane_given_up(sim_worker *worker, uint64_t incarnation)
{
    if (!watches(worker, incarnation) || !lives(worker->world, incarnation))
        schedule_dead(worker, incarnation, sim_random(worker->world, 5 * PD_NS_PER_MS));
}

void sim_plane_fence(sim_worker *worker, uint64_t incarnation)
{
    if (!fenced(worker, incarnation))
        worker->fences[worker->fences_next++ % SIM_FENCES_MAX] = incarnation;
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
            bool hit = g == 0 && i == 0;
            if (hit && damage == DAMAGE_LEFT_OUT)
                continue;
            if (hit && damage == DAMAGE_OTHER_BLOCK && !parcel->orphan)
                source = (source + 1) % sender->kv.blocks;
            memcpy(to,
                   parcel->orphan
                       ? (const void *)(content + ((size_t)g * parcel->count + i) * bytes)
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
    schedule_transfer(target, world->now_ns + WIRE_DELAY_NS + sim_random(world, JITTER_NS), &event);
}

static void land(sim_world *world, sim_worker *target, sim_parcel *parcel, bool noticed)
{
    sim_damage damage = noticed ? draw_damage(world, parcel) : DAMAGE_NONE;

    write_blocks(world, target, parcel, damage);
    if (!noticed || damage == DAMAGE_NO_NOTICE)
        return;
    if (damage == DAMAGE_VALID_TOKENS || damage == DAMAGE_OLD_EPOCH)
        damage_notice(world, parcel, damage);
    deliver_notice(world, target, parcel);
    if (damage == DAMAGE_TWO_NOTICES)
        deliver_notice(world, target, parcel);
}

/* The sender lives and hears how it went. */
static void tell_sent(sim_world *world, sim_worker *sender, const sim_parcel *parcel,
                      pd_status status)
{
    sim_link *link = &sender->links[parcel->peer];

    if (parcel->shipment == NO_SHIPMENT) {
        schedule_transfer(sender, world->now_ns + WIRE_DELAY_NS,
                          &(pd_transfer_event){.kind = PD_TRANSFER_SENT,
                                               .status = status,
                                               .peer = parcel->peer,
                                               .tag = link->tag,
                                               .ticket = parcel->ticket,
                                               .bytes = status == PD_OK ? parcel->bytes : 0,
                                               .wire_ns = world->now_ns - parcel->posted_ns});
        return;
    }
    sim_shipment *shipment = &sender->shipments[parcel->shipment];
    pd_assert(shipment->used && shipment->pieces > 0);
    shipment->pieces--;
    shipment->wire_ns += world->now_ns - parcel->posted_ns;
    if (status == PD_OK)
        shipment->bytes += parcel->bytes;
    else if (shipment->status == PD_OK)
        shipment->status = status;
    if (shipment->pieces == 0 && all_posted(shipment))
        end_shipment(sender, shipment);
    link->busy = false;
    pump(sender, parcel->peer);
}

void sim_plane_on_landed(sim_world *world, const sim_event *event)
{
    sim_parcel *parcel = event->bytes;
    sim_worker *sender = &world->workers[parcel->sender];
    sim_worker *target = &world->workers[parcel->target];
    bool there = target->core != NULL && target->incarnation == parcel->target_incarnation;
    bool open = there && !fenced(target, parcel->sender_incarnation);

    if (parcel->orphan) {
        if (open && parcel->in_socket)
            land(world, target, parcel, sim_chance(world, 0.5));
        return;
    }
    sim_link *link = &sender->links[parcel->peer];
    pd_assert(sender->core != NULL && sender->incarnation == parcel->sender_incarnation);
    if (!link->used || link->generation != parcel->generation) {
        sim_broken(world, "%s: a link was reused before what was posted on it had ended",
                   sender->name);
        return;
    }
    pd_status status = PD_E_CANCELLED;
    if (link->up && !there) {
        status = PD_E_PEER;
        tell_down(sender, parcel->peer);
    } else if (link->up) {
        if (open) /* what is fenced off is dropped without a word */
            land(world, target, parcel, true);
        status = PD_OK;
    } else if (open && sim_chance(world, 0.5)) {
        land(world, target, parcel, false); /* the link is down, and yet its bytes come */
    }
    tell_sent(world, sender, parcel, status);
}

void sim_plane_on_transfer(sim_worker *worker, const pd_transfer_event *cut)
{
    sim_world *world = worker->world;
    pd_transfer_event event; /* filled as far as it goes: it is large, and there are many */

    memcpy(&event, cut, offsetof(pd_transfer_event, notice) + cut->notice_len);
    sim_link *link = event.kind == PD_TRANSFER_NOTICE ? NULL : &worker->links[event.peer];
    if (event.kind == PD_TRANSFER_CONNECTED) {
        if (link->told_down)
            return; /* closed meanwhile */
        if (!target_lives(world, link)) {
            event.kind = PD_TRANSFER_PEER_DOWN;
            event.status = PD_E_PEER;
            link->told_down = true;
        } else {
            link->up = true;
        }
    }
    if (event.kind == PD_TRANSFER_CLOSED)
        link->used = false;
    worker->ops->on_transfer(worker->core, &event, world->now_ns);
}

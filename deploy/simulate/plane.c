#include "deploy/simulate/plane.h"

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/wire/notice.h"
#include "deploy/simulate/parcel.h"

#include <stdio.h>
#include <string.h>

/* What a fast link takes for a byte of a prompt that is shipped, its fixed cost spread over it: of
 * this a slow link is a multiple. */
#define USUAL_BYTE_MS 1.2e-5
/* One message in so many waits for a lost packet to be sent again, and all behind it. */
#define LOSES_PACKET  100
#define RESEND_NS     (400 * PD_NS_PER_MS)
#define SLOW_PIECE_MS 25.0 /* as common/worker/ship.c: half of its credit, a block at least */

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

    sim_parcel_tell(worker, world->now_ns + WIRE_DELAY_NS,
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

static bool loses_packet(sim_world *world)
{
    return (world->plan.allowed >> SIM_FAULT_SLOW_LINK & 1) != 0 && !world->quiet &&
           sim_random(world, LOSES_PACKET) == 0;
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
    parcel->message = link->messages;
    parcel->number = link->posted;
    size_t size = sizeof(*parcel);
    sim_parcel *copy = sim_copy(world, parcel, size);
    if (copy != NULL && parcel->message)
        copy = sim_parcel_fill(worker, copy, &size);
    if (copy == NULL)
        return PD_E_NOMEM;
    link->posted++;
    if (parcel->message)
        link->socket_bytes += parcel->bytes + parcel->notice_len;
    double slow_ms = (double)parcel->bytes * slow_byte_ms(worker, link);
    double ms = pd_cost_ship_ms(&world->cost, parcel->bytes) + 0.02 + slow_ms;
    world->coverage.faults[SIM_FAULT_SLOW_LINK] += slow_ms > 0;
    uint64_t wire_ns = (uint64_t)(ms * PD_NS_PER_MS) + sim_random(world, 50000);
    if (parcel->message && loses_packet(world))
        wire_ns += sim_random(world, RESEND_NS);
    if (link->free_at_ns < world->now_ns)
        link->free_at_ns = world->now_ns;
    link->free_at_ns += wire_ns;
    sim_schedule(world, link->free_at_ns,
                 (sim_event){.kind = SIM_LANDED, .bytes = copy, .bytes_len = size});
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

/* A piece of it is on the wire, or in the socket: that is all that its sender hears of it. */
static void posted(sim_worker *worker, sim_shipment *shipment, const sim_parcel *parcel)
{
    sim_link *link = &worker->links[parcel->peer];

    if (!link->messages) {
        link->busy = true;
        shipment->pieces++;
        return;
    }
    worker->world->coverage.messages_sent++;
    shipment->bytes += parcel->bytes;
    shipment->wire_ns += WIRE_DELAY_NS;
    if (all_posted(shipment))
        end_shipment(worker, shipment);
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
    shipment->group = shipment->asked.groups;
    posted(worker, shipment, &parcel);
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
    shipment->done += count;
    if (last) {
        shipment->done = 0;
        shipment->group += parcel.groups;
    }
    posted(worker, shipment, &parcel);
}

/* Whose turn it is; NULL: nobody waits for that link. Who waited longest is next. */
static sim_shipment *next_to_post(sim_worker *worker, pd_peer peer)
{
    sim_shipment *next = NULL;

    for (uint32_t i = 0; i < SIM_SHIPMENTS_MAX; i++) {
        sim_shipment *shipment = &worker->shipments[i];
        if (!shipment->used || shipment->asked.peer != peer || all_posted(shipment))
            continue;
        if (shipment->asked.count == 0 && must_wait(worker, shipment))
            continue;
        if (next == NULL || shipment->served < next->served)
            next = shipment;
    }
    return next;
}

/* One piece of a link's shipments is on the wire at a time, or as many as its socket takes. */
static void pump(sim_worker *worker, pd_peer peer)
{
    sim_link *link = &worker->links[peer];
    uint64_t room = worker->world->plan.socket_bytes;

    while (link->up && !link->busy && (!link->messages || link->socket_bytes < room)) {
        sim_shipment *next = next_to_post(worker, peer);
        if (next == NULL)
            return;
        next->served = ++link->turns;
        if (next->asked.count == 0)
            post_word(worker, next);
        else
            post_piece(worker, next);
    }
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

static bool by_messages(const sim_worker *worker, uint32_t target)
{
    const sim_world *world = worker->world;

    return world->plan.links == SIM_LINKS_MESSAGES ||
           (world->plan.links == SIM_LINKS_MIXED && world->workers[target].host != worker->host);
}

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
    bool messages = by_messages(worker, (uint32_t)target.worker);
    /* A newer link's words come after what an older one may still carry; over messages they end it.
     */
    for (pd_peer i = 0; !messages && i < SIM_LINKS_MAX; i++)
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
                                     .messages = messages,
                                     .free_at_ns = free_at_ns,
                                     .generation = ++worker->link_generation};
    pd_transfer_event event = {.kind = PD_TRANSFER_CONNECTED, .peer = peer, .tag = tag};
    snprintf(event.lane, sizeof(event.lane), "simulated");
    sim_parcel_tell(worker, world->now_ns + 200000 + sim_random(world, 2 * PD_NS_PER_MS), &event);
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
    sim_parcel_cut(worker, peer);
    link->up = false;
    link->told_down = true;
    drop_shipments(worker, peer, PD_E_CANCELLED);
    uint64_t at_ns = world->now_ns; /* what its socket holds does not hold it up */
    if (!link->messages && link->free_at_ns > at_ns)
        at_ns = link->free_at_ns;
    sim_parcel_tell(
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

    sim_parcel_cut(sender, peer);
    link->up = false;
    if (link->told_down)
        return;
    link->told_down = true;
    drop_shipments(sender, peer, PD_E_PEER);
    uint64_t delay_ns = PD_NS_PER_MS + sim_random(sender->world, 50 * PD_NS_PER_MS);
    sim_parcel_tell(
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

    sim_parcel_cut(worker, SIM_LINKS_MAX);
    sim_parcel_orphan(worker);
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

bool sim_plane_has_ended(const sim_worker *worker, uint64_t incarnation)
{
    return watches(worker, incarnation) && !lives(worker->world, incarnation);
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

/* The sender lives and hears how it went. */
static void tell_sent(sim_world *world, sim_worker *sender, const sim_parcel *parcel,
                      pd_status status)
{
    sim_link *link = &sender->links[parcel->peer];

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

/* A message is at its receiver, wherever its sender is by now. */
static void on_message(sim_world *world, sim_parcel *parcel, bool there, bool open)
{
    sim_worker *sender = &world->workers[parcel->sender];
    sim_worker *target = &world->workers[parcel->target];
    sim_link *link = &sender->links[parcel->peer];
    bool linked = sender->core != NULL && sender->incarnation == parcel->sender_incarnation &&
                  link->used && link->generation == parcel->generation;

    if (open && !parcel->lost) {
        if (sim_parcel_is_old(target, parcel)) {
            world->coverage.messages_old++;
        } else {
            world->coverage.messages_left += !linked || !link->up;
            sim_parcel_land(world, target, parcel, !parcel->torn);
        }
    }
    if (!linked)
        return;
    link->landed++;
    link->socket_bytes -= parcel->bytes + parcel->notice_len;
    if (link->up && !there)
        tell_down(sender, parcel->peer);
    else
        pump(sender, parcel->peer);
}

uint64_t sim_plane_waits_until(const sim_world *world, const sim_event *landed)
{
    const sim_parcel *parcel = landed->bytes;
    const sim_worker *target = &world->workers[parcel->target];
    bool there = target->core != NULL && target->incarnation == parcel->target_incarnation;

    return parcel->message && there ? target->frozen_until_ns : 0;
}

void sim_plane_on_landed(sim_world *world, const sim_event *event)
{
    sim_parcel *parcel = event->bytes;
    sim_worker *sender = &world->workers[parcel->sender];
    sim_worker *target = &world->workers[parcel->target];
    bool there = target->core != NULL && target->incarnation == parcel->target_incarnation;
    bool open = there && !fenced(target, parcel->sender_incarnation);

    if (parcel->message) {
        on_message(world, parcel, there, open);
        return;
    }
    if (parcel->orphan) {
        if (open && !parcel->lost)
            sim_parcel_land(world, target, parcel, sim_chance(world, 0.5));
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
            sim_parcel_land(world, target, parcel, true);
        status = PD_OK;
    } else if (open && sim_chance(world, 0.5)) {
        sim_parcel_land(world, target, parcel,
                        false); /* the link is down, and yet its bytes come */
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

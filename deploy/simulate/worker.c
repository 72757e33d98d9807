#include "deploy/simulate/worker.h"

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/wire/notice.h"
#include "decode-worker/decode.h"
#include "prefill-worker/prefill.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PARCEL_BLOCKS_MAX 64
#define WIRE_DELAY_NS     20000ull /* from landed to noticed */
#define TICK_NS           (50 * PD_NS_PER_MS)
#define BEAT_TICKS        2

/* Puts of one layer group and the notice behind them. */
typedef struct sim_parcel {
    pd_peer peer;
    uint64_t generation; /* of the link */
    uint64_t ticket;
    uint32_t group, count;
    pd_block sources[PARCEL_BLOCKS_MAX], targets[PARCEL_BLOCKS_MAX];
    uint64_t bytes, posted_ns;
    size_t notice_len;
    unsigned char notice[PD_TRANSFER_NOTICE_BYTES_MAX];
} sim_parcel;

typedef struct sim_address {
    uint64_t worker, incarnation;
} sim_address;

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

/* ---- the sink of the role's core ---- */

static void on_send(void *ctx, uint64_t router, const pd_message *message)
{
    sim_worker *worker = ctx;
    if (router == worker->world->router_incarnation)
        sim_send_to_router(worker, message);
}

static double step_ms(sim_world *world, const pd_step *step)
{
    double ms = 0;
    uint32_t batch = 0;
    uint64_t context = 0;

    for (uint32_t i = 0; i < step->slices_count; i++) {
        const pd_step_slice *slice = &step->slices[i];
        if (slice->count > 1) {
            ms += pd_cost_prefill_ms(&world->cost, slice->count, slice->position);
        } else {
            batch++;
            context += slice->position;
        }
    }
    ms += pd_cost_decode_step_ms(&world->cost, batch, context);
    ms *= 0.8 + 0.4 * (double)sim_random(world, 1000) / 1000;
    if (world->plan.faults.slow && !world->quiet && sim_chance(world, 0.01))
        ms *= 50;
    return ms;
}

static void on_run(void *ctx, pd_step *step)
{
    sim_worker *worker = ctx;
    sim_world *world = worker->world;
    uint32_t groups = world->plan.layout.groups;

    if (worker->step != NULL) {
        sim_broken(world, "%s: a step is run while another one is under way", worker->name);
        return;
    }
    if (step->slices_count == 0 || step->slices_count > world->plan.max_batch)
        sim_broken(world, "%s: a step of %u slices, at most %u are allowed", worker->name,
                   step->slices_count, world->plan.max_batch);
    worker->step = step;
    step->started_ns = world->now_ns;
    uint64_t took_ns = (uint64_t)(step_ms(world, step) * PD_NS_PER_MS);
    for (uint32_t group = 0; group < groups; group++)
        sim_schedule(world, world->now_ns + took_ns * (group + 1) / groups,
                     (sim_event){.kind = SIM_GROUP_DONE,
                                 .subject = worker->index,
                                 .incarnation = worker->incarnation,
                                 .a = group,
                                 .b = step->number});
    sim_schedule(world, world->now_ns + took_ns + 1,
                 (sim_event){.kind = SIM_STEP_DONE,
                             .subject = worker->index,
                             .incarnation = worker->incarnation,
                             .b = step->number});
}

static pd_status on_connect(void *ctx, const void *address, size_t bytes, uint64_t tag,
                            pd_peer *peer_out)
{
    sim_worker *worker = ctx;
    sim_address target;

    if (bytes != sizeof(target))
        return PD_E_INVALID;
    memcpy(&target, address, sizeof(target));
    for (pd_peer peer = 0; peer < SIM_LINKS_MAX; peer++) {
        sim_link *link = &worker->links[peer];
        if (link->used)
            continue;
        *link = (sim_link){.used = true,
                           .target = (uint32_t)target.worker,
                           .target_incarnation = target.incarnation,
                           .tag = tag,
                           .generation = ++worker->link_generation};
        pd_transfer_event event = {.kind = PD_TRANSFER_CONNECTED, .peer = peer, .tag = tag};
        snprintf(event.lane, sizeof(event.lane), "simulated");
        uint64_t delay_ns = 200000 + sim_random(worker->world, 2 * PD_NS_PER_MS);
        schedule_transfer(worker, worker->world->now_ns + delay_ns, &event);
        *peer_out = peer;
        return PD_OK;
    }
    return PD_E_OVERLOAD;
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
    uint64_t at_ns = link->free_at_ns > world->now_ns ? link->free_at_ns : world->now_ns;
    schedule_transfer(
        worker, at_ns + 100000,
        &(pd_transfer_event){.kind = PD_TRANSFER_CLOSED, .peer = peer, .tag = link->tag});
}

/* Posts a parcel behind all that was posted to that peer before. */
static pd_status post(sim_worker *worker, sim_parcel *parcel)
{
    sim_world *world = worker->world;
    sim_link *link = &worker->links[parcel->peer];

    if (parcel->peer >= SIM_LINKS_MAX || !link->used || !link->up)
        return PD_E_PEER;
    parcel->generation = link->generation;
    parcel->posted_ns = world->now_ns;
    sim_parcel *copy = sim_copy(world, parcel, sizeof(*parcel));
    if (copy == NULL)
        return PD_E_NOMEM;
    double ms = pd_cost_ship_ms(&world->cost, parcel->bytes) + 0.02;
    uint64_t wire_ns = (uint64_t)(ms * PD_NS_PER_MS) + sim_random(world, 50000);
    if (link->free_at_ns < world->now_ns)
        link->free_at_ns = world->now_ns;
    link->free_at_ns += wire_ns;
    sim_schedule(world, link->free_at_ns,
                 (sim_event){.kind = SIM_LANDED,
                             .subject = worker->index,
                             .incarnation = worker->incarnation,
                             .bytes = copy,
                             .bytes_len = sizeof(*copy)});
    return PD_OK;
}

static pd_status on_notify(void *ctx, pd_peer peer, const pd_notice *notice)
{
    sim_worker *worker = ctx;
    sim_parcel parcel = {.peer = peer};
    if (peer >= SIM_LINKS_MAX)
        return PD_E_PEER;
    parcel.notice_len = pd_notice_pack(notice, parcel.notice);
    return post(worker, &parcel);
}

static uint64_t on_seal(void *ctx, const pd_request_key *key, uint32_t group, uint32_t index,
                        pd_block block, uint32_t valid_tokens)
{
    sim_worker *worker = ctx;
    return sim_model_seal(&worker->kv, key, group, index, block, valid_tokens);
}

/* ---- start and end ---- */

void sim_worker_start(sim_worker *worker)
{
    sim_world *world = worker->world;
    const sim_plan *plan = &world->plan;

    worker->incarnation = pd_random_next(&world->random) | 1;
    pd_bus_identity(worker->name, worker->incarnation, worker->identity);
    pd_role_options options = {
        .name = worker->name,
        .incarnation = worker->incarnation,
        .layout = plan->layout,
        .vocab = SIM_VOCAB,
        .context_max = plan->context_max,
        .max_batch = plan->max_batch,
        .queue_max = plan->queue_max,
        .chunk_tokens = plan->chunk_tokens,
        .peers_max = SIM_LINKS_MAX / 2,
        .prefix_cache = plan->prefix_cache,
        .seals = plan->seals,
        .lost_after_ns = PD_NS_PER_S,
    };
    pd_role_sink sink = {.ctx = worker,
                         .send = on_send,
                         .run = on_run,
                         .connect = on_connect,
                         .close = on_close,
                         .notify = on_notify,
                         .seal = on_seal};
    memset(worker->links, 0, sizeof(worker->links));
    worker->step = NULL;
    worker->frozen_until_ns = 0;
    worker->welcome = false;
    worker->heard_ns = world->now_ns;
    worker->ticks = 0;
    memset(worker->sent_ns, 0, sizeof(worker->sent_ns));
    worker->received_ns = 0;
    pd_status status = sim_kv_init(&worker->kv, &plan->layout, worker->incarnation);
    if (status == PD_OK)
        status = worker->ops->create(&options, &sink, &worker->core);
    if (status != PD_OK) {
        world->status = status;
        sim_kv_fini(&worker->kv);
        worker->core = NULL;
        return;
    }
    sim_worker_on_beat(worker);
}

void sim_worker_fini(sim_worker *worker)
{
    if (worker->core != NULL)
        worker->ops->destroy(worker->core);
    worker->core = NULL;
    worker->step = NULL;
    sim_kv_fini(&worker->kv);
}

static void tell_down(sim_worker *sender, pd_peer peer)
{
    sim_link *link = &sender->links[peer];
    link->up = false;
    if (link->told_down)
        return;
    link->told_down = true;
    uint64_t delay_ns = PD_NS_PER_MS + sim_random(sender->world, 50 * PD_NS_PER_MS);
    schedule_transfer(
        sender, sender->world->now_ns + delay_ns,
        &(pd_transfer_event){
            .kind = PD_TRANSFER_PEER_DOWN, .status = PD_E_PEER, .peer = peer, .tag = link->tag});
}

void sim_worker_crash(sim_worker *worker)
{
    sim_world *world = worker->world;

    sim_worker_fini(worker);
    for (uint32_t i = 0; i < world->workers_count; i++)
        for (pd_peer peer = 0; peer < SIM_LINKS_MAX; peer++) {
            sim_worker *sender = &world->workers[i];
            sim_link *link = &sender->links[peer];
            if (sender->core != NULL && link->used && link->up &&
                link->target_incarnation == worker->incarnation)
                tell_down(sender, peer);
        }
    uint64_t delay_ns = 200 * PD_NS_PER_MS + sim_random(world, 1300 * PD_NS_PER_MS);
    sim_schedule(world, world->now_ns + delay_ns,
                 (sim_event){.kind = SIM_START, .subject = worker->index});
}

void sim_worker_cut_off(sim_world *world, uint64_t incarnation, uint32_t target)
{
    for (uint32_t i = 0; i < world->workers_count; i++) {
        sim_worker *sender = &world->workers[i];
        if (sender->core == NULL || sender->incarnation != incarnation)
            continue;
        for (pd_peer peer = 0; peer < SIM_LINKS_MAX; peer++)
            if (sender->links[peer].used && sender->links[peer].target == target)
                tell_down(sender, peer);
    }
}

/* ---- what reaches a worker ---- */

static void say_hello(sim_worker *worker)
{
    sim_world *world = worker->world;
    const sim_plan *plan = &world->plan;
    sim_address address = {worker->index, worker->incarnation};
    pd_message message = {.kind = PD_MSG_HELLO};
    pd_msg_hello *hello = &message.hello;

    *hello = (pd_msg_hello){
        .wire_version = PD_WIRE_VERSION,
        .role = worker->ops->role,
        .role_epoch = 1,
        .incarnation = worker->incarnation,
        .model_fingerprint = {1, 2},
        .layout_fingerprint = pd_kv_layout_fingerprint(&plan->layout),
        .block_tokens = plan->layout.block_tokens,
        .context_max = plan->context_max,
        .max_batch = plan->max_batch,
        .queue_max = plan->queue_max,
        .blocks = plan->layout.blocks,
        .transfer_address = &address,
        .transfer_address_len = sizeof(address),
        .pid = worker->index + 1,
    };
    snprintf(hello->name, sizeof(hello->name), "%s", worker->name);
    snprintf(hello->model, sizeof(hello->model), "simulated");
    snprintf(hello->backend, sizeof(hello->backend), "simulated");
    snprintf(hello->transfer, sizeof(hello->transfer), "simulated");
    pd_kv_layout_describe(&plan->layout, hello->layout, sizeof(hello->layout));
    sim_send_to_router(worker, &message);
}

void sim_worker_on_beat(sim_worker *worker)
{
    sim_world *world = worker->world;

    worker->ops->on_tick(worker->core, world->now_ns);
    if (world->now_ns - worker->heard_ns > PD_NS_PER_S)
        worker->welcome = false;
    if (worker->ticks++ % BEAT_TICKS == 0) {
        if (!worker->welcome) {
            say_hello(worker);
        } else {
            pd_message message = {.kind = PD_MSG_HEARTBEAT};
            worker->ops->heartbeat(worker->core, &message.heartbeat);
            message.heartbeat.incarnation = worker->incarnation;
            message.heartbeat.role_epoch = 1;
            message.heartbeat.warm = true;
            sim_send_to_router(worker, &message);
        }
    }
    sim_schedule(world, world->now_ns + TICK_NS,
                 (sim_event){.kind = SIM_BEAT,
                             .subject = worker->index,
                             .incarnation = worker->incarnation});
}

void sim_worker_on_message(sim_worker *worker, const pd_message *message)
{
    sim_world *world = worker->world;

    worker->heard_ns = world->now_ns;
    if (message->kind == PD_MSG_WELCOME)
        worker->welcome = true;
    if (message->kind == PD_MSG_REFUSED) {
        sim_worker_crash(worker); /* the process ends, and is started again */
        return;
    }
    if (message->kind == PD_MSG_PEER_GONE)
        sim_worker_cut_off(world, message->peer_gone.incarnation, worker->index);
    worker->ops->on_message(worker->core, world->router_incarnation, message, world->now_ns);
}

static void ship_group(sim_worker *worker, uint32_t group, pd_step_slice *slice)
{
    const sim_plan *plan = &worker->world->plan;
    const pd_ship *ship = &slice->ship;
    uint64_t seals[PARCEL_BLOCKS_MAX];

    for (uint32_t from = 0; from < ship->count; from += PARCEL_BLOCKS_MAX) {
        uint32_t count = ship->count - from;
        if (count > PARCEL_BLOCKS_MAX)
            count = PARCEL_BLOCKS_MAX;
        bool last = from + count == ship->count;
        pd_notice notice = {.kind = PD_NOTICE_BLOCKS,
                            .key = ship->key,
                            .sender = worker->incarnation,
                            .receiver = ship->receiver,
                            .group = group,
                            .groups = 1,
                            .slices = 1,
                            .first_block = ship->first + from,
                            .count = count,
                            .valid_tokens = last ? ship->valid_tokens : plan->layout.block_tokens,
                            .seals = plan->seals ? seals : NULL};
        sim_parcel parcel = {
            .peer = ship->peer, .ticket = ship->ticket, .group = group, .count = count};
        for (uint32_t i = 0; i < count; i++) {
            parcel.sources[i] = ship->sources[from + i];
            parcel.targets[i] = ship->targets[from + i];
            seals[i] = sim_model_seal(
                &worker->kv, &ship->key, group, notice.first_block + i, parcel.sources[i],
                i + 1 == count ? notice.valid_tokens : plan->layout.block_tokens);
        }
        parcel.bytes = count * pd_kv_layout_block_bytes(&plan->layout, group);
        parcel.notice_len = pd_notice_pack(&notice, parcel.notice);
        if (slice->ship_status == PD_OK)
            slice->ship_status = post(worker, &parcel);
        if (slice->ship_status != PD_OK)
            return;
        slice->notices_posted++;
    }
}

void sim_worker_on_group_done(sim_worker *worker, uint32_t group, uint64_t step)
{
    pd_assert(worker->step != NULL && worker->step->number == step);
    for (uint32_t i = 0; i < worker->step->slices_count; i++) {
        pd_step_slice *slice = &worker->step->slices[i];
        sim_model_write(&worker->kv, group, slice);
        if (slice->ship.count > 0)
            ship_group(worker, group, slice);
    }
}

void sim_worker_on_step_done(sim_worker *worker, uint64_t number)
{
    pd_step *step = worker->step;

    pd_assert(step != NULL && step->number == number);
    for (uint32_t i = 0; i < step->slices_count; i++)
        if (step->slices[i].want_token)
            step->slices[i].token_out = sim_model_token(&worker->kv, &step->slices[i]);
    step->status = PD_OK;
    step->finished_ns = worker->world->now_ns;
    worker->step = NULL;
    worker->ops->on_step_done(worker->core, step, worker->world->now_ns);
}

static void land(sim_world *world, const sim_worker *sender, sim_worker *target,
                 const sim_parcel *parcel)
{
    size_t bytes = world->plan.layout.block_tokens * sizeof(uint64_t);
    for (uint32_t i = 0; i < parcel->count; i++) {
        if (parcel->targets[i] >= target->kv.blocks) {
            sim_broken(world, "%s: puts into block %u of %s, which has %u", sender->name,
                       parcel->targets[i], target->name, target->kv.blocks);
            return;
        }
        memcpy(sim_kv_block(&target->kv, parcel->group, parcel->targets[i]),
               sim_kv_block(&sender->kv, parcel->group, parcel->sources[i]), bytes);
    }
    if (parcel->count > 0 && world->plan.faults.corrupt && world->plan.seals && !world->quiet &&
        sim_chance(world, 0.01)) {
        sim_kv_block(&target->kv, parcel->group, parcel->targets[0])[0] ^= 1;
        world->corrupted++;
    }
}

void sim_worker_on_landed(sim_world *world, sim_worker *sender, const sim_event *event)
{
    const sim_parcel *parcel = event->bytes;
    pd_transfer_event notice = {.kind = PD_TRANSFER_NOTICE, .notice_len = parcel->notice_len};

    if (sender == NULL)
        return; /* it died: what it had under way is lost */
    sim_link *link = &sender->links[parcel->peer];
    pd_transfer_event sent = {.kind = PD_TRANSFER_SENT,
                              .status = PD_E_CANCELLED,
                              .peer = parcel->peer,
                              .tag = link->tag,
                              .ticket = parcel->ticket,
                              .bytes = parcel->bytes,
                              .wire_ns = world->now_ns - parcel->posted_ns};
    if (!link->used || link->generation != parcel->generation) {
        sim_broken(world, "%s: a link was reused before what was posted on it had ended",
                   sender->name);
        return;
    }
    if (link->up) {
        sim_worker *target = &world->workers[link->target];
        if (target->core == NULL || target->incarnation != link->target_incarnation) {
            sent.status = PD_E_PEER;
            tell_down(sender, parcel->peer);
        } else {
            land(world, sender, target, parcel);
            memcpy(notice.notice, parcel->notice, parcel->notice_len);
            schedule_transfer(target, world->now_ns + WIRE_DELAY_NS, &notice);
            sent.status = PD_OK;
        }
    }
    schedule_transfer(sender, world->now_ns + WIRE_DELAY_NS, &sent);
}

void sim_worker_on_transfer(sim_worker *worker, const pd_transfer_event *cut)
{
    sim_world *world = worker->world;
    pd_transfer_event event = {0};

    memcpy(&event, cut, offsetof(pd_transfer_event, notice) + cut->notice_len);
    sim_link *link = event.kind == PD_TRANSFER_NOTICE ? NULL : &worker->links[event.peer];
    if (event.kind == PD_TRANSFER_CONNECTED) {
        const sim_worker *target = &world->workers[link->target];
        if (link->told_down)
            return; /* closed meanwhile */
        if (target->core == NULL || target->incarnation != link->target_incarnation) {
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

/* ---- what must hold ---- */

void sim_worker_check(sim_worker *worker)
{
    pd_ledger held = worker->ops->ledger(worker->core);
    uint32_t sum = held.free + held.cached + held.leased + held.running + held.quarantined;

    if (held.total != worker->world->plan.layout.blocks || sum != held.total)
        sim_broken(worker->world,
                   "%s: %u blocks: free %u cached %u leased %u running %u quarantined %u",
                   worker->name, held.total, held.free, held.cached, held.leased, held.running,
                   held.quarantined);
}

void sim_worker_held(const sim_worker *worker, char *text, size_t size)
{
    text[0] = '\0';
    if (worker->core == NULL) {
        snprintf(text, size, "%s is dead", worker->name);
        return;
    }
    pd_ledger held = worker->ops->ledger(worker->core);
    if (!worker->ops->idle(worker->core) || held.free + held.cached != held.total)
        snprintf(text, size, "%s holds leased %u running %u quarantined %u%s", worker->name,
                 held.leased, held.running, held.quarantined,
                 worker->ops->idle(worker->core) ? "" : ", and requests");
    else if (!worker->welcome || worker->frozen_until_ns > worker->world->now_ns)
        snprintf(text, size, "%s is frozen or not registered", worker->name);
}

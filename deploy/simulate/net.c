#include "deploy/simulate/net.h"

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/wire/unpack.h"
#include "decode-worker/admit.h"
#include "deploy/simulate/clients.h"
#include "deploy/simulate/faults.h"
#include "deploy/simulate/suspects.h"
#include "deploy/simulate/worker.h"

#include <string.h>

#define DELAY_LEAST_NS 30000
#define DELAY_NS       400000
#define LATE_NS        (20 * PD_NS_PER_MS)

/* True when a fault of that share befalls this message. */
static bool befalls(sim_world *world, sim_fault fault, double share)
{
    if (world->quiet || share == 0 || !sim_chance(world, share))
        return false;
    world->coverage.faults[fault]++;
    return true;
}

static void schedule_copy(sim_world *world, const pd_buf *buf, uint64_t at_ns, sim_event event)
{
    event.bytes = sim_copy(world, buf->bytes, buf->len);
    event.bytes_len = buf->len;
    if (event.bytes != NULL)
        sim_schedule(world, at_ns, event);
}

static void send(sim_router *router, const sim_worker *worker, const pd_message *message,
                 uint64_t *last_ns, sim_event event)
{
    sim_world *world = router->world;
    const sim_plan *plan = &world->plan;
    pd_buf buf;

    pd_buf_init(&buf, PD_MESSAGE_BYTES_MAX);
    pd_status status = pd_message_pack(message, &buf);
    uint64_t at_ns = world->now_ns + DELAY_LEAST_NS + sim_random(world, DELAY_NS);
    if (sim_chance(world, plan->late))
        at_ns += sim_random(world, LATE_NS);
    if (message->kind == PD_MSG_STEP_TOKENS && plan->tokens_late_ns > 0)
        at_ns += sim_random(world, plan->tokens_late_ns);
    bool cut = router->cut_until_ns[worker->index] > world->now_ns;
    if (status != PD_OK) {
        sim_broken(world, "a message of kind %s cannot be packed: %s",
                   pd_message_name(message->kind), pd_status_name(status));
    } else if ((cut && router->cut_drops[worker->index]) ||
               befalls(world, SIM_FAULT_LOSE, plan->lose)) {
        /* nobody hears of it */
    } else {
        if (cut)
            at_ns += router->cut_until_ns[worker->index] - world->now_ns;
        if (at_ns < *last_ns)
            at_ns = *last_ns; /* never overtakes on its link */
        if (befalls(world, SIM_FAULT_REORDER, plan->reorder))
            at_ns += sim_random(world, LATE_NS); /* and is overtaken */
        else
            *last_ns = at_ns;
        schedule_copy(world, &buf, at_ns, event);
        if (befalls(world, SIM_FAULT_DUPLICATE, plan->duplicate))
            schedule_copy(world, &buf, at_ns + sim_random(world, LATE_NS), event);
    }
    pd_buf_fini(&buf);
}

void sim_net_to_router(sim_worker *worker, uint32_t router, const pd_message *message)
{
    pd_channel channel = message->kind == PD_MSG_STEP_TOKENS ? PD_CHANNEL_TOKENS
                         : message->kind == PD_MSG_KV_EVENTS ? PD_CHANNEL_EVENTS
                                                             : PD_CHANNEL_CONTROL;
    send(&worker->world->routers[router], worker, message, &worker->views[router].sent_ns[channel],
         (sim_event){.kind = SIM_TO_ROUTER,
                     .subject = router,
                     .a = channel | worker->index << 8,
                     .b = worker->incarnation});
}

bool sim_net_to_worker(sim_router *router, const char *identity, const pd_message *message)
{
    sim_world *world = router->world;

    for (uint32_t i = 0; i < world->workers_count; i++) {
        sim_worker *worker = &world->workers[i];
        if (strcmp(worker->identity, identity) != 0)
            continue;
        sim_suspects_see_given(router, worker, message);
        if (worker->core == NULL) /* the socket hears of its end a little later */
            return !world->quiet && sim_chance(world, 0.3);
        sim_clients_see(router, message);
        send(router, worker, message, &worker->views[router->index].received_ns,
             (sim_event){.kind = SIM_TO_WORKER,
                         .subject = i,
                         .incarnation = worker->incarnation,
                         .a = router->index,
                         .b = router->incarnation});
        return true;
    }
    return false;
}

/* A promise is kept: a bind finds its room. */
static void check_bind(sim_world *world, const sim_event *event, const pd_message *message)
{
    if (message->kind == PD_MSG_LEASE_REPLY &&
        strcmp(message->lease_reply.reason, DECODE_ROOM_GONE) == 0)
        sim_broken(world, "%s has no room for what it promised",
                   world->workers[event->a >> 8].name);
}

static void count(sim_world *world, const pd_message *message)
{
    world->coverage.messages[message->kind]++;
    if (message->kind != PD_MSG_AUDIT_REPLY)
        return;
    for (uint32_t i = 0; i < message->audit_reply.entries_count; i++)
        if ((uint32_t)message->audit_reply.entries[i].state < SIM_AUDIT_STATES)
            world->coverage.audit_states[message->audit_reply.entries[i].state]++;
}

void sim_net_deliver(sim_world *world, const sim_event *event)
{
    pd_message message;
    pd_message_hold *hold = NULL;
    const char *reason = "";

    pd_status status = pd_message_unpack(event->bytes, event->bytes_len, &message, &hold, &reason);
    if (status != PD_OK) {
        sim_broken(world, "a packed message cannot be unpacked: %s", reason);
        return;
    }
    count(world, &message);
    if (event->kind == SIM_TO_WORKER) {
        sim_worker_on_message(&world->workers[event->subject], (uint32_t)event->a, event->b,
                              &message);
    } else {
        check_bind(world, event, &message);
        sim_router *router = &world->routers[event->subject];
        char from[PD_IDENTITY_BYTES];
        pd_bus_identity(world->workers[event->a >> 8].name, event->b, from);
        sim_clients_see_reply(router, &message);
        sim_suspects_see_reply(router, &message, event->b);
        router_core_on_message(router->core, (event->a & 255) == PD_CHANNEL_CONTROL ? from : NULL,
                               &message, world->now_ns);
        if (message.kind == PD_MSG_SUSPENDED)
            sim_faults_aim(router, &world->workers[event->a >> 8], &message.suspended);
    }
    pd_message_hold_free(hold);
}

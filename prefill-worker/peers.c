#include "prefill-worker/peers.h"

#include "common/base/log.h"
#include "prefill-worker/ending.h"

#include <stdio.h>

static void say_link(pd_role_core *core, uint64_t router, const pd_link *link, bool up,
                     const char *reason)
{
    pd_message message = {.kind = PD_MSG_LINK};

    snprintf(message.link.peer, sizeof message.link.peer, "%s", link->name);
    message.link.peer_incarnation = link->incarnation;
    message.link.up = up;
    snprintf(message.link.lane, sizeof message.link.lane, "%s", up ? link->lane : "");
    snprintf(message.link.reason, sizeof message.link.reason, "%s", reason);
    core->sink.send(core->sink.ctx, router, &message);
}

static void say_link_to_all(pd_role_core *core, const pd_link *link, bool up, const char *reason)
{
    for (uint32_t i = 0; i < PD_ROUTERS_MAX && !link->on_demand; i++) {
        const pd_router_seen *router = &core->routers.entries[i];
        if (router->router != 0 && !router->lost)
            say_link(core, router->router, link, up, reason);
    }
}

static void fail_link_requests(pd_role_core *core, uint64_t tag, const char *reason,
                               uint64_t now_ns)
{
    for (prefill_request *r = core->head, *next; r != NULL; r = next) {
        next = r->next;
        if (r->ship && r->link_tag == tag)
            prefill_end_early(core, r, PD_E_PEER, reason, now_ns);
    }
}

static void drop_link(pd_role_core *core, pd_link *link, const char *reason, uint64_t now_ns)
{
    uint64_t tag = link->tag;

    pd_log_info("msg=\"link closed: %s\" peer=%s", reason, link->name);
    pd_links_close(&core->links, link);
    fail_link_requests(core, tag, reason, now_ns);
    pd_source_link_down(&core->source, tag, reason, now_ns);
}

void prefill_peers_drop(void *ctx, pd_link *link, const char *reason, uint64_t now_ns)
{
    say_link_to_all(ctx, link, false, reason);
    drop_link(ctx, link, reason, now_ns);
}

static void connect_link(pd_role_core *core, pd_link *link, uint64_t now_ns)
{
    pd_link before = *link;
    pd_status status = pd_links_connect(&core->links, link);

    if (status == PD_OK || status == PD_E_OVERLOAD)
        return;
    pd_log_warn("msg=\"cannot connect to a worker\" peer=%s status=%s", before.name,
                pd_status_name(status));
    say_link_to_all(core, &before, false, "its address was refused");
    pd_source_link_down(&core->source, before.tag, "its address was refused", now_ns);
}

void prefill_peers_up(pd_role_core *core, uint64_t router, const pd_msg_peer_up *peer,
                      uint64_t now_ns)
{
    if (peer->role != PD_ROLE_DECODE)
        return;
    pd_link *link = pd_links_by_incarnation(&core->links, peer->incarnation);
    if (link != NULL) {
        link->on_demand = false;
        if (link->state == PD_LINK_UP)
            say_link(core, router, link, true, "");
        return;
    }
    pd_link *older = pd_links_by_name(&core->links, peer->name);
    if (older != NULL) /* of two routers one may be late, and believe in the older */
        prefill_peers_drop(core, older, "the decode worker was restarted", now_ns);
    link = pd_links_add(&core->links, peer);
    if (link == NULL) {
        pd_log_warn("msg=\"no place for a link\" peer=%s address_bytes=%zu", peer->name,
                    peer->transfer_address_len);
        return;
    }
    connect_link(core, link, now_ns);
}

void prefill_peers_gone(pd_role_core *core, const pd_msg_peer_gone *peer, uint64_t now_ns)
{
    pd_link *link = pd_links_by_incarnation(&core->links, peer->incarnation);

    if (link != NULL) /* another router may have it still, and offers it again */
        prefill_peers_drop(core, link, "the decode worker is gone", now_ns);
    prefill_pull_source_gone(&core->pulls, peer->incarnation, !peer->may_write);
}

void prefill_peers_sent(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    pd_request_key ticket = prefill_ticket_key(event->ticket);
    prefill_request *r = event->ticket == 0 ? NULL : pd_key_table_get(core->by_ticket, &ticket);

    core->counters.bytes_shipped += event->bytes; /* what left, of one that failed too */
    if (r == NULL)
        return;
    r->sent++;
    if (event->status == PD_E_CANCELLED) {
        /* Dropped because we asked for it, or with its link. */
        if (r->status == PD_OK && !r->answer_ended)
            prefill_end_early(core, r, PD_E_PEER, "blocks were not written", now_ns);
        else
            prefill_settle(core, r);
        return;
    }
    if (event->status != PD_OK) {
        pd_link *link = pd_links_by_tag(&core->links, r->link_tag);
        if (link != NULL && link->state == PD_LINK_UP) {
            say_link_to_all(core, link, false, "a write failed");
            drop_link(core, link, "a write failed", now_ns); /* r with it */
        } else {
            prefill_end_early(core, r, PD_E_PEER, "blocks could not be written", now_ns);
        }
        return;
    }
    r->ship_bytes += event->bytes;
    r->wire_ns += event->wire_ns;
    pd_cost_observe_ship(&core->cost, event->bytes, (double)event->wire_ns / 1e6);
    prefill_settle(core, r);
}

void prefill_peers_on_link(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    pd_link *link = pd_links_by_tag(&core->links, event->tag);

    if (link == NULL)
        return;
    if (event->kind == PD_TRANSFER_CONNECTED && link->state == PD_LINK_CONNECTING) {
        link->state = PD_LINK_UP;
        snprintf(link->lane, sizeof link->lane, "%s", event->lane);
        pd_log_info("msg=\"link up\" peer=%s lane=%s", link->name, link->lane);
        pd_last_words_pay(&core->words, link);
        say_link_to_all(core, link, true, "");
        pd_source_link_up(&core->source, now_ns);
    } else if (event->kind == PD_TRANSFER_PEER_DOWN && link->state != PD_LINK_CLOSING) {
        say_link_to_all(core, link, false, "the connection failed");
        drop_link(core, link, "the connection failed", now_ns);
    } else if (event->kind == PD_TRANSFER_CLOSED) {
        uint64_t tag = link->tag;
        pd_links_closed(link);
        for (prefill_request *r = core->head, *next; r != NULL; r = next) {
            next = r->next;
            if (!r->ship || r->link_tag != tag)
                continue;
            r->unclosed = event->status != PD_OK && r->posted > 0;
            prefill_settle(core, r);
        }
        pd_source_link_closed(&core->source, tag, event->status);
    }
}

/* An ending request whose puts do not come back holds its blocks: the link is stuck (a stopped
 * peer shows no error), so it is closed. True when one was: the list of requests has changed. */
static bool close_stuck_link(pd_role_core *core, uint64_t now_ns)
{
    for (prefill_request *r = core->head; r != NULL; r = r->next) {
        if (r->status == PD_OK || r->in_step || now_ns < r->ended_ns + core->options.lost_after_ns)
            continue;
        pd_link *link = pd_links_by_tag(&core->links, r->link_tag);
        if (link == NULL || link->state == PD_LINK_CLOSING)
            continue;
        say_link_to_all(core, link, false, "writes do not complete");
        drop_link(core, link, "writes do not complete", now_ns);
        return true;
    }
    return false;
}

void prefill_peers_tick(pd_role_core *core, uint64_t now_ns)
{
    while (close_stuck_link(core, now_ns))
        ;
    for (uint32_t i = 0; i < core->links.count; i++) {
        if (core->links.links[i].state == PD_LINK_WAITING)
            connect_link(core, &core->links.links[i], now_ns);
    }
}

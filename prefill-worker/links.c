#include "prefill-worker/links.h"

#include "common/base/mem.h"

#include <stdio.h>
#include <string.h>

pd_status prefill_links_init(prefill_links *links, uint32_t peers_max, const pd_role_sink *sink)
{
    *links = (prefill_links){.count = peers_max * 2, .tag_next = 1, .sink = sink};
    links->links = pd_calloc(links->count, sizeof *links->links);
    return links->links == NULL ? PD_E_NOMEM : PD_OK;
}

void prefill_links_fini(prefill_links *links)
{
    pd_free(links->links);
    *links = (prefill_links){0};
}

static bool live(const prefill_link *link)
{
    return link->state != PREFILL_LINK_NONE && link->state != PREFILL_LINK_CLOSING;
}

prefill_link *prefill_links_by_incarnation(prefill_links *links, uint64_t incarnation)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (live(&links->links[i]) && links->links[i].incarnation == incarnation)
            return &links->links[i];
    }
    return NULL;
}

prefill_link *prefill_links_by_tag(prefill_links *links, uint64_t tag)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (links->links[i].state != PREFILL_LINK_NONE && links->links[i].tag == tag)
            return &links->links[i];
    }
    return NULL;
}

prefill_link *prefill_links_by_name(prefill_links *links, const char *name)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (live(&links->links[i]) && strcmp(links->links[i].name, name) == 0)
            return &links->links[i];
    }
    return NULL;
}

prefill_link *prefill_links_add(prefill_links *links, const pd_msg_peer_up *peer)
{
    if (peer->transfer_address_len == 0 || peer->transfer_address_len > PD_WORKER_ADDRESS_BYTES_MAX)
        return NULL;
    for (uint32_t i = 0; i < links->count; i++) {
        prefill_link *link = &links->links[i];
        if (link->state != PREFILL_LINK_NONE)
            continue;
        *link = (prefill_link){.state = PREFILL_LINK_WAITING,
                               .incarnation = peer->incarnation,
                               .tag = links->tag_next++,
                               .address_len = peer->transfer_address_len};
        snprintf(link->name, sizeof link->name, "%s", peer->name);
        memcpy(link->address, peer->transfer_address, peer->transfer_address_len);
        return link;
    }
    return NULL;
}

pd_status prefill_links_connect(prefill_links *links, prefill_link *link)
{
    pd_assert(link->state == PREFILL_LINK_WAITING);
    pd_status status = links->sink->connect(links->sink->ctx, link->address, link->address_len,
                                            link->tag, &link->peer);
    if (status == PD_OK)
        link->state = PREFILL_LINK_CONNECTING;
    else if (status != PD_E_OVERLOAD)
        link->state = PREFILL_LINK_NONE;
    return status;
}

void prefill_links_close(prefill_links *links, prefill_link *link)
{
    if (link->state == PREFILL_LINK_WAITING) {
        link->state = PREFILL_LINK_NONE;
    } else if (live(link)) {
        link->state = PREFILL_LINK_CLOSING;
        if (links->held)
            link->close_owed = true;
        else
            links->sink->close(links->sink->ctx, link->peer);
    }
}

void prefill_links_hold(prefill_links *links)
{
    pd_assert(!links->held);
    links->held = true;
}

void prefill_links_let_go(prefill_links *links)
{
    pd_assert(links->held);
    links->held = false;
    for (uint32_t i = 0; i < links->count; i++) {
        prefill_link *link = &links->links[i];
        if (!link->close_owed)
            continue;
        link->close_owed = false;
        links->sink->close(links->sink->ctx, link->peer);
    }
}

void prefill_links_closed(prefill_link *link)
{
    link->state = PREFILL_LINK_NONE;
}

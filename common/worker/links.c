#include "common/worker/links.h"

#include "common/base/mem.h"

#include <stdio.h>
#include <string.h>

pd_status pd_links_init(pd_links *links, uint32_t peers_max, const pd_role_sink *sink)
{
    *links = (pd_links){.count = peers_max * 2, .tag_next = 1, .sink = sink};
    links->links = pd_calloc(links->count, sizeof *links->links);
    return links->links == NULL ? PD_E_NOMEM : PD_OK;
}

void pd_links_fini(pd_links *links)
{
    pd_free(links->links);
    *links = (pd_links){0};
}

static bool live(const pd_link *link)
{
    return link->state != PD_LINK_NONE && link->state != PD_LINK_CLOSING;
}

pd_link *pd_links_by_incarnation(pd_links *links, uint64_t incarnation)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (live(&links->links[i]) && links->links[i].incarnation == incarnation)
            return &links->links[i];
    }
    return NULL;
}

pd_link *pd_links_by_tag(pd_links *links, uint64_t tag)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (links->links[i].state != PD_LINK_NONE && links->links[i].tag == tag)
            return &links->links[i];
    }
    return NULL;
}

pd_link *pd_links_by_name(pd_links *links, const char *name)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (live(&links->links[i]) && strcmp(links->links[i].name, name) == 0)
            return &links->links[i];
    }
    return NULL;
}

pd_link *pd_links_add(pd_links *links, const pd_msg_peer_up *peer)
{
    if (peer->transfer_address_len == 0 || peer->transfer_address_len > PD_WORKER_ADDRESS_BYTES_MAX)
        return NULL;
    for (uint32_t i = 0; i < links->count; i++) {
        pd_link *link = &links->links[i];
        if (link->state != PD_LINK_NONE)
            continue;
        *link = (pd_link){.state = PD_LINK_WAITING,
                          .incarnation = peer->incarnation,
                          .tag = links->tag_next++,
                          .address_len = peer->transfer_address_len};
        snprintf(link->name, sizeof link->name, "%s", peer->name);
        memcpy(link->address, peer->transfer_address, peer->transfer_address_len);
        return link;
    }
    return NULL;
}

pd_status pd_links_connect(pd_links *links, pd_link *link)
{
    pd_assert(link->state == PD_LINK_WAITING);
    pd_status status = links->sink->connect(links->sink->ctx, link->address, link->address_len,
                                            link->tag, &link->peer);
    if (status == PD_OK)
        link->state = PD_LINK_CONNECTING;
    else if (status != PD_E_OVERLOAD)
        link->state = PD_LINK_NONE;
    return status;
}

void pd_links_close(pd_links *links, pd_link *link)
{
    if (link->state == PD_LINK_WAITING) {
        link->state = PD_LINK_NONE;
    } else if (live(link)) {
        link->state = PD_LINK_CLOSING;
        links->sink->close(links->sink->ctx, link->peer);
    }
}

void pd_links_closed(pd_link *link)
{
    link->state = PD_LINK_NONE;
}

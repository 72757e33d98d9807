#pragma once

/* common/worker/links.h - data links to those that this worker writes to, as the deciding part sees
 * them.
 *
 * A link belongs to one incarnation of a worker. It is asked for by a router's PEER_UP (decode
 * workers), or made on demand for a shipment of what is held already (common/worker/source). It
 * ends by PEER_GONE, by the same name with another incarnation, or by its failure; then its place
 * is free once the transfer has closed it. Pure. One thread. */

#include "common/worker/address.h"
#include "common/worker/role.h"

typedef enum pd_link_state {
    PD_LINK_NONE,
    PD_LINK_WAITING, /* for room in the transfer */
    PD_LINK_CONNECTING,
    PD_LINK_UP,
    PD_LINK_CLOSING, /* nothing is posted any more */
} pd_link_state;

typedef struct pd_link {
    pd_link_state state;
    char name[PD_NAME_BYTES];
    uint64_t incarnation;
    uint64_t tag; /* never used twice */
    pd_peer peer;
    bool
        on_demand; /* made for a PD_MSG_SHIP_REQUEST, and closed when idle (common/worker/source) */
    uint64_t used_ns; /* on demand: since when nothing was written by it */
    char lane[64];
    size_t address_len;
    unsigned char address[PD_WORKER_ADDRESS_BYTES_MAX]; /* while waiting */
} pd_link;

typedef struct pd_links {
    pd_link *links; /* [count] */
    uint32_t count;
    uint64_t tag_next;
    const pd_role_sink *sink;
} pd_links;

/* Holds twice peers_max, since closing links take places too. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_links_init(pd_links *links, uint32_t peers_max, const pd_role_sink *sink);
void pd_links_fini(pd_links *links);

/* NULL: none in this state of affairs. */
pd_link *pd_links_by_incarnation(pd_links *links, uint64_t incarnation);
pd_link *pd_links_by_tag(pd_links *links, uint64_t tag);
pd_link *pd_links_by_name(pd_links *links, const char *name); /* not closing */

/* A new link, waiting; no live link has that incarnation. NULL: no place, or an address that
 * cannot be one. */
pd_link *pd_links_add(pd_links *links, const pd_msg_peer_up *peer);
/* Asks the transfer to connect a waiting link. PD_E_OVERLOAD: no room in the transfer, still
 * waiting; another error: not connected, and the link is gone. */
PD_CHECKED pd_status pd_links_connect(pd_links *links, pd_link *link);
/* Ends a link; it is gone at once when it was waiting, else after pd_links_closed. */
void pd_links_close(pd_links *links, pd_link *link);
/* The transfer has closed it: its place is free. */
void pd_links_closed(pd_link *link);

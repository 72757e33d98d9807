#pragma once

/* prefill-worker/links.h - data links to decode workers, as the deciding part sees them.
 *
 * A link belongs to one incarnation of a decode worker. It is asked for by a router's PEER_UP, and
 * ends by PEER_GONE, by the same name with another incarnation, or by its failure; then its place
 * is free once the transfer has closed it. Pure. One thread. */

#include "common/worker/address.h"
#include "common/worker/role.h"

typedef enum prefill_link_state {
    PREFILL_LINK_NONE,
    PREFILL_LINK_WAITING, /* for room in the transfer */
    PREFILL_LINK_CONNECTING,
    PREFILL_LINK_UP,
    PREFILL_LINK_CLOSING, /* nothing is posted any more */
} prefill_link_state;

typedef struct prefill_link {
    prefill_link_state state;
    char name[PD_NAME_BYTES];
    uint64_t incarnation;
    uint64_t tag; /* never used twice */
    pd_peer peer;
    bool close_owed; /* closing, but the step under way still names peer */
    char lane[64];
    size_t address_len;
    unsigned char address[PD_WORKER_ADDRESS_BYTES_MAX]; /* while waiting */
} prefill_link;

typedef struct prefill_links {
    prefill_link *links; /* [count] */
    uint32_t count;
    uint64_t tag_next;
    bool held; /* a step is under way */
    const pd_role_sink *sink;
} prefill_links;

/* Holds twice peers_max, since closing links take places too. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status prefill_links_init(prefill_links *links, uint32_t peers_max,
                                        const pd_role_sink *sink);
void prefill_links_fini(prefill_links *links);

/* NULL: none in this state of affairs. */
prefill_link *prefill_links_by_incarnation(prefill_links *links, uint64_t incarnation);
prefill_link *prefill_links_by_tag(prefill_links *links, uint64_t tag);
prefill_link *prefill_links_by_name(prefill_links *links, const char *name); /* not closing */

/* A new link, waiting; no live link has that incarnation. NULL: no place, or an address that
 * cannot be one. */
prefill_link *prefill_links_add(prefill_links *links, const pd_msg_peer_up *peer);
/* Asks the transfer to connect a waiting link. PD_E_OVERLOAD: no room in the transfer, still
 * waiting; another error: not connected, and the link is gone. */
PD_CHECKED pd_status prefill_links_connect(prefill_links *links, prefill_link *link);
/* Ends a link; it is gone at once when it was waiting, else after prefill_links_closed. */
void prefill_links_close(prefill_links *links, prefill_link *link);
/* A step's plan names links by their peer, and the transfer uses the number of a closed one anew:
 * between hold and let_go no link is closed, so that what a step ships can never go to another
 * worker. */
void prefill_links_hold(prefill_links *links);
void prefill_links_let_go(prefill_links *links);
/* The transfer has closed it: its place is free. */
void prefill_links_closed(prefill_link *link);

#pragma once

/* common/worker/source.h - a worker as the source of KV that it holds already: PD_MSG_SHIP_REQUEST.
 *
 * Blocks of a suspended sequence (a move) or of the prefix cache (a pull, a move by cache) are
 * claimed once more, shipped to the receiver's leased blocks, and held until it has checked them
 * (Release), somebody ends it (Cancel, a lost router, the deadline), or they are asked for again
 * (ShipAgain). Claims are the shipment's own: the sequence may end meanwhile, its blocks stay until
 * the last put is over. Every request is answered by one ShipDone, and one more for each ShipAgain;
 * without may_land it means that this worker writes no more.
 *
 * Links are made when one is asked for and closed when they were idle for a while; what is not
 * written to can be closed for another. They lie in the role's own pd_links, where those that a
 * router asked for lie too; tickets of shipments have PD_SOURCE_TICKET set. The role passes on what
 * concerns them. Pure. One thread. */

#include "common/worker/audit.h"
#include "common/worker/blocks.h"
#include "common/worker/last_words.h"

#define PD_SOURCE_TICKET (UINT64_C(1) << 63)

typedef struct pd_source_ship pd_source_ship;

/* All but ships_max is borrowed. */
typedef struct pd_source_options {
    const pd_role_options *role;
    const pd_role_sink *sink;
    pd_blocks *blocks;
    pd_links *links;
    pd_last_words *words;
    pd_cost *cost; /* measured writes are learnt into it */
    pd_role_counters *counters;
    uint32_t ships_max;
    /* Closes a link and tells whom the role tells (pd_source_link_down too); NULL: links are the
     * source's alone. */
    void (*drop_link)(void *ctx, pd_link *link, const char *reason, uint64_t now_ns);
    void *ctx;
} pd_source_options;

enum { PD_SOURCE_RECEIVERS_MAX = 8 };

typedef struct pd_source {
    pd_source_options o;
    pd_source_ship *head; /* of all */
    uint32_t count;
    uint64_t ticket_next;
    bool ship_waits; /* the carrier had no room */
    struct pd_source_receiver {
        pd_msg_peer peer; /* its address is below */
        unsigned char address[PD_WORKER_ADDRESS_BYTES_MAX];
        uint64_t tried_ns;
    } receivers[PD_SOURCE_RECEIVERS_MAX]; /* the latest: a last word may be owed to them */
    uint32_t receivers_next;
} pd_source;

/* A source must not move in memory afterwards. */
void pd_source_init(pd_source *source, const pd_source_options *options);
void pd_source_fini(pd_source *source);

/* A sequence that is to move: its blocks and the positions they hold; the role has found it by
 * source_epoch. */
typedef struct pd_source_sequence {
    const pd_block *blocks;
    uint32_t kv_tokens;
} pd_source_sequence;

/* sequence: NULL, from the prefix cache. A key that is being shipped already is ignored; one that
 * has ended (common/worker/last_words) is refused. */
void pd_source_request(pd_source *source, const pd_msg_ship_request *asked,
                       const pd_source_sequence *sequence, uint64_t now_ns);
/* Nothing is written: says so, by ShipDone and on the data plane. reason: a literal. */
void pd_source_refuse(pd_source *source, const pd_msg_ship_request *asked, pd_status status,
                      const char *reason);
/* False: the key is not one of its; the role answers. */
bool pd_source_again(pd_source *source, const pd_msg_ship_again *asked, uint64_t now_ns);
/* A receiver asks whether the key is still written (PD_NOTICE_ASK): it waits for the last word. */
void pd_source_asked(pd_source *source, const pd_request_key *key, uint64_t receiver,
                     const pd_routers *routers, uint64_t now_ns);
/* The answer when nobody knows the key: nothing is written. */
void pd_source_unknown(pd_source *source, const pd_msg_ship_again *asked);
/* Ends the shipment of that key. True when there was one; *source_epoch_out: of the sequence that
 * has moved, 0 when it came from the cache. */
bool pd_source_release(pd_source *source, const pd_request_key *key, uint32_t *source_epoch_out);
/* False: there is none. */
bool pd_source_cancel(pd_source *source, const pd_request_key *key, uint64_t now_ns);
/* One of the sequence with that key is under way, or held until its release. */
bool pd_source_moves(const pd_source *source, const pd_request_key *key);
/* Ends all shipments for a router, or for all (0). */
void pd_source_end_all(pd_source *source, uint64_t router, const char *reason, uint64_t now_ns);
bool pd_source_idle(const pd_source *source);
/* Something is under way or held for that router. */
bool pd_source_serves(const pd_source *source, uint64_t router);
/* To every receiver: nothing is written any more for a router that is lost. While something of it
 * is still under way, its own last word comes first. Said a few times over, since a receiver may
 * take a lease request late. busy: a role that also sends on its own has something under way for
 * that router; NULL for one that sends nothing else. */
void pd_source_tell_lost(pd_source *source, pd_routers *routers,
                         bool (*busy)(const void *ctx, uint64_t router), const void *ctx,
                         uint64_t now_ns);

/* A PD_TRANSFER_SENT. False: not one of its tickets. */
bool pd_source_on_sent(pd_source *source, const pd_transfer_event *event, uint64_t now_ns);
/* What became of a link, whoever asked for it: after pd_links' own functions. */
void pd_source_link_up(pd_source *source, uint64_t now_ns);
void pd_source_link_down(pd_source *source, uint64_t tag, const char *reason, uint64_t now_ns);
void pd_source_link_closed(pd_source *source, uint64_t tag, pd_status status);
/* The same three for a role of which all links are the source's; other events are ignored. */
void pd_source_on_link(pd_source *source, const pd_transfer_event *event, uint64_t now_ns);
/* That worker is gone, or was restarted: its link is closed. */
void pd_source_peer_gone(pd_source *source, uint64_t incarnation, uint64_t now_ns);
/* Deadlines, stuck and idle links, last words that the carrier had no room for. */
void pd_source_tick(pd_source *source, uint64_t now_ns);

/* Every shipment, as PD_AUDIT_HOLDING with the blocks it claims. */
void pd_source_audit(const pd_source *source, pd_audit *audit);

#pragma once

/* deploy/simulate/parcel.h - what is on a data link: blocks and the notice behind them, and how
 * they land.
 *
 * On a link like shared memory a parcel's content is its sender's pool until it lands. On one of
 * messages, as over tcp, it is copied when it leaves, and what a socket holds lands without its
 * sender. One thread. */

#include "common/transfer/transfer.h"
#include "deploy/simulate/world.h"

#define PIECE_BLOCKS_MAX 64
#define PIECE_SEALS_MAX  64
#define NOTICE_BYTES     1024
#define WIRE_DELAY_NS    20000ull /* from landed to noticed, from sent to told */

typedef struct sim_parcel {
    uint32_t sender, target; /* workers */
    uint64_t sender_incarnation, target_incarnation;
    pd_peer peer;
    uint64_t generation; /* of the link */
    uint64_t number;     /* on the link */
    uint32_t shipment;   /* of the sender */
    uint64_t ticket;
    pd_request_key key;
    uint32_t group, groups, first, count;
    pd_block sources[PIECE_BLOCKS_MAX], targets[PIECE_BLOCKS_MAX];
    uint64_t bytes, posted_ns;
    bool message; /* it was sent when it left */
    bool filled;  /* its content is behind this struct, not in its sender's pool */
    bool orphan;  /* no message, and its sender is dead */
    bool lost;    /* it never lands; */
    bool torn;    /* but its blocks do, without their notice */
    size_t notice_len;
    unsigned char notice[NOTICE_BYTES];
} sim_parcel;

/* The data plane tells a worker something. */
void sim_parcel_tell(sim_worker *worker, uint64_t at_ns, const pd_transfer_event *event);

/* Takes a parcel's content (pd_malloc'ed) out of its sender's pool; sets *bytes to its new size.
 * Without memory it stays as it is, and the run ends. */
sim_parcel *sim_parcel_fill(const sim_worker *sender, sim_parcel *parcel, size_t *bytes);
/* It lands at a target that lives and has not fenced its sender off; without its notice when it is
 * torn, or not noticed. */
void sim_parcel_land(sim_world *world, sim_worker *target, sim_parcel *parcel, bool noticed);
/* A message comes. True: a newer link's has come before, and this one is dropped. */
bool sim_parcel_is_old(sim_worker *target, const sim_parcel *parcel);

/* A link of messages (all of the worker's that are up: SIM_LINKS_MAX) ends: of what its socket
 * holds only a first part lands, which may be all. */
void sim_parcel_cut(sim_worker *sender, pd_peer peer);
/* The worker is about to die: half of what it has on links like shared memory lands all the same.
 */
void sim_parcel_orphan(sim_worker *sender);

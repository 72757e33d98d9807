#pragma once

/* common/worker/ship.h - carries out shipments: the blocks are put, notices say that they are
 * there.
 *
 * A shipment waits in a list of its peer's until its turn comes. What is posted to the transfer and
 * has not landed yet is bounded for each peer (its credit), on a slow link to what it carries in
 * 50 ms; tickets take turns, each a quantum: a long prompt cannot hold up short ones by more than
 * that. Blocks that are neighbours in both pools go as one put, where their tensor-parallel splits
 * agree; else a block is cut into slices of its heads (common/worker/ship_puts). A quantum of
 * blocks is a *part*: its puts, its seals (one a slice), its notice; a shipment that fits one has
 * one notice. All parts together end in one PD_TRANSFER_SENT.
 *
 * Loop thread only, which is also the transfer's producer: nobody else may post to that transfer.
 * The owner calls pd_ship_pump whenever something may be done (each turn of its loop), gives every
 * PD_TRANSFER_SENT to pd_ship_sent, and takes what has ended from pd_ship_poll. */

#include "common/kv/seal.h"
#include "common/worker/ship_puts.h"

typedef struct pd_shipper pd_shipper;

typedef struct pd_shipper_options {
    pd_transfer *transfer;        /* borrowed, as is layout */
    const pd_kv_layout *layout;   /* the peers' are alike but for blocks and ranks */
    uint64_t incarnation;         /* in every notice */
    uint32_t peers_max;           /* the transfer's */
    pd_sealer sealer;             /* of the own pool; seal NULL: notices carry no seals */
    pd_ship_faults faults;        /* all 0: none */
    uint32_t shipments_max;       /* that wait or are on their way; 0: 4096 */
    uint64_t credit_bytes;        /* posted and not landed, a peer, at most; 0: 8 MiB */
    uint64_t quantum_bytes;       /* of a ticket's turn while others wait; 0: 1 MiB */
    uint64_t quantum_bytes_alone; /* while none does; 0: 4 MiB, or quantum_bytes if that is set */
} pd_shipper_options;

/* Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_ship_create(const pd_shipper_options *options, pd_shipper **shipper_out);
void pd_ship_destroy(pd_shipper *shipper);

/* A link was asked for by pd_transfer_connect: its peer's pool is laid out so
 * (pd_kv_layout_of_peer; pd_ship_slices of it is not 0: pd_assert); tag is the one given there. */
void pd_ship_open(pd_shipper *shipper, pd_peer peer, const pd_kv_layout *layout, uint64_t tag);
/* Right before pd_transfer_close: nothing is posted to that peer any more. What waits ends with
 * PD_E_CANCELLED. */
void pd_ship_close(pd_shipper *shipper, pd_peer peer);

/* As pd_role_sink.ship. PD_E_PEER: not open; PD_E_INVALID: targets outside the peer's pool
 * (logged); PD_E_OVERLOAD: too many wait; PD_E_NOMEM. */
PD_CHECKED pd_status pd_ship_post(pd_shipper *shipper, const pd_shipment *shipment);
/* As pd_role_sink.unship. */
void pd_ship_drop(pd_shipper *shipper, uint64_t ticket);
/* A notice without blocks. It goes after every part of the same request (of every request of the
 * same router, when its number is 0) that was asked for before it. Its PD_TRANSFER_SENT has ticket
 * 0. PD_E_PEER: not open; PD_E_OVERLOAD: too many wait. */
PD_CHECKED pd_status pd_ship_notify(pd_shipper *shipper, pd_peer peer, const pd_notice *notice);

/* Posts what may be posted, a few milliseconds' worth at most. True: more could be done at once. */
bool pd_ship_pump(pd_shipper *shipper);
/* A PD_TRANSFER_SENT from the transfer. True: it was a part's, and is used up; false: it is the
 * owner's (ticket 0). */
bool pd_ship_sent(pd_shipper *shipper, const pd_transfer_event *event);
/* The PD_TRANSFER_SENT of a shipment that has ended: status of the first part that failed, bytes
 * and post_ns summed, wire_ns the time that its peer's link was busy with it: waiting for others on
 * that link does not count, so that the sum over shipments is the link's. PD_E_AGAIN: none. */
PD_CHECKED pd_status pd_ship_poll(pd_shipper *shipper, pd_transfer_event *event_out);

/* Sums since the start, of parts that landed. */
typedef struct pd_ship_stats {
    uint64_t shipments, parts, puts, bytes;
    uint64_t wire_ns;      /* first put to all landed */
    uint64_t post_ns;      /* of that, spent posting: goal is a tenth at most */
    uint64_t seal_ns;      /* sealing, while the puts were under way */
    uint32_t seals_failed; /* parts in a row whose seals the device could not make */
    pd_status seal_status; /* of the last of them; PD_OK: the last part was sealed */
} pd_ship_stats;
pd_ship_stats pd_ship_read_stats(const pd_shipper *shipper);

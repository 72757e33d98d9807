#pragma once

/* common/transfer/carrier.h - what a transfer backend (UCX, NCCL) has to do. Inside
 * common/transfer only.
 *
 * A carrier has the pool's memory, its own or given, and moves bytes; the engine
 * (common/transfer/engine.h) decides when, keeps order and counts. Every function runs on the
 * engine's thread, and the carrier calls the engine back on it, from within any of these functions.
 *
 * A token names an operation. It is a number, not a pointer: a carrier may complete an operation
 * long after its peer was closed, or never, and the engine must be able to ignore that. */

#include "common/transfer/transfer.h"

typedef struct pd_carrier pd_carrier;

/* What the engine is told. engine is the pointer given at creation. */
typedef struct pd_carrier_events {
    void (*put_done)(void *engine, uint64_t token, pd_status status);
    void (*flush_done)(void *engine, uint64_t token, pd_status status);
    void (*send_done)(void *engine, uint64_t token, pd_status status);
    /* The connection is usable (lane says by what), or could not be made. */
    void (*opened)(void *engine, pd_peer peer, pd_status status, const char *lane);
    /* The connection broke. Only marks: no carrier function may be called from here. */
    void (*broken)(void *engine, pd_peer peer);
    void (*closed)(void *engine, pd_peer peer);
    /* A message from some peer; bytes are the carrier's and end with the call. */
    void (*received)(void *engine, const void *bytes, size_t len);
} pd_carrier_events;

/* The engine asks for no longer put: what a carrier that moves messages can send as one. */
#define PD_CARRIER_PUT_BYTES_MAX (512u << 10)
#define PD_CARRIER_PAGE          4096u
#define PD_CARRIER_POOL_TAIL     PD_CARRIER_PAGE

/* The shape of a peer's pool; checked. */
typedef struct pd_carrier_pool {
    uint64_t bytes;  /* a multiple of pieces */
    uint32_t pieces; /* 1 .. PD_TRANSFER_PIECES_MAX */
} pd_carrier_pool;

typedef struct pd_carrier_ops {
    const char *name;
    /* pieces of options is at least 1, and piece_memory NULL for a pool that the carrier allocates:
     * pool is not looked at. Of each piece, pool_bytes / pieces are for the caller; a carrier may
     * use PD_CARRIER_POOL_TAIL more, from the next page on. */
    pd_status (*create)(const pd_transfer_options *options, const pd_carrier_events *events,
                        void *engine, pd_carrier **carrier_out);
    void (*destroy)(pd_carrier *carrier);
    void *(*pool)(const pd_carrier *carrier);
    /* What open needs on the other side. */
    const void *(*address)(const pd_carrier *carrier, size_t *bytes_out);

    /* Readable when progress may have something to do, if arm returned true since. */
    int (*fd)(const pd_carrier *carrier);
    /* Does what can be done now; true if something was. */
    bool (*progress)(pd_carrier *carrier);
    /* True: it is fine to sleep on fd. False: progress first. */
    bool (*arm)(pd_carrier *carrier);

    /* Starts connecting peer, a number below peers_max that is not open; `opened` follows, and in
     * any case close is called once later. PD_OK or the reason it cannot work. */
    pd_status (*open)(pd_carrier *carrier, pd_peer peer, const void *address, size_t bytes,
                      pd_carrier_pool peer_pool);
    /* Cuts the connection, whatever is under way; `closed` follows, unless the carrier hangs. */
    void (*close)(pd_carrier *carrier, pd_peer peer);
    /* Operations on an open peer. PD_OK: done already, the event does not follow; PD_E_AGAIN:
     * started, the event follows; PD_E_OVERLOAD (not from flush): nothing was started, and fd will
     * be readable when it may go again; else failed. Ranges were checked: a put is within one
     * piece on either side. */
    pd_status (*put)(pd_carrier *carrier, pd_peer peer, uint64_t source_offset,
                     uint64_t target_offset, uint64_t bytes, uint64_t token);
    /* Done when every put before it is at the target. */
    pd_status (*flush)(pd_carrier *carrier, pd_peer peer, uint64_t token);
    /* bytes must live until it is done. */
    pd_status (*send)(pd_carrier *carrier, pd_peer peer, const void *bytes, size_t len,
                      uint64_t token);
    /* From its return on no bytes of that sender are written into the pool by this process. */
    void (*fence)(pd_carrier *carrier, uint64_t incarnation);
    /* Of a carrier that runs; any thread. NULL: never. */
    bool (*written_from_afar)(const pd_carrier *carrier);
} pd_carrier_ops;

extern const pd_carrier_ops pd_carrier_ucx;
extern const pd_carrier_ops pd_carrier_nccl;

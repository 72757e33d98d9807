#pragma once

/* common/transfer/engine.h - the transfer thread: keeps order, bounds what is in flight, notices
 * what hangs. Inside common/transfer only.
 *
 * One thread runs the carrier and owns everything in the engine. Others reach it through three
 * queues: control (from the loop thread), operations (from the producer), events (to the loop
 * thread). Whatever the carrier does or fails to do, each notice ends in one PD_TRANSFER_SENT. */

#include "common/base/queue.h"
#include "common/transfer/carrier.h"

typedef struct pd_engine pd_engine;

/* An event on its way out; on the heap, freed by who takes it from the queue. */
typedef struct pd_engine_event {
    struct pd_engine_event *next;
    pd_transfer_event_kind kind;
    pd_status status;
    pd_peer peer;
    uint64_t tag, ticket, bytes, wire_ns, post_ns, landed_ns;
    char lane[64];
    size_t notice_len;
    unsigned char notice[];
} pd_engine_event;

/* A notice and the puts before it; on the heap. */
typedef struct pd_engine_batch {
    struct pd_engine_batch *next;
    pd_engine_event *sent; /* the event it ends in */
    uint32_t number;       /* of the peer's batches */
    uint32_t puts_until;   /* the put number after its last one */
    bool flushed;          /* the flush after its puts is done */
    bool sending;          /* the carrier has the message and may still read it */
    bool done;
    uint64_t first_put_ns; /* 0: no put */
    size_t len;
    unsigned char message[]; /* as it goes over the wire */
} pd_engine_batch;

typedef enum pd_engine_op_kind { PD_ENGINE_PUT, PD_ENGINE_NOTICE } pd_engine_op_kind;

typedef struct pd_engine_op {
    pd_engine_op_kind kind;
    pd_peer peer;
    uint32_t generation;
    uint64_t source_offset, target_offset, bytes; /* put */
    pd_engine_batch *batch;                       /* notice: the engine's from here on */
} pd_engine_op;

typedef enum pd_engine_control_kind {
    PD_ENGINE_CONNECT,
    PD_ENGINE_CLOSE,
    PD_ENGINE_FENCE,
    PD_ENGINE_STOP,
} pd_engine_control_kind;

typedef struct pd_engine_control {
    pd_engine_control_kind kind;
    pd_peer peer;
    uint32_t generation;
    /* connect: the engine's from here on */
    unsigned char *address; /* the carrier's part */
    size_t address_bytes;
    pd_carrier_pool peer_pool;
    /* connected or down; down; closed. fence: fenced. So that none can be missing. */
    pd_engine_event *events[3];
    uint64_t incarnation; /* fence */
} pd_engine_control;

/* In the message of a notice, before the caller's bytes. */
typedef struct pd_engine_message {
    uint32_t magic;
    uint32_t len; /* of the caller's bytes */
    uint64_t target_incarnation;
} pd_engine_message;
#define PD_ENGINE_MESSAGE_MAGIC 0x314e564bu /* "KVN1" */
_Static_assert(sizeof(pd_engine_message) == 16, "goes over the wire");

/* Told on the engine's thread when a peer goes up (true) or down. */
typedef void pd_engine_up_fn(void *ctx, pd_peer peer, uint32_t generation, bool up);

typedef struct pd_engine_options {
    const pd_carrier_ops *carrier;
    const pd_transfer_options *transfer;
    uint64_t incarnation;
    pd_engine_up_fn *up;
    void *ctx;
} pd_engine_options;

#define PD_ENGINE_GENERATION_MASK 0xfffffu /* 20 bits: fits a token beside peer and number */
#define PD_ENGINE_PEERS_MAX       4096

/* Starts the thread and, on it, the carrier; returns when it runs. options->transfer is read
 * during the call only. Errors: as the carrier's create, PD_E_NOMEM, PD_E_IO (no thread). */
PD_CHECKED pd_status pd_engine_create(const pd_engine_options *options, pd_engine **engine_out);
/* Stops the thread; closes what is open, within about a second. Events not taken are freed. */
void pd_engine_destroy(pd_engine *engine);

void *pd_engine_pool(const pd_engine *engine);
bool pd_engine_written_from_afar(const pd_engine *engine);
const void *pd_engine_address(const pd_engine *engine, size_t *bytes_out);

/* Loop thread. Copies the item; PD_E_OVERLOAD when the queue is full: nothing was taken. */
PD_CHECKED pd_status pd_engine_control_push(pd_engine *engine, const pd_engine_control *control);
/* The producer. */
PD_CHECKED pd_status pd_engine_op_push(pd_engine *engine, const pd_engine_op *op);
/* Loop thread: items are pd_engine_event pointers. */
pd_queue *pd_engine_events(const pd_engine *engine);

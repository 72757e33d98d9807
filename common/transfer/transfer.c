#include "common/transfer/transfer.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/engine.h"
#include "common/transfer/ucx_context.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

/* Larger than any group's block, small enough that a run does not wait long to leave. */
#define MERGED_BYTES_MAX (1u << 20)

#define ADDRESS_MAGIC   0x3146584bu /* "KXF1" */
#define ADDRESS_VERSION 7           /* of the carriers' messages too */

/* An address: this, then the carrier's part. */
typedef struct address_header {
    uint32_t magic;
    uint16_t version;
    uint16_t carrier_bytes;
    char backend[8]; /* NUL-padded */
    uint64_t incarnation;
    uint64_t pool_bytes;
    uint32_t pieces; /* of the pool */
    uint32_t pad;    /* 0 */
    uint64_t check;  /* of everything else, check itself as 0: damage must not reach the carrier */
} address_header;
_Static_assert(sizeof(address_header) == 48, "goes over the wire");

typedef enum slot_state { SLOT_FREE, SLOT_OPENING, SLOT_UP, SLOT_DOWN, SLOT_CLOSING } slot_state;

/* What all three threads know of a peer. What comes after generation is written before the peer
 * goes up and stays until the slot is free. */
typedef struct peer_slot {
    _Atomic uint32_t state; /* slot_state */
    _Atomic uint32_t generation;
    _Atomic uint64_t tag;
    _Atomic uint64_t pool_bytes;
    _Atomic uint32_t pieces;
    _Atomic uint64_t incarnation;
} peer_slot;

struct pd_transfer {
    pd_engine *engine;
    char backend[8];
    uint32_t peers_max;
    uint64_t pool_bytes;
    uint32_t pieces;
    peer_slot *peers;  /* [peers_max] */
    pd_engine_op held; /* the producer's: a put that may still grow; bytes 0: none */
    size_t address_bytes;
    unsigned char address[PD_TRANSFER_ADDRESS_BYTES_MAX];
};

static const pd_carrier_ops *const carriers[] = {&pd_carrier_ucx, &pd_carrier_nccl};

static const pd_carrier_ops *carrier_named(const char *name)
{
    for (size_t i = 0; i < sizeof carriers / sizeof *carriers; i++) {
        if (name != NULL && strcmp(carriers[i]->name, name) == 0)
            return carriers[i];
    }
    return NULL;
}

/* On the engine's thread. A slot that the owner is closing, or has given to another peer, stays as
 * it is. */
static void on_up(void *ctx, pd_peer peer, uint32_t generation, bool up)
{
    peer_slot *slot = &((pd_transfer *)ctx)->peers[peer];
    if (atomic_load(&slot->generation) != generation)
        return;
    uint32_t expected = up ? SLOT_OPENING : SLOT_UP;
    if (!atomic_compare_exchange_strong(&slot->state, &expected, up ? SLOT_UP : SLOT_DOWN) && !up) {
        expected = SLOT_OPENING;
        atomic_compare_exchange_strong(&slot->state, &expected, SLOT_DOWN);
    }
}

/* ---- the address ---- */

static uint64_t address_check(const unsigned char *bytes, size_t len)
{
    unsigned char copy[PD_TRANSFER_ADDRESS_BYTES_MAX];
    pd_assert(len <= sizeof copy && len >= sizeof(address_header));
    memcpy(copy, bytes, len);
    memset(copy + offsetof(address_header, check), 0, sizeof(uint64_t));
    return pd_hash64(copy, len, ADDRESS_MAGIC);
}

static pd_status address_write(pd_transfer *transfer, uint64_t incarnation)
{
    size_t carrier_bytes;
    const void *carrier_address = pd_engine_address(transfer->engine, &carrier_bytes);
    if (carrier_bytes > sizeof transfer->address - sizeof(address_header)) {
        pd_log_error("msg=\"transfer: the carrier's address is too long\" bytes=%zu",
                     carrier_bytes);
        return PD_E_UNSUPPORTED;
    }
    address_header header = {
        .magic = ADDRESS_MAGIC,
        .version = ADDRESS_VERSION,
        .carrier_bytes = (uint16_t)carrier_bytes,
        .incarnation = incarnation,
        .pool_bytes = transfer->pool_bytes,
        .pieces = transfer->pieces,
    };
    memcpy(header.backend, transfer->backend, sizeof header.backend);
    transfer->address_bytes = sizeof header + carrier_bytes;
    memcpy(transfer->address, &header, sizeof header);
    memcpy(transfer->address + sizeof header, carrier_address, carrier_bytes);
    header.check = address_check(transfer->address, transfer->address_bytes);
    memcpy(transfer->address, &header, sizeof header);
    return PD_OK;
}

static bool pieces_fit(uint64_t pool_bytes, uint32_t pieces)
{
    return pieces >= 1 && pieces <= PD_TRANSFER_PIECES_MAX && pool_bytes % pieces == 0;
}

static pd_status address_read(const pd_transfer *transfer, const void *address, size_t bytes,
                              address_header *header_out)
{
    address_header header;
    const char *why = NULL;
    if (address == NULL || bytes < sizeof header || bytes > PD_TRANSFER_ADDRESS_BYTES_MAX) {
        pd_log_error("msg=\"transfer: an address of impossible length\" bytes=%zu", bytes);
        return PD_E_INVALID;
    }
    memcpy(&header, address, sizeof header);
    if (header.magic != ADDRESS_MAGIC)
        why = "not an address";
    else if (header.version != ADDRESS_VERSION)
        why = "another version";
    else if (header.carrier_bytes != bytes - sizeof header)
        why = "cut off or too long";
    else if (header.check != address_check(address, bytes))
        why = "damaged";
    else if (memcmp(header.backend, transfer->backend, sizeof header.backend) != 0)
        why = "another backend";
    else if (header.pool_bytes == 0 || header.incarnation == 0)
        why = "no pool";
    else if (!pieces_fit(header.pool_bytes, header.pieces))
        why = "a pool in impossible pieces";
    if (why != NULL) {
        pd_log_error("msg=\"transfer: a peer's address cannot be used: %s\" bytes=%zu", why, bytes);
        return PD_E_INVALID;
    }
    *header_out = header;
    return PD_OK;
}

/* ---- life ---- */

static pd_status check_options(const pd_transfer_options *options,
                               const pd_carrier_ops **carrier_out)
{
    *carrier_out = carrier_named(options->backend);
    if (*carrier_out == NULL) {
        pd_log_error("msg=\"transfer: unknown backend\" backend=%s",
                     options->backend == NULL ? "(none)" : options->backend);
        return PD_E_INVALID;
    }
    const char *transport = options->transport == NULL ? "(none)" : options->transport;
    if (strcmp(transport, "shm") != 0 && strcmp(transport, "tcp") != 0 &&
        strcmp(transport, "rdma") != 0 && strcmp(transport, "auto") != 0) {
        pd_log_error("msg=\"transfer: transport must be shm, tcp, rdma or auto\" transport=%s",
                     transport);
        return PD_E_INVALID;
    }
    if (options->pool_bytes == 0 || options->peers_max == 0 ||
        options->peers_max > PD_ENGINE_PEERS_MAX) {
        pd_log_error("msg=\"transfer: pool_bytes or peers_max out of range\" pool_bytes=%llu "
                     "peers_max=%u",
                     (unsigned long long)options->pool_bytes, options->peers_max);
        return PD_E_INVALID;
    }
    return PD_OK;
}

static pd_status check_pieces(const pd_transfer_options *options)
{
    bool given = options->piece_memory != NULL;
    if (!pieces_fit(options->pool_bytes, options->pieces)) {
        pd_log_error("msg=\"transfer: a pool has 1 to %d pieces, all of one size\" pieces=%u "
                     "pool_bytes=%llu",
                     PD_TRANSFER_PIECES_MAX, options->pieces,
                     (unsigned long long)options->pool_bytes);
        return PD_E_INVALID;
    }
    if (!given && (options->pool_kind != PD_MEMORY_HOST || options->pieces > 1)) {
        pd_log_error("msg=\"transfer: a pool in a GPU's memory or in pieces must be given\" "
                     "kind=%s pieces=%u",
                     pd_memory_kind_name(options->pool_kind), options->pieces);
        return PD_E_INVALID;
    }
    for (uint32_t i = 0; given && i < options->pieces; i++) {
        if (options->piece_memory[i] == NULL ||
            (uintptr_t)options->piece_memory[i] % PD_CARRIER_PAGE != 0) {
            pd_log_error("msg=\"transfer: a given pool must be whole pages\" piece=%u memory=%p", i,
                         options->piece_memory[i]);
            return PD_E_INVALID;
        }
    }
    return PD_OK;
}

pd_status pd_transfer_reach(const char *backend, const char *transport, pd_memory_reach wanted,
                            pd_memory_reach *reach_out)
{
    bool ucx = strcmp(backend, "ucx") == 0;
    bool of_use = ucx && pd_ucx_knows_fabric() && strcmp(transport, "tcp") != 0;

    if (wanted == PD_REACH_FABRIC && !of_use) {
        pd_log_error("msg=\"transfer: memory with a fabric handle is of no use here: it takes "
                     "backend ucx, UCX 1.18 or later, and another transport than tcp\" backend=%s "
                     "transport=%s",
                     backend, transport);
        return PD_E_UNSUPPORTED;
    }
    /* one that stays within the host has no use for more than plain memory, which is the surer way
     */
    bool within = strcmp(transport, "shm") == 0;
    *reach_out = wanted == PD_REACH_AUTO && (!of_use || within) ? PD_REACH_HOST : wanted;
    return PD_OK;
}

uint64_t pd_transfer_pool_room(uint64_t bytes)
{
    return (bytes + PD_CARRIER_PAGE - 1) / PD_CARRIER_PAGE * PD_CARRIER_PAGE + PD_CARRIER_POOL_TAIL;
}

pd_status pd_transfer_create(const pd_transfer_options *given, pd_transfer **transfer_out)
{
    const pd_carrier_ops *carrier;
    pd_transfer_options own = *given;
    const pd_transfer_options *options = &own;
    if (given->pieces == 0) { /* one of many: see carrier.h */
        own.pieces = 1;
        own.piece_memory = given->pool == NULL ? NULL : &given->pool;
    }
    pd_status status = check_options(options, &carrier);
    if (status == PD_OK)
        status = check_pieces(options);
    if (status != PD_OK)
        return status;
    pd_transfer *transfer = pd_calloc(1, sizeof *transfer);
    if (transfer == NULL)
        return PD_E_NOMEM;
    strncpy(transfer->backend, carrier->name, sizeof transfer->backend - 1);
    transfer->peers_max = options->peers_max;
    transfer->pool_bytes = options->pool_bytes;
    transfer->pieces = options->pieces;
    transfer->peers = pd_calloc(options->peers_max, sizeof *transfer->peers);
    if (transfer->peers == NULL) {
        pd_free(transfer);
        return PD_E_NOMEM;
    }
    pd_engine_options engine_options = {
        .carrier = carrier,
        .transfer = options,
        .incarnation = pd_random_id(),
        .up = on_up,
        .ctx = transfer,
    };
    status = pd_engine_create(&engine_options, &transfer->engine);
    if (status == PD_OK)
        status = address_write(transfer, engine_options.incarnation);
    if (status != PD_OK) {
        pd_transfer_destroy(transfer);
        return status;
    }
    *transfer_out = transfer;
    return PD_OK;
}

void pd_transfer_destroy(pd_transfer *transfer)
{
    if (transfer == NULL)
        return;
    pd_engine_destroy(transfer->engine);
    pd_free(transfer->peers);
    pd_free(transfer);
}

void *pd_transfer_pool(const pd_transfer *transfer)
{
    return pd_engine_pool(transfer->engine);
}

const void *pd_transfer_address(const pd_transfer *transfer, size_t *bytes_out)
{
    *bytes_out = transfer->address_bytes;
    return transfer->address;
}

bool pd_transfer_written_from_afar(const pd_transfer *transfer)
{
    return pd_engine_written_from_afar(transfer->engine);
}

/* ---- peers ---- */

static pd_peer free_slot(const pd_transfer *transfer)
{
    pd_peer peer = 0;
    while (peer < transfer->peers_max && atomic_load(&transfer->peers[peer].state) != SLOT_FREE)
        peer++;
    return peer;
}

/* Everything the engine will need for the peer's events, so that none can fail to be told. */
static pd_status make_connect(pd_peer peer, uint32_t generation, uint64_t tag,
                              const unsigned char *carrier_address, const address_header *header,
                              pd_engine_control *control_out)
{
    static const pd_transfer_event_kind kinds[3] = {
        PD_TRANSFER_PEER_DOWN, /* becomes CONNECTED if all goes well */
        PD_TRANSFER_PEER_DOWN,
        PD_TRANSFER_CLOSED,
    };
    pd_engine_control control = {
        .kind = PD_ENGINE_CONNECT,
        .peer = peer,
        .generation = generation,
        .address = pd_malloc(header->carrier_bytes + 1u),
        .address_bytes = header->carrier_bytes,
        .peer_pool = {.bytes = header->pool_bytes, .pieces = header->pieces},
    };
    bool complete = control.address != NULL;
    for (int i = 0; i < 3; i++) {
        control.events[i] = pd_calloc(1, sizeof *control.events[i]);
        if (control.events[i] == NULL) {
            complete = false;
            continue;
        }
        control.events[i]->kind = kinds[i];
        control.events[i]->peer = peer;
        control.events[i]->tag = tag;
    }
    *control_out = control;
    if (!complete)
        return PD_E_NOMEM;
    memcpy(control.address, carrier_address, header->carrier_bytes);
    return PD_OK;
}

static void free_connect(pd_engine_control *control)
{
    pd_free(control->address);
    for (int i = 0; i < 3; i++)
        pd_free(control->events[i]);
}

pd_status pd_transfer_connect(pd_transfer *transfer, const void *address, size_t bytes,
                              uint64_t tag, pd_peer *peer_out)
{
    address_header header;
    pd_status status = address_read(transfer, address, bytes, &header);
    if (status != PD_OK)
        return status;
    pd_peer peer = free_slot(transfer);
    if (peer == transfer->peers_max)
        return PD_E_OVERLOAD;
    peer_slot *slot = &transfer->peers[peer];
    uint32_t generation = (atomic_load(&slot->generation) + 1) & PD_ENGINE_GENERATION_MASK;
    pd_engine_control control;
    status = make_connect(peer, generation, tag, (const unsigned char *)address + sizeof header,
                          &header, &control);
    if (status == PD_OK) {
        atomic_store(&slot->generation, generation);
        atomic_store(&slot->tag, tag);
        atomic_store(&slot->pool_bytes, header.pool_bytes);
        atomic_store(&slot->pieces, header.pieces);
        atomic_store(&slot->incarnation, header.incarnation);
        atomic_store(&slot->state, SLOT_OPENING);
        status = pd_engine_control_push(transfer->engine, &control);
    }
    if (status != PD_OK) {
        atomic_store(&slot->state, SLOT_FREE);
        free_connect(&control);
        return status;
    }
    *peer_out = peer;
    return PD_OK;
}

void pd_transfer_close(pd_transfer *transfer, pd_peer peer)
{
    pd_assert(peer < transfer->peers_max);
    peer_slot *slot = &transfer->peers[peer];
    uint32_t state = atomic_load(&slot->state);
    if (state == SLOT_FREE || state == SLOT_CLOSING)
        return;
    atomic_store(&slot->state, SLOT_CLOSING);
    pd_engine_control control = {
        .kind = PD_ENGINE_CLOSE,
        .peer = peer,
        .generation = atomic_load(&slot->generation),
    };
    /* the queue holds far more than all peers' connects and closes in a turn of the engine */
    while (pd_engine_control_push(transfer->engine, &control) != PD_OK)
        usleep(1000);
}

pd_status pd_transfer_fence(pd_transfer *transfer, uint64_t incarnation)
{
    pd_assert(incarnation != 0);
    pd_engine_event *fenced = pd_calloc(1, sizeof *fenced);
    if (fenced == NULL)
        return PD_E_NOMEM;
    fenced->kind = PD_TRANSFER_FENCED;
    fenced->tag = incarnation;
    pd_engine_control control = {
        .kind = PD_ENGINE_FENCE,
        .events = {fenced},
        .incarnation = incarnation,
    };
    pd_status status = pd_engine_control_push(transfer->engine, &control);
    if (status != PD_OK)
        pd_free(fenced);
    return status;
}

/* ---- the producer ---- */

/* bytes is not 0. */
static bool inside_one_piece(uint64_t offset, uint64_t bytes, uint64_t pool_bytes, uint32_t pieces)
{
    uint64_t piece_bytes = pool_bytes / pieces;
    return offset < pool_bytes && bytes <= piece_bytes - offset % piece_bytes;
}

static bool is_up(const pd_transfer *transfer, pd_peer peer, uint32_t generation)
{
    const peer_slot *slot = &transfer->peers[peer];
    return atomic_load(&slot->state) == SLOT_UP && atomic_load(&slot->generation) == generation;
}

/* Hands the held put on. PD_E_OVERLOAD: it stays held. */
static pd_status held_push(pd_transfer *transfer)
{
    if (transfer->held.bytes == 0)
        return PD_OK;
    /* its peer is gone: the notice after it is refused, so nobody is misled */
    if (is_up(transfer, transfer->held.peer, transfer->held.generation)) {
        pd_status status = pd_engine_op_push(transfer->engine, &transfer->held);
        if (status != PD_OK)
            return status;
    }
    transfer->held.bytes = 0;
    return PD_OK;
}

static bool held_grow(pd_transfer *transfer, const pd_engine_op *op, uint64_t peer_pool_bytes,
                      uint32_t peer_pieces)
{
    pd_engine_op *held = &transfer->held;
    uint64_t bytes = held->bytes + op->bytes;
    if (held->bytes == 0 || held->peer != op->peer || held->generation != op->generation ||
        held->source_offset + held->bytes != op->source_offset ||
        held->target_offset + held->bytes != op->target_offset || bytes > MERGED_BYTES_MAX ||
        !inside_one_piece(held->source_offset, bytes, transfer->pool_bytes, transfer->pieces) ||
        !inside_one_piece(held->target_offset, bytes, peer_pool_bytes, peer_pieces))
        return false;
    held->bytes = bytes;
    return true;
}

pd_status pd_transfer_put(pd_transfer *transfer, pd_peer peer, uint64_t ticket,
                          uint64_t source_offset, uint64_t target_offset, uint64_t bytes)
{
    pd_assert(peer < transfer->peers_max);
    const peer_slot *slot = &transfer->peers[peer];
    pd_engine_op op = {
        .kind = PD_ENGINE_PUT,
        .peer = peer,
        .generation = atomic_load(&slot->generation),
        .source_offset = source_offset,
        .target_offset = target_offset,
        .bytes = bytes,
    };
    if (!is_up(transfer, peer, op.generation))
        return PD_E_PEER;
    uint64_t peer_pool_bytes = atomic_load(&slot->pool_bytes);
    uint32_t peer_pieces = atomic_load(&slot->pieces);
    if (bytes == 0 ||
        !inside_one_piece(source_offset, bytes, transfer->pool_bytes, transfer->pieces) ||
        !inside_one_piece(target_offset, bytes, peer_pool_bytes, peer_pieces)) {
        pd_log_error("msg=\"transfer: a put outside the pools, or across pieces of one\" "
                     "ticket=%llu source=%llu target=%llu bytes=%llu pool=%llu pieces=%u "
                     "peer_pool=%llu peer_pieces=%u",
                     (unsigned long long)ticket, (unsigned long long)source_offset,
                     (unsigned long long)target_offset, (unsigned long long)bytes,
                     (unsigned long long)transfer->pool_bytes, transfer->pieces,
                     (unsigned long long)peer_pool_bytes, peer_pieces);
        return PD_E_INVALID;
    }
    if (held_grow(transfer, &op, peer_pool_bytes, peer_pieces))
        return PD_OK;
    pd_status status = held_push(transfer);
    if (status != PD_OK)
        return status;
    transfer->held = op;
    return PD_OK;
}

static pd_engine_batch *make_batch(const peer_slot *slot, const void *bytes, size_t len)
{
    pd_engine_batch *batch = pd_calloc(1, sizeof *batch + sizeof(pd_engine_message) + len);
    pd_engine_event *sent = pd_calloc(1, sizeof *sent);
    if (batch == NULL || sent == NULL) {
        pd_free(batch);
        pd_free(sent);
        return NULL;
    }
    pd_engine_message message = {
        .magic = PD_ENGINE_MESSAGE_MAGIC,
        .len = (uint32_t)len,
        .target_incarnation = atomic_load(&slot->incarnation),
    };
    sent->kind = PD_TRANSFER_SENT;
    batch->sent = sent;
    batch->len = sizeof message + len;
    memcpy(batch->message, &message, sizeof message);
    if (len != 0)
        memcpy(batch->message + sizeof message, bytes, len);
    return batch;
}

pd_status pd_transfer_notice(pd_transfer *transfer, pd_peer peer, uint64_t ticket,
                             const void *bytes, size_t len)
{
    pd_assert(peer < transfer->peers_max);
    if (len > PD_TRANSFER_NOTICE_BYTES_MAX)
        return PD_E_TOO_LARGE;
    const peer_slot *slot = &transfer->peers[peer];
    uint32_t generation = atomic_load(&slot->generation);
    if (!is_up(transfer, peer, generation))
        return PD_E_PEER;
    pd_status status = held_push(transfer);
    if (status != PD_OK)
        return status;
    pd_engine_batch *batch = make_batch(slot, bytes, len);
    if (batch == NULL)
        return PD_E_NOMEM;
    batch->sent->peer = peer;
    batch->sent->tag = atomic_load(&slot->tag);
    batch->sent->ticket = ticket;
    pd_engine_op op = {
        .kind = PD_ENGINE_NOTICE, .peer = peer, .generation = generation, .batch = batch};
    status = pd_engine_op_push(transfer->engine, &op);
    if (status != PD_OK) {
        pd_free(batch->sent);
        pd_free(batch);
    }
    return status;
}

/* ---- events ---- */

int pd_transfer_fd(const pd_transfer *transfer)
{
    return pd_queue_fd(pd_engine_events(transfer->engine));
}

pd_status pd_transfer_poll(pd_transfer *transfer, pd_transfer_event *event_out)
{
    pd_queue *events = pd_engine_events(transfer->engine);
    pd_engine_event *event;
    if (pd_queue_pop(events, &event) != PD_OK) {
        /* the fd must be readable for what comes after this look, and for nothing else */
        pd_queue_drain_fd(events);
        if (pd_queue_pop(events, &event) != PD_OK)
            return PD_E_AGAIN;
    }
    event_out->kind = event->kind;
    event_out->status = event->status;
    event_out->peer = event->peer;
    event_out->tag = event->tag;
    event_out->ticket = event->ticket;
    event_out->bytes = event->bytes;
    event_out->wire_ns = event->wire_ns;
    event_out->post_ns = event->post_ns;
    event_out->landed_ns = event->landed_ns;
    memcpy(event_out->lane, event->lane, sizeof event_out->lane);
    event_out->notice_len = event->notice_len;
    memcpy(event_out->notice, event->notice, event->notice_len);
    if (event->kind == PD_TRANSFER_CLOSED)
        atomic_store(&transfer->peers[event->peer].state, SLOT_FREE);
    pd_free(event);
    return PD_OK;
}

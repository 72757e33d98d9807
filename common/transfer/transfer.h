#pragma once

/* common/transfer/transfer.h - KV blocks from one worker's pool into another's, whoever carries
 * them.
 *
 * A transfer endpoint (pd_transfer) has the memory that others may write: the KV pool is allocated
 * by it, since who carries blocks decides which memory is fast, or given to it, where it must be a
 * device's. It runs on a thread of its own,
 * which alone touches the carrier (UCX, NCCL). The caller's thread and it talk through bounded
 * queues: every function below is for the owner's loop thread. Results come from pd_transfer_poll,
 * announced by pd_transfer_fd.
 *
 * A put names a peer, a run of source bytes in the own pool and where it goes in the peer's. After
 * its puts a caller sends a notice; it is delivered at the peer only after every put posted before
 * it to that peer has landed, and is not sent at all when one of them failed. So a notice that
 * arrives means that its bytes are there. Notices may overtake each other. */

#include "common/base/memory_kind.h"
#include "common/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct pd_transfer pd_transfer;

#define PD_TRANSFER_NOTICE_BYTES_MAX  8192
#define PD_TRANSFER_ADDRESS_BYTES_MAX 4096
#define PD_TRANSFER_PIECES_MAX        8

typedef struct pd_transfer_options {
    const char *backend; /* "ucx"; "nccl": between GPUs' pools, messages all the same by UCX */
    /* "shm"; "tcp"; "rdma": shm within a host, else NICs that put into memory; "auto": shm within a
     * host, else tcp. Of pools in GPUs' memory shm means cuda_ipc, which reaches other hosts too
     * where one NVLink fabric joins them, and tcp goes through host memory. */
    const char *transport;
    const char *device; /* for tcp, such as "eth0"; NULL: lo. For rdma, such as "mlx5_0:1"; NULL or
                           lo: the NICs nearest to the memory */
    uint64_t pool_bytes;
    /* NULL: the transfer allocates it; else pd_transfer_pool_room(pool_bytes) bytes of the
     * caller's, page-aligned, which outlive the transfer. Host memory from outside should be one
     * shared mapping of a file that stays open (memfd_create): peers map it. Other memory they
     * cannot: within a host their puts go as messages through one queue, which is slower, and which
     * a sender that is killed in the wrong moment leaves stuck. */
    void *pool;
    /* A given pool that is no one piece of memory, such as a part in each GPU's. 0: one, at pool.
     * Else pool is not looked at, and offsets from n * (pool_bytes / pieces) on lie at
     * piece_memory[n], which has pd_transfer_pool_room(pool_bytes / pieces) bytes and is otherwise
     * as said of pool. pool_bytes is a multiple of pieces. Peers may have other numbers of them. */
    uint32_t pieces;
    void *const *piece_memory; /* [pieces], copied */
    pd_memory_kind pool_kind;  /* of all pieces: peers' pools must be of the same kind */
    uint32_t peers_max;
    uint32_t puts_in_flight_max; /* a peer; 0: 128; rounded up to a power of two, at most 4096. No
                                    more than 8 MiB are in flight to a peer in any case */
    uint32_t stall_ms;           /* a peer to which nothing moves for so long is down; 0: 5000 */
    uint64_t incarnation;        /* ours, by which others fence us off; 0: nobody can */
    uint32_t comms_max;          /* nccl: communicators kept at once, some 50 to 100 MiB of the
                                    GPU's memory each; 0: 16 */
} pd_transfer_options;

/* What a pool from outside must hold: some bytes behind it are the transfer's own. In pieces, each
 * of them has its own: bytes are a piece's then. */
uint64_t pd_transfer_pool_room(uint64_t bytes);

/* How a GPU's pool should be made for that backend and transport, before there is a transfer:
 * memory with a fabric handle is of use only to a UCX that knows it, and where blocks may leave the
 * host. wanted AUTO becomes AUTO or HOST. PD_E_UNSUPPORTED, logged: FABRIC is wanted, and of none.
 */
PD_CHECKED pd_status pd_transfer_reach(const char *backend, const char *transport,
                                       pd_memory_reach wanted, pd_memory_reach *reach_out);

/* Errors: PD_E_NOMEM (no memory for the pool, logged with its size), PD_E_UNSUPPORTED (also: memory
 * of a GPU, where the carrier's library has no support for it or the transport cannot reach it),
 * PD_E_IO, PD_E_INVALID (unknown backend or transport, no pool, a pool or piece that is not
 * page-aligned, more than PD_TRANSFER_PIECES_MAX pieces or pieces of different sizes, peers_max 0
 * or over 4096).
 */
PD_CHECKED pd_status pd_transfer_create(const pd_transfer_options *options,
                                        pd_transfer **transfer_out);
/* Ends the thread and the pool. */
void pd_transfer_destroy(pd_transfer *transfer);

/* The pool: pool_bytes, page-aligned; zeroed, unless it was given. In pieces: the first of them. */
void *pd_transfer_pool(const pd_transfer *transfer);
/* What a peer needs to write here: opaque bytes, for pd_transfer_connect on the other side. */
const void *pd_transfer_address(const pd_transfer *transfer, size_t *bytes_out);

typedef uint32_t pd_peer; /* index, 0 .. peers_max - 1; chosen by the transfer */

/* Starts connecting to a peer by its address (same backend, checked). tag is the caller's and
 * comes back in events. The event PD_TRANSFER_CONNECTED or PD_TRANSFER_PEER_DOWN follows.
 * Errors: PD_E_INVALID (not an address), PD_E_OVERLOAD (peers_max). */
PD_CHECKED pd_status pd_transfer_connect(pd_transfer *transfer, const void *address, size_t bytes,
                                         uint64_t tag, pd_peer *peer_out);
/* Force-closes; puts and notices under way are failed with PD_E_CANCELLED, whether or not their
 * carrier ever completes them. The index is free for reuse after the event PD_TRANSFER_CLOSED
 * (status PD_E_TIMEOUT: the carrier did not end the connection, it was abandoned); no thread may
 * use it for the old peer after that. Until then a failed put may still write at the peer. */
void pd_transfer_close(pd_transfer *transfer, pd_peer peer);

/* Adds a put of bytes from the own pool to the peer's pool. ticket groups puts and the notice after
 * them. A put that goes on where the last one to the same peer ended, in both pools and in the same
 * piece of each, becomes one with it. PD_E_OVERLOAD: the queue is full, try after the next poll;
 * PD_E_PEER: not connected; PD_E_INVALID: not inside one piece of the own pool and one of the
 * peer's (logged), nothing was taken. */
PD_CHECKED pd_status pd_transfer_put(pd_transfer *transfer, pd_peer peer, uint64_t ticket,
                                     uint64_t source_offset, uint64_t target_offset,
                                     uint64_t bytes);
/* After the ticket's puts so far: notice bytes for the peer. The event PD_TRANSFER_SENT with the
 * ticket tells when it is safe to reuse the source of every put before it, or that they failed.
 * One PD_TRANSFER_SENT a notice. A ticket may have several notices. SENT does not tell that the
 * peer is alive: into shared memory one can write after its reader's death. PD_E_TOO_LARGE: len;
 * PD_E_NOMEM, PD_E_OVERLOAD, PD_E_PEER: nothing was taken, and no SENT follows. */
PD_CHECKED pd_status pd_transfer_notice(pd_transfer *transfer, pd_peer peer, uint64_t ticket,
                                        const void *bytes, size_t len);

/* Nothing that a sender with that incarnation (its options') wrote lands here any more, once the
 * event PD_TRANSFER_FENCED with the incarnation as its tag has come. For a sender that is dead, or
 * that nobody believes any more: over tcp its bytes may lie in a socket long after its end. What a
 * living process writes into memory that it has mapped is not held up: only its death ends that.
 * The 256 latest are remembered; the same one again is fine. Errors: PD_E_OVERLOAD, PD_E_NOMEM: no
 * event follows, try again. */
PD_CHECKED pd_status pd_transfer_fence(pd_transfer *transfer, uint64_t incarnation);

/* May a sender that lives on another host write here without this process taking part, by a NIC or
 * over a fabric? Then a fence does not hold it up, as it does over messages: that somebody took it
 * for dead is no proof that its blocks are free. Never changes. */
bool pd_transfer_written_from_afar(const pd_transfer *transfer);

typedef enum pd_transfer_event_kind {
    PD_TRANSFER_CONNECTED, /* peer, tag, lane: what carries the bytes, such as "posix+cma" */
    PD_TRANSFER_PEER_DOWN, /* peer, tag, status: connection failed or broke; close it */
    PD_TRANSFER_CLOSED,    /* peer, tag */
    PD_TRANSFER_SENT,      /* peer, tag, ticket, status, bytes, wire_ns */
    PD_TRANSFER_NOTICE,    /* notice, notice_len: from a peer */
    PD_TRANSFER_FENCED,    /* tag: the incarnation; notices polled before it had all their bytes */
} pd_transfer_event_kind;

typedef struct pd_transfer_event {
    pd_transfer_event_kind kind;
    pd_status status;
    pd_peer peer;
    uint64_t tag;
    uint64_t ticket;
    uint64_t bytes;     /* put to the peer since the notice before */
    uint64_t wire_ns;   /* first put posted to all landed */
    uint64_t post_ns;   /* of that, spent posting: starting puts that then went on by themselves */
    uint64_t landed_ns; /* pd_clock_now_ns when all had landed */
    char lane[64];
    size_t notice_len;
    unsigned char notice[PD_TRANSFER_NOTICE_BYTES_MAX];
} pd_transfer_event;

int pd_transfer_fd(const pd_transfer *transfer);
/* PD_E_AGAIN when there is none. */
PD_CHECKED pd_status pd_transfer_poll(pd_transfer *transfer, pd_transfer_event *event_out);

#pragma once

/* tests/unit/transfer/two_processes.h - a sender and receivers that are processes of their own,
 * which say what lies in their pools at the moment a notice arrives. For the tests of transfers. */

#include "common/transfer/transfer.h"

#include <sys/types.h>

enum {
    POOL_BYTES = 8 << 20,
    PIECE_BYTES = 60 << 10,
    PIECES = POOL_BYTES / PIECE_BYTES,
    EVENTS_KEPT = 5000, /* more than wait for a loop that takes none */
};

/* What a notice says: these pieces of your pool have these hashes now. */
typedef struct claim {
    uint64_t offset, bytes, hash;
} claim;

/* The receiver's answer to a notice. */
typedef struct answer {
    uint32_t claims, wrong;
} answer;

typedef struct receiver {
    pid_t pid;
    int in, out; /* ours: what we read, what we write */
    size_t address_bytes;
    unsigned char address[PD_TRANSFER_ADDRESS_BYTES_MAX];
    uint32_t pool_pieces; /* 0: one */
} receiver;

/* Large: not for the stack. What next_event and expect took last. */
extern pd_transfer_event event;

/* For main: does what a process started by process_start is for, and is its status; -1: none. */
int process_role(int argc, char **argv);

/* Memory for a pool that no transfer made; shared: that peers can map. NULL: none. */
void *outside_memory(bool shared);
/* Reads a test's name for a transport: those of the options, "shared" (shm between pools that their
 * owners gave), "nccl" and "nccl-tcp" (that carrier, its messages by "auto" or "tcp", between pools
 * that pass for a GPU's). "shared:4", "shm:4" and "tcp:4": the pool is given in 4 pieces that lie
 * apart, mappings of files or plain memory; of one such transfer in a process. "gpu:4": over tcp,
 * each on a device of its own, with the stand-in for the driver. */
void read_transport(pd_transfer_options *options);
const char *transport_of(void **state);
/* Where an offset of the transfer's pool lies, in pieces too. */
unsigned char *pool_at(const pd_transfer *transfer, uint64_t offset);

receiver process_start(const char *role, const char *transport);
receiver receiver_start_as(const char *role, const char *transport);
receiver receiver_start(const char *transport);
void receiver_end(receiver *r);
void receiver_kill(receiver *r);
void read_all(int fd, void *bytes, size_t len);

pd_transfer *sender_create(const char *transport, uint32_t stall_ms);
/* False: none in wait_ms. */
bool next_event(pd_transfer *transfer, int wait_ms);
void expect(pd_transfer *transfer, pd_transfer_event_kind kind, pd_status status);
pd_peer connect_to(pd_transfer *transfer, const receiver *r, uint64_t tag);
void close_peer(pd_transfer *transfer, pd_peer peer);
/* Puts pieces of fresh content to places of our choosing and says so; the receiver must agree. */
void round_trip(pd_transfer *transfer, pd_peer peer, receiver *r, uint64_t *random,
                uint32_t pieces);
/* Fences the senders off; notices of theirs may come before. */
void fence_all(pd_transfer *transfer, const receiver *senders, uint32_t count);

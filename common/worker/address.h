#pragma once

/* common/worker/address.h - what a prefill worker must know to write into a decode worker's pool:
 * how many blocks and tensor-parallel ranks the pool has (offsets depend on them), its layout, and
 * the transfer's address.
 *
 * The bytes travel in pd_msg_hello and pd_msg_peer_up and mean nothing to a router. Pure. */

#include "common/transfer/transfer.h"

typedef struct pd_worker_address {
    uint32_t blocks, ranks;
    uint64_t layout_fingerprint;
    const void *transfer; /* borrowed */
    size_t transfer_len;  /* 1 .. PD_TRANSFER_ADDRESS_BYTES_MAX */
} pd_worker_address;

#define PD_WORKER_ADDRESS_HEAD_BYTES 20
#define PD_WORKER_ADDRESS_BYTES_MAX  (PD_WORKER_ADDRESS_HEAD_BYTES + PD_TRANSFER_ADDRESS_BYTES_MAX)

/* Writes at most PD_WORKER_ADDRESS_BYTES_MAX bytes; returns how many. */
size_t pd_worker_address_pack(const pd_worker_address *address, unsigned char *bytes);
/* Points into bytes. PD_E_INVALID: not such an address. */
PD_CHECKED pd_status pd_worker_address_unpack(const void *bytes, size_t len,
                                              pd_worker_address *address_out);

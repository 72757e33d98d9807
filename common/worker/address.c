#include "common/worker/address.h"

#include <string.h>

#define ADDRESS_MAGIC 0x6b764132u /* "kvA2" */

static void put(unsigned char *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t take(const unsigned char *at, int bytes)
{
    uint64_t value = 0;

    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

size_t pd_worker_address_pack(const pd_worker_address *address, unsigned char *bytes)
{
    pd_assert(address->transfer_len > 0 && address->transfer_len <= PD_TRANSFER_ADDRESS_BYTES_MAX);
    put(bytes, ADDRESS_MAGIC, 4);
    put(bytes + 4, address->blocks, 4);
    put(bytes + 8, address->layout_fingerprint, 8);
    put(bytes + 16, address->ranks, 4);
    memcpy(bytes + PD_WORKER_ADDRESS_HEAD_BYTES, address->transfer, address->transfer_len);
    return PD_WORKER_ADDRESS_HEAD_BYTES + address->transfer_len;
}

pd_status pd_worker_address_unpack(const void *bytes, size_t len, pd_worker_address *address_out)
{
    const unsigned char *at = bytes;

    if (len <= PD_WORKER_ADDRESS_HEAD_BYTES || len > PD_WORKER_ADDRESS_BYTES_MAX ||
        take(at, 4) != ADDRESS_MAGIC || take(at + 4, 4) == 0 || take(at + 16, 4) == 0)
        return PD_E_INVALID;
    *address_out = (pd_worker_address){
        .blocks = (uint32_t)take(at + 4, 4),
        .ranks = (uint32_t)take(at + 16, 4),
        .layout_fingerprint = take(at + 8, 8),
        .transfer = at + PD_WORKER_ADDRESS_HEAD_BYTES,
        .transfer_len = len - PD_WORKER_ADDRESS_HEAD_BYTES,
    };
    return PD_OK;
}

#include "common/wire/notice.h"
#include "common/transfer/transfer.h"

#include <string.h>

/* magic, version, kind, then the fields in the order of the struct, then the seals. */
#define NOTICE_MAGIC 0x6b764e31u /* "kvN1" */
enum { HEAD_BYTES = 80 };
_Static_assert(HEAD_BYTES + 8 * PD_NOTICE_SEALS_MAX <= PD_TRANSFER_NOTICE_BYTES_MAX,
               "a full notice fits what a transfer carries");

static unsigned char *put(unsigned char *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (unsigned char)(value >> (8 * i));
    return at + bytes;
}

static uint64_t take(const unsigned char **at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)(*at)[i] << (8 * i);
    *at += bytes;
    return value;
}

size_t pd_notice_pack(const pd_notice *notice, unsigned char *bytes)
{
    uint64_t seals = (uint64_t)notice->groups * notice->count * notice->slices;
    pd_assert(seals <= PD_NOTICE_SEALS_MAX);
    unsigned char *at = bytes;
    at = put(at, NOTICE_MAGIC, 4);
    at = put(at, PD_WIRE_VERSION, 4);
    at = put(at, notice->kind, 4);
    at = put(at, notice->key.router, 8);
    at = put(at, notice->key.number, 8);
    at = put(at, notice->key.epoch, 4);
    at = put(at, notice->sender, 8);
    at = put(at, notice->receiver, 8);
    at = put(at, notice->group, 4);
    at = put(at, notice->first_block, 4);
    at = put(at, notice->count, 4);
    at = put(at, notice->valid_tokens, 4);
    at = put(at, notice->seals != NULL, 4);
    at = put(at, notice->groups, 4);
    at = put(at, notice->slices, 4);
    at = put(at, notice->again, 4);
    pd_assert(at - bytes == HEAD_BYTES);
    for (uint32_t i = 0; notice->seals != NULL && i < seals; i++)
        at = put(at, notice->seals[i], 8);
    return (size_t)(at - bytes);
}

pd_status pd_notice_unpack(const unsigned char *bytes, size_t len, uint64_t *seals,
                           pd_notice *notice_out)
{
    const unsigned char *at = bytes;
    pd_notice notice = {0};

    if (len < HEAD_BYTES || take(&at, 4) != NOTICE_MAGIC || take(&at, 4) != PD_WIRE_VERSION)
        return PD_E_INVALID;
    uint64_t kind = take(&at, 4);
    notice.key.router = take(&at, 8);
    notice.key.number = take(&at, 8);
    notice.key.epoch = (uint32_t)take(&at, 4);
    notice.sender = take(&at, 8);
    notice.receiver = take(&at, 8);
    notice.group = (uint32_t)take(&at, 4);
    notice.first_block = (uint32_t)take(&at, 4);
    notice.count = (uint32_t)take(&at, 4);
    notice.valid_tokens = (uint32_t)take(&at, 4);
    uint64_t sealed = take(&at, 4);
    notice.groups = (uint32_t)take(&at, 4);
    notice.slices = (uint32_t)take(&at, 4);
    notice.again = (uint32_t)take(&at, 4);
    bool blocks = kind == PD_NOTICE_BLOCKS;
    uint64_t count = 0;
    if (notice.count <= PD_NOTICE_SEALS_MAX && notice.groups <= PD_NOTICE_SEALS_MAX &&
        notice.slices <= PD_NOTICE_SEALS_MAX)
        count = (uint64_t)notice.count * notice.groups * notice.slices;
    if (kind < PD_NOTICE_BLOCKS || kind > PD_NOTICE_WRITTEN || sealed > 1 ||
        (blocks && (count == 0 || count > PD_NOTICE_SEALS_MAX)) || (!blocks && sealed != 0) ||
        len != HEAD_BYTES + (sealed != 0 ? 8 * (size_t)count : 0))
        return PD_E_INVALID;
    notice.kind = (pd_notice_kind)kind;
    for (uint32_t i = 0; sealed != 0 && i < count; i++)
        seals[i] = take(&at, 8);
    notice.seals = sealed != 0 ? seals : NULL;
    *notice_out = notice;
    return PD_OK;
}

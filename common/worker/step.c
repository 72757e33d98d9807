#include "common/worker/step.h"

uint32_t pd_ship_notices(uint32_t count, uint32_t groups)
{
    return (count + PD_NOTICE_BLOCKS_MAX - 1) / PD_NOTICE_BLOCKS_MAX * groups;
}

uint64_t pd_ship_seal_request(const pd_request_key *key)
{
    return pd_mix64(key->router) ^ key->number;
}

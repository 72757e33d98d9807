#include "common/worker/step.h"

uint64_t pd_ship_seal_request(const pd_request_key *key)
{
    return pd_mix64(key->router) ^ key->number;
}

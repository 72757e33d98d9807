#include "decode-worker/senders.h"

#include "common/base/log.h"

#include <stdio.h>

bool decode_senders_is_dead(const decode_senders *senders, uint64_t incarnation)
{
    for (uint32_t i = 0; i < DECODE_SENDERS_DEAD_MAX; i++) {
        if (incarnation != 0 && senders->dead[i].incarnation == incarnation)
            return true;
    }
    return false;
}

bool decode_senders_is_ended(const decode_senders *senders, uint64_t incarnation)
{
    for (uint32_t i = 0; i < DECODE_SENDERS_DEAD_MAX; i++) {
        if (incarnation != 0 && senders->dead[i].incarnation == incarnation)
            return senders->dead[i].ended;
    }
    return false;
}

void decode_senders_refuse(decode_senders *senders, uint64_t incarnation, bool ended)
{
    if (incarnation == 0)
        return;
    if (!decode_senders_is_dead(senders, incarnation)) {
        senders->dead[senders->next].incarnation = incarnation;
        senders->dead[senders->next].ended = false;
        senders->next = (senders->next + 1) % DECODE_SENDERS_DEAD_MAX;
    }
    for (uint32_t i = 0; ended && i < DECODE_SENDERS_DEAD_MAX; i++)
        senders->dead[i].ended |= senders->dead[i].incarnation == incarnation;
}

void decode_senders_welcome(decode_senders *senders, const pd_msg_peer_up *peer)
{
    for (uint32_t i = 0; i < DECODE_SENDERS_DEAD_MAX; i++) {
        if (peer->incarnation == 0 || senders->dead[i].incarnation != peer->incarnation)
            continue;
        if (senders->dead[i].ended) {
            pd_log_warn("msg=\"a peer is announced whose process has ended\" peer=%s", peer->name);
            continue;
        }
        senders->dead[i].incarnation = 0;
        pd_log_info("msg=\"a peer that was given up is back\" peer=%s", peer->name);
    }
}

void decode_senders_say_fenced(const decode_senders *senders, const pd_role_sink *sink,
                               uint64_t router, const char *name, uint64_t incarnation)
{
    pd_message message = {.kind = PD_MSG_LINK, .link = {.peer_incarnation = incarnation}};

    if (!decode_senders_is_ended(senders, incarnation))
        return;
    snprintf(message.link.peer, sizeof message.link.peer, "%s", name);
    snprintf(message.link.reason, sizeof message.link.reason, "it was given up and is fenced off");
    sink->send(sink->ctx, router, &message);
}

#include "common/worker/writers.h"

#include "common/base/log.h"

#include <stdio.h>

bool pd_writers_is_dead(const pd_writers *writers, uint64_t incarnation)
{
    for (uint32_t i = 0; i < PD_WRITERS_DEAD_MAX; i++) {
        if (incarnation != 0 && writers->dead[i].incarnation == incarnation)
            return true;
    }
    return false;
}

bool pd_writers_is_ended(const pd_writers *writers, uint64_t incarnation)
{
    for (uint32_t i = 0; i < PD_WRITERS_DEAD_MAX; i++) {
        if (incarnation != 0 && writers->dead[i].incarnation == incarnation)
            return writers->dead[i].ended;
    }
    return false;
}

void pd_writers_refuse(pd_writers *writers, uint64_t incarnation, bool ended)
{
    if (incarnation == 0)
        return;
    if (!pd_writers_is_dead(writers, incarnation)) {
        writers->dead[writers->next].incarnation = incarnation;
        writers->dead[writers->next].ended = false;
        writers->next = (writers->next + 1) % PD_WRITERS_DEAD_MAX;
    }
    for (uint32_t i = 0; ended && i < PD_WRITERS_DEAD_MAX; i++)
        writers->dead[i].ended |= writers->dead[i].incarnation == incarnation;
}

void pd_writers_welcome(pd_writers *writers, const pd_msg_peer_up *peer)
{
    for (uint32_t i = 0; i < PD_WRITERS_DEAD_MAX; i++) {
        if (peer->incarnation == 0 || writers->dead[i].incarnation != peer->incarnation)
            continue;
        if (writers->dead[i].ended) {
            pd_log_warn("msg=\"a peer is announced whose process has ended\" peer=%s", peer->name);
            continue;
        }
        writers->dead[i].incarnation = 0;
        pd_log_info("msg=\"a peer that was given up is back\" peer=%s", peer->name);
    }
}

void pd_writers_say_fenced(const pd_writers *writers, const pd_role_sink *sink, uint64_t router,
                           const char *name, uint64_t incarnation)
{
    pd_message message = {.kind = PD_MSG_LINK, .link = {.peer_incarnation = incarnation}};

    if (!pd_writers_is_ended(writers, incarnation))
        return;
    snprintf(message.link.peer, sizeof message.link.peer, "%s", name);
    snprintf(message.link.reason, sizeof message.link.reason, "it was given up and is fenced off");
    sink->send(sink->ctx, router, &message);
}

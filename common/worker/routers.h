#pragma once

/* common/worker/routers.h - the routers that a worker serves, and which of them still live.
 *
 * Any message is a sign of life. A router that was silent for its lost_after is lost: what it owned
 * is dropped, and nothing of it is taken until it welcomes the worker anew, so that a request which
 * was under way while it was silent is not believed afterwards; nor is a welcome to an earlier
 * session. A router is known from its first
 * message on. While this process stood still its messages waited: that time counts for nobody.
 * Pure. One thread. */

#include "common/wire/messages.h"

#define PD_ROUTERS_MAX 64

typedef struct pd_router_seen {
    uint64_t router; /* incarnation; 0: unused */
    uint64_t seen_ns;
    uint64_t lost_after_ns;
    bool lost;
    uint32_t session;    /* ours with it (pd_msg_hello): one higher each time that it is lost */
    uint32_t said_count; /* the owner's: how often others were told that it is lost */
    uint64_t said_ns;    /* and when */
} pd_router_seen;

typedef struct pd_routers {
    pd_router_seen entries[PD_ROUTERS_MAX];
    uint64_t lost_after_ns; /* of a router that has not said its own */
    uint64_t ticked_ns;     /* the owner's last tick */
} pd_routers;

void pd_routers_init(pd_routers *routers, uint64_t lost_after_ns);

/* A message came. True when it may be believed: the router is not lost, or this is its welcome.
 * False also when PD_ROUTERS_MAX live ones are known already. */
bool pd_routers_on_message(pd_routers *routers, uint64_t router, const pd_message *message,
                           uint64_t now_ns);
/* How long this process stood still before this tick, which is asked at every one: 0 when the last
 * one (*ticked_ns, 0: none) is as near as ticks are. */
uint64_t pd_own_pause_ns(uint64_t *ticked_ns, uint64_t now_ns);
/* At each tick, before the next question: returns pd_own_pause_ns, by which every router is taken
 * to have been heard later. */
uint64_t pd_routers_take_time(pd_routers *routers, uint64_t now_ns);
/* A router that has just become lost, one a call; 0 when there is none (more). */
uint64_t pd_routers_next_lost(pd_routers *routers, uint64_t now_ns);
/* True when known and not lost. */
bool pd_routers_live(const pd_routers *routers, uint64_t router);

#pragma once

/* common/worker/writers.h - who may not write here any more: incarnations that a router gave up or
 * whose process has ended. Nothing is leased for them. The latest are remembered. Pure; one thread.
 */

#include "common/worker/role.h"

enum { PD_WRITERS_DEAD_MAX = 1024 };

typedef struct pd_writers {
    struct {
        uint64_t incarnation; /* 0: unused */
        bool ended;           /* no process any more: no router can bring it back */
    } dead[PD_WRITERS_DEAD_MAX];
    uint32_t next;
} pd_writers;

/* Nothing that it writes can land here any more, whoever counts on it. */
bool pd_writers_is_ended(const pd_writers *writers, uint64_t incarnation);
bool pd_writers_is_dead(const pd_writers *writers, uint64_t incarnation);
void pd_writers_refuse(pd_writers *writers, uint64_t incarnation, bool ended);
/* A router gave it up and another one, or the same anew, counts on it: it may write again. */
void pd_writers_welcome(pd_writers *writers, const pd_msg_peer_up *peer);
/* A router that knew it only later may count on a sender that was given up and fenced off here, and
 * that lives. Nothing of it lands any more: the router hears that it has to come anew. */
void pd_writers_say_fenced(const pd_writers *writers, const pd_role_sink *sink, uint64_t router,
                           const char *name, uint64_t incarnation);

#pragma once

/* decode-worker/senders.h - who may not write here any more: incarnations that a router gave up or
 * whose process has ended. Nothing is leased for them. The latest are remembered. Pure; one thread.
 */

#include "common/worker/role.h"

enum { DECODE_SENDERS_DEAD_MAX = 64 };

typedef struct decode_senders {
    struct {
        uint64_t incarnation; /* 0: unused */
        bool ended;           /* no process any more: no router can bring it back */
    } dead[DECODE_SENDERS_DEAD_MAX];
    uint32_t next;
} decode_senders;

/* Nothing that it writes can land here any more, whoever counts on it. */
bool decode_senders_is_ended(const decode_senders *senders, uint64_t incarnation);
bool decode_senders_is_dead(const decode_senders *senders, uint64_t incarnation);
void decode_senders_refuse(decode_senders *senders, uint64_t incarnation, bool ended);
/* A router gave it up and another one, or the same anew, counts on it: it may write again. */
void decode_senders_welcome(decode_senders *senders, const pd_msg_peer_up *peer);
/* A router that knew it only later may count on a sender that was given up and fenced off here, and
 * that lives. Nothing of it lands any more: the router hears that it has to come anew. */
void decode_senders_say_fenced(const decode_senders *senders, const pd_role_sink *sink,
                               uint64_t router, const char *name, uint64_t incarnation);

#pragma once

/* common/transfer/senders.h - whom a receiver still believes. Inside common/transfer only.
 *
 * What a process sent before its end, or over a link that was cut, may arrive long after: over tcp
 * it lies in sockets. Every message names its sender's incarnation and which of the sender's links
 * it came by. Remembers the latest PD_SENDERS_MAX of each kind; the oldest is forgotten first.
 * Engine thread only. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define PD_SENDERS_MAX 1024

/* In front of every message. */
typedef struct pd_link_head {
    uint64_t sender; /* its incarnation; 0: it has none, and nobody can fence it off */
    uint64_t link;   /* the sender counts the links it opens */
} pd_link_head;
_Static_assert(sizeof(pd_link_head) == 16, "goes over the wire");

typedef struct pd_senders {
    uint64_t fenced[PD_SENDERS_MAX];
    uint64_t fenced_count; /* ever */
    pd_link_head newest[PD_SENDERS_MAX];
    uint64_t newest_count; /* ever */
    uint64_t dropped;      /* messages */
} pd_senders;

/* From here on nothing of that incarnation is believed. */
void pd_senders_fence(pd_senders *senders, uint64_t incarnation);
bool pd_senders_is_fenced(const pd_senders *senders, uint64_t incarnation);
/* A message by that link is here: true when a newer link of that sender has spoken already. A
 * sender opens a link only when the one before is closed; what was under way on that one may come
 * later all the same. */
bool pd_senders_is_old(pd_senders *senders, const pd_link_head *head);
/* A message was dropped for one of these reasons: the first, then ever fewer are logged. */
void pd_senders_dropped(pd_senders *senders, const pd_link_head *head, size_t bytes);

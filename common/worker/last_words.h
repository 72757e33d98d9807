#pragma once

/* common/worker/last_words.h - a sender's aborts: "I write these blocks no more", by data plane.
 *
 * Words of a newer link end what an older one may still carry (common/transfer), so one that is
 * owed since a link broke may be paid by the next; and the latest that were said by the older one
 * are said once more, since it may have ended before they arrived. Pure; one thread. */

#include "common/worker/links.h"

enum { PD_LAST_WORDS_OWED_MAX = 256, PD_LAST_WORDS_SAID_MAX = 256 };

typedef struct pd_last_words {
    const pd_role_options *options;
    const pd_role_sink *sink;
    const pd_links *links;
    struct {
        uint64_t receiver; /* 0: unused */
        pd_request_key key;
    } owed[PD_LAST_WORDS_OWED_MAX];
    uint32_t owed_next;
    struct {
        uint64_t tag; /* of the link; 0: unused */
        uint64_t receiver;
        pd_request_key key;
    } said[PD_LAST_WORDS_SAID_MAX]; /* the latest: a link that broke may have lost them */
    uint32_t said_next;
} pd_last_words;

/* All is borrowed. */
void pd_last_words_init(pd_last_words *words, const pd_role_options *options,
                        const pd_role_sink *sink, const pd_links *links);
/* By a link that is up. */
void pd_last_words_abort(pd_last_words *words, const pd_link *link, const pd_request_key *key);
/* By the next link to that receiver, which may be up already. Too many: the oldest is forgotten,
 * which is logged. */
void pd_last_words_owe(pd_last_words *words, uint64_t receiver, const pd_request_key *key);
/* This link has come up. */
void pd_last_words_pay(pd_last_words *words, const pd_link *link);
/* One to that receiver waits for its link. */
bool pd_last_words_owes_to(const pd_last_words *words, uint64_t receiver);
/* To everybody: who leased for it is not known. */
void pd_last_words_everywhere(pd_last_words *words, const pd_request_key *key);
/* One is owed for that key: what was written may still land. */
bool pd_last_words_owes(const pd_last_words *words, const pd_request_key *key);

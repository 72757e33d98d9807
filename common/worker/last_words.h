#pragma once

/* common/worker/last_words.h - a sender's words on the data plane: its aborts ("I write these
 * blocks no more"), and that all is written; and the keys that it has ended with, so that it keeps
 * that word.
 *
 * Words of a newer link end what an older one may still carry (common/transfer), so one that is
 * owed since a link broke may be paid by the next; and the latest that were said by the older one
 * are said once more, since it may have ended before they arrived. Pure; one thread. */

#include "common/worker/links.h"

enum {
    PD_LAST_WORDS_OWED_MAX = 1024,
    PD_LAST_WORDS_SAID_MAX = 4096,
    PD_LAST_WORDS_SAID_EMPTY_MAX = 256,
    PD_LAST_WORDS_ENDED_MAX = 256,
    PD_LAST_WORDS_FORGOTTEN_MAX = 256,
    PD_LAST_WORDS_FORGOTTEN_BITS = 1 << 18,
};

typedef struct pd_last_word {
    uint64_t tag; /* of the link that it was said by; 0: unused */
    uint64_t receiver;
    pd_request_key key;
} pd_last_word;

typedef struct pd_last_words {
    const pd_role_options *options;
    const pd_role_sink *sink;
    const pd_links *links;
    struct {
        uint64_t receiver; /* 0: unused */
        pd_request_key key;
        bool never; /* it cannot be said as long as this worker lives */
        bool empty; /* nothing was written for it: it is said because the receiver may wait */
    } owed[PD_LAST_WORDS_OWED_MAX];
    uint32_t owed_next;
    /* Receivers to whom a word is owed that had no place any more: none that speaks for all of a
     * router's may be said to them, and they are not told that nothing may land. Who died on
     * another host is not known to have ended, so that they only ever become more: those that had
     * no place are marked in a Bloom filter (B. H. Bloom, CACM 13 (7), 1970: three bits each),
     * which denies none of them, and of 10,000 takes one other in 800 for one. */
    uint64_t forgotten[PD_LAST_WORDS_FORGOTTEN_MAX];
    uint64_t forgotten_more[PD_LAST_WORDS_FORGOTTEN_BITS / 64];
    bool forgotten_any;   /* of those bits is set */
    bool never_forgotten; /* one that can never be said: nothing is said to any of them any more */
    /* The latest: a link that broke may have lost them, and who asks for one hears that it is on
     * its way. Those on nothing apart, of which there may be many: said to more than who asks. */
    pd_last_word said[PD_LAST_WORDS_SAID_MAX], said_empty[PD_LAST_WORDS_SAID_EMPTY_MAX];
    uint32_t said_next, said_empty_next;
    pd_request_key ended[PD_LAST_WORDS_ENDED_MAX]; /* the latest */
    uint32_t ended_next;
} pd_last_words;

/* All is borrowed. */
void pd_last_words_init(pd_last_words *words, const pd_role_options *options,
                        const pd_role_sink *sink, const pd_links *links);
/* By a link that is up. What the carrier has no room for is owed; nothing is said of a key that
 * pd_last_words_never was told of. */
void pd_last_words_abort(pd_last_words *words, const pd_link *link, const pd_request_key *key);
/* All that leaves for that key is written, with what the first again PD_MSG_SHIP_AGAIN asked for.
 * By the link that carried it, if that is up still; what the carrier has no room for is not said:
 * the receiver finds out by waiting. */
void pd_last_words_written(const pd_last_words *words, uint64_t link_tag, const pd_request_key *key,
                           uint32_t again);
/* By the next link to that receiver, which may be up already. Too many: one is forgotten, which is
 * logged; its receiver keeps its blocks until one of the two has ended. That is one on nothing, or
 * else to a receiver of which one was forgotten before, or to one without a link, where there is
 * such a one: the dead take no place of the living. One that can never be said goes last of all.
 * empty: nothing was written. */
void pd_last_words_owe(pd_last_words *words, uint64_t receiver, const pd_request_key *key,
                       bool empty);
/* The link that wrote could not be closed: what it has may land for ever, and no word of any link
 * can be the last. Room as for what is owed. */
void pd_last_words_never(pd_last_words *words, uint64_t receiver, const pd_request_key *key);
/* What is owed to those whose link is up. At each tick. */
void pd_last_words_retry(pd_last_words *words);
/* That receiver's process has ended: nothing is owed to it. Not of one that was only given up: it
 * may be another router's still, and what was sent to it lands when it goes on. */
void pd_last_words_dead(pd_last_words *words, uint64_t receiver);
/* This link has come up. */
void pd_last_words_pay(pd_last_words *words, const pd_link *link);
/* One to that receiver waits for its link. */
bool pd_last_words_owes_to(const pd_last_words *words, uint64_t receiver);
/* Nothing was written for it here, and who leased for it is not known: to everybody. */
void pd_last_words_everywhere(pd_last_words *words, const pd_request_key *key);
/* What was written for that key may still land: one is owed for it, can never be said, or was said,
 * behind what may be seconds away. receiver: who asks; 0: that is not known, and it may be any of
 * those of whom a word was forgotten. */
bool pd_last_words_owes(const pd_last_words *words, const pd_request_key *key, uint64_t receiver);
/* Somebody asks for it by way of a router, whose answer could overtake what is on its way. True:
 * the receiver is to wait for the data plane's word, which is owed, or was said: by a link
 * that is up it is said once more, else it is owed. False: nothing of it can be on its way. */
bool pd_last_words_say_again(pd_last_words *words, const pd_request_key *key, uint64_t receiver);

/* Nothing is written for that key any more, whether it was or not: a request for it that comes now
 * was late, or comes twice, and must not be begun. */
void pd_last_words_end(pd_last_words *words, const pd_request_key *key);
bool pd_last_words_ended(const pd_last_words *words, const pd_request_key *key);

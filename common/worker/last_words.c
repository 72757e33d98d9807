#include "common/worker/last_words.h"

#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/worker/key_table.h"

void pd_last_words_init(pd_last_words *words, const pd_role_options *options,
                        const pd_role_sink *sink, const pd_links *links)
{
    *words = (pd_last_words){.options = options, .sink = sink, .links = links};
}

/* Its bits in forgotten_more: three, of 18 each. */
enum { BITS = 3, BIT_WIDTH = 18 };
_Static_assert(1 << BIT_WIDTH == PD_LAST_WORDS_FORGOTTEN_BITS, "a bit's number has that width");

static uint32_t bit_of(uint64_t receiver, uint32_t i)
{
    return pd_mix64(receiver) >> (i * BIT_WIDTH) & (PD_LAST_WORDS_FORGOTTEN_BITS - 1);
}

static bool is_marked(const pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < BITS; i++) {
        uint32_t bit = bit_of(receiver, i);
        if ((words->forgotten_more[bit / 64] >> (bit % 64) & 1) == 0)
            return false;
    }
    return true;
}

static void mark(pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < BITS; i++) {
        uint32_t bit = bit_of(receiver, i);
        words->forgotten_more[bit / 64] |= UINT64_C(1) << (bit % 64);
    }
    words->forgotten_any = true;
}

static bool is_forgotten(const pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_FORGOTTEN_MAX; i++) {
        if (words->forgotten[i] == receiver)
            return true;
    }
    return is_marked(words, receiver);
}

/* Its place is wanted. Nothing was written for an empty one: its receiver asks again. */
static void forget(pd_last_words *words, uint32_t at)
{
    uint64_t receiver = words->owed[at].receiver;
    uint32_t i = 0;

    words->never_forgotten = words->never_forgotten || words->owed[at].never;
    if (words->owed[at].empty || is_forgotten(words, receiver))
        return;
    pd_log_warn("msg=\"too many last words are owed: one is forgotten, its blocks stay "
                "quarantined until this worker ends\" receiver=%016llx",
                (unsigned long long)receiver);
    while (i < PD_LAST_WORDS_FORGOTTEN_MAX && words->forgotten[i] != 0)
        i++;
    if (i < PD_LAST_WORDS_FORGOTTEN_MAX)
        words->forgotten[i] = receiver;
    else
        mark(words, receiver);
}

static bool any_forgotten(const pd_last_words *words)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_FORGOTTEN_MAX; i++) {
        if (words->forgotten[i] != 0)
            return true;
    }
    return words->forgotten_any;
}

void pd_last_words_dead(pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (words->owed[i].receiver == receiver)
            words->owed[i].receiver = 0;
    }
    for (uint32_t i = 0; i < PD_LAST_WORDS_SAID_MAX; i++) {
        if (words->said[i].receiver == receiver)
            words->said[i].tag = 0;
    }
    for (uint32_t i = 0; i < PD_LAST_WORDS_SAID_EMPTY_MAX; i++) {
        if (words->said_empty[i].receiver == receiver)
            words->said_empty[i].tag = 0;
    }
    for (uint32_t i = 0; i < PD_LAST_WORDS_FORGOTTEN_MAX; i++) {
        if (words->forgotten[i] == receiver)
            words->forgotten[i] = 0;
    }
}

static bool has_link(const pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < words->links->count; i++) {
        const pd_link *link = &words->links->links[i];
        if (link->state != PD_LINK_NONE && link->incarnation == receiver)
            return true;
    }
    return false;
}

/* What is lost least when its place is given away, and then less and less gladly. */
typedef enum place_rank {
    PLACE_FREE,
    PLACE_EMPTY,     /* on nothing: its receiver asks again */
    PLACE_FORGOTTEN, /* of its receiver one was forgotten already */
    PLACE_NO_LINK,   /* which the living mostly have */
    PLACE_SAYABLE,   /* one day */
    PLACE_ANY,       /* and nothing but that keeps its receiver from being told that it ended */
} place_rank;

static bool is_of_rank(const pd_last_words *words, uint32_t at, place_rank rank)
{
    uint64_t receiver = words->owed[at].receiver;

    if (receiver != 0 && words->owed[at].never)
        return rank == PLACE_ANY;
    switch (rank) {
    case PLACE_FREE: return receiver == 0;
    case PLACE_EMPTY: return words->owed[at].empty;
    case PLACE_FORGOTTEN: return is_forgotten(words, receiver);
    case PLACE_NO_LINK: return !has_link(words, receiver);
    default: return true;
    }
}

/* The oldest of those that are lost least. */
static uint32_t place_for(const pd_last_words *words)
{
    for (place_rank rank = PLACE_FREE; rank < PLACE_ANY; rank++) {
        for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
            uint32_t at = (words->owed_next + i) % PD_LAST_WORDS_OWED_MAX;
            if (is_of_rank(words, at, rank))
                return at;
        }
    }
    return words->owed_next;
}

static void put_owed(pd_last_words *words, uint64_t receiver, const pd_request_key *key, bool never,
                     bool empty)
{
    uint32_t at = place_for(words);

    if (words->owed[at].receiver != 0)
        forget(words, at);
    words->owed[at].receiver = receiver;
    words->owed[at].key = *key;
    words->owed[at].never = never;
    words->owed[at].empty = empty;
    words->owed_next = (at + 1) % PD_LAST_WORDS_OWED_MAX;
}

/* A word would speak of what can never be said. */
static bool silenced(const pd_last_words *words, uint64_t receiver, const pd_request_key *key)
{
    if ((key->number == 0 || words->never_forgotten) && is_forgotten(words, receiver))
        return true;
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (words->owed[i].receiver != receiver || !words->owed[i].never)
            continue;
        if (pd_request_key_equal(&words->owed[i].key, key) ||
            (key->number == 0 && key->router == words->owed[i].key.router))
            return true;
    }
    return false;
}

/* False: not said, and never to be, or owed. empty: nothing was written for it. */
static bool put_abort(pd_last_words *words, const pd_link *link, const pd_request_key *key,
                      bool empty)
{
    pd_notice notice = {
        .kind = PD_NOTICE_ABORT,
        .key = *key,
        .sender = words->options->incarnation,
        .receiver = link->incarnation,
    };

    if (silenced(words, link->incarnation, key))
        return false;
    pd_status status = words->sink->notify(words->sink->ctx, link->peer, &notice);
    if (status == PD_OK)
        return true;
    pd_log_debug("msg=\"an abort was not taken: later\" peer=%s status=%s number=%llu epoch=%u",
                 link->name, pd_status_name(status), (unsigned long long)key->number, key->epoch);
    put_owed(words, link->incarnation, key, false, empty);
    return false;
}

static void say_abort(pd_last_words *words, const pd_link *link, const pd_request_key *key,
                      bool empty)
{
    if (!put_abort(words, link, key, empty))
        return;
    pd_last_word *said =
        empty ? &words->said_empty[words->said_empty_next] : &words->said[words->said_next];
    *said = (pd_last_word){.tag = link->tag, .receiver = link->incarnation, .key = *key};
    if (empty)
        words->said_empty_next = (words->said_empty_next + 1) % PD_LAST_WORDS_SAID_EMPTY_MAX;
    else
        words->said_next = (words->said_next + 1) % PD_LAST_WORDS_SAID_MAX;
}

void pd_last_words_abort(pd_last_words *words, const pd_link *link, const pd_request_key *key)
{
    say_abort(words, link, key, false);
}

static const pd_link *up_by_tag(const pd_links *links, uint64_t tag)
{
    for (uint32_t i = 0; i < links->count; i++) {
        if (links->links[i].state == PD_LINK_UP && links->links[i].tag == tag)
            return &links->links[i];
    }
    return NULL;
}

void pd_last_words_written(const pd_last_words *words, uint64_t link_tag, const pd_request_key *key,
                           uint32_t again)
{
    const pd_link *link = up_by_tag(words->links, link_tag);

    if (link == NULL)
        return;
    pd_notice notice = {.kind = PD_NOTICE_WRITTEN,
                        .key = *key,
                        .sender = words->options->incarnation,
                        .receiver = link->incarnation,
                        .again = again};
    pd_status status = words->sink->notify(words->sink->ctx, link->peer, &notice);
    if (status != PD_OK)
        pd_log_debug("msg=\"that all is written was not taken\" peer=%s status=%s number=%llu",
                     link->name, pd_status_name(status), (unsigned long long)key->number);
}

static const pd_link *up_to(const pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < words->links->count; i++) {
        const pd_link *link = &words->links->links[i];
        if (link->state == PD_LINK_UP && link->incarnation == receiver)
            return link;
    }
    return NULL;
}

void pd_last_words_owe(pd_last_words *words, uint64_t receiver, const pd_request_key *key,
                       bool empty)
{
    const pd_link *link = up_to(words, receiver);

    if (link != NULL)
        say_abort(words, link, key, empty); /* the next one is up already */
    else
        put_owed(words, receiver, key, false, empty);
}

void pd_last_words_never(pd_last_words *words, uint64_t receiver, const pd_request_key *key)
{
    put_owed(words, receiver, key, true, false);
}

/* Says one that is owed; when the carrier has no room it is owed again. */
static void pay_one(pd_last_words *words, uint32_t i, const pd_link *link)
{
    pd_request_key key = words->owed[i].key;

    words->owed[i].receiver = 0;
    say_abort(words, link, &key, words->owed[i].empty);
}

void pd_last_words_retry(pd_last_words *words)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (words->owed[i].receiver == 0 || words->owed[i].never)
            continue;
        const pd_link *link = up_to(words, words->owed[i].receiver);
        if (link != NULL)
            pay_one(words, i, link);
    }
}

/* What an older link to the same receiver said last. */
static void say_once_more(pd_last_words *words, pd_last_word *said, uint32_t count,
                          const pd_link *link, bool empty)
{
    for (uint32_t i = 0; i < count; i++) {
        pd_request_key key = said[i].key;
        if (said[i].receiver != link->incarnation || said[i].tag == 0 || said[i].tag == link->tag)
            continue;
        said[i].tag = put_abort(words, link, &key, empty) ? link->tag : 0; /* in its place */
    }
}

void pd_last_words_pay(pd_last_words *words, const pd_link *link)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (words->owed[i].receiver == link->incarnation && !words->owed[i].never)
            pay_one(words, i, link);
    }
    say_once_more(words, words->said, PD_LAST_WORDS_SAID_MAX, link, false);
    say_once_more(words, words->said_empty, PD_LAST_WORDS_SAID_EMPTY_MAX, link, true);
}

bool pd_last_words_owes_to(const pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (receiver != 0 && words->owed[i].receiver == receiver && !words->owed[i].never)
            return true;
    }
    return false;
}

void pd_last_words_everywhere(pd_last_words *words, const pd_request_key *key)
{
    for (uint32_t i = 0; i < words->links->count; i++) {
        const pd_link *link = &words->links->links[i];
        if (link->state == PD_LINK_UP)
            say_abort(words, link, key, true);
        else if (link->state == PD_LINK_WAITING || link->state == PD_LINK_CONNECTING)
            put_owed(words, link->incarnation, key, false, true);
    }
}

static bool may_be_forgotten(const pd_last_words *words, uint64_t receiver)
{
    return receiver == 0 ? any_forgotten(words) : is_forgotten(words, receiver);
}

bool pd_last_words_owes(const pd_last_words *words, const pd_request_key *key, uint64_t receiver)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (words->owed[i].receiver != 0 && !words->owed[i].empty &&
            pd_request_key_equal(&words->owed[i].key, key))
            return true;
    }
    /* A word that was said comes behind its bytes, which may be seconds away, or its link took it
     * along: then the next one's is to come. */
    for (uint32_t i = 0; i < PD_LAST_WORDS_SAID_MAX; i++) {
        if (words->said[i].tag != 0 && pd_request_key_equal(&words->said[i].key, key))
            return true;
    }
    return may_be_forgotten(words, receiver);
}

bool pd_last_words_say_again(pd_last_words *words, const pd_request_key *key, uint64_t receiver)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_SAID_MAX; i++) {
        if (words->said[i].tag == 0 || !pd_request_key_equal(&words->said[i].key, key))
            continue;
        const pd_link *link = up_by_tag(words->links, words->said[i].tag);
        words->said[i].tag = 0; /* it is the next one's */
        if (link != NULL)
            say_abort(words, link, key, false);
        else /* its link took it along, perhaps, and nobody need make another one */
            pd_last_words_owe(words, words->said[i].receiver, key, false);
        return true;
    }
    return pd_last_words_owes(words, key, receiver);
}

bool pd_last_words_ended(const pd_last_words *words, const pd_request_key *key)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_ENDED_MAX; i++) {
        if (pd_request_key_equal(&words->ended[i], key))
            return true;
    }
    return false;
}

void pd_last_words_end(pd_last_words *words, const pd_request_key *key)
{
    if (pd_last_words_ended(words, key))
        return;
    words->ended[words->ended_next] = *key;
    words->ended_next = (words->ended_next + 1) % PD_LAST_WORDS_ENDED_MAX;
}

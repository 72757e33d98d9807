#include "common/worker/last_words.h"

#include "common/base/log.h"
#include "common/worker/key_table.h"

void pd_last_words_init(pd_last_words *words, const pd_role_options *options,
                        const pd_role_sink *sink, const pd_links *links)
{
    *words = (pd_last_words){.options = options, .sink = sink, .links = links};
}

void pd_last_words_abort(pd_last_words *words, const pd_link *link, const pd_request_key *key)
{
    pd_notice notice = {
        .kind = PD_NOTICE_ABORT,
        .key = *key,
        .sender = words->options->incarnation,
        .receiver = link->incarnation,
    };

    uint32_t at = words->said_next;
    words->said[at].tag = link->tag;
    words->said[at].receiver = link->incarnation;
    words->said[at].key = *key;
    words->said_next = (at + 1) % PD_LAST_WORDS_SAID_MAX;
    if (words->sink->notify(words->sink->ctx, link->peer, &notice) != PD_OK)
        pd_log_warn("msg=\"an abort could not be posted; the next link will tell\" peer=%s "
                    "number=%llu epoch=%u",
                    link->name, (unsigned long long)key->number, key->epoch);
}

void pd_last_words_owe(pd_last_words *words, uint64_t receiver, const pd_request_key *key)
{
    uint32_t at = words->owed_next;

    for (uint32_t i = 0; i < words->links->count; i++) {
        const pd_link *link = &words->links->links[i];
        if (link->state == PD_LINK_UP && link->incarnation == receiver) {
            pd_last_words_abort(words, link, key); /* the next one is up already */
            return;
        }
    }
    if (words->owed[at].receiver != 0)
        pd_log_warn("msg=\"too many last words are owed: one is forgotten, its blocks stay "
                    "quarantined until this worker ends\" receiver=%016llx",
                    (unsigned long long)words->owed[at].receiver);
    words->owed[at].receiver = receiver;
    words->owed[at].key = *key;
    words->owed_next = (at + 1) % PD_LAST_WORDS_OWED_MAX;
}

void pd_last_words_pay(pd_last_words *words, const pd_link *link)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (words->owed[i].receiver != link->incarnation || link->incarnation == 0)
            continue;
        words->owed[i].receiver = 0;
        pd_last_words_abort(words, link, &words->owed[i].key);
    }
    for (uint32_t i = 0; i < PD_LAST_WORDS_SAID_MAX; i++) {
        pd_request_key key = words->said[i].key;
        if (words->said[i].receiver != link->incarnation || words->said[i].tag == 0 ||
            words->said[i].tag == link->tag)
            continue;
        words->said[i].tag = 0;
        pd_last_words_abort(words, link, &key);
    }
}

bool pd_last_words_owes_to(const pd_last_words *words, uint64_t receiver)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (receiver != 0 && words->owed[i].receiver == receiver)
            return true;
    }
    return false;
}

void pd_last_words_everywhere(pd_last_words *words, const pd_request_key *key)
{
    for (uint32_t i = 0; i < words->links->count; i++) {
        const pd_link *link = &words->links->links[i];
        if (link->state == PD_LINK_UP)
            pd_last_words_abort(words, link, key);
        else if (link->state == PD_LINK_WAITING || link->state == PD_LINK_CONNECTING)
            pd_last_words_owe(words, link->incarnation, key);
    }
}

bool pd_last_words_owes(const pd_last_words *words, const pd_request_key *key)
{
    for (uint32_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        if (words->owed[i].receiver != 0 && pd_request_key_equal(&words->owed[i].key, key))
            return true;
    }
    return false;
}

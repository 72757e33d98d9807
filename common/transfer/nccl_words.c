#include "common/transfer/nccl_words.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <string.h>

/* parts: head and rest; the word goes out in progress. */
pd_status pd_nccl_say_bytes(nccl_link *link, const void *head, size_t head_len, const void *bytes,
                            size_t len, word **word_out)
{
    word *w = pd_calloc(1, sizeof *w + head_len + len);
    if (w == NULL) {
        pd_log_error("msg=\"transfer: no memory for a message\" bytes=%zu", head_len + len);
        return PD_E_NOMEM;
    }
    w->len = head_len + len;
    memcpy(w->bytes, head, head_len);
    if (len != 0)
        memcpy(w->bytes + head_len, bytes, len);
    if (link->words_tail != NULL)
        link->words_tail->next = w;
    else
        link->words = w;
    link->words_tail = w;
    link->words_count++;
    if (word_out != NULL)
        *word_out = w;
    return PD_OK;
}

void pd_nccl_say(nccl_link *link, const void *bytes, size_t len)
{
    if (pd_nccl_say_bytes(link, bytes, len, NULL, 0, NULL) != PD_OK)
        link->broken = true;
}

void pd_nccl_say_kind(nccl_link *link, word_kind kind)
{
    word_head head = {.kind = kind, .batch = link->batch, .link = link->id};
    pd_nccl_say(link, &head, sizeof head);
}

void pd_nccl_words_drop(nccl_link *link)
{
    while (link->words != NULL) {
        word *next = link->words->next;
        pd_free(link->words);
        link->words = next;
    }
    link->words_tail = NULL;
    link->words_count = 0;
}

void pd_nccl_posted_remove(pd_carrier *carrier, word *w)
{
    for (word **at = &carrier->posted; *at != NULL; at = &(*at)->next) {
        if (*at == w) {
            *at = w->next;
            pd_free(w);
            return;
        }
    }
    pd_assert(false);
}

/* Gives the base what waits for it. */
bool pd_nccl_words_post(pd_carrier *carrier, nccl_link *link)
{
    bool any = false;
    while (link->words != NULL && link->base == BASE_OPEN) {
        word *w = link->words;
        word *next = w->next;
        /* first into the list: the base may end it before it returns */
        w->next = carrier->posted;
        carrier->posted = w;
        pd_status status = pd_carrier_ucx.send(carrier->base, pd_nccl_index(carrier, link),
                                               w->bytes, w->len, (uintptr_t)w);
        if (status == PD_E_OVERLOAD) {
            carrier->posted = w->next;
            w->next = next;
            return any;
        }
        any = true;
        link->words = next;
        link->words_count--;
        if (next == NULL)
            link->words_tail = NULL;
        if (status == PD_E_AGAIN)
            continue;
        if (status == PD_OK && w->notice)
            carrier->events->send_done(carrier->engine, w->token, PD_OK);
        if (status != PD_OK)
            link->base = BASE_BROKEN;
        pd_nccl_posted_remove(carrier, w);
    }
    return any;
}

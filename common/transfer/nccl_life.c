#include "common/transfer/nccl_life.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/process.h"
#include "common/transfer/nccl_comm.h"
#include "common/transfer/nccl_words.h"

#include <string.h>
#include <unistd.h>

/* Of the carrier of messages, which has no blocks to move. */
static const pd_carrier_pool base_pool = {.bytes = PD_CARRIER_PAGE, .pieces = 1};

enum { OPENED_AGAIN_MAX = 4 }; /* each wait is twice the one before, so many times */

/* ---- processes ---- */

process_mark pd_nccl_process(void)
{
    process_mark mark = {.host = pd_process_host(), .pid = getpid()};

    if (pd_process_started(mark.pid, &mark.started) != PD_OK)
        mark.host = 0; /* then nobody can tell whether it lives */
    return mark;
}

static bool is_alive(const process_mark *mark)
{
    uint64_t started;

    return pd_process_started(mark->pid, &started) == PD_OK && started == mark->started;
}

bool pd_nccl_is_seen(const pd_carrier *carrier, const process_mark *mark)
{
    return mark->host != 0 && mark->host == carrier->process.host && is_alive(mark);
}

static bool is_dead(nccl_link *link, uint64_t now_ns)
{
    if (!link->seen || now_ns - link->looked_ns < LOOK_NS)
        return false;
    link->looked_ns = now_ns;
    return !is_alive(&link->process);
}

/* ---- ends ---- */

void pd_nccl_link_stop(pd_carrier *carrier, nccl_link *link)
{
    pd_nccl_comm_end(carrier, link);
    if (carrier->active == link)
        carrier->active = NULL;
    link->batch_state = BATCH_NONE;
    link->pinned = link->launched = false;
}

static void base_close(pd_carrier *carrier, nccl_link *link)
{
    link->base = BASE_CLOSING;
    pd_carrier_ucx.close(carrier->base, pd_nccl_index(carrier, link));
}

void pd_nccl_link_end(pd_carrier *carrier, nccl_link *link)
{
    pd_nccl_link_stop(carrier, link);
    pd_nccl_words_drop(link);
    link->state = LINK_ENDING;
    if (link->base != BASE_CLOSED && link->base != BASE_CLOSING)
        base_close(carrier, link);
}

void pd_nccl_link_part(pd_carrier *carrier, nccl_link *link)
{
    pd_nccl_link_stop(carrier, link);
    pd_nccl_words_drop(link);
    link->state = LINK_PARTING;
    link->parting_ns = pd_clock_now_ns();
    link->said_ns = 0;
}

/* An outgoing one stays until it is closed from above. */
void pd_nccl_link_fail(pd_carrier *carrier, nccl_link *link)
{
    if (!link->in) {
        pd_nccl_link_stop(carrier, link);
        link->broken = true;
        if (!link->told)
            carrier->events->broken(carrier->engine, pd_nccl_index(carrier, link));
        link->told = true;
    } else if (link->state == LINK_UP) {
        pd_nccl_link_part(carrier, link);
    } else { /* its sender, which has heard nothing yet, speaks again */
        pd_nccl_link_end(carrier, link);
    }
}

pd_status pd_nccl_link_open(pd_carrier *carrier, nccl_link *link)
{
    link->base = BASE_OPENING;
    link->opened_ns = pd_clock_now_ns();
    pd_status status = pd_carrier_ucx.open(carrier->base, pd_nccl_index(carrier, link),
                                           link->address, link->address_bytes, base_pool);
    if (status != PD_OK)
        link->base = BASE_BROKEN;
    return status;
}

nccl_link *pd_nccl_link_find(pd_carrier *carrier, uint64_t id, bool in)
{
    for (uint32_t i = 0; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->id == id && link->in == in && link->state != LINK_FREE &&
            link->state != LINK_ENDING)
            return link;
    }
    return NULL;
}

/* ---- a link's first word ---- */

/* A hello, or a goodbye. */
static void say_who(pd_carrier *carrier, nccl_link *link, word_kind kind)
{
    word_hello hello = {
        .head = {.kind = kind, .batch = link->batch, .link = link->id},
        .incarnation = link->incarnation,
        .process = carrier->process,
        .address_bytes = (uint32_t)(carrier->address_bytes - sizeof(nccl_address)),
    };
    memcpy(hello.address, carrier->address + sizeof(nccl_address), hello.address_bytes);
    pd_nccl_say(link, &hello, offsetof(word_hello, address) + hello.address_bytes);
}

static bool read_who(word_hello *hello, const void *bytes, size_t len)
{
    const size_t least = offsetof(word_hello, address);

    if (len < least || len > sizeof *hello)
        return false;
    memcpy(hello, bytes, len);
    return hello->address_bytes == len - least;
}

/* It is time for a word that is repeated. */
static bool is_due(nccl_link *link, uint64_t now_ns)
{
    if (link->base != BASE_OPEN || link->words_count != 0 ||
        (link->said_ns != 0 && now_ns - link->said_ns < REPEAT_NS))
        return false;
    link->said_ns = now_ns;
    return true;
}

bool pd_nccl_greet(pd_carrier *carrier, nccl_link *link)
{
    if (!is_due(link, pd_clock_now_ns()))
        return false;
    link->greeted = true;
    say_who(carrier, link, WORD_HELLO);
    return true;
}

static nccl_link *free_place(pd_carrier *carrier)
{
    for (uint32_t i = carrier->peers_max; i < carrier->links_max; i++) {
        if (carrier->links[i].state == LINK_FREE)
            return &carrier->links[i];
    }
    return NULL;
}

/* All places are taken: one that only lingers gives way, else the one that stands idle longest; its
 * sender is told. One at a time: the sender that needs the place says its hello again. */
static void make_place(pd_carrier *carrier)
{
    nccl_link *oldest = NULL;

    for (uint32_t i = carrier->peers_max; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->state == LINK_PARTING && link->bye)
            link->parting_ns = 0;
        if (link->state == LINK_PARTING || link->state == LINK_ENDING || link->broken)
            return;
        if (link->state == LINK_UP && link->batch_state == BATCH_NONE &&
            (oldest == NULL || link->used_ns < oldest->used_ns))
            oldest = link;
    }
    if (oldest != NULL)
        oldest->broken = true;
}

static void place_take(pd_carrier *carrier, nccl_link *place, const word_hello *hello)
{
    *place = (nccl_link){
        .state = LINK_WANTED,
        .in = true,
        .bye = hello->head.kind == WORD_BYE,
        .id = hello->head.link,
        .incarnation = hello->incarnation,
        .process = hello->process,
        .seen = pd_nccl_is_seen(carrier, &hello->process),
        .used_ns = pd_clock_now_ns(),
        .address_bytes = hello->address_bytes,
    };
    memcpy(place->address, hello->address, hello->address_bytes);
}

void pd_nccl_take_hello(pd_carrier *carrier, const void *bytes, size_t len)
{
    word_hello hello;

    if (!read_who(&hello, bytes, len) || pd_senders_is_fenced(&carrier->senders, hello.incarnation))
        return;
    nccl_link *known = pd_nccl_link_find(carrier, hello.head.link, true);
    if (known != NULL) { /* said again before our welcome was there */
        if (known->state == LINK_UP && known->words_count == 0)
            pd_nccl_say_kind(known, WORD_WELCOME);
        return;
    }
    nccl_link *place = free_place(carrier);
    if (place != NULL)
        place_take(carrier, place, &hello);
    else
        make_place(carrier);
}

/* Of a fenced sender too: what it is told is true of it. */
void pd_nccl_take_bye(pd_carrier *carrier, const void *bytes, size_t len)
{
    word_hello hello;

    if (!read_who(&hello, bytes, len))
        return;
    nccl_link *link = pd_nccl_link_find(carrier, hello.head.link, true);
    if (link != NULL) {
        link->bye = true;
        link->said_ns = 0; /* answered again */
        return;
    }
    nccl_link *place = free_place(carrier);
    if (place != NULL) /* for the answer alone */
        place_take(carrier, place, &hello);
}

void pd_nccl_take_fail(nccl_link *link)
{
    link->broken = link->gone = true;
    link->exposed = false;
}

void pd_nccl_take_bye_ok(nccl_link *link)
{
    if (link->state == LINK_PARTING)
        link->bye = link->gone = true;
}

/* ---- parting ---- */

/* Is there nothing more to say, or nobody to say it to? */
static bool is_parted(pd_carrier *carrier, nccl_link *link, uint64_t now_ns)
{
    uint64_t age_ns = now_ns - link->parting_ns;
    bool dead = is_dead(link, now_ns);

    link->gone |= dead;
    /* what can only be courtesy is given little time */
    if (dead || (link->in && link->bye && (link->base == BASE_BROKEN || age_ns >= LINGER_NS)) ||
        (!link->in &&
         (link->bye || (link->gone && (link->base != BASE_OPEN || age_ns >= LINGER_NS)))))
        return true;
    if (age_ns < carrier->stall_ns)
        return false;
    pd_log_warn("msg=\"transfer: nccl: the other end of a link that has ended does not answer\" "
                "what=%s link=%016llx",
                pd_nccl_what(link), (unsigned long long)link->id);
    link->silent = !link->gone; /* out: not reported closed, for it may still be written */
    return true;
}

bool pd_nccl_part_progress(pd_carrier *carrier, nccl_link *link)
{
    uint64_t now_ns = pd_clock_now_ns();

    if (is_parted(carrier, link, now_ns)) {
        pd_nccl_link_end(carrier, link);
        return true;
    }
    switch (link->base) {
    case BASE_BROKEN:
        pd_nccl_words_drop(link);
        link->said_ns = 0;
        base_close(carrier, link);
        return true;
    case BASE_CLOSED:
        if (now_ns - link->opened_ns < (uint64_t)REPEAT_NS << link->opened_again)
            return false;
        if (link->opened_again < OPENED_AGAIN_MAX)
            link->opened_again++;
        pd_nccl_link_open(carrier, link); /* where it fails: broken, and again */
        return true;
    case BASE_OPENING:
    case BASE_CLOSING: return false;
    case BASE_OPEN: break;
    }
    /* a sender that went without a word is answered once each time it speaks */
    if (link->in && link->bye) {
        if (link->said_ns == 0 && is_due(link, now_ns)) {
            pd_nccl_say_kind(link, WORD_BYE_OK);
            link->parting_ns = now_ns;
        }
    } else if (is_due(link, now_ns)) {
        if (link->in)
            pd_nccl_say_kind(link, WORD_FAIL);
        else
            say_who(carrier, link, WORD_BYE);
    }
    return pd_nccl_words_post(carrier, link);
}

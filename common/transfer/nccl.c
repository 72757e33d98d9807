/* The NCCL carrier: bytes go between GPUs' pools by ncclSend and ncclRecv of a communicator of two
 * ranks a link; words about them, and notices, go by a carrier of messages below (UCX).
 *
 * One batch: the sender announces runs of bytes; the receiver posts the receives and says GO, with
 * what a new communicator needs if there is none; the sender posts the same runs in the same order;
 * the receiver says LANDED when its stream has ended, and only that ends the puts. Notices are sent
 * after it.
 *
 * Order: a process runs one batch at a time, in or out, so that its device never holds kernels of
 * two communicators, of which each could wait for the other one's place. A batch needs both
 * processes. They are taken in the order of their ids, the smaller first, each in the order of
 * asking: whoever waits holds smaller ids than the one waited for, so no ring of waiting can close.
 *
 * Everything runs on the engine's thread, calls into NCCL included. docs/decisions/nccl.md. */

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/nccl_comm.h"
#include "common/transfer/nccl_words.h"

#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define STALL_MS_DEFAULT 5000
#define DESTROY_NS       (500 * PD_NS_PER_MS)

/* ---- the life of a link ---- */

static void batch_release(pd_carrier *carrier, nccl_link *link)
{
    if (carrier->active == link)
        carrier->active = NULL;
}

/* Ends the work of the link on this device, if there is any. */
static void link_stop(pd_carrier *carrier, nccl_link *link)
{
    pd_nccl_comm_end(carrier, link);
    batch_release(carrier, link);
    link->batch_state = BATCH_NONE;
}

static void link_end(pd_carrier *carrier, nccl_link *link)
{
    link_stop(carrier, link);
    pd_nccl_words_drop(link);
    link->state = LINK_ENDING;
    link->finished = false;
    pd_carrier_ucx.close(carrier->base, pd_nccl_index(carrier, link));
}

/* The link can carry nothing more. An outgoing one stays until it is closed from above. */
static void link_fail(pd_carrier *carrier, nccl_link *link)
{
    link_stop(carrier, link);
    if (link->in) {
        link_end(carrier, link);
        return;
    }
    if (link->state == LINK_UP || link->state == LINK_OPENING || link->state == LINK_GREETING)
        carrier->events->broken(carrier->engine, pd_nccl_index(carrier, link));
    link->broken = true;
}

/* Something of this batch went wrong here: the sender is told, and does not try again. */
static void batch_fail(pd_carrier *carrier, nccl_link *link)
{
    link_stop(carrier, link);
    if (link->in) {
        pd_nccl_say_kind(link, WORD_FAIL);
        pd_nccl_words_post(carrier, link);
    }
    link_fail(carrier, link);
}

static nccl_link *link_find(pd_carrier *carrier, uint64_t id, bool in)
{
    for (uint32_t i = 0; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->id == id && link->in == in && link->state != LINK_FREE &&
            link->state != LINK_ENDING)
            return link;
    }
    return NULL;
}

/* A place for a sender's link. Where all are taken, one that stands idle longest gives way: its
 * sender is gone without a word, or finds out at its next batch. */
static nccl_link *place_for_sender(pd_carrier *carrier)
{
    nccl_link *oldest = NULL;
    for (uint32_t i = carrier->peers_max; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->state == LINK_FREE)
            return link;
        if (link->state == LINK_UP && link->batch_state == BATCH_NONE &&
            (oldest == NULL || link->used_ns < oldest->used_ns))
            oldest = link;
    }
    if (oldest != NULL)
        oldest->broken = true; /* free when it is closed; its sender waits for its own deadline */
    return NULL;
}

/* ---- what comes ---- */

static void take_hello(pd_carrier *carrier, const word_head *head, const void *bytes, size_t len)
{
    word_hello hello;
    const size_t least = offsetof(word_hello, address);
    if (len < least || len > sizeof hello)
        return;
    memcpy(&hello, bytes, len);
    if (hello.address_bytes != len - least || link_find(carrier, head->link, true) != NULL ||
        pd_senders_is_fenced(&carrier->senders, hello.incarnation))
        return;
    nccl_link *link = place_for_sender(carrier);
    if (link == NULL)
        return;
    *link = (nccl_link){
        .state = LINK_WANTED,
        .in = true,
        .id = head->link,
        .incarnation = hello.incarnation,
        .used_ns = pd_clock_now_ns(),
        .hello_bytes = hello.address_bytes,
    };
    memcpy(link->hello, hello.address, hello.address_bytes);
}

static void take_announce(pd_carrier *carrier, nccl_link *link, const void *bytes, size_t len)
{
    word_announce announce;
    const size_t least = offsetof(word_announce, runs);
    bool good = len >= least && len <= sizeof announce && link->state == LINK_UP &&
                link->batch_state == BATCH_NONE;
    if (good) {
        memcpy(&announce, bytes, len);
        good = announce.count != 0 && announce.count <= RUNS_MAX &&
               announce.count * sizeof(run) == len - least;
    }
    for (uint32_t i = 0; good && i < announce.count; i++) {
        const run *r = &announce.runs[i];
        good = r->bytes != 0 && r->bytes <= carrier->pool_bytes &&
               r->offset <= carrier->pool_bytes - r->bytes;
    }
    if (!good) {
        pd_log_warn("msg=\"transfer: an announcement that is malformed or not for this pool, its "
                    "link is ended\" link=%016llx",
                    (unsigned long long)link->id);
        link->broken = true;
        return;
    }
    link->batch = announce.head.batch;
    link->count = announce.count;
    memcpy(link->runs, announce.runs, announce.count * sizeof(run));
    link->go = (word_go){.epoch = announce.epoch};
    link->batch_state = BATCH_WAITING;
    link->ticket = ++carrier->tickets;
}

static void take_go(pd_carrier *carrier, nccl_link *link, const void *bytes, size_t len)
{
    if (len != sizeof link->go || link->batch_state != BATCH_ANNOUNCED)
        return;
    memcpy(&link->go, bytes, sizeof link->go);
    link->batch_state = BATCH_GO;
    if (carrier->active != link) /* one that holds this process already goes on at once */
        link->ticket = ++carrier->tickets;
}

static void take_landed(pd_carrier *carrier, nccl_link *link)
{
    if (link->batch_state == BATCH_LAUNCHING || link->batch_state == BATCH_RUNNING)
        link->landed = true; /* and our own stream is about to say so */
    if (link->batch_state != BATCH_SENT)
        return;
    link->batch_state = BATCH_NONE;
    for (uint32_t i = 0; i < link->count; i++)
        carrier->events->put_done(carrier->engine, link->tokens[i], PD_OK);
}

static void take_word(pd_carrier *carrier, const word_head *head, const void *bytes, size_t len)
{
    bool to_receiver = head->kind == WORD_ANNOUNCE || head->kind == WORD_BYE;
    nccl_link *link = link_find(carrier, head->link, to_receiver);
    if (link == NULL)
        return; /* of a link that has ended */
    if ((head->kind == WORD_GO || head->kind == WORD_LANDED) && head->batch != link->batch)
        return;
    switch ((word_kind)head->kind) {
    case WORD_WELCOME:
        if (link->state == LINK_GREETING) {
            link->state = LINK_UP;
            carrier->events->opened(carrier->engine, pd_nccl_index(carrier, link), PD_OK, "nccl");
        }
        break;
    case WORD_ANNOUNCE: take_announce(carrier, link, bytes, len); break;
    case WORD_GO: take_go(carrier, link, bytes, len); break;
    case WORD_LANDED: take_landed(carrier, link); break;
    case WORD_FAIL: link->broken = true; break;
    case WORD_BYE: link->bye = true; break;
    case WORD_BYE_OK:
        if (link->state == LINK_PARTING)
            link->bye = true;
        break;
    case WORD_HELLO:
    case WORD_NOTICE: break;
    }
}

/* From within the base: changes states, calls nothing of the base. */
static void on_received(void *ctx, const void *bytes, size_t len)
{
    pd_carrier *carrier = ctx;
    word_head head;
    if (len < sizeof head)
        return;
    memcpy(&head, bytes, sizeof head);
    if (head.kind == WORD_NOTICE)
        carrier->events->received(carrier->engine, (const unsigned char *)bytes + sizeof head,
                                  len - sizeof head);
    else if (head.kind == WORD_HELLO)
        take_hello(carrier, &head, bytes, len);
    else
        take_word(carrier, &head, bytes, len);
}

static void on_opened(void *ctx, pd_peer index, pd_status status, const char *lane)
{
    pd_carrier *carrier = ctx;
    nccl_link *link = &carrier->links[index];
    (void)lane;
    if (link->state != LINK_OPENING)
        return;
    if (status != PD_OK) {
        link->broken = true;
        if (!link->in)
            carrier->events->opened(carrier->engine, index, status, "");
        return;
    }
    if (link->in) {
        link->state = LINK_UP;
        pd_nccl_say_kind(link, WORD_WELCOME);
        return;
    }
    word_hello hello = {
        .head = {.kind = WORD_HELLO, .link = link->id},
        .incarnation = link->incarnation,
        .address_bytes = (uint32_t)(carrier->address_bytes - sizeof(nccl_address)),
    };
    memcpy(hello.address, carrier->address + sizeof(nccl_address), hello.address_bytes);
    link->state = LINK_GREETING;
    pd_nccl_say(link, &hello, offsetof(word_hello, address) + hello.address_bytes);
}

static void on_broken(void *ctx, pd_peer index)
{
    pd_carrier *carrier = ctx;
    carrier->links[index].broken = true;
}

static void on_closed(void *ctx, pd_peer index)
{
    pd_carrier *carrier = ctx;
    carrier->links[index].finished = true;
}

static void on_send_done(void *ctx, uint64_t token, pd_status status)
{
    pd_carrier *carrier = ctx;
    word *w = (word *)(uintptr_t)token;
    if (w->notice && !w->dropped)
        carrier->events->send_done(carrier->engine, w->token, status);
    pd_nccl_posted_remove(carrier, w);
}

static void on_nothing(void *ctx, uint64_t token, pd_status status)
{
    (void)ctx, (void)token, (void)status;
    pd_assert(false); /* the base is asked for no put and no flush */
}

static const pd_carrier_events base_events = {
    .put_done = on_nothing,
    .flush_done = on_nothing,
    .send_done = on_send_done,
    .opened = on_opened,
    .broken = on_broken,
    .closed = on_closed,
    .received = on_received,
};

/* ---- batches ---- */

/* Out: what waits becomes a batch. With the smaller id this process is taken first. */
static void batch_begin(pd_carrier *carrier, nccl_link *link)
{
    link->count = link->next_count;
    memcpy(link->runs, link->next_runs, link->count * sizeof *link->runs);
    memcpy(link->from, link->next_from, link->count * sizeof *link->from);
    memcpy(link->tokens, link->next_tokens, link->count * sizeof *link->tokens);
    link->next_count = 0;
    link->landed = false;
    link->batch++;
    link->batch_state = BATCH_WAITING;
    link->ticket = ++carrier->tickets;
}

static void batch_announce(nccl_link *link)
{
    word_announce announce = {
        .head = {.kind = WORD_ANNOUNCE, .batch = link->batch, .link = link->id},
        .epoch = link->epoch,
        .count = link->count,
    };
    memcpy(announce.runs, link->runs, link->count * sizeof(run));
    link->batch_state = BATCH_ANNOUNCED;
    link->since_ns = pd_clock_now_ns();
    pd_nccl_say(link, &announce, offsetof(word_announce, runs) + link->count * sizeof(run));
}

/* In: this process is taken for the link's batch. */
static bool receive_begin(pd_carrier *carrier, nccl_link *link)
{
    word_go go = {
        .head = {.kind = WORD_GO, .batch = link->batch, .link = link->id},
        .epoch = link->epoch,
        .fresh = link->epoch == 0 || link->epoch != link->go.epoch,
    };
    if (go.fresh) {
        go.epoch = ++carrier->epochs;
        int result = carrier->library->nccl_get_unique_id(&go.id);
        if (result != PD_NCCL_SUCCESS) {
            pd_log_warn("msg=\"transfer: nccl: no id for a communicator: %s\"",
                        carrier->library->nccl_error_text(result));
            return false;
        }
        if (!pd_nccl_comm_make(carrier, link, go.id, go.epoch))
            return false;
        link->batch_state = BATCH_INIT;
    }
    pd_nccl_say(link, &go, sizeof go);
    return go.fresh || pd_nccl_comm_launch(carrier, link);
}

static bool send_begin(pd_carrier *carrier, nccl_link *link)
{
    if (link->go.fresh) {
        link->batch_state = BATCH_INIT;
        return pd_nccl_comm_make(carrier, link, link->go.id, link->go.epoch);
    }
    return link->comm != NULL && link->epoch == link->go.epoch &&
           pd_nccl_comm_launch(carrier, link);
}

static void batch_over(pd_carrier *carrier, nccl_link *link)
{
    batch_release(carrier, link);
    link->used_ns = pd_clock_now_ns();
    if (link->in) {
        link->batch_state = BATCH_NONE;
        pd_nccl_say_kind(link, WORD_LANDED);
        return;
    }
    link->batch_state = BATCH_SENT;
    if (link->landed)
        take_landed(carrier, link);
}

/* One step of the batch that this process is taken for. False: it failed. */
static bool batch_step(pd_carrier *carrier, nccl_link *link, bool *moved_out)
{
    bool done = false;
    batch_state before = link->batch_state;
    bool good = true;
    switch (link->batch_state) {
    case BATCH_GO: good = send_begin(carrier, link); break;
    case BATCH_INIT:
        good = pd_nccl_comm_look(carrier, link, &done);
        if (good && done)
            good = pd_nccl_comm_launch(carrier, link);
        break;
    case BATCH_LAUNCHING:
        good = pd_nccl_comm_look(carrier, link, &done);
        if (good && done)
            link->batch_state = BATCH_RUNNING;
        break;
    case BATCH_RUNNING: {
        int cu = carrier->library->cuda_stream_query(carrier->stream);
        good = pd_nccl_comm_look(carrier, link, &done);
        if (cu != PD_CU_SUCCESS && cu != PD_CU_NOT_READY) {
            pd_log_error("msg=\"transfer: the stream of nccl's work failed\" cuda_error=%d", cu);
            good = false;
        } else if (good && cu == PD_CU_SUCCESS)
            batch_over(carrier, link);
        break;
    }
    case BATCH_NONE:
    case BATCH_WAITING:
    case BATCH_ANNOUNCED:
    case BATCH_SENT: break;
    }
    if (link->batch_state != before) {
        *moved_out = true;
        link->since_ns =
            before == BATCH_GO || link->since_ns == 0 ? pd_clock_now_ns() : link->since_ns;
    }
    return good;
}

/* The next batch in the order of asking takes this process. */
static bool take_turn(pd_carrier *carrier)
{
    nccl_link *first = NULL;
    for (uint32_t i = 0; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        bool waits = link->batch_state == BATCH_WAITING || link->batch_state == BATCH_GO;
        if (link->state == LINK_UP && waits && !link->broken &&
            (first == NULL || link->ticket < first->ticket))
            first = link;
    }
    if (first == NULL)
        return false;
    carrier->active = first;
    first->since_ns = pd_clock_now_ns();
    if (first->batch_state == BATCH_GO)
        return true; /* the next step launches it */
    if (!first->in)
        batch_announce(first);
    else if (!receive_begin(carrier, first))
        batch_fail(carrier, first);
    return true;
}

/* One that waits for the receiver may do so for longer: others may be before it there. */
static bool is_late(const pd_carrier *carrier, const nccl_link *link)
{
    uint64_t allowed_ns =
        link->batch_state == BATCH_ANNOUNCED ? carrier->stall_ns / 4 * 3 : carrier->stall_ns / 2;
    return pd_clock_now_ns() - link->since_ns > allowed_ns;
}

static bool active_progress(pd_carrier *carrier)
{
    bool moved = false;
    nccl_link *link = carrier->active;
    if (link == NULL)
        return take_turn(carrier);
    if (!batch_step(carrier, link, &moved)) {
        batch_fail(carrier, link);
        return true;
    }
    if (carrier->active == link && is_late(carrier, link)) {
        static const char *const what[] = {
            [BATCH_NONE] = "nothing",           [BATCH_WAITING] = "its turn",
            [BATCH_ANNOUNCED] = "the receiver", [BATCH_GO] = "its turn",
            [BATCH_INIT] = "the communicator",  [BATCH_LAUNCHING] = "the launch",
            [BATCH_RUNNING] = "the stream",     [BATCH_SENT] = "the receiver",
        };
        pd_log_warn("msg=\"transfer: nccl: nothing moved, aborted\" what=%s waited_for=\"%s\" "
                    "link=%016llx",
                    pd_nccl_what(link), what[link->batch_state], (unsigned long long)link->id);
        batch_fail(carrier, link);
        return true;
    }
    return moved;
}

/* ---- progress ---- */

/* Of the carrier of messages, which has no blocks to move. */
static const pd_carrier_pool message_pool = {.bytes = PD_CARRIER_PAGE, .pieces = 1};

static bool open_wanted(pd_carrier *carrier, nccl_link *link)
{
    link->state = LINK_OPENING;
    if (pd_carrier_ucx.open(carrier->base, pd_nccl_index(carrier, link), link->hello,
                            link->hello_bytes, message_pool) != PD_OK)
        link->broken = true;
    return true;
}

static void link_closed(pd_carrier *carrier, nccl_link *link)
{
    link->state = LINK_FREE;
    if (!link->in && !link->silent)
        carrier->events->closed(carrier->engine, pd_nccl_index(carrier, link));
}

static bool link_progress(pd_carrier *carrier, nccl_link *link)
{
    switch (link->state) {
    case LINK_FREE: return false;
    case LINK_WANTED: return open_wanted(carrier, link);
    case LINK_ENDING:
        if (!link->finished)
            return false;
        link_closed(carrier, link);
        return true;
    case LINK_PARTING:
        if (!link->bye && !link->broken)
            return pd_nccl_words_post(carrier, link);
        link_end(carrier, link);
        return true;
    case LINK_OPENING:
    case LINK_GREETING:
    case LINK_UP: break;
    }
    if (link->broken) {
        if (!link->in && link->told)
            return false; /* told; it is closed from above */
        link->told = true;
        link_fail(carrier, link);
        return true;
    }
    if (link->in && link->bye) {
        link_stop(carrier, link);
        pd_nccl_say_kind(link, WORD_BYE_OK);
        pd_nccl_words_post(carrier, link);
        link_end(carrier, link);
        return true;
    }
    bool any = false;
    if (!link->in && link->state == LINK_UP && link->batch_state == BATCH_NONE &&
        link->next_count != 0) {
        batch_begin(carrier, link);
        any = true;
        /* the receiver is the smaller: it is taken first */
        if (link->peer_id < carrier->id)
            batch_announce(link);
    }
    return pd_nccl_words_post(carrier, link) || any;
}

static bool progress(pd_carrier *carrier)
{
    uint64_t expired;
    if (carrier->timer_set && read(carrier->timer_fd, &expired, sizeof expired) > 0)
        carrier->timer_set = false;
    bool any = pd_carrier_ucx.progress(carrier->base);
    any |= active_progress(carrier);
    for (uint32_t i = 0; i < carrier->links_max; i++)
        any |= link_progress(carrier, &carrier->links[i]);
    return any;
}

static bool arm(pd_carrier *carrier)
{
    if (!pd_carrier_ucx.arm(carrier->base))
        return false;
    const nccl_link *link = carrier->active;
    bool polled = link != NULL && link->batch_state >= BATCH_INIT;
    if (polled && !carrier->timer_set) {
        struct itimerspec once = {.it_value.tv_nsec = POLL_NS};
        carrier->timer_set = timerfd_settime(carrier->timer_fd, 0, &once, NULL) == 0;
    }
    return true;
}

/* ---- operations ---- */

static pd_status open_peer(pd_carrier *carrier, pd_peer index, const void *bytes, size_t len,
                           pd_carrier_pool peer_pool)
{
    nccl_link *link = &carrier->links[index];
    nccl_address head;
    (void)peer_pool;
    if (len < sizeof head) {
        pd_log_error("msg=\"transfer: a peer's address is malformed\" bytes=%zu", len);
        return PD_E_INVALID;
    }
    memcpy(&head, bytes, sizeof head);
    if (head.base_bytes != len - sizeof head || head.id == carrier->id) {
        pd_log_error("msg=\"transfer: a peer's address is malformed, or our own\" bytes=%zu", len);
        return PD_E_INVALID;
    }
    if (head.version != (uint32_t)carrier->library->version) {
        pd_log_error("msg=\"transfer: a peer has another version of NCCL\" ours=%d theirs=%u",
                     carrier->library->version, head.version);
        return PD_E_MISMATCH;
    }
    if (link->state == LINK_PARTING) { /* the engine has given up waiting for its end */
        link->silent = true;
        link_end(carrier, link);
    }
    if (link->state == LINK_ENDING && link->finished)
        link->state = LINK_FREE;
    if (link->state != LINK_FREE) {
        pd_log_warn("msg=\"transfer: the last connection of this place does not end\" peer=%u",
                    index);
        return PD_E_OVERLOAD;
    }
    uint64_t incarnation = link->incarnation; /* our own */
    *link = (nccl_link){
        .state = LINK_OPENING,
        .id = pd_random_id(),
        .peer_id = head.id,
        .incarnation = incarnation,
    };
    return pd_carrier_ucx.open(carrier->base, index, (const unsigned char *)bytes + sizeof head,
                               head.base_bytes, message_pool);
}

/* While the receiver may hold receives of this link it may still write: `closed` waits for its
 * word, or for its end; for ever, if neither comes. */
static void close_peer(pd_carrier *carrier, pd_peer index)
{
    nccl_link *link = &carrier->links[index];
    bool may_write = !link->broken && link->state == LINK_UP &&
                     (link->batch_state >= BATCH_ANNOUNCED || carrier->active == link);
    bool was_up = !link->broken && link->state == LINK_UP;
    if (link->state == LINK_FREE || link->state == LINK_ENDING) { /* it was not opened */
        link->silent = link->state == LINK_ENDING;
        carrier->events->closed(carrier->engine, index);
        return;
    }
    link_stop(carrier, link);
    pd_nccl_words_drop(link);
    if (was_up) {
        pd_nccl_say_kind(link, WORD_BYE);
        pd_nccl_words_post(carrier, link);
    }
    if (may_write && !link->broken) {
        link->state = LINK_PARTING;
        return;
    }
    link_end(carrier, link);
}

static pd_status put(pd_carrier *carrier, pd_peer index, uint64_t source_offset,
                     uint64_t target_offset, uint64_t bytes, uint64_t token)
{
    nccl_link *link = &carrier->links[index];
    if (link->broken || link->state != LINK_UP)
        return PD_E_PEER;
    if (link->next_count == RUNS_MAX)
        return PD_E_OVERLOAD;
    uint32_t at = link->next_count++;
    link->next_runs[at] = (run){.offset = target_offset, .bytes = bytes};
    link->next_from[at] = source_offset;
    link->next_tokens[at] = token;
    return PD_E_AGAIN;
}

/* A put is done when it has landed, so there is nothing to flush. */
static pd_status flush(pd_carrier *carrier, pd_peer index, uint64_t token)
{
    (void)token;
    return carrier->links[index].broken ? PD_E_PEER : PD_OK;
}

static pd_status send_notice(pd_carrier *carrier, pd_peer index, const void *bytes, size_t len,
                             uint64_t token)
{
    nccl_link *link = &carrier->links[index];
    word_head head = {.kind = WORD_NOTICE, .link = link->id};
    word *w;
    if (link->broken || link->state != LINK_UP)
        return PD_E_PEER;
    if (link->words_count >= WORDS_MAX)
        return PD_E_OVERLOAD;
    pd_status status = pd_nccl_say_bytes(link, &head, sizeof head, bytes, len, &w);
    if (status != PD_OK)
        return status;
    w->notice = true;
    w->token = token;
    return PD_E_AGAIN;
}

static void fence(pd_carrier *carrier, uint64_t incarnation)
{
    pd_senders_fence(&carrier->senders, incarnation);
    for (uint32_t i = carrier->peers_max; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->incarnation != incarnation || link->state == LINK_FREE ||
            link->state == LINK_ENDING)
            continue;
        link_stop(carrier, link);
        link->broken = true;
    }
    pd_carrier_ucx.fence(carrier->base, incarnation);
}

/* ---- create ---- */

static pd_status init_device(pd_carrier *carrier)
{
    const pd_nccl_library *l = carrier->library;
    int result = l->cuda_init(0);
    const char *what = "cuInit";
    if (result == PD_CU_SUCCESS) {
        what = "the pool's device";
        result = l->cuda_pointer_attribute(&carrier->device, PD_CU_POINTER_DEVICE_ORDINAL,
                                           (uintptr_t)carrier->pool);
    }
    if (result == PD_CU_SUCCESS) {
        what = "its context";
        result = l->cuda_context_retain(&carrier->context, carrier->device);
        if (result != PD_CU_SUCCESS)
            carrier->context = NULL;
    }
    if (result == PD_CU_SUCCESS)
        result = l->cuda_context_set(carrier->context);
    if (result == PD_CU_SUCCESS) {
        what = "a stream";
        result = l->cuda_stream_create(&carrier->stream, PD_CU_STREAM_NON_BLOCKING);
    }
    if (result == PD_CU_SUCCESS)
        return PD_OK;
    pd_log_error("msg=\"transfer: nccl cannot use this device: no %s\" cuda_error=%d", what,
                 result);
    return PD_E_UNSUPPORTED;
}

static pd_status init_base(pd_carrier *carrier, const pd_transfer_options *options)
{
    pd_transfer_options base = *options;
    base.piece_memory = NULL;
    base.pool_kind = PD_MEMORY_HOST;
    base.pool_bytes = message_pool.bytes;
    base.peers_max = carrier->links_max;
    pd_status status = pd_carrier_ucx.create(&base, &base_events, carrier, &carrier->base);
    if (status != PD_OK)
        return status;
    size_t bytes;
    const void *base_address = pd_carrier_ucx.address(carrier->base, &bytes);
    if (bytes > BASE_ADDRESS_MAX) {
        pd_log_error("msg=\"transfer: the address for messages is too long\" bytes=%zu", bytes);
        return PD_E_UNSUPPORTED;
    }
    nccl_address head = {.id = carrier->id,
                         .version = (uint32_t)carrier->library->version,
                         .base_bytes = (uint32_t)bytes};
    memcpy(carrier->address, &head, sizeof head);
    memcpy(carrier->address + sizeof head, base_address, bytes);
    carrier->address_bytes = sizeof head + bytes;
    return PD_OK;
}

static pd_status init_wait(pd_carrier *carrier)
{
    struct epoll_event event = {.events = EPOLLIN};
    carrier->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    carrier->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (carrier->epoll_fd >= 0 && carrier->timer_fd >= 0 &&
        epoll_ctl(carrier->epoll_fd, EPOLL_CTL_ADD, carrier->timer_fd, &event) == 0 &&
        epoll_ctl(carrier->epoll_fd, EPOLL_CTL_ADD, pd_carrier_ucx.fd(carrier->base), &event) == 0)
        return PD_OK;
    pd_log_error("msg=\"transfer: epoll failed: %m\"");
    return PD_E_IO;
}

/* Closes what the engine does not know of: links that others opened. What the base does not close
 * in time it frees as it can. */
static void links_end(pd_carrier *carrier)
{
    uint64_t end_ns = pd_clock_now_ns() + DESTROY_NS;
    for (uint32_t i = 0; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->state != LINK_FREE && link->state != LINK_ENDING && link->state != LINK_WANTED)
            link_end(carrier, link);
    }
    for (uint32_t i = 0; i < carrier->links_max && pd_clock_now_ns() < end_ns;) {
        const nccl_link *link = &carrier->links[i];
        if (link->state != LINK_ENDING || link->finished)
            i++;
        else if (!pd_carrier_ucx.progress(carrier->base))
            usleep(200);
    }
}

static void destroy(pd_carrier *carrier)
{
    if (carrier == NULL)
        return;
    if (carrier->base != NULL) {
        links_end(carrier);
        pd_carrier_ucx.destroy(carrier->base);
    }
    while (carrier->posted != NULL) {
        word *next = carrier->posted->next;
        pd_free(carrier->posted);
        carrier->posted = next;
    }
    if (carrier->stream != NULL)
        carrier->library->cuda_stream_destroy(carrier->stream);
    if (carrier->context != NULL) {
        carrier->library->cuda_context_set(NULL);
        carrier->library->cuda_context_release(carrier->device);
    }
    if (carrier->epoll_fd >= 0)
        close(carrier->epoll_fd);
    if (carrier->timer_fd >= 0)
        close(carrier->timer_fd);
    pd_free(carrier->links);
    pd_free(carrier);
}

static pd_status create(const pd_transfer_options *options, const pd_carrier_events *events,
                        void *engine, pd_carrier **carrier_out)
{
    const pd_nccl_library *library;
    if (options->pool_kind != PD_MEMORY_CUDA) {
        pd_log_error("msg=\"transfer: the KV pool lies in host memory, and nccl carries GPUs' "
                     "memory only\" backend=nccl");
        return PD_E_UNSUPPORTED;
    }
    if (options->pieces > 1) {
        pd_log_error("msg=\"transfer: the KV pool lies in several GPUs' memory, and nccl carries "
                     "that of one\" backend=nccl pieces=%u",
                     options->pieces);
        return PD_E_UNSUPPORTED;
    }
    pd_status status = pd_nccl_library_load(&library);
    if (status != PD_OK)
        return status;
    pd_carrier *carrier = pd_calloc(1, sizeof *carrier);
    if (carrier == NULL)
        return PD_E_NOMEM;
    carrier->events = events;
    carrier->engine = engine;
    carrier->library = library;
    carrier->peers_max = options->peers_max;
    carrier->links_max = 2 * options->peers_max + SENDERS_MORE;
    carrier->pool = options->piece_memory[0];
    carrier->pool_bytes = options->pool_bytes;
    carrier->id = pd_random_id();
    carrier->comms_max = options->comms_max != 0 ? options->comms_max : COMMS_DEFAULT;
    carrier->stall_ns =
        (options->stall_ms != 0 ? options->stall_ms : STALL_MS_DEFAULT) * PD_NS_PER_MS;
    carrier->epoll_fd = carrier->timer_fd = -1;
    carrier->links = pd_calloc(carrier->links_max, sizeof *carrier->links);
    status = carrier->links == NULL ? PD_E_NOMEM : init_device(carrier);
    for (uint32_t i = 0; status == PD_OK && i < options->peers_max; i++)
        carrier->links[i].incarnation = options->incarnation;
    if (status == PD_OK)
        status = init_base(carrier, options);
    if (status == PD_OK)
        status = init_wait(carrier);
    if (status != PD_OK) {
        destroy(carrier);
        return status;
    }
    pd_log_debug("msg=\"nccl ready\" version=%d device=%d comms_max=%u", library->version,
                 carrier->device, carrier->comms_max);
    *carrier_out = carrier;
    return PD_OK;
}

static void *pool(const pd_carrier *carrier)
{
    return carrier->pool;
}

static const void *address(const pd_carrier *carrier, size_t *bytes_out)
{
    *bytes_out = carrier->address_bytes;
    return carrier->address;
}

static int fd(const pd_carrier *carrier)
{
    return carrier->epoll_fd;
}

const pd_carrier_ops pd_carrier_nccl = {
    .name = "nccl",
    .create = create,
    .destroy = destroy,
    .pool = pool,
    .address = address,
    .fd = fd,
    .progress = progress,
    .arm = arm,
    .open = open_peer,
    .close = close_peer,
    .put = put,
    .flush = flush,
    .send = send_notice,
    .fence = fence,
};

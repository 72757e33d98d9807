#include "common/transfer/nccl_batch.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/transfer/nccl_comm.h"
#include "common/transfer/nccl_life.h"
#include "common/transfer/nccl_words.h"

#include <string.h>

/* ---- words ---- */

void pd_nccl_take_announce(pd_carrier *carrier, nccl_link *link, const void *bytes, size_t len)
{
    word_announce announce;
    const size_t least = offsetof(word_announce, runs);
    bool good = len >= least && len <= sizeof announce && link->batch_state == BATCH_NONE;
    if (link->state != LINK_UP || link->broken || link->bye)
        return; /* it ends here, fenced off perhaps, and its sender is told */
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
    link->launched = false;
    link->said_ns = pd_clock_now_ns();
    link->ticket = ++carrier->tickets;
}

void pd_nccl_take_go(pd_carrier *carrier, nccl_link *link, const void *bytes, size_t len)
{
    if (len != sizeof link->go || link->batch_state != BATCH_ANNOUNCED)
        return;
    memcpy(&link->go, bytes, sizeof link->go);
    link->batch_state = BATCH_GO;
    link->said_ns = pd_clock_now_ns();
    if (carrier->active != link) /* one that holds this process already goes on at once */
        link->ticket = ++carrier->tickets;
}

/* The sender is taken for it as well: from here on both ends work, and time counts. */
void pd_nccl_take_launch(nccl_link *link)
{
    if (link->batch_state < BATCH_INIT || link->launched)
        return;
    link->launched = true;
    link->since_ns = pd_clock_now_ns();
}

void pd_nccl_take_waits(nccl_link *link)
{
    bool waited_for = link->in ? link->batch_state >= BATCH_INIT && !link->launched
                               : link->batch_state == BATCH_ANNOUNCED;
    if (waited_for)
        link->since_ns = pd_clock_now_ns();
}

void pd_nccl_take_landed(pd_carrier *carrier, nccl_link *link)
{
    if (link->batch_state == BATCH_LAUNCHING || link->batch_state == BATCH_RUNNING)
        link->landed = true; /* and our own stream is about to say so */
    if (link->batch_state != BATCH_SENT)
        return;
    link->batch_state = BATCH_NONE;
    link->exposed = false;
    for (uint32_t i = 0; i < link->count; i++)
        carrier->events->put_done(carrier->engine, link->tokens[i], PD_OK);
}

/* ---- one batch ---- */

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

static uint32_t pinned_count(const pd_carrier *carrier)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < carrier->peers_max; i++)
        count += carrier->links[i].pinned;
    return count;
}

/* Naming a communicator promises that it will be here when GO comes. Until this process is taken
 * for the batch that keeps its place from others, so one place at least is never promised:
 * whichever batch holds the process can make its own, and waits for nobody. Without a promise the
 * batch gets a new one. */
static void batch_announce(pd_carrier *carrier, nccl_link *link)
{
    bool held = carrier->active == link;
    bool promise = link->comm != NULL && (held || pinned_count(carrier) + 1 < carrier->comms_max);
    word_announce announce = {
        .head = {.kind = WORD_ANNOUNCE, .batch = link->batch, .link = link->id},
        .epoch = promise ? link->epoch : 0,
        .count = link->count,
    };
    memcpy(announce.runs, link->runs, link->count * sizeof(run));
    link->pinned = promise && !held;
    link->exposed = true;
    link->batch_state = BATCH_ANNOUNCED;
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
    link->since_ns = pd_clock_now_ns();
    pd_nccl_say_kind(link, WORD_LAUNCH);
    if (link->go.fresh) {
        link->batch_state = BATCH_INIT;
        return pd_nccl_comm_make(carrier, link, link->go.id, link->go.epoch);
    }
    return link->comm != NULL && link->epoch == link->go.epoch &&
           pd_nccl_comm_launch(carrier, link);
}

static void batch_over(pd_carrier *carrier, nccl_link *link)
{
    carrier->active = NULL;
    link->used_ns = pd_clock_now_ns();
    if (link->in) {
        link->batch_state = BATCH_NONE;
        pd_nccl_say_kind(link, WORD_LANDED);
        return;
    }
    link->batch_state = BATCH_SENT;
    if (link->landed)
        pd_nccl_take_landed(carrier, link);
}

/* The stream's state first: what NCCL says afterwards is of all that the stream has ended. */
static bool look_at_stream(pd_carrier *carrier, nccl_link *link)
{
    int cu = carrier->library->cuda_stream_query(carrier->stream);
    bool done;
    bool good = pd_nccl_comm_look(carrier, link, &done);
    if (cu != PD_CU_SUCCESS && cu != PD_CU_NOT_READY) {
        pd_log_error("msg=\"transfer: the stream of nccl's work failed\" cuda_error=%d", cu);
        return false;
    }
    if (good && done && cu == PD_CU_SUCCESS)
        batch_over(carrier, link);
    return good;
}

/* One step of the batch that this process is taken for. False: it failed. */
static bool batch_step(pd_carrier *carrier, nccl_link *link)
{
    bool done = false, good = true;
    switch (link->batch_state) {
    case BATCH_GO: return send_begin(carrier, link);
    case BATCH_INIT:
        good = pd_nccl_comm_look(carrier, link, &done);
        return good && done ? pd_nccl_comm_launch(carrier, link) : good;
    case BATCH_LAUNCHING:
        good = pd_nccl_comm_look(carrier, link, &done);
        if (good && done)
            link->batch_state = BATCH_RUNNING;
        return good;
    case BATCH_RUNNING: return look_at_stream(carrier, link);
    case BATCH_NONE:
    case BATCH_WAITING:
    case BATCH_ANNOUNCED:
    case BATCH_SENT: break;
    }
    return true;
}

/* ---- order ---- */

/* The next batch in the order of asking takes this process. */
static bool take_turn(pd_carrier *carrier)
{
    nccl_link *first = NULL;
    for (uint32_t i = 0; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        bool waits = link->batch_state == BATCH_WAITING || link->batch_state == BATCH_GO;
        if (link->state == LINK_UP && waits && !link->broken && !link->bye &&
            (first == NULL || link->ticket < first->ticket))
            first = link;
    }
    if (first == NULL)
        return false;
    carrier->active = first;
    first->pinned = false;
    first->since_ns = pd_clock_now_ns();
    if (first->batch_state == BATCH_GO)
        return true; /* the next step launches it */
    if (!first->in)
        batch_announce(carrier, first);
    else if (!receive_begin(carrier, first))
        pd_nccl_link_fail(carrier, first);
    return true;
}

static void log_late(const nccl_link *link)
{
    static const char *const what[] = {
        [BATCH_NONE] = "nothing",           [BATCH_WAITING] = "its turn",
        [BATCH_ANNOUNCED] = "the receiver", [BATCH_GO] = "its turn",
        [BATCH_INIT] = "the communicator",  [BATCH_LAUNCHING] = "the launch",
        [BATCH_RUNNING] = "the stream",     [BATCH_SENT] = "the receiver",
    };
    bool alone = link->in && !link->launched;
    pd_log_warn("msg=\"transfer: nccl: nothing moved, aborted\" what=%s waited_for=\"%s\" "
                "link=%016llx",
                pd_nccl_what(link), alone ? "the sender" : what[link->batch_state],
                (unsigned long long)link->id);
}

bool pd_nccl_active_progress(pd_carrier *carrier)
{
    nccl_link *link = carrier->active;
    if (link == NULL)
        return take_turn(carrier);
    batch_state before = link->batch_state;
    bool good = batch_step(carrier, link);
    if (good && carrier->active == link &&
        pd_clock_now_ns() - link->since_ns > carrier->stall_ns / 2) {
        log_late(link);
        good = false;
    }
    if (!good)
        pd_nccl_link_fail(carrier, link);
    return !good || link->batch_state != before;
}

bool pd_nccl_batch_progress(pd_carrier *carrier, nccl_link *link)
{
    uint64_t now_ns = pd_clock_now_ns();
    bool waits =
        carrier->active != link && link->batch_state == (link->in ? BATCH_WAITING : BATCH_GO);
    if (waits && now_ns - link->said_ns > REPEAT_NS && link->words_count == 0) {
        link->said_ns = now_ns;
        pd_nccl_say_kind(link, WORD_WAITS);
    }
    if (link->in || link->batch_state != BATCH_NONE || link->next_count == 0)
        return false;
    batch_begin(carrier, link);
    /* the receiver is the smaller: it is taken first */
    if (link->peer_id < carrier->id)
        batch_announce(carrier, link);
    return true;
}

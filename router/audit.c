#include "router/audit.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "router/move.h"
#include "router/patience.h"
#include "router/pull.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    AUDIT_MS = 2000,
    AGREE = 2,               /* answers in a row */
    AGREE_UNKNOWN = 5,       /* that name a worker of which this router has never heard */
    AUDIT_UNKNOWN_MAX = 256, /* keys remembered; the rest waits for the next answer */
    AUDIT_WAITS_MAX = ROUTER_AUDIT_WAITS_MAX / 2, /* who lives, and who does not */
};

/* Where an entry belongs in the router's view, as bits of router_request.audit_seen. */
enum {
    SEEN_PREFILL = 1,
    SEEN_DECODE = 2,
    SEEN_MOVE = 4,
    SEEN_UNSTARTED = 8,
    SEEN_AWAITED = 16,
    SEEN_STALLED = 32
};

typedef struct strangers {
    pd_audit_entry entries[AUDIT_UNKNOWN_MAX];
    uint32_t count;
} strangers;

typedef struct record {
    router_audit_view view;
    bool answered;
    uint64_t asked_ns, answered_ns;
    uint32_t serial;
    uint64_t step; /* of the worker's report at the answer before */
    bool steps;    /* it has made one since, or none is under way: its engine does not hang */
    strangers unknown, waiting;           /* of the last answer; waiting: quarantined */
    uint64_t waits[AUDIT_WAITS_MAX];      /* given up or unknown, of the last answer */
    uint8_t waits_times[AUDIT_WAITS_MAX]; /* in a row */
    uint32_t waits_count;
    uint64_t lives[AUDIT_WAITS_MAX]; /* registered when it answered, and waited for too */
    uint32_t lives_count;
} record;

struct router_audit {
    router_audit_options o;
    uint64_t due_ns[ROUTER_WORKERS_MAX];
    uint64_t next_ns;
    record *records[ROUTER_WORKERS_MAX];
};

pd_status router_audit_create(const router_audit_options *options, router_audit **audit_out)
{
    router_audit *audit = pd_calloc(1, sizeof *audit);
    if (audit == NULL)
        return PD_E_NOMEM;
    audit->o = *options;
    audit->next_ns = UINT64_MAX;
    *audit_out = audit;
    return PD_OK;
}

void router_audit_destroy(router_audit *audit)
{
    if (audit == NULL)
        return;
    for (uint32_t i = 0; i < ROUTER_WORKERS_MAX; i++)
        pd_free(audit->records[i]);
    pd_free(audit);
}

void router_audit_reset(router_audit *audit, uint32_t slot, uint64_t now_ns)
{
    pd_free(audit->records[slot]);
    audit->records[slot] = NULL;
    audit->due_ns[slot] = now_ns + AUDIT_MS * PD_NS_PER_MS;
    if (audit->due_ns[slot] < audit->next_ns)
        audit->next_ns = audit->due_ns[slot];
}

static void ask(router_audit *audit, uint32_t slot, uint64_t now_ns)
{
    record *of = audit->records[slot];
    if (of == NULL) {
        of = pd_calloc(1, sizeof *of);
        if (of == NULL) {
            pd_log_warn("msg=\"no memory for an audit\"");
            return;
        }
        audit->records[slot] = of;
    }
    pd_message message = {.kind = PD_MSG_AUDIT, .audit = {.serial = ++of->serial}};
    of->asked_ns = now_ns;
    const router_worker *worker = &audit->o.cluster->workers[slot];
    if (!audit->o.sink->send(audit->o.sink->ctx, worker->identity, &message))
        pd_log_debug("msg=\"audit not taken\" worker=%s", worker->hello.name);
}

void router_audit_on_tick(router_audit *audit, uint64_t now_ns)
{
    if (now_ns < audit->next_ns)
        return;
    audit->next_ns = UINT64_MAX;
    for (uint32_t i = 0; i < audit->o.cluster->slots_used; i++) {
        if (!audit->o.cluster->workers[i].used)
            continue;
        if (now_ns >= audit->due_ns[i]) {
            ask(audit, i, now_ns);
            audit->due_ns[i] = now_ns + AUDIT_MS * PD_NS_PER_MS;
        }
        if (audit->due_ns[i] < audit->next_ns)
            audit->next_ns = audit->due_ns[i];
    }
}

uint64_t router_audit_next_due(const router_audit *audit)
{
    return audit->next_ns;
}

/* ---- what the worker has ---- */

static bool same_key(const pd_request_key *a, const pd_request_key *b)
{
    return a->router == b->router && a->number == b->number && a->epoch == b->epoch;
}

/* True when the router knows of it: it is what it should be. Marks what was seen. */
static bool known(router_audit *audit, uint32_t slot, const pd_audit_entry *entry)
{
    router_requests *t = audit->o.requests;
    router_request *moving = router_request_find_moving(t, &entry->key);
    if (moving != NULL) {
        if (moving->move.slot == slot)
            moving->audit_seen |= SEEN_MOVE;
        return moving->move.slot == slot || moving->decode == slot;
    }
    router_request *r = router_request_find_key(t, &entry->key);
    if (r == NULL)
        return false;
    bool copies = entry->state == PD_AUDIT_HOLDING;
    if (r->prefill == slot && (r->prefill_open || r->prefill_holds)) {
        r->audit_seen |= SEEN_PREFILL;
        return true;
    }
    bool ended = copies || entry->state == PD_AUDIT_QUARANTINED;
    if (r->decode == slot && r->decode_open && !ended) {
        r->audit_seen |= SEEN_DECODE;
        if (entry->state == PD_AUDIT_LANDED || entry->state == PD_AUDIT_LANDING)
            r->audit_seen |= SEEN_UNSTARTED;
        if (entry->state == PD_AUDIT_AWAITED)
            r->audit_seen |= SEEN_AWAITED;
        if (entry->state == PD_AUDIT_STALLED)
            r->audit_seen |= SEEN_STALLED;
        return true;
    }
    bool pulls = r->pull.slot == slot && (r->pull.open || r->pull.holds);
    return pulls || entry->state == PD_AUDIT_QUARANTINED;
}

static void end_unknown(router_audit *audit, uint32_t slot, const pd_audit_entry *entry)
{
    const router_worker *worker = &audit->o.cluster->workers[slot];
    const router_request *r = router_request_find_key(audit->o.requests, &entry->key);
    audit->o.counters->audit_unknown++;
    pd_log_warn("msg=\"a worker holds what this router does not know: ended there\" worker=%s "
                "request=%" PRIx64 " epoch=%u state=%d blocks=%u",
                worker->hello.name, entry->key.number, entry->key.epoch, (int)entry->state,
                entry->blocks);
    if (r != NULL && r->decode == slot && r->decode_open) { /* copies beside a live sequence */
        pd_message release = {.kind = PD_MSG_RELEASE, .release = {.key = entry->key}};
        if (!audit->o.sink->send(audit->o.sink->ctx, worker->identity, &release))
            pd_log_debug("msg=\"release not taken\" worker=%s", worker->hello.name);
        return;
    }
    const pd_msg_cancel cancel = {.key = entry->key};
    router_cluster_cancel(audit->o.cluster, slot, &cancel);
}

/* Blocks of an attempt that is over wait for a sender's last word, which was lost, or came before
 * the lease was bound. A prefill worker that is told to end what it does not know says by data
 * plane, behind all that it ever posted, that it writes nothing of it. A decode worker from which a
 * sequence was to move may have no link to this one: it answers by ShipDone, which is passed on. So
 * it is for a request of a router that is lost; its prefill workers have said so by themselves. */
static void ask_senders(router_audit *audit, uint32_t slot, const pd_audit_entry *entry,
                        const pd_msg_audit_reply *reply)
{
    router_cluster *cluster = audit->o.cluster;
    const pd_msg_cancel cancel = {.key = entry->key};
    /* A block that there is not, which ends a shipment. */
    pd_message again = {
        .kind = PD_MSG_SHIP_AGAIN,
        .ship_again = {
            .key = entry->key, .group = UINT32_MAX, .count = 1, .receiver = reply->incarnation}};
    bool own = entry->key.router == audit->o.requests->o.router;
    audit->o.counters->audit_quarantined++;
    if (cluster->workers[slot].hello.role != PD_ROLE_DECODE) {
        router_pull_ask_again(audit->o.requests, slot, &entry->key);
        return;
    }
    for (uint32_t i = 0; own && i < cluster->slots_used; i++) {
        if (cluster->workers[i].used && cluster->workers[i].hello.role == PD_ROLE_PREFILL)
            router_cluster_cancel(cluster, i, &cancel);
    }
    for (uint32_t k = 0; k < reply->waits_for_count; k++) {
        uint32_t from = router_cluster_by_incarnation(cluster, reply->waits_for[k]);
        if (from == ROUTER_NO_WORKER || cluster->workers[from].hello.role != PD_ROLE_DECODE)
            continue;
        if (!audit->o.sink->send(audit->o.sink->ctx, cluster->workers[from].identity, &again))
            pd_log_debug("msg=\"a question for a last word was not taken\" worker=%s",
                         cluster->workers[from].hello.name);
    }
}

static bool was_there(const strangers *before, const pd_request_key *key)
{
    for (uint32_t i = 0; i < before->count; i++) {
        if (same_key(&before->entries[i].key, key))
            return true;
    }
    return false;
}

static void take_entries(router_audit *audit, uint32_t slot, record *of,
                         const pd_msg_audit_reply *reply)
{
    strangers unknown = {.count = 0}, waiting = {.count = 0};
    memset(of->view.states, 0, sizeof of->view.states);
    for (uint32_t i = 0; i < reply->entries_count; i++) {
        const pd_audit_entry *entry = &reply->entries[i];
        bool quarantined = entry->state == PD_AUDIT_QUARANTINED;
        strangers *now = quarantined ? &waiting : &unknown;
        if ((uint32_t)entry->state < ROUTER_AUDIT_STATES)
            of->view.states[entry->state]++;
        bool own = entry->key.router == audit->o.requests->o.router;
        if (known(audit, slot, entry) || now->count == AUDIT_UNKNOWN_MAX || (!own && !quarantined))
            continue;
        now->entries[now->count++] = *entry;
        if (quarantined && was_there(&of->waiting, &entry->key))
            ask_senders(audit, slot, entry, reply);
        else if (!quarantined && was_there(&of->unknown, &entry->key))
            end_unknown(audit, slot, entry);
    }
    of->unknown = unknown;
    of->waiting = waiting;
    of->view.unknown_count = unknown.count;
    of->view.unknown = of->unknown.entries;
}

/* ---- what the router counts on ---- */

/* True when it was missing AGREE times in a row. */
static bool missed(uint8_t *times, bool expected, bool seen)
{
    *times = !expected || seen ? 0 : (uint8_t)(*times + 1);
    return *times >= AGREE;
}

static void miss(router_audit *audit, router_request *r, uint32_t slot, uint64_t now_ns)
{
    router_requests *t = audit->o.requests;
    const router_worker *worker = router_request_worker(t, slot);
    char why[ROUTER_MESSAGE_BYTES];
    snprintf(why, sizeof why, "%s worker %s does not know the request any more",
             router_role_name(worker->hello.role), worker->hello.name);
    const router_failure failure = {.reason = ROUTER_RETRY_MISSING,
                                    .slot = ROUTER_NO_WORKER,
                                    .code = "worker_failed",
                                    .why = why};
    audit->o.counters->audit_missing++;
    router_request_retry(t, r, &failure, now_ns);
}

static void check_prefill(router_audit *audit, router_request *r, uint32_t slot, bool sees,
                          uint64_t now_ns)
{
    bool works = r->state == ROUTER_REQUEST_PREFILLING || r->state == ROUTER_REQUEST_LANDING;
    if (!missed(&r->missed_prefill, true, sees))
        return;
    r->prefill_open = r->prefill_holds = false;
    if (works)
        miss(audit, r, slot, now_ns);
}

/* r is not queued, and what it counts on at this worker was asked for before the question. */
static void check(router_audit *audit, router_request *r, uint32_t slot, uint64_t asked_ns,
                  uint64_t now_ns)
{
    router_requests *t = audit->o.requests;
    uint32_t seen = r->audit_seen;
    record *of = audit->records[slot];
    r->audit_seen = 0;
    if (r->prefill == slot && r->prefill_open && r->prefill_sent_ns < asked_ns) {
        of->view.expected_prefill++;
        check_prefill(audit, r, slot, (seen & SEEN_PREFILL) != 0, now_ns);
    } else if (r->move.slot == slot && r->move.sent_ns < asked_ns) {
        of->view.expected_decode++;
        if (missed(&r->missed_move, true, (seen & SEEN_MOVE) != 0))
            router_move_failed(t, r, "the new worker does not know of it any more", now_ns);
    } else if (r->decode == slot && r->decode_open && r->lease_sent_ns < asked_ns) {
        bool unstarted =
            (seen & SEEN_UNSTARTED) != 0 && r->start_sent_ns < asked_ns &&
            r->next_index == r->base_index + 1 &&
            (r->state == ROUTER_REQUEST_LANDING || r->state == ROUTER_REQUEST_DECODING);
        of->view.expected_decode++;
        if (missed(&r->missed_decode, r->state != ROUTER_REQUEST_CLOSING,
                   (seen & SEEN_DECODE) != 0))
            miss(audit, r, slot, now_ns);
        else if (missed(&r->unstarted, unstarted, false) &&
                 router_request_send_start(t, r, r->landing_ns, now_ns))
            audit->o.counters->audit_unstarted++;
        else if (r->state == ROUTER_REQUEST_LANDING && (seen & SEEN_AWAITED) != 0)
            /* it is at it: when to give up its sender it knows best */
            router_request_set_due(t, r,
                                   now_ns + router_patience_behind_ns(t->o.config, r->landing_ns));
        else if (r->state == ROUTER_REQUEST_DECODING && (seen & SEEN_STALLED) != 0 && of->steps)
            /* it waits for room, which what lands slowly holds */
            router_request_set_due(t, r, now_ns + t->o.config->decode_idle_ns);
    }
}

/* ---- quarantines ---- */

/* How often in a row it was waited for, this answer included. */
static uint8_t waited(const record *of, uint64_t incarnation)
{
    for (uint32_t k = 0; k < of->waits_count; k++) {
        if (of->waits[k] == incarnation)
            return of->waits_times[k] == UINT8_MAX ? UINT8_MAX : of->waits_times[k] + 1;
    }
    return 1;
}

static void take_waits(router_audit *audit, uint32_t slot, record *of,
                       const pd_msg_audit_reply *reply)
{
    uint64_t waits[AUDIT_WAITS_MAX];
    uint8_t times[AUDIT_WAITS_MAX];
    uint32_t count = 0;
    const router_worker *worker = &audit->o.cluster->workers[slot];
    of->lives_count = 0;
    for (uint32_t i = 0; i < reply->waits_for_count && count < AUDIT_WAITS_MAX; i++) {
        uint64_t incarnation = reply->waits_for[i];
        if (router_cluster_by_incarnation(audit->o.cluster, incarnation) != ROUTER_NO_WORKER) {
            if (of->lives_count < AUDIT_WAITS_MAX)
                of->lives[of->lives_count++] = incarnation;
            continue;
        }
        waits[count] = incarnation;
        times[count] = waited(of, incarnation);
        /* Whoever lives says hello within a second. One that died while no router that knew it was
         * left to say so, nobody else will ever give up. */
        bool gave_up = router_cluster_gave_up(audit->o.cluster, incarnation);
        if (times[count++] < (gave_up ? AGREE : AGREE_UNKNOWN))
            continue;
        pd_log_warn("msg=\"blocks wait for a worker that was given up: said again\" worker=%s "
                    "incarnation=%016" PRIx64 " known=%d",
                    worker->hello.name, incarnation, gave_up);
        audit->o.counters->audit_waits++;
        router_cluster_tell_gone(audit->o.cluster, slot, incarnation);
    }
    memcpy(of->waits, waits, count * sizeof waits[0]);
    memcpy(of->waits_times, times, count * sizeof times[0]);
    of->waits_count = count;
}

void router_audit_on_reply(router_audit *audit, uint32_t slot, const pd_msg_audit_reply *reply,
                           uint64_t now_ns)
{
    router_requests *t = audit->o.requests;
    const router_worker *worker = &audit->o.cluster->workers[slot];
    record *of = audit->records[slot];
    if (of == NULL || reply->serial != of->serial ||
        reply->incarnation != worker->hello.incarnation)
        return; /* an answer to an older question */
    of->steps = !worker->report.busy || worker->report.step != of->step;
    of->step = worker->report.step;
    of->view.ledger = reply->ledger;
    of->view.expected_prefill = of->view.expected_decode = 0;
    take_entries(audit, slot, of, reply);
    for (uint32_t i = 0; i < t->slots_used; i++) {
        router_request *r = &t->slots[i];
        if (r->state != ROUTER_REQUEST_NONE && r->state != ROUTER_REQUEST_QUEUED)
            check(audit, r, slot, of->asked_ns, now_ns);
        r->audit_seen = 0;
    }
    take_waits(audit, slot, of, reply);
    of->answered = true;
    of->answered_ns = now_ns;
}

static void show_wait(const router_cluster *cluster, uint64_t incarnation, router_audit_view *view)
{
    bool lives;
    const char *name = router_cluster_name_of(cluster, incarnation, &lives);
    view->waits[view->waits_count++] =
        (router_audit_wait){.incarnation = incarnation,
                            .state = lives          ? ROUTER_WAIT_LIVES
                                     : name != NULL ? ROUTER_WAIT_GONE
                                                    : ROUTER_WAIT_UNKNOWN,
                            .name = name};
    view->gone_count += !lives;
}

void router_audit_view_of(const router_audit *audit, uint32_t slot, uint64_t now_ns,
                          router_audit_view *view_out)
{
    const record *of = audit->records[slot];
    const router_worker *worker = &audit->o.cluster->workers[slot];
    bool answered = of != NULL && of->answered;
    *view_out = answered ? of->view : (router_audit_view){0};
    view_out->name = worker->hello.name;
    view_out->role = worker->hello.role;
    view_out->incarnation = worker->hello.incarnation;
    view_out->answered = answered;
    if (!answered)
        return;
    view_out->age_ns = now_ns - of->answered_ns;
    for (uint32_t i = 0; i < of->waits_count; i++)
        show_wait(audit->o.cluster, of->waits[i], view_out);
    for (uint32_t i = 0; i < of->lives_count; i++)
        show_wait(audit->o.cluster, of->lives[i], view_out);
    for (uint32_t i = 0; i < audit->o.requests->slots_used; i++) {
        const router_request *r = &audit->o.requests->slots[i];
        bool misses = (r->prefill == slot && r->missed_prefill > 0) ||
                      (r->decode == slot && r->missed_decode > 0) ||
                      (r->move.slot == slot && r->missed_move > 0);
        if (r->state == ROUTER_REQUEST_NONE || !misses)
            continue;
        if (view_out->missing_count < ROUTER_AUDIT_MISSING_MAX)
            view_out->missing[view_out->missing_count] = r->key.number;
        view_out->missing_count++;
    }
}

#include "router/pull.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/kv/prefix_hash.h"
#include "router/patience.h"

#include <stdio.h>
#include <string.h>

/* Asking, connecting and waiting for the step after: predicted gains below that are noise. */
static const double PULL_BASE_MS = 3;
/* Shipping competes with other traffic, computing is sure: only a clear gain counts. */
static const double SHIP_TIMES = 1.5;
static const double PATIENCE_TIMES = 4;
/* Both ends have to get their turn, and on a busy host that takes a while: no worker need be heard
 * more often than it beats. A source that dies ends the wait at once, whatever this is. */
static const double PATIENCE_HEARTBEATS = 2;

void router_pull_choose(const router_requests *t, router_request *r)
{
    const router_core_config *config = t->o.config;
    const router_cluster *cluster = t->o.cluster;
    uint32_t tokens = router_request_base_tokens(r);
    uint32_t usable = pd_prefix_hash_usable(tokens, config->block_tokens);
    uint32_t cached = r->terms.prefill_cached_blocks;
    double best_gain = 0;

    r->pull = (router_pull){.slot = ROUTER_NO_WORKER};
    if (cached > usable)
        cached = usable;
    uint32_t has = cached * config->block_tokens;
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        const router_worker *worker = &cluster->workers[i];
        if (i == r->prefill || !router_worker_ready(worker) ||
            worker->hello.role != PD_ROLE_DECODE || worker->hello.transfer_address_len == 0)
            continue;
        uint32_t holds = router_index_prefix(t->o.index, i, r->hashes, r->hashes_count);
        holds = holds < usable ? holds : usable;
        if (holds <= cached)
            continue;
        uint32_t would = holds * config->block_tokens;
        double computing = pd_cost_prefill_ms(&t->cost, tokens - has, has) -
                           pd_cost_prefill_ms(&t->cost, tokens - would, would);
        double shipping =
            pd_cost_ship_ms(&t->cost, (uint64_t)(holds - cached) * config->block_bytes);
        double gain = computing - SHIP_TIMES * shipping - PULL_BASE_MS;
        if (gain > best_gain) {
            best_gain = gain;
            r->pull = (router_pull){.slot = i, .blocks = holds, .ms = shipping};
        }
    }
}

double router_pull_ms(const router_core_config *config, const router_request *r)
{
    double heartbeat_ms = (double)config->heartbeat_ns / (double)PD_NS_PER_MS;

    return r->pull.slot == ROUTER_NO_WORKER
               ? 0
               : PATIENCE_HEARTBEATS * heartbeat_ms + PATIENCE_TIMES * r->pull.ms;
}

void router_pull_fill(router_requests *t, const router_request *r, pd_msg_prefill_request *m)
{
    if (r->pull.slot == ROUTER_NO_WORKER)
        return;
    router_worker_peer(router_request_worker(t, r->pull.slot), false, &m->pull);
    m->pull_blocks = r->pull.blocks;
    m->pull_ms = (uint32_t)router_pull_ms(t->o.config, r) + 1;
}

static void end_pull(router_requests *t, router_request *r, bool may_land, const char *why)
{
    pd_message message = {.kind = PD_MSG_PULL_END,
                          .pull_end = {.key = r->key, .may_land = may_land}};
    snprintf(message.pull_end.reason, sizeof message.pull_end.reason, "%s", why);
    t->o.counters->pulls_failed++;
    pd_log_req_info(r->id, "msg=\"pull ended: %s\" blocks=%u", why, r->pull.blocks);
    if (r->prefill != ROUTER_NO_WORKER && !router_request_send(t, r->prefill, &message))
        pd_log_req_debug(r->id, "msg=\"the end of a pull was not taken: its patience ends it\"");
}

void router_pull_on_started(router_requests *t, router_request *r,
                            const pd_msg_prefill_started *started)
{
    const router_core_config *config = t->o.config;
    uint64_t last = (uint64_t)started->pull_first + started->pull_blocks_count;
    if (started->pull_blocks_count == 0 || r->pull.asked)
        return;
    if (r->pull.slot == ROUTER_NO_WORKER || last > r->pull.blocks) {
        end_pull(t, r, false,
                 r->pull.slot == ROUTER_NO_WORKER ? "there is no source any more"
                                                  : "more blocks than were offered");
        return;
    }
    pd_message message = {.kind = PD_MSG_SHIP_REQUEST};
    pd_msg_ship_request *m = &message.ship_request;
    m->key = r->key;
    memcpy(m->id, r->id, sizeof m->id);
    router_worker_peer(router_request_worker(t, r->prefill), true, &m->receiver);
    m->first_block = started->pull_first;
    m->blocks = started->pull_blocks;
    m->blocks_count = started->pull_blocks_count;
    m->hashes = r->hashes;
    m->hashes_count = (uint32_t)last;
    m->kv_tokens = (uint32_t)last * config->block_tokens;
    m->deadline_ms = (uint32_t)router_pull_ms(t->o.config, r) + 1;
    if (!router_request_send(t, r->pull.slot, &message)) {
        r->pull.slot = ROUTER_NO_WORKER;
        end_pull(t, r, false, "the source does not take messages");
        return;
    }
    t->o.counters->pulls++;
    r->pull.asked = r->pull.open = r->pull.holds = true;
}

/* All has landed: its copies may go, and no last word is needed. */
static void release(router_requests *t, router_request *r)
{
    pd_message message = {.kind = PD_MSG_RELEASE, .release = {.key = r->key}};
    if (r->pull.holds && router_request_send(t, r->pull.slot, &message))
        r->pull.holds = false;
}

/* ---- after the request ---- */

void router_pull_left(router_requests *t, const router_request *r)
{
    if (!r->pull.asked || r->prefill == ROUTER_NO_WORKER || (!r->pull.open && !r->pull.may_land))
        return;
    bool gone = r->pull.slot == ROUTER_NO_WORKER;
    t->left_pulls[t->left_pulls_count++ % ROUTER_LEFT_PULLS_MAX] = (router_left_pull){
        .key = r->key,
        .source = gone ? 0 : router_request_worker(t, r->pull.slot)->hello.incarnation,
        .receiver = router_request_worker(t, r->prefill)->hello.incarnation,
        .may_land = r->pull.may_land,
        .again = r->pull.again.count};
}

static router_left_pull *find_left(router_requests *t, const pd_request_key *key)
{
    for (uint32_t i = 0; i < ROUTER_LEFT_PULLS_MAX; i++) {
        router_left_pull *left = &t->left_pulls[i];
        if (left->key.number == key->number && left->key.epoch == key->epoch &&
            left->key.router == key->router)
            return left;
    }
    return NULL;
}

static void tell_unwritten(router_requests *t, uint32_t slot, const pd_request_key *key)
{
    const pd_msg_cancel cancel = {.key = *key, .unwritten = true};
    router_cluster_cancel(t->o.cluster, slot, &cancel);
}

/* An answer that is said of one who asked is no word on another's blocks. */
static bool said_of(const pd_msg_ship_done *done, uint64_t receiver)
{
    return done->receiver == 0 || done->receiver == receiver;
}

static bool on_left(router_requests *t, uint32_t slot, const pd_msg_ship_done *done)
{
    router_left_pull *left = find_left(t, &done->key);
    if (left == NULL || left->source != router_request_worker(t, slot)->hello.incarnation ||
        !said_of(done, left->receiver))
        return false;
    if (done->status == PD_OK && done->again != left->again)
        return true; /* said before it heard that it is to ship once more */
    left->may_land = done->may_land;
    if (left->may_land)
        return true; /* a cut link: the receiver waits for more than a word */
    uint32_t to = router_cluster_by_incarnation(t->o.cluster, left->receiver);
    if (to != ROUTER_NO_WORKER)
        tell_unwritten(t, to, &done->key);
    *left = (router_left_pull){.key.number = 0};
    return true;
}

void router_pull_ask_again(router_requests *t, uint32_t slot, const pd_request_key *key)
{
    const router_left_pull *left = find_left(t, key);
    if (left == NULL) { /* nobody was asked, or has said it: unless it was forgotten */
        if (t->left_pulls_count <= ROUTER_LEFT_PULLS_MAX)
            tell_unwritten(t, slot, key);
        return;
    }
    uint32_t source = router_cluster_by_incarnation(t->o.cluster, left->source);
    /* No layer group that there is: what matters is the answer, also of one that has forgotten the
     * key. A block that was written again now could land where the first writing's end has freed
     * it. */
    pd_message message = {
        .kind = PD_MSG_SHIP_AGAIN,
        .ship_again = {.key = *key, .group = UINT32_MAX, .count = 1, .receiver = left->receiver}};
    if (source != ROUTER_NO_WORKER && !router_request_send(t, source, &message))
        pd_log_debug("msg=\"a question for a last word was not taken\"");
}

/* A source says that it holds nothing for a key of which this router knows nothing: perhaps of a
 * router that is lost. Whoever keeps blocks for it, or asked, hears of it, and by whom it is said.
 */
static void say_unwritten(router_requests *t, uint32_t source, const pd_msg_ship_done *done)
{
    const pd_msg_cancel cancel = {.key = done->key,
                                  .unwritten = true,
                                  .source = router_request_worker(t, source)->hello.incarnation};
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (i != source && worker->used && said_of(done, worker->hello.incarnation))
            router_cluster_cancel(t->o.cluster, i, &cancel);
    }
}

bool router_pull_on_done(router_requests *t, uint32_t slot, const pd_msg_ship_done *done)
{
    router_request *r = router_request_find_key(t, &done->key);
    if (r == NULL) {
        bool left = on_left(t, slot, done);
        if (!left && done->status == PD_E_NOT_FOUND && !done->may_land)
            say_unwritten(t, slot, done);
        return left;
    }
    if (r->pull.slot != slot || !r->pull.asked)
        return false;
    if (r->prefill == ROUTER_NO_WORKER) /* the answer goes on without it; who waits is noted */
        return on_left(t, slot, done);
    if (!said_of(done, router_request_worker(t, r->prefill)->hello.incarnation))
        return true;
    if (!r->pull.open || (done->status == PD_OK && done->again != r->pull.again.count))
        return true; /* said before it heard that it is to ship once more */
    r->pull.open = false;
    r->pull.may_land = done->may_land;
    if (done->status == PD_OK && done->ship_bytes > 0)
        pd_cost_observe_ship(&t->cost, done->ship_bytes, done->ship_ms);
    /* One that is done when the prompt was computed meanwhile is not released: what it has sent may
     * still land. Its deadline ends it, with the last word that the blocks' quarantine waits for;
     * released, it would know nothing of them and say that nothing can land. */
    if (done->status != PD_OK) {
        r->pull.holds = false;
        if (r->prefill != ROUTER_NO_WORKER)
            end_pull(t, r, done->may_land, done->reason[0] == '\0' ? "it failed" : done->reason);
    }
    return true;
}

void router_pull_on_landed(router_requests *t, router_request *r)
{
    r->pull.may_land = r->pull.may_land && r->pull.open;
    if (r->pull.slot != ROUTER_NO_WORKER)
        release(t, r);
}

void router_pull_on_refetch(router_requests *t, router_request *r, const pd_msg_refetch *refetch)
{
    if (r->pull.slot == ROUTER_NO_WORKER || !r->pull.asked)
        return;
    pd_log_req_warn(r->id,
                    "msg=\"pulled blocks did not arrive right: %s\" sender=%s receiver=%s group=%u "
                    "first_block=%u count=%u asked_before=%u",
                    refetch->reason, router_request_worker(t, r->pull.slot)->hello.name,
                    router_request_worker(t, r->prefill)->hello.name, refetch->group,
                    refetch->first_block, refetch->count, r->pull.again.count);
    if (!router_again_may(&r->pull.again, refetch)) {
        end_pull(t, r, r->pull.open || r->pull.may_land, "blocks came wrong twice");
        return;
    }
    pd_message message = {
        .kind = PD_MSG_SHIP_AGAIN,
        .ship_again = {.key = r->key,
                       .group = refetch->group,
                       .first_block = refetch->first_block,
                       .count = refetch->count,
                       .receiver = router_request_worker(t, r->prefill)->hello.incarnation}};
    t->o.counters->refetches++;
    if (!router_request_send(t, r->pull.slot, &message)) {
        end_pull(t, r, r->pull.open || r->pull.may_land, "the source does not take messages");
        return;
    }
    router_again_sent(&r->pull.again, refetch);
    r->pull.open = true;
}

void router_pull_on_gone(router_requests *t, router_request *r, const char *why)
{
    bool waits = r->pull.asked && r->pull.open && r->state == ROUTER_REQUEST_PREFILLING;
    r->pull.may_land = r->pull.may_land || r->pull.open; /* it may only stand still */
    r->pull.slot = ROUTER_NO_WORKER;
    r->pull.open = r->pull.holds = false;
    if (waits)
        end_pull(t, r, true, why);
}

#include "prefill-worker/pull.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <stddef.h>
#include <string.h>

enum { ASK_MS = 2000 };

struct prefill_pull {
    prefill_pull *prev, *next;
    prefill_request *request; /* NULL: given up */
    pd_landing landing;
    pd_lease *lease;
    uint32_t held; /* leading blocks that were here, pinned while it lasts */
    uint64_t deadline_ns;
    uint64_t ask_ns; /* given up: when its source is asked for its last word */
};

pd_status prefill_pulls_init(prefill_pulls *pulls, const pd_role_options *options,
                             const pd_role_sink *sink, pd_blocks *blocks,
                             pd_role_counters *counters)
{
    uint32_t block_tokens = options->layout.block_tokens;
    uint32_t blocks_max = (options->context_max + block_tokens - 1) / block_tokens;

    *pulls =
        (prefill_pulls){.options = options, .sink = sink, .blocks = blocks, .counters = counters};
    pd_lander_init(&pulls->lander, options, sink);
    return pd_lease_table_create(blocks->cache, PREFILL_PULLS_MAX, blocks_max, &pulls->leases);
}

static void forget(prefill_pulls *pulls, prefill_pull *pull)
{
    if (pull->prev != NULL)
        pull->prev->next = pull->next;
    else
        pulls->head = pull->next;
    if (pull->next != NULL)
        pull->next->prev = pull->prev;
    pd_landing_fini(&pull->landing);
    pd_free(pull);
}

void prefill_pulls_fini(prefill_pulls *pulls)
{
    pd_lander_fini(&pulls->lander);
    while (pulls->head != NULL)
        forget(pulls, pulls->head);
    pd_lease_table_destroy(pulls->leases);
    pulls->leases = NULL;
}

static prefill_pull *find(const prefill_pulls *pulls, const pd_request_key *key)
{
    const pd_lease *lease = pd_lease_find(pulls->leases, pd_ship_seal_request(key), key->epoch);
    prefill_pull *pull = lease == NULL ? NULL : lease->user;

    return pull != NULL && pull->landing.key.router == key->router &&
                   pull->landing.key.number == key->number
               ? pull
               : NULL;
}

/* ---- beginning ---- */

static pd_status lease_blocks(prefill_pulls *pulls, const prefill_request *r, uint32_t count,
                              pd_lease **lease_out)
{
    pd_lease_grant_args args = {
        .request = pd_ship_seal_request(&r->key),
        .epoch = r->key.epoch,
        .owner = r->key.router,
        .prefill = r->pull_from.incarnation,
        .blocks = count,
        .expiry_ns = UINT64_MAX,
    };
    pd_lease *lease;
    pd_status status = pd_lease_grant(pulls->leases, &args, &lease);

    if (status != PD_OK)
        return status;
    status = pd_lease_bind(pulls->leases, lease, NULL, 0);
    if (status != PD_OK) {
        pd_lease_release(pulls->leases, lease); /* granted only: gone */
        return status;
    }
    *lease_out = lease;
    return PD_OK;
}

/* Blocks held .. end - 1 are to come. PD_E_OVERLOAD, PD_E_NOMEM: nothing has changed. */
static pd_status begin(prefill_pulls *pulls, prefill_request *r, uint32_t held, uint32_t end,
                       uint64_t now_ns)
{
    uint64_t wait_ns = r->pull_ns != 0 ? r->pull_ns : pulls->options->lost_after_ns;
    prefill_pull *pull = pd_calloc(1, sizeof *pull);

    if (pull == NULL)
        return PD_E_NOMEM;
    pd_status status =
        pd_landing_init(&pull->landing, &pulls->lander, &r->key, r->id, &r->pull_from, end - held);
    if (status == PD_OK)
        status = lease_blocks(pulls, r, end - held, &pull->lease);
    if (status != PD_OK) {
        pd_landing_fini(&pull->landing);
        pd_free(pull);
        return status;
    }
    pd_landing_begin(&pull->landing, held, end - held, end * pulls->options->layout.block_tokens,
                     pull->lease->blocks);
    pull->lease->user = pull;
    pull->request = r;
    pull->held = held;
    pull->deadline_ns = now_ns + wait_ns;
    pull->next = pulls->head;
    if (pull->next != NULL)
        pull->next->prev = pull;
    pulls->head = pull;
    r->pull = pull;
    r->item.parked = true;
    return PD_OK;
}

bool prefill_pull_begin(prefill_pulls *pulls, prefill_request *r, uint64_t now_ns)
{
    /* At least one token is computed here, for its logits. */
    uint32_t end = (r->item.tokens - 1) / pulls->options->layout.block_tokens;
    pd_prefix_cache *cache = pulls->blocks->cache;

    end = end < r->hashes_count ? end : r->hashes_count;
    end = end < r->pull_blocks ? end : r->pull_blocks;
    if (r->pull_blocks == 0 || r->pull_from.incarnation == 0 || !pulls->options->prefix_cache ||
        pd_writers_is_ended(&pulls->writers, r->pull_from.incarnation))
        return false;
    r->pull_blocks = 0; /* one try */
    uint32_t held = pd_prefix_cache_pin(cache, r->hashes, end, PD_CLAIM_RUNNING, r->blocks);
    pd_status status = held < end ? begin(pulls, r, held, end, now_ns) : PD_E_AGAIN;
    if (status != PD_OK) {
        pd_prefix_cache_drop(cache, r->blocks, held, PD_CLAIM_RUNNING);
        return false;
    }
    pd_log_req_debug(r->id, "msg=\"pulls blocks\" from=%s first=%u count=%u", r->pull_from.name,
                     held, end - held);
    return true;
}

void prefill_pull_describe(const prefill_request *r, pd_msg_prefill_started *started)
{
    if (r->pull == NULL)
        return;
    started->pull_first = r->pull->held;
    started->pull_blocks = r->pull->lease->blocks;
    started->pull_blocks_count = r->pull->lease->blocks_count;
}

/* ---- ending ---- */

/* A quarantine ends when nobody writes and nobody reads. The pull may be gone afterwards. */
static void settle(prefill_pulls *pulls, prefill_pull *pull)
{
    const pd_request_key *key = &pull->landing.key;

    if (pull->request != NULL || !pd_landing_over(&pull->landing))
        return;
    bool acked = pd_lease_sender_acked(pulls->leases, pd_ship_seal_request(key), key->epoch);
    pd_assert(acked);
    forget(pulls, pull);
}

/* Its request goes on without it. */
static void let_go(prefill_pulls *pulls, prefill_pull *pull)
{
    prefill_request *r = pull->request;

    pd_prefix_cache_drop(pulls->blocks->cache, r->blocks, pull->held, PD_CLAIM_RUNNING);
    r->pull = NULL;
    r->item.parked = false;
    pull->request = NULL;
}

static void give_up(prefill_pulls *pulls, prefill_pull *pull, const char *why)
{
    pd_log_req_info(pull->landing.id, "msg=\"a pull ends: %s\" from=%s landed=%u of=%u", why,
                    pull->landing.sender_name, pull->landing.good_count, pull->landing.to_land);
    let_go(pulls, pull);
    pull->ask_ns = 0;
    pd_land_give_up(&pulls->lander, &pull->landing);
    bool quarantined = pd_lease_release(pulls->leases, pull->lease);
    pd_assert(quarantined); /* it was landing */
    settle(pulls, pull);
}

void prefill_pull_give_up(prefill_pulls *pulls, prefill_request *r)
{
    if (r->pull != NULL)
        give_up(pulls, r->pull, "nobody waits any more");
}

static void land(prefill_pulls *pulls, prefill_pull *pull)
{
    pd_message message = {.kind = PD_MSG_LANDED, .landed = {.key = pull->landing.key}};
    prefill_request *r = pull->request;
    uint32_t count = pull->lease->blocks_count;

    memcpy(r->blocks + pull->held, pull->lease->blocks, count * sizeof *r->blocks);
    pd_blocks_remember(pulls->blocks, r->hashes, r->blocks, pull->held + count, UINT32_MAX);
    pd_lease_landed(pulls->leases, pull->lease);
    /* What was pulled is cache like any other: the prompt finds it there as it starts. */
    pd_lease_release(pulls->leases, pull->lease);
    let_go(pulls, pull);
    forget(pulls, pull);
    pulls->sink->send(pulls->sink->ctx, message.landed.key.router, &message);
}

static void take(prefill_pulls *pulls, prefill_pull *pull, pd_land_result result)
{
    if (pull->request == NULL)
        settle(pulls, pull);
    else if (result == PD_LAND_DONE)
        land(pulls, pull);
    else if (result == PD_LAND_BROKEN)
        give_up(pulls, pull, "a block's seal does not match its bytes");
    else if (result == PD_LAND_UNCHECKED)
        give_up(pulls, pull, "its device cannot read landed blocks");
}

/* The source writes no more: what has come in full is checked to the end. */
static void close(prefill_pulls *pulls, prefill_pull *pull, const char *why)
{
    bool lacks = !pd_landing_written(&pull->landing);

    pull->landing.closed = true;
    if (pull->request != NULL && lacks)
        give_up(pulls, pull, why);
    else
        settle(pulls, pull);
}

/* ---- events ---- */

void prefill_pull_ended(prefill_pulls *pulls, const pd_msg_pull_end *ended)
{
    prefill_pull *pull = find(pulls, &ended->key);

    if (pull == NULL)
        return;
    if (!ended->may_land)
        close(pulls, pull, ended->reason);
    else if (pull->request != NULL && !pd_landing_written(&pull->landing))
        give_up(pulls, pull, ended->reason);
}

void prefill_pull_unwritten(prefill_pulls *pulls, const pd_request_key *key, uint64_t source)
{
    prefill_pull *pull = find(pulls, key);

    if (pull != NULL && (source == 0 || pull->lease->prefill == source))
        close(pulls, pull, "nobody writes");
}

static void on_abort(prefill_pulls *pulls, const pd_notice *notice)
{
    bool any = false;

    for (prefill_pull *pull = pulls->head, *next; pull != NULL; pull = next) {
        next = pull->next;
        if (!pd_landing_is_aborted(&pull->landing, pulls->options, notice))
            continue;
        close(pulls, pull, "the source gave up");
        any = true;
    }
    pulls->counters->notices_ignored += !any;
}

void prefill_pull_on_notice(prefill_pulls *pulls, const pd_notice *notice, uint64_t now_ns)
{
    prefill_pull *pull = find(pulls, &notice->key);
    pd_land_result result = PD_LAND_IGNORED;

    if (notice->kind == PD_NOTICE_ABORT) {
        on_abort(pulls, notice);
        return;
    }
    if (pull != NULL && notice->kind == PD_NOTICE_WRITTEN &&
        pd_land_on_written(&pulls->lander, &pull->landing, notice, now_ns))
        return; /* the tick acts upon it */
    if (pull != NULL && notice->kind == PD_NOTICE_BLOCKS)
        result = pd_land_on_notice(&pulls->lander, &pull->landing, notice, now_ns);
    if (result == PD_LAND_IGNORED)
        pulls->counters->notices_ignored++;
    else
        take(pulls, pull, result);
}

void prefill_pull_on_checked(prefill_pulls *pulls, const pd_checked *checked)
{
    pd_landing *landing;
    pd_land_result result = pd_land_on_checked(&pulls->lander, checked, &landing);

    if (landing != NULL)
        take(pulls, (prefill_pull *)((unsigned char *)landing - offsetof(prefill_pull, landing)),
             result);
}

void prefill_pull_source_gone(prefill_pulls *pulls, uint64_t incarnation, bool dead)
{
    if (dead)
        pd_writers_refuse(&pulls->writers, incarnation, true);
    for (prefill_pull *pull = pulls->head, *next; pull != NULL; pull = next) {
        next = pull->next;
        if (incarnation == 0 || pull->lease->prefill != incarnation)
            continue;
        if (dead)
            close(pulls, pull, "the source is gone");
        else if (pull->request != NULL && !pd_landing_written(&pull->landing))
            give_up(pulls, pull, "the source was given up");
    }
}

void prefill_pulls_audit(const prefill_pulls *pulls, pd_audit *audit)
{
    for (const prefill_pull *pull = pulls->head; pull != NULL; pull = pull->next) {
        bool given_up = pull->request == NULL;
        pd_audit_add(audit, &pull->landing.key, given_up ? PD_AUDIT_QUARANTINED : PD_AUDIT_LANDING,
                     pull->lease->blocks_count);
        if (given_up)
            pd_audit_wait_for(audit, pull->lease->prefill);
    }
}

void prefill_pulls_ask(prefill_pulls *pulls, pd_links *links, uint64_t now_ns)
{
    for (prefill_pull *pull = pulls->head; pull != NULL; pull = pull->next) {
        if (pull->request != NULL || now_ns < pull->ask_ns)
            continue;
        bool first = pull->ask_ns == 0; /* its word is probably on its way */
        pull->ask_ns = now_ns + ASK_MS * PD_NS_PER_MS;
        const pd_link *link = pd_links_by_incarnation(links, pull->lease->prefill);
        if (first || link == NULL || link->state != PD_LINK_UP)
            continue;
        pd_notice notice = {.kind = PD_NOTICE_ASK,
                            .key = pull->landing.key,
                            .sender = pulls->options->incarnation,
                            .receiver = link->incarnation};
        if (pulls->sink->notify(pulls->sink->ctx, link->peer, &notice) != PD_OK)
            pd_log_debug("msg=\"a question for a last word was not taken\" peer=%s", link->name);
    }
}

void prefill_pulls_tick(prefill_pulls *pulls, uint64_t now_ns)
{
    pd_land_retry(&pulls->lander);
    for (prefill_pull *pull = pulls->head, *next; pull != NULL; pull = next) {
        next = pull->next;
        if (pull->request == NULL)
            continue;
        if (now_ns >= pull->deadline_ns)
            give_up(pulls, pull, "it took too long");
        else if (pd_land_tick(&pulls->lander, &pull->landing, now_ns) == PD_LAND_BROKEN)
            give_up(pulls, pull, "blocks that its source has written did not come");
        /* What is only late is not asked for: fetched twice it would be later yet. */
    }
}

#include "router/retry.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/place.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { FAILURES_IN_ROW_MAX = 3, FAILURES_MAX = 16, BACKOFF_MS = 50, BACKOFF_MS_MAX = 1000 };
enum { BUDGET_FILLS_S = 60 };
static const double BUDGET_A_REQUEST = 0.1;

/* ---- ends ---- */

void router_request_fail(router_requests *t, router_request *r, int http, const char *code,
                         uint32_t retry_after_s, const char *format, ...)
{
    router_error error = {.http_status = http,
                          .type = http == 400   ? "invalid_request_error"
                                  : http == 429 ? "rate_limit_error"
                                                : "server_error",
                          .code = code,
                          .retry_after_s = retry_after_s};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.message, sizeof error.message, format, arguments);
    va_end(arguments);
    pd_log_req_warn(r->id, "msg=\"request failed: %s\" status=%d code=%s state=%s tokens=%u",
                    error.message, http, code, router_request_state_name(r->state), r->next_index);
    router_handle handle = r->key.number;
    t->o.counters->failed++;
    router_request_release(t, r, ROUTER_EVENT_FAILED);
    t->o.sink->error(t->o.sink->ctx, handle, &error);
}

void router_request_finish(router_requests *t, router_request *r, uint64_t now_ns)
{
    router_finish end = {.reason = r->reason,
                         .prompt_tokens = r->prompt_tokens,
                         .completion_tokens = r->next_index,
                         .cached_tokens = r->cached_tokens,
                         .queued_ns = r->queued_ns,
                         .first_ns = r->first_ns - r->arrived_ns,
                         .total_ns = now_ns - r->arrived_ns};
    router_handle handle = r->key.number;
    pd_log_req_debug(r->id, "msg=\"request done\" tokens=%u cached=%u failures=%u ms=%.1f",
                     r->next_index, r->cached_tokens, r->failures, (double)end.total_ns / 1e6);
    t->o.counters->finished++;
    router_request_release(t, r, ROUTER_EVENT_FINISHED);
    t->o.sink->finish(t->o.sink->ctx, handle, &end);
}

bool router_request_clients_error(router_requests *t, router_request *r, pd_status status,
                                  const char *worker, const char *reason)
{
    if (status == PD_E_TOO_LARGE)
        router_request_fail(t, r, 400, "context_length_exceeded", 0,
                            "prompt (%u tokens) and answer (%u) are more than worker %s takes: %s",
                            r->prompt_tokens, r->max_tokens, worker, reason);
    else if (status == PD_E_INVALID)
        router_request_fail(t, r, 400, "invalid_request", 0, "worker %s refused the request: %s",
                            worker, reason);
    else
        return false;
    return true;
}

/* ---- again ---- */

uint64_t router_request_backoff_ns(router_requests *t, uint64_t base_ms, uint32_t times)
{
    uint64_t ms = base_ms;
    for (uint32_t i = 1; i < times && ms < BACKOFF_MS_MAX; i++)
        ms *= 2;
    if (ms > BACKOFF_MS_MAX)
        ms = BACKOFF_MS_MAX;
    uint64_t jitter = pd_random_next(&t->random) % 1024; /* of 1024: 0.5 to 1.5 times */
    return ms * (512 + jitter) * PD_NS_PER_MS / 1024;
}

void router_request_requeue(router_requests *t, router_request *r, router_event event,
                            uint64_t now_ns)
{
    router_request_leave_workers(t, r, event == ROUTER_EVENT_GIVES_WAY);
    router_request_step(t, r, event);
    r->key.epoch = ++r->epoch_last;
    r->early_count = 0;
    r->base_index = r->next_index;
    r->placed_ns = now_ns;
    router_request_enqueue(t, r);
    router_request_set_due(t, r, r->queue_due_ns);
    if (router_request_extend_hashes(t, r, router_request_base_tokens(r)) != PD_OK)
        router_request_fail(t, r, 503, "out_of_memory", 1, "the router is out of memory");
}

void router_retry_accepted(router_requests *t)
{
    t->budget += BUDGET_A_REQUEST;
}

static bool spend(router_requests *t, uint64_t now_ns)
{
    double most = t->o.config->requests_max;
    if (now_ns > t->budget_ns) {
        t->budget += most / BUDGET_FILLS_S * (double)(now_ns - t->budget_ns) / (double)PD_NS_PER_S;
        t->budget_ns = now_ns;
    }
    if (t->budget > most)
        t->budget = most;
    if (t->budget < 1)
        return false;
    t->budget -= 1;
    return true;
}

/* Now a suspect: whom it left a moment ago may die of it yet, and must have no other one then. */
static void keep_left_free(router_requests *t, const router_request *r)
{
    for (uint32_t i = 0; i < ROUTER_LEFT_MAX; i++) {
        uint32_t slot = router_cluster_by_incarnation(t->o.cluster, r->left[i].incarnation);
        uint64_t until_ns = r->left[i].left_ns + t->o.config->lost_after_ns;
        if (r->left[i].incarnation != 0 && slot != ROUTER_NO_WORKER)
            router_request_leave_suspect(t, r, slot, until_ns);
    }
}

bool router_request_is_explained(const router_requests *t, uint64_t incarnation, uint64_t now_ns)
{
    for (uint32_t i = 0; i < ROUTER_EXPLAINED_MAX; i++) {
        if (t->explained[i].incarnation == incarnation && now_ns <= t->explained[i].until_ns)
            return true;
    }
    return false;
}

/* What it left a short while ago may be dying of it: nobody else is to be blamed for that. */
static void explain_left(router_requests *t, const router_request *r)
{
    for (uint32_t i = 0; i < ROUTER_LEFT_MAX; i++) {
        if (r->left[i].incarnation != 0)
            t->explained[t->explained_next++ % ROUTER_EXPLAINED_MAX] = (router_explained){
                r->left[i].incarnation, r->left[i].left_ns + t->o.config->lost_after_ns};
    }
}

static void convict(router_requests *t, router_request *r)
{
    explain_left(t, r);
    bool same = strcmp(r->killed[0], r->killed[1]) == 0;
    t->o.counters->suspects++;
    router_request_fail(t, r, 500, "request_suspect", 0,
                        "request %s was being computed at %s, and at %s%s when %s died or fell "
                        "silent: it is not given a third worker",
                        r->id, r->killed[0], r->killed[1], same ? " again (started anew)," : "",
                        same ? "it" : "they");
}

bool router_request_blame(router_requests *t, router_request *r, const router_death *death,
                          uint64_t now_ns)
{
    bool was_suspect = r->killed_count > 0;
    bool begun = r->next_index - r->base_index < ROUTER_BEGUN_TOKENS;
    if (death->explained && !was_suspect)
        return false;
    /* Who met others at each death must not be excused for ever. */
    bool excused = death->explained && r->distance < ROUTER_DISTANCE_ALWAYS;
    for (uint32_t k = 0; death->alone && !excused && k < ROUTER_ALONE_DEATHS_MAX; k++) {
        if (r->alone_at[k] != 0)
            continue;
        r->alone_at[k] = death->incarnation;
        r->deaths_alone++;
        break;
    }
    memmove(r->killed[0], r->killed[1], sizeof r->killed[0]);
    snprintf(r->killed[1], sizeof r->killed[1], "%s", death->worker);
    r->killed_at[0] = r->killed_at[1];
    r->killed_at[1] = death->incarnation;
    if ((was_suspect && death->only_suspect && !excused) ||
        r->deaths_alone >= ROUTER_ALONE_DEATHS_MAX) {
        convict(t, r);
        return true;
    }
    router_request_set_killed(t, r, 1);
    if (was_suspect && r->distance < ROUTER_DISTANCE_ALWAYS)
        r->distance++;
    if (!was_suspect && (begun || death->alone))
        r->distance = ROUTER_DISTANCE_TURN;
    if (was_suspect)
        pd_log_req_warn(r->id,
                        "msg=\"several suspects were at %s when it died: which of them it was is "
                        "not known\"",
                        death->worker);
    r->suspect_ns = now_ns;
    router_request_wake_at(t, router_place_turn_ends_ns(t, r));
    keep_left_free(t, r);
    return false;
}

static void not_dead(router_requests *t, router_request *r, uint64_t incarnation)
{
    bool any = false;

    for (uint32_t k = 0; k < ROUTER_ALONE_DEATHS_MAX; k++) {
        if (r->alone_at[k] != incarnation)
            continue;
        r->alone_at[k] = 0;
        r->deaths_alone--;
    }
    for (uint32_t k = 0; k < ROUTER_DEATHS_MAX; k++) {
        if (r->killed_at[k] == incarnation)
            r->killed_at[k] = 0;
        any = any || r->killed_at[k] != 0;
    }
    if (r->killed_at[1] == 0 && any) { /* the one before it is the latest again */
        memcpy(r->killed[1], r->killed[0], sizeof r->killed[1]);
        r->killed_at[1] = r->killed_at[0];
        r->killed_at[0] = 0;
    }
    if (r->killed_count > 0 && !any)
        router_request_set_killed(t, r, 0);
}

void router_requests_not_dead(router_requests *t, uint64_t incarnation)
{
    for (uint32_t i = 0; incarnation != 0 && i < t->slots_used; i++) {
        if (t->slots[i].state != ROUTER_REQUEST_NONE)
            not_dead(t, &t->slots[i], incarnation);
    }
}

router_presence router_request_was_left(const router_requests *t, const router_request *r,
                                        uint64_t incarnation, uint64_t now_ns)
{
    router_presence presence = ROUTER_ABSENT;
    for (uint32_t i = 0; i < ROUTER_LEFT_MAX; i++) {
        if (r->left[i].incarnation == incarnation && r->left[i].presence > presence &&
            now_ns - r->left[i].left_ns <= t->o.config->lost_after_ns)
            presence = r->left[i].presence;
    }
    return presence;
}

void router_request_left_well(router_requests *t, uint32_t slot, const pd_request_key *key)
{
    router_request *r = key->router == t->o.router ? router_request_find(t, key->number) : NULL;
    uint64_t incarnation = router_request_worker(t, slot)->hello.incarnation;
    for (uint32_t i = 0; r != NULL && i < ROUTER_LEFT_MAX; i++) {
        if (r->left[i].incarnation == incarnation && r->left[i].epoch == key->epoch)
            r->left[i].incarnation = 0;
    }
}

/* It is given up at that worker, for another's fault. */
static void remember_left(router_requests *t, router_request *r, uint32_t slot, uint64_t now_ns)
{
    router_presence presence = router_request_presence(r, slot, now_ns);
    if (presence == ROUTER_ABSENT)
        return;
    r->left[r->left_count++ % ROUTER_LEFT_MAX] =
        (router_left){.incarnation = router_request_worker(t, slot)->hello.incarnation,
                      .left_ns = now_ns,
                      .epoch = r->key.epoch,
                      .presence = presence};
}

void router_request_retry(router_requests *t, router_request *r, const router_failure *failure,
                          uint64_t now_ns)
{
    const router_core_config *config = t->o.config;
    if (r->failures_in_row >= FAILURES_IN_ROW_MAX || r->failures >= FAILURES_MAX) {
        router_request_fail(t, r, 503, failure->code, 1, "%s (attempt %u)", failure->why,
                            r->failures + 1);
        return;
    }
    if (!spend(t, now_ns)) {
        t->o.counters->budget_exhausted++;
        router_request_fail(t, r, 503, "retry_budget", 5,
                            "%s, and too many requests were tried again lately", failure->why);
        return;
    }
    r->failures++;
    r->failures_in_row++;
    t->o.counters->retries[failure->reason]++;
    t->o.counters->retried++;
    t->o.counters->resumed += r->next_index > 0;
    pd_log_req_warn(r->id, "msg=\"tried again: %s\" reason=%s attempt=%u tokens=%u", failure->why,
                    router_retry_reason_name(failure->reason), r->failures + 1, r->next_index);
    if (failure->slot != ROUTER_NO_WORKER && failure->role == PD_ROLE_PREFILL)
        r->avoid_prefill = failure->slot;
    else if (failure->slot != ROUTER_NO_WORKER)
        r->avoid_decode = failure->slot;
    remember_left(t, r, r->prefill, now_ns);
    remember_left(t, r, r->decode, now_ns);
    r->not_before_ns =
        r->failures_in_row <= 1
            ? 0
            : now_ns + router_request_backoff_ns(t, BACKOFF_MS, r->failures_in_row - 1);
    if (r->queue_due_ns < now_ns + config->queue_ns)
        r->queue_due_ns = now_ns + config->queue_ns;
    router_request_requeue(t, r, ROUTER_EVENT_RETRIED, now_ns);
}

const char *router_retry_reason_name(router_retry_reason reason)
{
    static const char *const names[ROUTER_RETRY_REASONS] = {
        [ROUTER_RETRY_LOST] = "lost",       [ROUTER_RETRY_FAILED] = "failed",
        [ROUTER_RETRY_SILENT] = "silent",   [ROUTER_RETRY_UNREACHABLE] = "unreachable",
        [ROUTER_RETRY_SEAL] = "seal",       [ROUTER_RETRY_SESSION] = "session",
        [ROUTER_RETRY_MISSING] = "missing", [ROUTER_RETRY_PEER] = "peer"};
    return reason < ROUTER_RETRY_REASONS ? names[reason] : "?";
}

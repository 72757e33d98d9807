#pragma once

/* router/retry.h - how a request ends, and when it may be tried again.
 *
 * A worker that is lost, fails a request or is silent past a deadline costs the request an attempt:
 * it goes back to the queue with the next epoch, from the tokens that its client has. What bounds
 * that:
 *
 * FAILURES_IN_ROW_MAX (3): failed attempts without a token of a decode worker, 4 in all. One covers
 * a worker that died, two a second one that died with it, three bad luck.
 *
 * FAILURES_MAX (16) in all: a long answer outlives a rolling restart of a large pool, and a request
 * that fails after each token does not go on for ever.
 *
 * The budget: a bucket of tokens, one a retry, over all requests. It holds requests_max (the loss
 * of a whole pool costs each request in flight one retry, and must fail none), and fills by
 * requests_max a minute and a tenth of a token for each request taken in: what fails again and
 * again adds 10 % to the load, not a storm. Empty: 503.
 *
 * ROUTER_DEATHS_MAX (2): workers that died (silent, or came back as a new process) while they
 * computed it, as they had said; or may have, when nobody else was known to be computed there. It
 * may be what kills them, and gets no third: 500. After the first death, however long it ran, it is
 * a suspect, until it has made ROUTER_ABSOLVED_TOKENS of a later attempt: what kills does so again,
 * and soon. Suspects spread over the workers (place.c), so that of those that were in one death
 * together the second convicts only who was in both. One that had only begun there
 * (ROUTER_BEGUN_TOKENS), or was alone, waits in the queue for its turn, lost_after at most; one
 * that had run in company does not wait. Where several met all the same, the death convicts none,
 * and each keeps its distance for longer: for lost_after, and after yet another such death for as
 * long as it takes. What is no suspect keeps no distance, and is not held up.
 *
 * A death that was only silence is taken back when that worker is heard again
 * (router_requests_not_dead).
 *
 * ROUTER_ALONE_DEATHS_MAX (4): deaths of workers that computed nothing else of this router's, in
 * all its life, however many tokens it made in between.
 *
 * Backoff: none before the first retry, whose worker is gone; then 50 ms, 100, ... up to 1 s, each
 * times 0.5 to 1.5 at random, so that what failed together does not come back together.
 *
 * The queue's deadline: anew for each retry, since a pool without workers may come back.
 *
 * What a worker refuses as the client's error (too large, invalid) is never tried again. A worker
 * without room is not a failure: the request waits in the queue.
 *
 * The inside of router/request.h. One thread. */

#include "router/request_table.h"

typedef struct router_failure {
    router_retry_reason reason;
    pd_role role;     /* of whom to avoid; with slot */
    uint32_t slot;    /* ROUTER_NO_WORKER: nobody, or it is gone */
    const char *code; /* of the error, should there be no other attempt */
    const char *why;
} router_failure;

/* Ends with an error. r is gone afterwards. */
__attribute__((format(printf, 6, 7))) void
router_request_fail(router_requests *t, router_request *r, int http, const char *code,
                    uint32_t retry_after_s, const char *format, ...);
/* Closing ends well. r is gone afterwards. */
void router_request_finish(router_requests *t, router_request *r, uint64_t now_ns);

/* Back to the queue for another attempt with the next epoch; no failure is counted. event:
 * ROUTER_EVENT_REFUSED, ROUTER_EVENT_GIVES_WAY (its blocks stay as cache). r may be gone
 * afterwards: out of memory. */
void router_request_requeue(router_requests *t, router_request *r, router_event event,
                            uint64_t now_ns);
/* Another attempt, or an error. r may be gone afterwards. */
void router_request_retry(router_requests *t, router_request *r, const router_failure *failure,
                          uint64_t now_ns);
/* Of what that incarnation dies, should it now, is known: one that left it a short while ago has
 * been convicted since. */
bool router_request_is_explained(const router_requests *t, uint64_t incarnation, uint64_t now_ns);
typedef struct router_death {
    const char *worker;
    uint64_t incarnation;
    bool alone;        /* no other request of this router was there */
    bool only_suspect; /* or may have been; of the suspects, if it is one */
    bool explained; /* one that was convicted had left it a short while ago: it may be its doing */
} router_death;
/* That worker died while it computed the request. True: it was one too many, and r is gone. */
bool router_request_blame(router_requests *t, router_request *r, const router_death *death,
                          uint64_t now_ns);
/* Whether that incarnation computed the request until it was tried again for another's fault, a
 * short while ago, and has not said since that it does so no more: it may have been dying. */
router_presence router_request_was_left(const router_requests *t, const router_request *r,
                                        uint64_t incarnation, uint64_t now_ns);
/* The worker says its last word on an attempt that was given up: it outlived that. */
void router_request_left_well(router_requests *t, uint32_t slot, const pd_request_key *key);
/* What a worker answered with status: true when that is the client's error, which has ended it. */
bool router_request_clients_error(router_requests *t, router_request *r, pd_status status,
                                  const char *worker, const char *reason);
/* A pause of about base_ms * 2^(times - 1), at most a second, times 0.5 to 1.5. */
uint64_t router_request_backoff_ns(router_requests *t, uint64_t base_ms, uint32_t times);
/* A request was taken in. */
void router_retry_accepted(router_requests *t);

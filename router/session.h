#pragma once

/* router/session.h - one HTTP request that asks for an answer, from its body to its last byte.
 *
 * A session has one core request a choice (prompts times n). Tokens become text that may be shown;
 * a stream is pulled from here at the client's pace, so a slow client costs the text it has not
 * read yet, which max_tokens bounds. Status and headers of a stream are sent with the first token
 * (or the first keep-alive), so that what fails before has a status of its own. Whoever ends first
 * - client, answer, failure - ends the rest: nothing stays behind. Loop thread only. */

#include "common/metrics/metrics.h"
#include "router/core.h"
#include "router/http.h"
#include "router/stream.h"
#include "router/text_pool.h"

typedef struct session session;
typedef struct session_choice session_choice;

/* What all sessions share; belongs to the service. */
typedef struct session_env {
    router_core *core;
    const text_context *text;
    const char *model;
    pd_metrics *metrics;
    pd_metric *ttft, *itl, *e2e, *queue; /* histograms */
    pd_metric *prompt, *generation;      /* histograms: tokens of a choice */
    /* Every request ends in one of them, every choice of it by itself. */
    pd_metric *success_stop, *success_length, *success_abort, *success_error, *success_timeout;
    session_choice **by_slot; /* [requests_max], by the low bits of a handle */
    session_choice *starting; /* its handle is being made */
    session *first;
    uint32_t count;
    uint64_t random; /* seeds of requests that name none */
} session_env;

/* The exchange's user pointer becomes the session. NULL: out of memory, nothing changed. */
session *session_create(session_env *env, http_exchange *exchange, api_endpoint endpoint,
                        const char *request_id, uint64_t now_ns);
/* The prepared job (owned by the session from now on): starts its choices, or answers its error. */
void session_start(session *session, text_job *job, uint64_t now_ns);
/* The job that will come must not find the session: set by whoever submits it. */
void session_set_pending(session *session, text_job *job);
/* Answers an error without a job. The session is gone afterwards. */
void session_refuse(session *session, const api_error *error);

http_pull session_pull(session *session, pd_buf *out);
/* The client is gone; the session too afterwards. */
void session_gone(session *session, uint64_t now_ns);
/* Sends keep-alives to silent streams. */
void session_tick_all(session_env *env, uint64_t now_ns);

/* From the core's sink. */
void session_on_token(session_env *env, router_handle handle, uint32_t index, uint32_t token,
                      pd_finish finish, uint64_t now_ns);
void session_on_finish(session_env *env, router_handle handle, const router_finish *finish);
void session_on_error(session_env *env, router_handle handle, const router_error *error);

/* Counts kvferry_http_requests_total{endpoint,status}. */
void session_count(session_env *env, const char *endpoint, int status);
/* Headers of an answer: content type, the request's id, Retry-After when not 0 (text must hold 16).
 */
void session_headers(const char *request_id, const char *content_type, uint32_t retry_after_s,
                     char *text, http_headers *headers_out);
#define SESSION_ID_BYTES 48 /* of a request id, NUL included */

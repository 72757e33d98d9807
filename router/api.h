#pragma once

/* router/api.h - an OpenAI body to a checked request, and errors in OpenAI's shape.
 *
 * What a parameter of ours or OpenAI's API cannot do yet is refused with a 400 that names it, when
 * ignoring it would change the answer (tools, logprobs, penalties, logit_bias, ...). Harmless ones
 * (user, metadata, store, service_tier, ...) and keys that nobody knows are ignored, since clients
 * send more of them every month. Any thread; a request belongs to whoever holds it. */

#include "common/base/buf.h"
#include "common/base/json.h"
#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define API_STOPS_MAX      16
#define API_STOP_BYTES_MAX 1024
#define API_CHOICES_MAX    64 /* prompts times n */

typedef enum api_endpoint {
    API_COMPLETIONS,
    API_CHAT,
    API_TOKENIZE,
    API_DETOKENIZE,
} api_endpoint;

typedef struct api_error {
    int http_status; /* 400, 404, ... */
    const char *type;
    const char *code; /* NULL: null */
    char param[64];   /* "": null */
    char message[320];
    uint32_t retry_after_s;
} api_error;

typedef struct api_limits {
    const char *model; /* the served name */
    const char *const *aliases;
    uint32_t aliases_count;
    uint32_t vocab;
    uint32_t context_max;
    uint32_t stops_max; /* at most API_STOPS_MAX */
} api_limits;

typedef struct api_text {
    const char *bytes; /* may hold NUL */
    size_t len;
} api_text;

/* One prompt of /v1/completions: text, or ids. */
typedef struct api_prompt {
    api_text text; /* bytes NULL: ids */
    uint32_t *ids;
    uint32_t ids_count;
} api_prompt;

typedef struct api_request {
    api_endpoint endpoint;
    pd_json *root;           /* owns what text and messages point to */
    pd_json *normalized;     /* owned; NULL when messages are the client's own */
    const pd_json *messages; /* chat, and tokenize of a conversation: role and content strings */
    api_prompt *prompts;     /* completions, tokenize: [prompts_count] */
    uint32_t prompts_count;
    uint32_t n;
    const char *model_label; /* the served name: never the client's text */
    bool stream, include_usage;
    bool ignore_eos, return_token_ids, add_special_tokens, skip_special_tokens;
    bool add_generation_prompt;
    bool has_seed, has_max_tokens;
    float temperature, top_p;
    uint32_t top_k;
    uint64_t seed;
    uint32_t max_tokens; /* with has_max_tokens */
    int32_t priority;    /* higher goes first: the body's, as vLLM means it, negated */
    api_text stops[API_STOPS_MAX];
    uint32_t stops_count;
} api_request;

/* Tokens that /tokenize and /detokenize take: beyond the context, so that a client learns by how
 * much it is over; bounded, so that counting costs no more than a few prompts. */
uint32_t api_count_max(const api_limits *limits);

/* Reads and checks a body. On PD_OK the caller owns *request_out (api_request_destroy). Otherwise
 * *error_out is what to answer. Errors: PD_E_INVALID, PD_E_NOT_FOUND (the model), PD_E_NOMEM. */
PD_CHECKED pd_status api_parse(api_endpoint endpoint, const char *body, size_t len,
                               const api_limits *limits, api_request **request_out,
                               api_error *error_out);
void api_request_destroy(api_request *request);

__attribute__((format(printf, 5, 6))) void api_error_set(api_error *error, int http_status,
                                                         const char *code, const char *param,
                                                         const char *format, ...);
/* {"error":{"message","type","param","code"}} */
void api_error_write(const api_error *error, pd_buf *buf);

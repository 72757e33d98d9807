#pragma once

/* router/text_pool.h - from a body to token ids and block hashes, off the loop when it is long.
 *
 * A job is parsed, checked, rendered, tokenized and hashed by one of a few threads, with bounded
 * queues: a prompt of megabytes never holds up the loop. A short body is done at once, on the
 * caller's thread, which is faster than waking another. All calls from the loop thread. */

#include "common/base/hash.h"
#include "common/base/loop.h"
#include "common/text/template.h"
#include "common/text/tokenizer.h"
#include "router/api.h"

typedef struct text_context {
    const pd_tokenizer *tokenizer;
    const pd_template *chat; /* NULL: the model has no chat template */
    api_limits limits;
    pd_hash128 hash_root; /* common/kv/prefix_hash: before any token */
    uint32_t block_tokens;
    uint32_t max_tokens_default;  /* completions that name none */
    uint32_t chat_tokens_default; /* chats that name none */
    size_t rendered_bytes_max;
} text_context;

/* A prompt ready to be sent. */
typedef struct text_prompt {
    pd_token_ids ids;
    pd_hash128 *hashes; /* of the full blocks */
    uint32_t hashes_count;
    uint32_t max_tokens; /* of its answer; at least 1 */
} text_prompt;

typedef struct text_job {
    /* in */
    api_endpoint endpoint;
    char *body; /* owned by the job */
    size_t body_len;
    void *user; /* NULL: whoever asked has gone */
    /* out */
    bool failed;
    api_error error;      /* with failed */
    api_request *request; /* owned */
    text_prompt *prompts; /* owned, [request->prompts_count] */
    pd_buf text;          /* detokenize: the text */
} text_job;

typedef struct text_pool text_pool;
/* A job that text_pool_submit took is done. The receiver owns it: text_job_destroy. */
typedef void text_pool_fn(void *ctx, text_job *job);

/* threads: 1 to 8; queue_max jobs may wait in each. context is copied; what it points to must
 * outlive the pool. Errors: PD_E_NOMEM, PD_E_IO (a thread does not start). */
PD_CHECKED pd_status text_pool_create(pd_loop *loop, const text_context *context, uint32_t threads,
                                      uint32_t queue_max, text_pool_fn *fn, void *ctx,
                                      text_pool **pool_out);
/* Waits for the job each thread is at; jobs not reported are freed. */
void text_pool_destroy(text_pool *pool);

/* body is copied. PD_E_NOMEM. */
PD_CHECKED pd_status text_job_create(api_endpoint endpoint, const char *body, size_t len,
                                     void *user, text_job **job_out);
void text_job_destroy(text_job *job);

/* Bodies up to this are done by text_job_run on the loop. */
#define TEXT_INLINE_BYTES 4096
/* The work itself; any thread. */
void text_job_run(const text_context *context, text_job *job);

/* PD_E_OVERLOAD: every queue is full; the job stays the caller's. */
PD_CHECKED pd_status text_pool_submit(text_pool *pool, text_job *job);

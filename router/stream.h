#pragma once

/* router/stream.h - tokens to text that may be shown, and answers in OpenAI's shape.
 *
 * An answer's text passes through here token by token: half characters and the beginning of a stop
 * string are held back, a stop string ends the answer and is never shown, wherever token borders
 * lie. So the joined deltas of a stream are the text of the answer without streaming. Pure; one
 * thread at a time. */

#include "common/base/buf.h"
#include "common/text/detokenizer.h"
#include "router/api.h"

#include <stdint.h>

typedef struct stream_text {
    pd_detokenizer detokenizer;
    const api_text *stops; /* [stops_count], borrowed */
    uint32_t stops_count;
    pd_buf held; /* text not shown yet: could become a stop string */
    bool stopped;
} stream_text;

void stream_text_init(stream_text *text, const pd_tokenizer *tokenizer, const api_text *stops,
                      uint32_t stops_count, bool special);
void stream_text_fini(stream_text *text);

/* Appends to shown what is safe to show. After a stop string text->stopped is set and nothing more
 * comes. Errors: PD_E_NOMEM, PD_E_TOO_LARGE (of shown). */
PD_CHECKED pd_status stream_text_push(stream_text *text, uint32_t token, pd_buf *shown);
/* The answer ended otherwise: what was held back is shown, unless the last bytes complete a stop.
 */
PD_CHECKED pd_status stream_text_finish(stream_text *text, pd_buf *shown);

/* ---- bodies ---- */

typedef struct stream_usage {
    uint32_t prompt_tokens, completion_tokens, cached_tokens;
} stream_usage;

typedef struct stream_head {
    api_endpoint endpoint; /* API_CHAT or API_COMPLETIONS */
    const char *id;        /* of the answer: "chatcmpl-..." */
    const char *model;
    int64_t created; /* unix seconds */
    bool include_usage;
} stream_head;

/* One choice, or one step of it. */
typedef struct stream_part {
    uint32_t index;
    api_text text;
    bool first;                /* chat streams: the delta that names the role */
    const char *finish;        /* "stop", "length"; NULL: null */
    const uint32_t *token_ids; /* NULL: not asked for */
    uint32_t token_ids_count;
    const uint32_t *prompt_token_ids; /* NULL: not asked for, or not in this step */
    uint32_t prompt_token_ids_count;
} stream_part;

/* One server-sent event with one choice. */
void stream_write_chunk(const stream_head *head, const stream_part *part, pd_buf *out);
/* The last event before the end: no choices, the usage. */
void stream_write_usage(const stream_head *head, const stream_usage *usage, pd_buf *out);
void stream_write_error(const api_error *error, pd_buf *out);
void stream_write_done(pd_buf *out);      /* data: [DONE] */
void stream_write_keepalive(pd_buf *out); /* a comment, which clients skip */

/* A whole answer without streaming. */
void stream_write_answer(const stream_head *head, const stream_part *parts, uint32_t parts_count,
                         const stream_usage *usage, pd_buf *out);

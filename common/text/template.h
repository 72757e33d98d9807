#pragma once

/* common/text/template.h - chat templates: the Jinja that models' templates use, compiled once.
 *
 * Rendering yields pieces, so that what the template wrote and what a user wrote stay apart:
 * control tokens are recognised in the former only, and no user can close a turn by typing its
 * marker. Immutable after compiling; renders on any thread. */

#include "common/base/buf.h"
#include "common/base/json.h"
#include "common/text/tokenizer.h"

typedef struct pd_template pd_template;

typedef struct pd_template_error {
    uint32_t line; /* of the template, 1-based; 0 unknown */
    char message[256];
} pd_template_error;

/* Compiles source. A construct we do not have is PD_E_UNSUPPORTED and named in *error, at compile
 * time wherever it stands. bos and eos are the texts of those tokens ("" when none). */
PD_CHECKED pd_status pd_template_compile(const char *source, size_t len, const char *bos,
                                         const char *eos, pd_template **template_out,
                                         pd_template_error *error);
void pd_template_destroy(pd_template *template_);

/* Renders a conversation: messages is a JSON array of objects, tools an array or NULL, extra an
 * object of further variables or NULL. text gets the rendered text; spans marks which bytes of it
 * came from the messages. The result equals Jinja2's with trim_blocks and lstrip_blocks on. Errors:
 * PD_E_INVALID (the template raised: *error holds its sentence; or a value it cannot work on),
 * PD_E_TOO_LARGE (text->max), PD_E_NOMEM. */
typedef pd_text_range pd_template_span; /* bytes of text that a user wrote, ascending, disjoint */

typedef struct pd_template_spans {
    pd_template_span *spans; /* owned; pd_template_spans_fini */
    size_t count, size;
} pd_template_spans;
void pd_template_spans_fini(pd_template_spans *spans);

PD_CHECKED pd_status pd_template_render(const pd_template *template_, const pd_json *messages,
                                        const pd_json *tools, const pd_json *extra,
                                        bool add_generation_prompt, pd_buf *text,
                                        pd_template_spans *spans, pd_template_error *error);

/* Tokenizes a rendered text: special tokens outside the spans only. Same errors as
 * pd_tokenizer_encode. Text on both sides of a span's border is pre-tokenized as one where no
 * special token stands between (as a reference tokenizer does with the whole text). */
PD_CHECKED pd_status pd_template_encode(const pd_tokenizer *tokenizer, const char *text, size_t len,
                                        const pd_template_spans *spans, size_t ids_max,
                                        pd_token_ids *ids);

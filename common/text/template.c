#include "common/text/template.h"
#include "common/base/mem.h"
#include "common/text/jinja.h"

#include <stdio.h>
#include <string.h>

enum {
    SOURCE_BYTES_MAX = 1 << 20,
    TREE_BYTES_MAX = 64 << 20,
    WORK_MAX = 50 * 1000 * 1000, /* steps of one rendering; a step is well under a microsecond */
    VALUES_BYTES_BASE = 32 << 20,
    VALUES_PER_TEXT = 16, /* bytes of values for each byte that may be rendered */
};

struct pd_template {
    pd_arena *arena;
    const pd_jinja_node *root;
    const char *bos, *eos;
};

static pd_status report(pd_template_error *error, pd_status status, uint32_t line,
                        const char *message)
{
    error->line = line;
    snprintf(error->message, sizeof error->message, "%s", message);
    return status;
}

pd_status pd_template_compile(const char *source, size_t len, const char *bos, const char *eos,
                              pd_template **template_out, pd_template_error *error)
{
    pd_value_context values = {.bytes_left = TREE_BYTES_MAX, .work_left = WORK_MAX};
    pd_template *template_ = NULL;
    pd_jinja_node *root = NULL;

    *error = (pd_template_error){0};
    if (len > SOURCE_BYTES_MAX)
        return report(error, PD_E_UNSUPPORTED, 0, "the template is longer than 1 MiB");
    /* twice: the tokens lie in the arena beside the tree's values */
    pd_status status = pd_arena_create(2 * (size_t)TREE_BYTES_MAX, &values.arena);
    if (status == PD_OK)
        status = pd_jinja_parse(&values, source, len, &root, error);
    if (status == PD_OK) {
        template_ = pd_calloc(1, sizeof *template_);
        char *bos_copy = pd_arena_strndup(values.arena, bos, strlen(bos));
        char *eos_copy = pd_arena_strndup(values.arena, eos, strlen(eos));
        if (template_ != NULL && bos_copy != NULL && eos_copy != NULL) {
            *template_ = (pd_template){values.arena, root, bos_copy, eos_copy};
            *template_out = template_;
            return PD_OK;
        }
        status = PD_E_NOMEM;
    }
    if (status == PD_E_NOMEM)
        report(error, status, 0, "out of memory");
    pd_free(template_);
    pd_arena_destroy(values.arena);
    return status;
}

void pd_template_destroy(pd_template *template_)
{
    if (template_ == NULL)
        return;
    pd_arena_destroy(template_->arena);
    pd_free(template_);
}

void pd_template_spans_fini(pd_template_spans *spans)
{
    pd_free(spans->spans);
    *spans = (pd_template_spans){0};
}

/* A role is the client's word, but templates build markers from it ("<|" + role + "|>"): the known
 * ones count as the template's own. */
static bool known_role(const pd_value *role)
{
    static const char *const roles[] = {"system",    "user",     "assistant", "tool",
                                        "developer", "function", "ipython",   "model"};

    if (role->kind != PD_VALUE_STRING)
        return false;
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++) {
        if (strlen(roles[i]) == role->as.string->len &&
            memcmp(roles[i], role->as.string->bytes, role->as.string->len) == 0)
            return true;
    }
    return false;
}

static void prepare_message(pd_value_context *values, pd_dict *message)
{
    pd_value *role = (pd_value *)pd_value_get_text(values, message, "role");
    pd_value *content = (pd_value *)pd_value_get_text(values, message, "content");

    if (role != NULL && known_role(role))
        *role = pd_value_string(values, role->as.string->bytes, role->as.string->len, PD_MARK_NONE);
    /* a turn of tool calls alone: content null, absent and empty mean the same */
    const pd_value *calls = pd_value_get_text(values, message, "tool_calls");
    if (calls == NULL || !pd_value_truth(calls))
        return;
    if (content == NULL)
        pd_value_put(values, message, pd_value_text(values, "content"), pd_value_text(values, ""));
    else if (content->kind == PD_VALUE_NONE)
        *content = pd_value_text(values, "");
}

static void bind_inputs(pd_jinja_run *run, const pd_template *template_, const pd_json *messages,
                        const pd_json *tools, const pd_json *extra, bool add_generation_prompt)
{
    pd_value_context *values = &run->values;
    pd_value list = pd_value_of_json(values, messages, PD_MARK_ALL);

    for (size_t i = 0; list.kind == PD_VALUE_LIST && i < list.as.list->count; i++) {
        if (list.as.list->items[i].kind == PD_VALUE_DICT)
            prepare_message(values, list.as.list->items[i].as.dict);
    }
    if (extra != NULL) {
        pd_value more = pd_value_of_json(values, extra, PD_MARK_ALL);
        for (size_t i = 0; more.kind == PD_VALUE_DICT && i < more.as.dict->count; i++)
            pd_jinja_bind(run, more.as.dict->pairs[i].key.as.string->bytes,
                          more.as.dict->pairs[i].value);
    }
    pd_jinja_bind(run, "messages", list);
    /* as others do: without tools the variable is there and none */
    pd_jinja_bind(run, "tools",
                  tools != NULL ? pd_value_of_json(values, tools, PD_MARK_ALL) : pd_value_none());
    if (extra == NULL || pd_json_get(extra, "documents") == NULL)
        pd_jinja_bind(run, "documents", pd_value_none());
    pd_jinja_bind(run, "bos_token", pd_value_text(values, template_->bos));
    pd_jinja_bind(run, "eos_token", pd_value_text(values, template_->eos));
    pd_jinja_bind(run, "add_generation_prompt", pd_value_bool(add_generation_prompt));
}

pd_status pd_template_render(const pd_template *template_, const pd_json *messages,
                             const pd_json *tools, const pd_json *extra, bool add_generation_prompt,
                             pd_buf *text, pd_template_spans *spans, pd_template_error *error)
{
    size_t bytes_max = text->max > (SIZE_MAX - VALUES_BYTES_BASE) / VALUES_PER_TEXT
                           ? SIZE_MAX
                           : VALUES_BYTES_BASE + text->max * VALUES_PER_TEXT;
    pd_jinja_run run = {
        .values = {.bytes_left = bytes_max, .work_left = WORK_MAX},
        .sink = {text, spans},
    };

    *error = (pd_template_error){0};
    spans->count = 0;
    pd_status status = pd_arena_create(SIZE_MAX, &run.values.arena); /* bytes_left bounds it */
    if (status != PD_OK)
        return report(error, status, 0, "out of memory");
    run.frame = &run.globals;
    bind_inputs(&run, template_, messages, tools, extra, add_generation_prompt);
    pd_jinja_exec(&run, template_->root);
    status = run.values.status;
    if (status != PD_OK)
        report(error, status, run.line, run.values.message);
    pd_arena_destroy(run.values.arena);
    return status;
}

pd_status pd_template_encode(const pd_tokenizer *tokenizer, const char *text, size_t len,
                             const pd_template_spans *spans, size_t ids_max, pd_token_ids *ids)
{
    return pd_tokenizer_encode_ranges(tokenizer, text, len, spans->spans, spans->count, ids_max,
                                      ids);
}

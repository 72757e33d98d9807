#include "router/api.h"
#include "common/base/mem.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { NORMALIZED_MAX = 256 << 20 };

/* ---- errors ---- */

static const char *type_of(int http_status)
{
    switch (http_status) {
    case 401: return "authentication_error";
    case 429: return "rate_limit_error";
    default: return http_status < 500 ? "invalid_request_error" : "server_error";
    }
}

void api_error_set(api_error *error, int http_status, const char *code, const char *param,
                   const char *format, ...)
{
    *error = (api_error){.http_status = http_status, .type = type_of(http_status), .code = code};
    if (param != NULL)
        snprintf(error->param, sizeof error->param, "%s", param);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
}

void api_error_write(const api_error *error, pd_buf *buf)
{
    pd_buf_puts(buf, "{\"error\":{\"message\":");
    pd_json_write_string(buf, error->message, strlen(error->message));
    pd_buf_printf(buf, ",\"type\":\"%s\",\"param\":", error->type);
    if (error->param[0] == '\0')
        pd_buf_puts(buf, "null");
    else
        pd_json_write_string(buf, error->param, strlen(error->param));
    if (error->code == NULL)
        pd_buf_puts(buf, ",\"code\":null}}");
    else
        pd_buf_printf(buf, ",\"code\":\"%s\"}}", error->code);
}

/* Short for the many checks below: sets a 400 and yields its status. */
#define REFUSE(error, param, ...)                                                                  \
    (api_error_set((error), 400, NULL, (param), __VA_ARGS__), PD_E_INVALID)

static pd_status wrong_type(api_error *error, const char *param, const pd_json *value,
                            const char *expected)
{
    return REFUSE(error, param, "%s: expected %s, got %s", param, expected,
                  pd_json_type_name(pd_json_type_of(value)));
}

static pd_status unsupported(api_error *error, const char *param)
{
    api_error_set(error, 400, "unsupported_parameter", param, "%s is not supported here yet",
                  param);
    return PD_E_INVALID;
}

/* The top-level key that offset lies under, so that a number or escape that JSON cannot hold is
 * blamed on its field; "" when it is under none. Only looks at text before offset. */
static void key_before(const char *text, size_t offset, char *key, size_t size)
{
    int depth = 0;
    size_t start = 0, end = 0;
    bool value = false; /* behind a colon at depth 1 */

    for (size_t i = 0; i < offset; i++) {
        char c = text[i];
        if (c == '"') {
            size_t from = ++i;
            while (i < offset && text[i] != '"')
                i += text[i] == '\\' ? 2 : 1;
            if (depth == 1 && !value && i < offset) {
                start = from;
                end = i;
            }
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            depth--;
        } else if (depth == 1 && (c == ':' || c == ',')) {
            value = c == ':';
        }
    }
    key[0] = '\0';
    for (size_t i = start; i < end; i++) /* a name, and never a piece of someone's text */
        value = value && (isalnum((unsigned char)text[i]) || text[i] == '_');
    if (value && end > start && end - start < size) {
        memcpy(key, text + start, end - start);
        key[end - start] = '\0';
    }
}

static pd_status parse_body(const char *body, size_t len, pd_json **root_out, api_error *error)
{
    pd_json_error cause;
    pd_status status = pd_json_parse(body, len, root_out, &cause);
    if (status == PD_E_INVALID) {
        char key[64] = "";
        size_t offset = cause.offset < len ? cause.offset : len;
        if (cause.number_range || strstr(cause.message, "Unicode") != NULL ||
            strstr(cause.message, "UTF-8") != NULL)
            key_before(body, offset, key, sizeof key);
        return REFUSE(error, key, "the body is no valid JSON: %s, at byte %zu", cause.message,
                      cause.offset);
    }
    if (status != PD_OK) {
        api_error_set(error, 503, "out_of_memory", NULL, "the router is out of memory");
        return status;
    }
    if (pd_json_type_of(*root_out) != PD_JSON_OBJECT) {
        pd_status refused = REFUSE(error, NULL, "the body must be a JSON object, got %s",
                                   pd_json_type_name(pd_json_type_of(*root_out)));
        pd_json_free(*root_out);
        *root_out = NULL;
        return refused;
    }
    return PD_OK;
}

/* ---- scalars; absent and null leave the default ---- */

static pd_json *present(const pd_json *object, const char *key)
{
    pd_json *value = pd_json_get(object, key);
    return value == NULL || pd_json_type_of(value) == PD_JSON_NULL ? NULL : value;
}

static pd_status read_bool(const pd_json *root, const char *key, bool *value, api_error *error)
{
    const pd_json *item = present(root, key);
    if (item == NULL)
        return PD_OK;
    if (pd_json_type_of(item) != PD_JSON_BOOL)
        return wrong_type(error, key, item, "true or false");
    *value = pd_json_bool(item);
    return PD_OK;
}

static pd_status read_number(const pd_json *root, const char *key, double min, double max,
                             double *value, api_error *error)
{
    const pd_json *item = present(root, key);
    if (item == NULL)
        return PD_OK;
    pd_json_type type = pd_json_type_of(item);
    if (type != PD_JSON_INTEGER && type != PD_JSON_REAL)
        return wrong_type(error, key, item, "a number");
    double number = pd_json_number(item);
    if (!isfinite(number) || number < min || number > max)
        return REFUSE(error, key, "%s: %g is not between %g and %g", key, number, min, max);
    *value = number;
    return PD_OK;
}

static pd_status read_integer(const pd_json *root, const char *key, int64_t min, int64_t max,
                              int64_t *value, bool *given, api_error *error)
{
    const pd_json *item = present(root, key);
    if (item == NULL)
        return PD_OK;
    if (pd_json_type_of(item) != PD_JSON_INTEGER)
        return wrong_type(error, key, item, "an integer");
    int64_t number = pd_json_integer(item);
    if (number < min || number > max)
        return REFUSE(error, key, "%s: %lld is not between %lld and %lld", key, (long long)number,
                      (long long)min, (long long)max);
    *value = number;
    if (given != NULL)
        *given = true;
    return PD_OK;
}

/* ---- what is refused ---- */

typedef enum refuse_when {
    WHEN_PRESENT,    /* anything but null */
    WHEN_TRUE,       /* anything but false */
    WHEN_NOT_EMPTY,  /* anything but an empty array, object or string */
    WHEN_NOT_NUMBER, /* anything but the neutral number */
} refuse_when;

static const struct {
    const char *key;
    refuse_when when;
    double neutral, min, max; /* WHEN_NOT_NUMBER: out of min .. max is an error of its own */
} NOT_YET[] = {
    {"frequency_penalty", WHEN_NOT_NUMBER, 0, -2, 2},
    {"presence_penalty", WHEN_NOT_NUMBER, 0, -2, 2},
    {"repetition_penalty", WHEN_NOT_NUMBER, 1, 0, 10},
    {"min_p", WHEN_NOT_NUMBER, 0, 0, 1},
    {"min_tokens", WHEN_NOT_NUMBER, 0, 0, 1e9},
    {"length_penalty", WHEN_NOT_NUMBER, 1, -10, 10},
    {"logit_bias", WHEN_NOT_EMPTY, 0, 0, 0},
    {"tools", WHEN_NOT_EMPTY, 0, 0, 0},
    {"functions", WHEN_NOT_EMPTY, 0, 0, 0},
    {"suffix", WHEN_NOT_EMPTY, 0, 0, 0},
    {"stop_token_ids", WHEN_NOT_EMPTY, 0, 0, 0},
    {"bad_words", WHEN_NOT_EMPTY, 0, 0, 0},
    {"allowed_token_ids", WHEN_NOT_EMPTY, 0, 0, 0},
    {"cache_salt", WHEN_NOT_EMPTY, 0, 0, 0},
    {"echo", WHEN_TRUE, 0, 0, 0},
    {"use_beam_search", WHEN_TRUE, 0, 0, 0},
    {"include_stop_str_in_output", WHEN_TRUE, 0, 0, 0},
    {"continue_final_message", WHEN_TRUE, 0, 0, 0},
    {"prompt_logprobs", WHEN_PRESENT, 0, 0, 0},
    {"audio", WHEN_PRESENT, 0, 0, 0},
    {"web_search_options", WHEN_PRESENT, 0, 0, 0},
    {"chat_template", WHEN_PRESENT, 0, 0, 0},
    {"chat_template_kwargs", WHEN_NOT_EMPTY, 0, 0, 0},
    {"guided_json", WHEN_PRESENT, 0, 0, 0},
    {"guided_regex", WHEN_PRESENT, 0, 0, 0},
    {"guided_choice", WHEN_PRESENT, 0, 0, 0},
    {"guided_grammar", WHEN_PRESENT, 0, 0, 0},
    {"structured_outputs", WHEN_PRESENT, 0, 0, 0},
    {"guided_json_object", WHEN_TRUE, 0, 0, 0},
    {"prompt_embeds", WHEN_PRESENT, 0, 0, 0},
    {"truncate_prompt_tokens", WHEN_PRESENT, 0, 0, 0},
    {"documents", WHEN_NOT_EMPTY, 0, 0, 0},
    {"logits_processors", WHEN_NOT_EMPTY, 0, 0, 0},
};

static bool is_empty(const pd_json *value)
{
    size_t len = 1;
    if (pd_json_type_of(value) == PD_JSON_STRING) {
        pd_json_string(value, &len);
        return len == 0;
    }
    return (pd_json_type_of(value) == PD_JSON_ARRAY || pd_json_type_of(value) == PD_JSON_OBJECT) &&
           pd_json_count(value) == 0;
}

static pd_status check_logprobs(const pd_json *root, api_endpoint endpoint, api_error *error)
{
    const pd_json *logprobs = present(root, "logprobs");
    int64_t top = 0;
    pd_status status = read_integer(root, "top_logprobs", 0, 20, &top, NULL, error);
    if (status != PD_OK)
        return status;
    if (endpoint == API_COMPLETIONS && logprobs != NULL) {
        int64_t count = 0;
        if (pd_json_type_of(logprobs) == PD_JSON_BOOL && !pd_json_bool(logprobs))
            return PD_OK;
        status = read_integer(root, "logprobs", 0, 20, &count, NULL, error);
        return status != PD_OK ? status : unsupported(error, "logprobs");
    }
    bool wanted = false;
    status = read_bool(root, "logprobs", &wanted, error);
    if (status != PD_OK)
        return status;
    if (wanted)
        return unsupported(error, "logprobs");
    if (top > 0)
        return REFUSE(error, "top_logprobs", "top_logprobs needs logprobs to be true");
    return PD_OK;
}

static pd_status check_formats(const pd_json *root, api_error *error)
{
    const pd_json *format = present(root, "response_format");
    if (format != NULL) {
        size_t len = 0;
        const char *type = pd_json_string(pd_json_get(format, "type"), &len);
        if (pd_json_type_of(format) != PD_JSON_OBJECT || type == NULL)
            return REFUSE(error, "response_format", "response_format: expected {\"type\": ...}");
        if (len != 4 || memcmp(type, "text", 4) != 0)
            return unsupported(error, "response_format");
    }
    const pd_json *modalities = present(root, "modalities");
    for (size_t i = 0; i < pd_json_count(modalities); i++) {
        size_t len = 0;
        const char *name = pd_json_string(pd_json_at(modalities, i), &len);
        if (name == NULL || len != 4 || memcmp(name, "text", 4) != 0)
            return unsupported(error, "modalities");
    }
    const pd_json *choice = present(root, "tool_choice");
    if (choice != NULL) {
        size_t len = 0;
        const char *name = pd_json_string(choice, &len);
        if (name == NULL || !((len == 4 && memcmp(name, "none", 4) == 0) ||
                              (len == 4 && memcmp(name, "auto", 4) == 0)))
            return unsupported(error, "tool_choice");
    }
    return PD_OK;
}

static pd_status check_not_yet(const pd_json *root, api_endpoint endpoint, api_error *error)
{
    for (size_t i = 0; i < sizeof NOT_YET / sizeof NOT_YET[0]; i++) {
        const char *key = NOT_YET[i].key;
        const pd_json *item = present(root, key);
        if (item == NULL)
            continue;
        double number = NOT_YET[i].neutral;
        bool flag = false;
        pd_status status = PD_OK;
        bool refused = false;
        switch (NOT_YET[i].when) {
        case WHEN_PRESENT: refused = true; break;
        case WHEN_NOT_EMPTY: refused = !is_empty(item); break;
        case WHEN_TRUE:
            status = read_bool(root, key, &flag, error);
            refused = flag;
            break;
        case WHEN_NOT_NUMBER:
            status = read_number(root, key, NOT_YET[i].min, NOT_YET[i].max, &number, error);
            refused = number != NOT_YET[i].neutral;
            break;
        }
        if (status != PD_OK)
            return status;
        if (refused)
            return unsupported(error, key);
    }
    pd_status status = check_logprobs(root, endpoint, error);
    return status != PD_OK ? status : check_formats(root, error);
}

/* ---- the model ---- */

static bool equals(const char *name, const char *text, size_t len)
{
    return strlen(name) == len && memcmp(name, text, len) == 0;
}

/* For a message: one line, to its end even where it holds a NUL. */
static void visible(const char *text, size_t len, char *out, size_t size)
{
    size_t i = 0;
    for (; i < len && i + 1 < size; i++)
        out[i] = (unsigned char)text[i] < ' ' || text[i] == 0x7f ? '?' : text[i];
    out[i] = '\0';
}

static pd_status check_model(const pd_json *root, const api_limits *limits, bool required,
                             api_request *request, api_error *error)
{
    const pd_json *model = present(root, "model");
    request->model_label = limits->model;
    if (model == NULL && required)
        return REFUSE(error, "model", "model: a required key is missing");
    if (model == NULL)
        return PD_OK;
    size_t len = 0;
    const char *name = pd_json_string(model, &len);
    if (name == NULL)
        return wrong_type(error, "model", model, "a string");
    if (equals(limits->model, name, len))
        return PD_OK;
    for (uint32_t i = 0; i < limits->aliases_count; i++) {
        if (equals(limits->aliases[i], name, len))
            return PD_OK;
    }
    char shown[101];
    visible(name, len, shown, sizeof shown);
    api_error_set(error, 404, "model_not_found", "model",
                  "the model '%s' does not exist here; this router serves '%s'", shown,
                  limits->model);
    return PD_E_NOT_FOUND;
}

uint32_t api_count_max(const api_limits *limits)
{
    enum { TIMES = 4, BOUND = 1 << 20 };
    uint64_t count = (uint64_t)limits->context_max * TIMES;
    uint32_t least = limits->context_max + 1;
    return count < BOUND ? (uint32_t)count : least > BOUND ? least : BOUND;
}

/* ---- prompts ---- */

static bool all_of(const pd_json *array, pd_json_type type)
{
    for (size_t i = 0; i < pd_json_count(array); i++) {
        if (pd_json_type_of(pd_json_at(array, i)) != type)
            return false;
    }
    return true;
}

static pd_status read_ids(const pd_json *array, const char *param, const api_limits *limits,
                          uint32_t count_max, api_prompt *prompt, api_error *error)
{
    size_t count = pd_json_count(array);
    if (count == 0)
        return REFUSE(error, param, "%s: a prompt must not be empty", param);
    if (count > count_max) {
        api_error_set(error, 400, "context_length_exceeded", param,
                      "%u tokens at most are taken here, %s has %zu", count_max, param, count);
        return PD_E_INVALID;
    }
    prompt->ids = pd_malloc(count * sizeof *prompt->ids);
    if (prompt->ids == NULL) {
        api_error_set(error, 503, "out_of_memory", NULL, "the router is out of memory");
        return PD_E_NOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        const pd_json *item = pd_json_at(array, i);
        if (pd_json_type_of(item) != PD_JSON_INTEGER)
            return REFUSE(error, param, "%s: item %zu is %s, expected a token id", param, i,
                          pd_json_type_name(pd_json_type_of(item)));
        int64_t id = pd_json_integer(item);
        if (id < 0 || id >= limits->vocab)
            return REFUSE(error, param, "%s: token id %lld is not between 0 and %u", param,
                          (long long)id, limits->vocab - 1);
        prompt->ids[i] = (uint32_t)id;
    }
    prompt->ids_count = (uint32_t)count;
    return PD_OK;
}

static pd_status take_prompt(api_request *request, uint32_t index, const pd_json *value,
                             const char *param, const api_limits *limits, api_error *error)
{
    api_prompt *prompt = &request->prompts[index];
    if (pd_json_type_of(value) == PD_JSON_ARRAY)
        return read_ids(value, param, limits, limits->context_max, prompt, error);
    prompt->text.bytes = pd_json_string(value, &prompt->text.len);
    pd_assert(prompt->text.bytes != NULL);
    if (prompt->text.len == 0)
        return REFUSE(error, param, "%s: a prompt must not be empty", param);
    return PD_OK;
}

/* A string, an array of strings, an array of ids, or an array of arrays of ids. */
static pd_status read_prompts(const pd_json *value, const char *param, const api_limits *limits,
                              api_request *request, api_error *error)
{
    pd_json_type type = pd_json_type_of(value);
    bool single = type == PD_JSON_STRING;
    if (type != PD_JSON_STRING && type != PD_JSON_ARRAY)
        return wrong_type(error, param, value, "a string, or an array of strings or token ids");
    if (type == PD_JSON_ARRAY) {
        if (pd_json_count(value) == 0)
            return REFUSE(error, param, "%s: must not be empty", param);
        pd_json_type first = pd_json_type_of(pd_json_at(value, 0));
        single = first != PD_JSON_STRING && first != PD_JSON_ARRAY;
        if (!single && !all_of(value, first))
            return REFUSE(error, param, "%s: strings, token ids and arrays cannot be mixed", param);
    }
    size_t count = single ? 1 : pd_json_count(value);
    if (count > API_CHOICES_MAX)
        return REFUSE(error, param, "%s: at most %d prompts in one request, got %zu", param,
                      API_CHOICES_MAX, count);
    request->prompts = pd_calloc(count, sizeof *request->prompts);
    if (request->prompts == NULL) {
        api_error_set(error, 503, "out_of_memory", NULL, "the router is out of memory");
        return PD_E_NOMEM;
    }
    request->prompts_count = (uint32_t)count;
    for (uint32_t i = 0; i < count; i++) {
        pd_status status =
            take_prompt(request, i, single ? value : pd_json_at(value, i), param, limits, error);
        if (status != PD_OK)
            return status;
    }
    return PD_OK;
}

/* ---- messages ---- */

static const char *const ROLES[] = {"system", "developer", "user", "assistant", "tool", "function"};

static bool known_role(const char *role, size_t len)
{
    for (size_t i = 0; i < sizeof ROLES / sizeof ROLES[0]; i++) {
        if (equals(ROLES[i], role, len))
            return true;
    }
    return false;
}

/* Checks one message; *plain false when it has to be rewritten for the template. */
static pd_status check_message(const pd_json *message, size_t index, bool *plain, api_error *error)
{
    size_t len = 0;
    if (pd_json_type_of(message) != PD_JSON_OBJECT)
        return REFUSE(error, "messages", "messages[%zu]: expected an object, got %s", index,
                      pd_json_type_name(pd_json_type_of(message)));
    const char *role = pd_json_string(pd_json_get(message, "role"), &len);
    if (role == NULL)
        return REFUSE(error, "messages", "messages[%zu].role: a required string is missing", index);
    if (!known_role(role, len))
        return REFUSE(error, "messages",
                      "messages[%zu].role: '%.40s' is none of system, developer, user, assistant, "
                      "tool, function",
                      index, role);
    if (equals("developer", role, len))
        *plain = false; /* OpenAI's newer name of "system"; templates know the old one */
    const pd_json *calls = present(message, "tool_calls");
    if ((calls != NULL && !is_empty(calls)) || present(message, "function_call") != NULL)
        return REFUSE(error, "messages", "messages[%zu].tool_calls is not supported here yet",
                      index);
    const pd_json *content = pd_json_get(message, "content");
    if (content == NULL || pd_json_type_of(content) == PD_JSON_NULL)
        return REFUSE(error, "messages", "messages[%zu].content: a required key is missing", index);
    if (pd_json_type_of(content) == PD_JSON_STRING)
        return PD_OK;
    if (pd_json_type_of(content) != PD_JSON_ARRAY)
        return REFUSE(error, "messages",
                      "messages[%zu].content: expected a string or an array of parts, got %s",
                      index, pd_json_type_name(pd_json_type_of(content)));
    *plain = false;
    for (size_t i = 0; i < pd_json_count(content); i++) {
        const pd_json *part = pd_json_at(content, i);
        const char *type = pd_json_string(pd_json_get(part, "type"), &len);
        size_t text_len;
        if (type == NULL || !equals("text", type, len) ||
            pd_json_string(pd_json_get(part, "text"), &text_len) == NULL)
            return REFUSE(error, "messages",
                          "messages[%zu].content[%zu]: only {\"type\":\"text\",\"text\":...} parts "
                          "are supported",
                          index, i);
    }
    return PD_OK;
}

static void write_content(const pd_json *content, pd_buf *text)
{
    size_t len = 0;
    const char *bytes = pd_json_string(content, &len);
    if (bytes != NULL) {
        pd_json_write_string(text, bytes, len);
        return;
    }
    /* Parts follow each other on lines of their own, as vLLM joins them. */
    pd_buf joined;
    pd_buf_init(&joined, NORMALIZED_MAX);
    for (size_t i = 0; i < pd_json_count(content); i++) {
        bytes = pd_json_string(pd_json_get(pd_json_at(content, i), "text"), &len);
        if (i > 0)
            pd_buf_puts(&joined, "\n");
        pd_buf_append(&joined, bytes, len);
    }
    pd_json_write_string(text, pd_buf_text(&joined), joined.len);
    if (pd_buf_status(&joined) != PD_OK)
        text->status = joined.status;
    pd_buf_fini(&joined);
}

/* What else a message holds (a name, a tool_call_id): templates may read it. */
static void write_others(pd_json *message, pd_buf *text)
{
    void *iter = NULL;
    const char *key;
    pd_json *value;
    while (pd_json_next(message, &iter, &key, &value)) {
        if (strcmp(key, "role") == 0 || strcmp(key, "content") == 0)
            continue;
        pd_buf_puts(text, ",");
        pd_json_write_string(text, key, strlen(key));
        pd_buf_puts(text, ":");
        pd_json_dump(value, text);
    }
}

/* The conversation as templates want it: every content a string. */
static pd_status normalize(const pd_json *messages, api_request *request, api_error *error)
{
    pd_buf text;
    pd_json_error cause;
    pd_buf_init(&text, NORMALIZED_MAX);
    pd_buf_puts(&text, "[");
    for (size_t i = 0; i < pd_json_count(messages); i++) {
        pd_json *message = pd_json_at(messages, i);
        size_t len = 0;
        const char *role = pd_json_string(pd_json_get(message, "role"), &len);
        pd_buf_puts(&text, i > 0 ? ",{\"role\":" : "{\"role\":");
        if (equals("developer", role, len))
            pd_buf_puts(&text, "\"system\"");
        else
            pd_json_write_string(&text, role, len);
        pd_buf_puts(&text, ",\"content\":");
        write_content(pd_json_get(message, "content"), &text);
        write_others(message, &text);
        pd_buf_puts(&text, "}");
    }
    pd_buf_puts(&text, "]");
    pd_status status = pd_buf_status(&text);
    if (status == PD_OK)
        status = pd_json_parse(pd_buf_text(&text), text.len, &request->normalized, &cause);
    pd_buf_fini(&text);
    if (status != PD_OK)
        api_error_set(error, 503, "out_of_memory", NULL, "the router is out of memory");
    else
        request->messages = request->normalized;
    return status;
}

static pd_status read_messages(const pd_json *root, api_request *request, api_error *error)
{
    const pd_json *messages = present(root, "messages");
    bool plain = true;
    if (messages == NULL)
        return REFUSE(error, "messages", "messages: a required key is missing");
    if (pd_json_type_of(messages) != PD_JSON_ARRAY)
        return wrong_type(error, "messages", messages, "an array of messages");
    if (pd_json_count(messages) == 0)
        return REFUSE(error, "messages", "messages: must not be empty");
    for (size_t i = 0; i < pd_json_count(messages); i++) {
        pd_status status = check_message(pd_json_at(messages, i), i, &plain, error);
        if (status != PD_OK)
            return status;
    }
    request->messages = messages;
    return plain ? PD_OK : normalize(messages, request, error);
}

/* ---- sampling, stops, stream ---- */

static pd_status read_stop(const pd_json *item, const api_limits *limits, api_request *request,
                           api_error *error)
{
    size_t len = 0;
    const char *text = pd_json_string(item, &len);
    if (text == NULL)
        return wrong_type(error, "stop", item, "a string or an array of strings");
    if (len == 0)
        return REFUSE(error, "stop", "stop: a stop string must not be empty");
    if (len > API_STOP_BYTES_MAX)
        return REFUSE(error, "stop", "stop: a stop string has at most %d bytes, got %zu",
                      API_STOP_BYTES_MAX, len);
    if (request->stops_count == limits->stops_max || request->stops_count == API_STOPS_MAX)
        return REFUSE(error, "stop", "stop: at most %u stop strings", request->stops_count);
    request->stops[request->stops_count++] = (api_text){text, len};
    return PD_OK;
}

static pd_status read_stops(const pd_json *root, const api_limits *limits, api_request *request,
                            api_error *error)
{
    const pd_json *stop = present(root, "stop");
    if (stop == NULL)
        return PD_OK;
    if (pd_json_type_of(stop) != PD_JSON_ARRAY)
        return read_stop(stop, limits, request, error);
    for (size_t i = 0; i < pd_json_count(stop); i++) {
        pd_status status = read_stop(pd_json_at(stop, i), limits, request, error);
        if (status != PD_OK)
            return status;
    }
    return PD_OK;
}

static pd_status read_stream(const pd_json *root, api_request *request, api_error *error)
{
    pd_status status = read_bool(root, "stream", &request->stream, error);
    const pd_json *options = present(root, "stream_options");
    if (status != PD_OK || options == NULL)
        return status;
    if (pd_json_type_of(options) != PD_JSON_OBJECT)
        return wrong_type(error, "stream_options", options, "an object");
    if (!request->stream)
        return REFUSE(error, "stream_options", "stream_options needs stream to be true");
    const pd_json *usage = present(options, "include_usage");
    if (usage != NULL && pd_json_type_of(usage) != PD_JSON_BOOL)
        return wrong_type(error, "stream_options.include_usage", usage, "true or false");
    request->include_usage = usage != NULL && pd_json_bool(usage);
    return PD_OK;
}

static pd_status read_max_tokens(const pd_json *root, api_request *request, api_error *error)
{
    int64_t old = 0, new = 0;
    bool has_old = false, has_new = false;
    pd_status status = read_integer(root, "max_tokens", 1, UINT32_MAX, &old, &has_old, error);
    if (status == PD_OK)
        status = read_integer(root, "max_completion_tokens", 1, UINT32_MAX, &new, &has_new, error);
    if (status != PD_OK)
        return status;
    request->has_max_tokens = has_old || has_new;
    request->max_tokens = (uint32_t)(has_new ? new : old);
    return PD_OK;
}

static pd_status read_sampling(const pd_json *root, const api_limits *limits, api_request *request,
                               api_error *error)
{
    double temperature = 1, top_p = 1;
    int64_t top_k = 0, seed = 0, n = 1, best_of = 0, priority = 0;
    bool has_best_of = false;
    pd_status status = read_number(root, "temperature", 0, 2, &temperature, error);
    if (status == PD_OK)
        status = read_number(root, "top_p", 0, 1, &top_p, error);
    if (status == PD_OK && top_p <= 0)
        status = REFUSE(error, "top_p", "top_p: must be over 0");
    if (status == PD_OK)
        status = read_integer(root, "top_k", -1, INT32_MAX, &top_k, NULL, error);
    if (status == PD_OK)
        status = read_integer(root, "seed", INT64_MIN, INT64_MAX, &seed, &request->has_seed, error);
    if (status == PD_OK)
        status = read_integer(root, "n", 1, API_CHOICES_MAX, &n, NULL, error);
    if (status == PD_OK)
        status = read_integer(root, "priority", -INT32_MAX, INT32_MAX, &priority, NULL, error);
    if (status == PD_OK)
        status = read_integer(root, "best_of", 1, API_CHOICES_MAX, &best_of, &has_best_of, error);
    if (status == PD_OK && has_best_of && best_of != n)
        status = unsupported(error, "best_of");
    if (status != PD_OK)
        return status;
    request->temperature = (float)temperature;
    request->top_p = (float)top_p;
    if (request->top_p <= 0) /* smaller than a float can be */
        request->top_p = 1e-30f;
    request->top_k = top_k <= 0 || top_k >= limits->vocab ? 0 : (uint32_t)top_k;
    request->seed = (uint64_t)seed;
    request->n = (uint32_t)n;
    request->priority = (int32_t)-priority; /* there the lower value goes first */
    return PD_OK;
}

static pd_status read_flags(const pd_json *root, api_request *request, api_error *error)
{
    request->add_special_tokens = request->skip_special_tokens = true;
    request->add_generation_prompt = true;
    pd_status status = read_bool(root, "ignore_eos", &request->ignore_eos, error);
    if (status == PD_OK)
        status = read_bool(root, "return_token_ids", &request->return_token_ids, error);
    if (status == PD_OK)
        status = read_bool(root, "add_special_tokens", &request->add_special_tokens, error);
    if (status == PD_OK)
        status = read_bool(root, "skip_special_tokens", &request->skip_special_tokens, error);
    if (status == PD_OK)
        status = read_bool(root, "add_generation_prompt", &request->add_generation_prompt, error);
    return status;
}

static pd_status read_generation(const pd_json *root, const api_limits *limits,
                                 api_request *request, api_error *error)
{
    pd_status status = check_model(root, limits, true, request, error);
    if (status == PD_OK)
        status = read_sampling(root, limits, request, error);
    if (status == PD_OK)
        status = read_max_tokens(root, request, error);
    if (status == PD_OK)
        status = read_stops(root, limits, request, error);
    if (status == PD_OK)
        status = read_stream(root, request, error);
    if (status == PD_OK)
        status = read_flags(root, request, error);
    if (status == PD_OK)
        status = check_not_yet(root, request->endpoint, error);
    if (status != PD_OK)
        return status;
    if (request->endpoint == API_CHAT) {
        request->prompts_count = 1;
        return read_messages(root, request, error);
    }
    const pd_json *prompt = present(root, "prompt");
    if (prompt == NULL)
        return REFUSE(error, "prompt", "prompt: a required key is missing");
    status = read_prompts(prompt, "prompt", limits, request, error);
    if (status == PD_OK && (uint64_t)request->prompts_count * request->n > API_CHOICES_MAX)
        status = REFUSE(error, "n", "n: %u prompts times %u are over %d choices",
                        request->prompts_count, request->n, API_CHOICES_MAX);
    return status;
}

static pd_status read_tokenize(const pd_json *root, const api_limits *limits, api_request *request,
                               api_error *error)
{
    pd_status status = check_model(root, limits, false, request, error);
    if (status == PD_OK)
        status = read_flags(root, request, error);
    if (status != PD_OK)
        return status;
    request->prompts_count = 1;
    if (present(root, "messages") != NULL)
        return read_messages(root, request, error);
    const pd_json *prompt = present(root, "prompt");
    if (prompt == NULL)
        return REFUSE(error, "prompt", "prompt: one of prompt and messages is required");
    if (pd_json_type_of(prompt) != PD_JSON_STRING)
        return wrong_type(error, "prompt", prompt, "a string");
    request->prompts = pd_calloc(1, sizeof *request->prompts);
    if (request->prompts == NULL) {
        api_error_set(error, 503, "out_of_memory", NULL, "the router is out of memory");
        return PD_E_NOMEM;
    }
    request->prompts->text.bytes = pd_json_string(prompt, &request->prompts->text.len);
    return PD_OK;
}

static pd_status read_detokenize(const pd_json *root, const api_limits *limits,
                                 api_request *request, api_error *error)
{
    pd_status status = check_model(root, limits, false, request, error);
    if (status == PD_OK)
        status = read_flags(root, request, error);
    if (status != PD_OK)
        return status;
    const pd_json *tokens = present(root, "tokens");
    if (tokens == NULL)
        return REFUSE(error, "tokens", "tokens: a required key is missing");
    if (pd_json_type_of(tokens) != PD_JSON_ARRAY)
        return wrong_type(error, "tokens", tokens, "an array of token ids");
    request->prompts = pd_calloc(1, sizeof *request->prompts);
    if (request->prompts == NULL) {
        api_error_set(error, 503, "out_of_memory", NULL, "the router is out of memory");
        return PD_E_NOMEM;
    }
    request->prompts_count = 1;
    if (pd_json_count(tokens) == 0)
        return PD_OK;
    return read_ids(tokens, "tokens", limits, api_count_max(limits), request->prompts, error);
}

pd_status api_parse(api_endpoint endpoint, const char *body, size_t len, const api_limits *limits,
                    api_request **request_out, api_error *error_out)
{
    api_request *request = pd_calloc(1, sizeof *request);
    if (request == NULL) {
        api_error_set(error_out, 503, "out_of_memory", NULL, "the router is out of memory");
        return PD_E_NOMEM;
    }
    request->endpoint = endpoint;
    request->n = 1;
    pd_status status = parse_body(body, len, &request->root, error_out);
    if (status == PD_OK) {
        if (endpoint == API_TOKENIZE)
            status = read_tokenize(request->root, limits, request, error_out);
        else if (endpoint == API_DETOKENIZE)
            status = read_detokenize(request->root, limits, request, error_out);
        else
            status = read_generation(request->root, limits, request, error_out);
    }
    if (status != PD_OK) {
        api_request_destroy(request);
        return status;
    }
    *request_out = request;
    return PD_OK;
}

void api_request_destroy(api_request *request)
{
    if (request == NULL)
        return;
    for (uint32_t i = 0; request->prompts != NULL && i < request->prompts_count; i++)
        pd_free(request->prompts[i].ids);
    pd_free(request->prompts);
    pd_json_free(request->normalized);
    pd_json_free(request->root);
    pd_free(request);
}

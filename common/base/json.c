#include "common/base/json.h"
#include "common/base/utf8.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* jansson recurses to a depth of 2,048; ours is lower and is checked before it is entered. */
static bool depth_fits(const char *text, size_t len, size_t *offset_out)
{
    int depth = 0;
    bool in_string = false;

    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > PD_JSON_DEPTH_MAX) {
                *offset_out = i;
                return false;
            }
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return true;
}

pd_status pd_json_parse(const char *text, size_t len, pd_json **root_out, pd_json_error *error)
{
    json_error_t cause;

    *error = (pd_json_error){0};
    if (!depth_fits(text, len, &error->offset)) {
        snprintf(error->message, sizeof error->message, "nested deeper than %d", PD_JSON_DEPTH_MAX);
        return PD_E_INVALID;
    }
    json_t *root =
        json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &cause);
    if (root == NULL) {
        enum json_error_code code = json_error_code(&cause);
        error->offset = cause.position > 0 ? (size_t)cause.position : 0;
        error->number_range = code == json_error_numeric_overflow;
        snprintf(error->message, sizeof error->message, "%s", cause.text);
        return code == json_error_out_of_memory ? PD_E_NOMEM : PD_E_INVALID;
    }
    *root_out = root;
    return PD_OK;
}

void pd_json_free(pd_json *root)
{
    json_decref(root);
}

pd_json_type pd_json_type_of(const pd_json *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: return PD_JSON_OBJECT;
    case JSON_ARRAY: return PD_JSON_ARRAY;
    case JSON_STRING: return PD_JSON_STRING;
    case JSON_INTEGER: return PD_JSON_INTEGER;
    case JSON_REAL: return PD_JSON_REAL;
    case JSON_TRUE:
    case JSON_FALSE: return PD_JSON_BOOL;
    case JSON_NULL: break;
    }
    return PD_JSON_NULL;
}

const char *pd_json_type_name(pd_json_type type)
{
    static const char *const names[] = {"null",     "a boolean", "an integer", "a number",
                                        "a string", "an array",  "an object"};
    return names[type];
}

pd_json *pd_json_get(const pd_json *object, const char *key)
{
    return json_object_get(object, key);
}

bool pd_json_next(pd_json *object, void **iter, const char **key_out, pd_json **value_out)
{
    *iter = *iter == NULL ? json_object_iter(object) : json_object_iter_next(object, *iter);
    if (*iter == NULL)
        return false;
    *key_out = json_object_iter_key(*iter);
    *value_out = json_object_iter_value(*iter);
    return true;
}

size_t pd_json_count(const pd_json *value)
{
    return json_is_array(value) ? json_array_size(value) : json_object_size(value);
}

pd_json *pd_json_at(const pd_json *array, size_t index)
{
    return json_array_get(array, index);
}

const char *pd_json_string(const pd_json *value, size_t *len_out)
{
    if (!json_is_string(value))
        return NULL;
    if (len_out != NULL)
        *len_out = json_string_length(value);
    return json_string_value(value);
}

int64_t pd_json_integer(const pd_json *value)
{
    return json_integer_value(value);
}

double pd_json_number(const pd_json *value)
{
    return json_number_value(value);
}

bool pd_json_bool(const pd_json *value)
{
    return json_is_true(value);
}

static int append_piece(const char *bytes, size_t len, void *ctx)
{
    pd_buf *buf = ctx;
    pd_buf_append(buf, bytes, len);
    return buf->status == PD_OK ? 0 : -1;
}

void pd_json_dump(const pd_json *value, pd_buf *buf)
{
    if (json_dump_callback(value, append_piece, buf, JSON_COMPACT | JSON_ENCODE_ANY) != 0 &&
        buf->status == PD_OK)
        buf->status = PD_E_NOMEM;
}

static void write_escape(pd_buf *buf, unsigned char c)
{
    switch (c) {
    case '"': pd_buf_puts(buf, "\\\""); return;
    case '\\': pd_buf_puts(buf, "\\\\"); return;
    case '\n': pd_buf_puts(buf, "\\n"); return;
    case '\r': pd_buf_puts(buf, "\\r"); return;
    case '\t': pd_buf_puts(buf, "\\t"); return;
    default: pd_buf_printf(buf, "\\u%04x", c);
    }
}

void pd_json_write_string(pd_buf *buf, const char *text, size_t len)
{
    size_t start = 0, i = 0; /* text[start..i) is plain and not yet written */

    pd_buf_append(buf, "\"", 1);
    while (i < len) {
        unsigned char c = (unsigned char)text[i];
        size_t step = c < 0x80 ? 1 : pd_utf8_len(text + i, len - i);
        if (step != 0 && c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) {
            i += step;
            continue;
        }
        pd_buf_append(buf, text + start, i - start);
        if (step == 0) {
            pd_buf_puts(buf, "\xef\xbf\xbd");
            step = pd_utf8_bad_len(text + i, len - i);
        } else {
            write_escape(buf, c);
        }
        i += step;
        start = i;
    }
    pd_buf_append(buf, text + start, len - start);
    pd_buf_append(buf, "\"", 1);
}

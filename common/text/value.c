#include "common/text/value.h"
#include "common/base/utf8.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 100, WRITE_MAX = 64 << 20 };

void pd_value_fail(pd_value_context *ctx, pd_status status, const char *format, ...)
{
    va_list args;

    if (ctx->status != PD_OK)
        return;
    ctx->status = status;
    va_start(args, format);
    vsnprintf(ctx->message, sizeof ctx->message, format, args);
    va_end(args);
}

bool pd_value_work(pd_value_context *ctx, uint64_t steps)
{
    if (ctx->status != PD_OK)
        return false;
    if (steps > ctx->work_left) {
        ctx->work_left = 0;
        pd_value_fail(ctx, PD_E_TOO_LARGE, "the template takes too many steps");
        return false;
    }
    ctx->work_left -= steps;
    return true;
}

void *pd_value_alloc(pd_value_context *ctx, size_t count, size_t bytes)
{
    size_t total;

    if (ctx->status != PD_OK)
        return NULL;
    if (__builtin_mul_overflow(count, bytes, &total) || total > ctx->bytes_left) {
        pd_value_fail(ctx, PD_E_TOO_LARGE, "the template's values take too much memory");
        return NULL;
    }
    void *memory = pd_arena_alloc(ctx->arena, total != 0 ? total : 1);
    if (memory == NULL)
        pd_value_fail(ctx, PD_E_NOMEM, "out of memory");
    else
        ctx->bytes_left -= total;
    return memory;
}

pd_value pd_value_undefined(const char *missing)
{
    return (pd_value){.kind = PD_VALUE_UNDEFINED, .as.missing = missing};
}

pd_value pd_value_none(void)
{
    return (pd_value){.kind = PD_VALUE_NONE};
}

pd_value pd_value_bool(bool boolean)
{
    return (pd_value){.kind = PD_VALUE_BOOL, .as.boolean = boolean};
}

pd_value pd_value_integer(int64_t integer)
{
    return (pd_value){.kind = PD_VALUE_INTEGER, .as.integer = integer};
}

pd_value pd_value_real(double real)
{
    return (pd_value){.kind = PD_VALUE_REAL, .as.real = real};
}

pd_value pd_value_string(pd_value_context *ctx, const char *bytes, size_t len, pd_mark mark)
{
    pd_string *string = pd_value_alloc(ctx, 1, sizeof *string);

    if (string == NULL)
        return pd_value_undefined(NULL);
    *string = (pd_string){.bytes = bytes, .len = len, .mark = mark};
    return (pd_value){.kind = PD_VALUE_STRING, .as.string = string};
}

pd_value pd_value_text(pd_value_context *ctx, const char *text)
{
    return pd_value_string(ctx, text, strlen(text), PD_MARK_NONE);
}

pd_value pd_value_substring(pd_value_context *ctx, const pd_string *string, size_t start,
                            size_t end)
{
    pd_assert(start <= end && end <= string->len);
    pd_string *part = pd_value_alloc(ctx, 1, sizeof *part);
    if (part == NULL)
        return pd_value_undefined(NULL);
    *part = (pd_string){.bytes = string->bytes + start,
                        .len = end - start,
                        .mark = string->mark,
                        .marks = string->marks != NULL ? string->marks + start : NULL};
    return (pd_value){.kind = PD_VALUE_STRING, .as.string = part};
}

pd_value pd_value_joined(pd_value_context *ctx, const pd_string *const *parts, size_t count)
{
    size_t len = 0, at = 0;
    bool all = true, none = true;

    for (size_t i = 0; i < count; i++) {
        if (parts[i]->len == 0)
            continue;
        len += parts[i]->len; /* cannot wrap: each lies in memory, and their number is bounded */
        all = all && parts[i]->mark == PD_MARK_ALL;
        none = none && parts[i]->mark == PD_MARK_NONE;
        if (len > ctx->bytes_left)
            break;
    }
    pd_mark mark = none ? PD_MARK_NONE : all ? PD_MARK_ALL : PD_MARK_MIXED;
    char *bytes = pd_value_alloc(ctx, len, 1);
    unsigned char *marks = mark == PD_MARK_MIXED ? pd_value_alloc(ctx, len, 1) : NULL;
    pd_string *string = pd_value_alloc(ctx, 1, sizeof *string);
    if (string == NULL)
        return pd_value_undefined(NULL);
    for (size_t i = 0; i < count; i++) {
        const pd_string *part = parts[i];
        if (part->len == 0)
            continue;
        memcpy(bytes + at, part->bytes, part->len);
        if (marks != NULL && part->mark == PD_MARK_MIXED)
            memcpy(marks + at, part->marks, part->len);
        else if (marks != NULL)
            memset(marks + at, part->mark == PD_MARK_ALL, part->len);
        at += part->len;
    }
    *string = (pd_string){.bytes = bytes, .len = len, .mark = mark, .marks = marks};
    return (pd_value){.kind = PD_VALUE_STRING, .as.string = string};
}

pd_list *pd_value_new_list(pd_value_context *ctx, size_t count, bool tuple)
{
    pd_list *list = pd_value_alloc(ctx, 1, sizeof *list);
    pd_value *items = pd_value_alloc(ctx, count, sizeof *items);

    if (list == NULL || items == NULL)
        return NULL;
    *list = (pd_list){.count = count, .tuple = tuple, .items = items};
    return list;
}

pd_value pd_value_of_list(const pd_list *list)
{
    if (list == NULL)
        return pd_value_undefined(NULL);
    return (pd_value){.kind = PD_VALUE_LIST, .as.list = list};
}

pd_dict *pd_value_new_dict(pd_value_context *ctx, size_t size)
{
    pd_dict *dict = pd_value_alloc(ctx, 1, sizeof *dict);
    pd_pair *pairs = pd_value_alloc(ctx, size, sizeof *pairs);

    if (dict == NULL || pairs == NULL)
        return NULL;
    *dict = (pd_dict){.size = size, .pairs = pairs};
    return dict;
}

pd_value pd_value_of_dict(pd_dict *dict)
{
    if (dict == NULL)
        return pd_value_undefined(NULL);
    return (pd_value){.kind = PD_VALUE_DICT, .as.dict = dict};
}

static pd_value *find(pd_value_context *ctx, const pd_dict *dict, const pd_value *key)
{
    if (!pd_value_work(ctx, dict->count / 8))
        return NULL;
    for (size_t i = 0; i < dict->count; i++) {
        if (pd_value_equal(ctx, &dict->pairs[i].key, key))
            return &dict->pairs[i].value;
    }
    return NULL;
}

/* Without looking for an equal key: the caller knows there is none. */
static void append_pair(pd_value_context *ctx, pd_dict *dict, pd_value key, pd_value value)
{
    if (dict->count == dict->size) {
        size_t size = dict->size * 2 + 4;
        pd_pair *pairs = pd_value_alloc(ctx, size, sizeof *pairs);
        if (pairs == NULL)
            return;
        if (dict->count != 0)
            memcpy(pairs, dict->pairs, dict->count * sizeof *pairs);
        dict->pairs = pairs;
        dict->size = size;
    }
    dict->pairs[dict->count++] = (pd_pair){key, value};
}

void pd_value_put(pd_value_context *ctx, pd_dict *dict, pd_value key, pd_value value)
{
    pd_value *there = find(ctx, dict, &key);

    if (there != NULL)
        *there = value;
    else
        append_pair(ctx, dict, key, value);
}

const pd_value *pd_value_get(pd_value_context *ctx, const pd_dict *dict, pd_value key)
{
    return find(ctx, dict, &key);
}

const pd_value *pd_value_get_text(pd_value_context *ctx, const pd_dict *dict, const char *key)
{
    size_t len = strlen(key);

    if (!pd_value_work(ctx, dict->count / 8))
        return NULL;
    for (size_t i = 0; i < dict->count; i++) {
        const pd_value *have = &dict->pairs[i].key;
        if (have->kind == PD_VALUE_STRING && have->as.string->len == len &&
            memcmp(have->as.string->bytes, key, len) == 0)
            return &dict->pairs[i].value;
    }
    return NULL;
}

static pd_value of_json(pd_value_context *ctx, const pd_json *json, pd_mark mark, int depth)
{
    size_t len = 0, count = pd_json_count(json);

    pd_assert(depth <= DEPTH_MAX); /* the JSON reader's own limit is lower */
    switch (pd_json_type_of(json)) {
    case PD_JSON_NULL: return pd_value_none();
    case PD_JSON_BOOL: return pd_value_bool(pd_json_bool(json));
    case PD_JSON_INTEGER: return pd_value_integer(pd_json_integer(json));
    case PD_JSON_REAL: return pd_value_real(pd_json_number(json));
    case PD_JSON_STRING: {
        const char *text = pd_json_string(json, &len);
        return pd_value_string(ctx, text, len, mark);
    }
    case PD_JSON_ARRAY: {
        pd_list *list = pd_value_new_list(ctx, count, false);
        for (size_t i = 0; list != NULL && i < count; i++)
            list->items[i] = of_json(ctx, pd_json_at(json, i), mark, depth + 1);
        return pd_value_of_list(list);
    }
    case PD_JSON_OBJECT: break;
    }
    pd_dict *dict = pd_value_new_dict(ctx, count);
    void *iter = NULL;
    const char *key;
    pd_json *item;
    while (dict != NULL && pd_json_next((pd_json *)json, &iter, &key, &item) &&
           ctx->status == PD_OK)
        append_pair(ctx, dict, pd_value_string(ctx, key, strlen(key), mark),
                    of_json(ctx, item, mark, depth + 1));
    return pd_value_of_dict(dict);
}

pd_value pd_value_of_json(pd_value_context *ctx, const pd_json *json, pd_mark mark)
{
    return of_json(ctx, json, mark, 0);
}

bool pd_value_truth(const pd_value *value)
{
    switch (value->kind) {
    case PD_VALUE_UNDEFINED:
    case PD_VALUE_NONE: return false;
    case PD_VALUE_BOOL: return value->as.boolean;
    case PD_VALUE_INTEGER: return value->as.integer != 0;
    case PD_VALUE_REAL: return value->as.real != 0;
    case PD_VALUE_STRING: return value->as.string->len != 0;
    case PD_VALUE_LIST: return value->as.list->count != 0;
    case PD_VALUE_DICT: return value->as.dict->count != 0;
    default: return true;
    }
}

bool pd_value_is_number(const pd_value *value)
{
    return value->kind == PD_VALUE_BOOL || value->kind == PD_VALUE_INTEGER ||
           value->kind == PD_VALUE_REAL;
}

int64_t pd_value_whole(const pd_value *value)
{
    return value->kind == PD_VALUE_BOOL ? value->as.boolean : value->as.integer;
}

double pd_value_number(const pd_value *value)
{
    return value->kind == PD_VALUE_REAL ? value->as.real : (double)pd_value_whole(value);
}

const char *pd_value_kind_name(const pd_value *value)
{
    static const char *const names[] = {
        "an undefined value", "none",    "a bool",  "an integer",  "a real number",
        "a string",           "a list",  "a dict",  "a namespace", "a loop",
        "a function",         "a macro", "a method"};
    return names[value->kind];
}

static int compare_strings(const pd_string *a, const pd_string *b)
{
    size_t common = a->len < b->len ? a->len : b->len;
    int order = common != 0 ? memcmp(a->bytes, b->bytes, common) : 0;

    if (order != 0)
        return order; /* UTF-8 sorts as its code points do */
    return a->len < b->len ? -1 : a->len > b->len;
}

static bool equal(pd_value_context *ctx, const pd_value *a, const pd_value *b, int depth)
{
    if (depth > DEPTH_MAX || !pd_value_work(ctx, 1))
        return false;
    if (pd_value_is_number(a) && pd_value_is_number(b)) {
        if (a->kind != PD_VALUE_REAL && b->kind != PD_VALUE_REAL)
            return pd_value_whole(a) == pd_value_whole(b);
        return pd_value_number(a) == pd_value_number(b);
    }
    if (a->kind != b->kind)
        return false;
    switch (a->kind) {
    case PD_VALUE_UNDEFINED:
    case PD_VALUE_NONE: return true;
    case PD_VALUE_STRING: return compare_strings(a->as.string, b->as.string) == 0;
    case PD_VALUE_LIST: {
        const pd_list *x = a->as.list, *y = b->as.list;
        bool same = x->count == y->count && x->tuple == y->tuple;
        for (size_t i = 0; same && i < x->count; i++)
            same = equal(ctx, &x->items[i], &y->items[i], depth + 1);
        return same;
    }
    case PD_VALUE_DICT: {
        const pd_dict *x = a->as.dict, *y = b->as.dict;
        bool same = x->count == y->count;
        for (size_t i = 0; same && i < x->count; i++) {
            const pd_value *other = find(ctx, y, &x->pairs[i].key);
            same = other != NULL && equal(ctx, &x->pairs[i].value, other, depth + 1);
        }
        return same;
    }
    case PD_VALUE_FUNCTION: return strcmp(a->as.function, b->as.function) == 0;
    default: return a->as.method == b->as.method;
    }
}

bool pd_value_equal(pd_value_context *ctx, const pd_value *a, const pd_value *b)
{
    return equal(ctx, a, b, 0);
}

static int compare(pd_value_context *ctx, const pd_value *a, const pd_value *b, int depth)
{
    if (pd_value_is_number(a) && pd_value_is_number(b)) {
        if (a->kind != PD_VALUE_REAL && b->kind != PD_VALUE_REAL) {
            int64_t x = pd_value_whole(a), y = pd_value_whole(b);
            return x < y ? -1 : x > y;
        }
        double x = pd_value_number(a), y = pd_value_number(b);
        return x < y ? -1 : x > y;
    }
    if (a->kind == PD_VALUE_STRING && b->kind == PD_VALUE_STRING)
        return compare_strings(a->as.string, b->as.string);
    if (a->kind == PD_VALUE_LIST && b->kind == PD_VALUE_LIST && depth < DEPTH_MAX) {
        const pd_list *x = a->as.list, *y = b->as.list;
        for (size_t i = 0; i < x->count && i < y->count && ctx->status == PD_OK; i++) {
            if (!equal(ctx, &x->items[i], &y->items[i], depth + 1))
                return compare(ctx, &x->items[i], &y->items[i], depth + 1);
        }
        return x->count < y->count ? -1 : x->count > y->count;
    }
    if (a->kind == PD_VALUE_UNDEFINED || b->kind == PD_VALUE_UNDEFINED) {
        const char *name = a->kind == PD_VALUE_UNDEFINED ? a->as.missing : b->as.missing;
        pd_value_fail(ctx, PD_E_INVALID, "'%s' is undefined", name != NULL ? name : "value");
        return 0;
    }
    pd_value_fail(ctx, PD_E_INVALID, "%s and %s have no order", pd_value_kind_name(a),
                  pd_value_kind_name(b));
    return 0;
}

int pd_value_compare(pd_value_context *ctx, const pd_value *a, const pd_value *b)
{
    return compare(ctx, a, b, 0);
}

size_t pd_value_length(const pd_string *string)
{
    size_t count = 0;

    for (size_t i = 0; i < string->len; i++)
        count += ((unsigned char)string->bytes[i] & 0xc0) != 0x80;
    return count;
}

size_t pd_value_byte_at(const pd_string *string, size_t index)
{
    size_t at = 0;

    while (at < string->len) {
        if (((unsigned char)string->bytes[at] & 0xc0) != 0x80 && index-- == 0)
            break;
        at++;
    }
    return at;
}

bool pd_value_is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

const pd_list *pd_value_iterate(pd_value_context *ctx, const pd_value *value)
{
    pd_list *list;

    switch (value->kind) {
    case PD_VALUE_LIST: return value->as.list;
    case PD_VALUE_UNDEFINED: return pd_value_new_list(ctx, 0, false);
    case PD_VALUE_DICT: {
        const pd_dict *dict = value->as.dict;
        list = pd_value_new_list(ctx, dict->count, false);
        for (size_t i = 0; list != NULL && i < dict->count; i++)
            list->items[i] = dict->pairs[i].key;
        return list;
    }
    case PD_VALUE_STRING: {
        const pd_string *string = value->as.string;
        list = pd_value_new_list(ctx, pd_value_length(string), false);
        size_t at = 0;
        for (size_t i = 0; list != NULL && i < list->count && ctx->status == PD_OK; i++) {
            size_t len = pd_utf8_len(string->bytes + at, string->len - at);
            list->items[i] = pd_value_substring(ctx, string, at, at + len);
            at += len;
        }
        return list;
    }
    default:
        pd_value_fail(ctx, PD_E_INVALID, "%s cannot be iterated", pd_value_kind_name(value));
        return NULL;
    }
}

/* ---- writing: str() and JSON ---- */

typedef struct writer {
    pd_value_context *ctx;
    pd_buf buf;
    bool user; /* some of it a user wrote */
    bool json, sort_keys;
    int indent;
} writer;

/* The shortest digits that read back as the same number, as Python writes them. */
static void write_real(writer *w, double real)
{
    char digits[40];

    if (isnan(real) || isinf(real)) {
        const char *name = isnan(real) ? (w->json ? "NaN" : "nan") : (w->json ? "Infinity" : "inf");
        pd_buf_printf(&w->buf, "%s%s", !isnan(real) && real < 0 ? "-" : "", name);
        return;
    }
    int precision = 1;
    for (; precision < 17; precision++) {
        snprintf(digits, sizeof digits, "%.*e", precision - 1, real);
        if (strtod(digits, NULL) == real)
            break;
    }
    snprintf(digits, sizeof digits, "%.*e", precision - 1, real);
    int exponent = (int)strtol(strchr(digits, 'e') + 1, NULL, 10);
    if (exponent < -4 || exponent >= 16) {
        *strchr(digits, 'e') = '\0';
        pd_buf_printf(&w->buf, "%se%c%02d", digits, exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    int decimals = precision - 1 - exponent;
    pd_buf_printf(&w->buf, "%.*f", decimals > 0 ? decimals : 1, real);
}

static void write_quoted(writer *w, const pd_string *s)
{
    bool single = memchr(s->bytes, '\'', s->len) == NULL || memchr(s->bytes, '"', s->len) != NULL;
    char quote = w->json || !single ? '"' : '\'';

    w->user = w->user || s->mark != PD_MARK_NONE;
    pd_buf_append(&w->buf, &quote, 1);
    for (size_t i = 0; i < s->len; i++) {
        unsigned char c = (unsigned char)s->bytes[i];
        if (c == '\\' || c == (unsigned char)quote)
            pd_buf_printf(&w->buf, "\\%c", c);
        else if (c == '\n' || c == '\r' || c == '\t')
            pd_buf_puts(&w->buf, c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t");
        else if (w->json && (c == '\b' || c == '\f'))
            pd_buf_puts(&w->buf, c == '\b' ? "\\b" : "\\f");
        else if (c < 0x20 || (c == 0x7f && !w->json))
            pd_buf_printf(&w->buf, w->json ? "\\u%04x" : "\\x%02x", c);
        else
            pd_buf_append(&w->buf, &c, 1);
    }
    pd_buf_append(&w->buf, &quote, 1);
}

static void write_value(writer *w, const pd_value *value, int depth);

static void write_break(writer *w, int depth)
{
    if (w->indent >= 0)
        pd_buf_printf(&w->buf, "\n%*s", w->indent * depth, "");
}

static void write_list(writer *w, const pd_list *list, int depth)
{
    bool round = list->tuple && !w->json;

    pd_buf_puts(&w->buf, round ? "(" : "[");
    for (size_t i = 0; i < list->count && w->ctx->status == PD_OK; i++) {
        if (i != 0)
            pd_buf_puts(&w->buf, w->indent >= 0 ? "," : ", ");
        write_break(w, depth + 1);
        write_value(w, &list->items[i], depth + 1);
    }
    if (round && list->count == 1)
        pd_buf_puts(&w->buf, ",");
    if (list->count != 0)
        write_break(w, depth);
    pd_buf_puts(&w->buf, round ? ")" : "]");
}

static int by_key(const void *a, const void *b)
{
    const pd_value *x = &(*(const pd_pair *const *)a)->key, *y = &(*(const pd_pair *const *)b)->key;
    if (x->kind != PD_VALUE_STRING || y->kind != PD_VALUE_STRING)
        return 0;
    return compare_strings(x->as.string, y->as.string);
}

static void write_dict(writer *w, const pd_dict *dict, int depth)
{
    const pd_pair **order = pd_value_alloc(w->ctx, dict->count, sizeof *order);

    if (order == NULL)
        return;
    for (size_t i = 0; i < dict->count; i++)
        order[i] = &dict->pairs[i];
    if (w->sort_keys)
        qsort(order, dict->count, sizeof *order, by_key);
    pd_buf_puts(&w->buf, "{");
    for (size_t i = 0; i < dict->count && w->ctx->status == PD_OK; i++) {
        if (i != 0)
            pd_buf_puts(&w->buf, w->indent >= 0 ? "," : ", ");
        write_break(w, depth + 1);
        if (w->json && order[i]->key.kind != PD_VALUE_STRING) {
            pd_buf_puts(&w->buf, "\"");
            write_value(w, &order[i]->key, depth + 1);
            pd_buf_puts(&w->buf, "\"");
        } else {
            write_value(w, &order[i]->key, depth + 1);
        }
        pd_buf_puts(&w->buf, ": ");
        write_value(w, &order[i]->value, depth + 1);
    }
    if (dict->count != 0)
        write_break(w, depth);
    pd_buf_puts(&w->buf, "}");
}

static void write_value(writer *w, const pd_value *value, int depth)
{
    if (depth > DEPTH_MAX) {
        pd_value_fail(w->ctx, PD_E_INVALID, "a value is nested too deep to be written");
        return;
    }
    if (!pd_value_work(w->ctx, 1))
        return;
    switch (value->kind) {
    case PD_VALUE_NONE: pd_buf_puts(&w->buf, w->json ? "null" : "None"); return;
    case PD_VALUE_BOOL:
        pd_buf_puts(&w->buf, w->json ? (value->as.boolean ? "true" : "false")
                                     : (value->as.boolean ? "True" : "False"));
        return;
    case PD_VALUE_INTEGER: pd_buf_printf(&w->buf, "%" PRId64, value->as.integer); return;
    case PD_VALUE_REAL: write_real(w, value->as.real); return;
    case PD_VALUE_STRING: write_quoted(w, value->as.string); return;
    case PD_VALUE_LIST: write_list(w, value->as.list, depth); return;
    case PD_VALUE_DICT: write_dict(w, value->as.dict, depth); return;
    case PD_VALUE_UNDEFINED:
        if (!w->json) {
            pd_buf_puts(&w->buf, "Undefined");
            return;
        }
        break;
    default: break;
    }
    pd_value_fail(w->ctx, PD_E_INVALID, "%s cannot be written as text", pd_value_kind_name(value));
}

static pd_value write_all(writer *w, const pd_value *value)
{
    pd_value result = pd_value_undefined(NULL);

    pd_buf_init(&w->buf, w->ctx->bytes_left < WRITE_MAX ? w->ctx->bytes_left : WRITE_MAX);
    write_value(w, value, 0);
    pd_status status = pd_buf_status(&w->buf);
    if (status != PD_OK)
        pd_value_fail(w->ctx, status, "a value is too large to be written as text");
    char *bytes = pd_value_alloc(w->ctx, w->buf.len, 1);
    if (bytes != NULL) {
        memcpy(bytes, pd_buf_text(&w->buf), w->buf.len);
        result = pd_value_string(w->ctx, bytes, w->buf.len, w->user ? PD_MARK_ALL : PD_MARK_NONE);
    }
    pd_buf_fini(&w->buf);
    return result;
}

pd_value pd_value_to_string(pd_value_context *ctx, const pd_value *value)
{
    writer w = {.ctx = ctx, .indent = -1};

    if (value->kind == PD_VALUE_STRING)
        return *value;
    if (value->kind == PD_VALUE_UNDEFINED)
        return pd_value_text(ctx, "");
    return write_all(&w, value);
}

pd_value pd_value_to_json(pd_value_context *ctx, const pd_value *value, int indent, bool sort_keys)
{
    writer w = {.ctx = ctx, .json = true, .indent = indent, .sort_keys = sort_keys};
    return write_all(&w, value);
}

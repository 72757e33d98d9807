#include "common/base/clock.h"
#include "common/text/jinja.h"
#include "common/text/jinja_strings.h"

#include <string.h>
#include <time.h>

enum { RANGE_MAX = 100000 };

static pd_value undefined(void)
{
    return pd_value_undefined(NULL);
}

/* ---- attributes and items ---- */

static const char *const string_methods[] = {
    "strip",      "lstrip",       "rstrip",       "split", "rsplit", "splitlines",
    "replace",    "startswith",   "endswith",     "upper", "lower",  "title",
    "capitalize", "removeprefix", "removesuffix", "find",  "rfind",  "count",
    "join",       "isdigit",      "isspace",      NULL};
static const char *const dict_methods[] = {"get", "items", "keys", "values", NULL};
static const char *const list_methods[] = {"index", "count", NULL};
static const char *const loop_methods[] = {"cycle", "changed", NULL};
static const char *const functions[] = {"range",           "namespace",    "dict",
                                        "raise_exception", "strftime_now", NULL};

bool pd_jinja_has_method(const char *name)
{
    return pd_jinja_among(name, string_methods) || pd_jinja_among(name, dict_methods) ||
           pd_jinja_among(name, list_methods) || pd_jinja_among(name, loop_methods);
}

bool pd_jinja_has_function(const char *name)
{
    return pd_jinja_among(name, functions);
}

bool pd_jinja_is_method_of(const pd_value *value, const char *name)
{
    switch (value->kind) {
    case PD_VALUE_STRING: return pd_jinja_among(name, string_methods);
    case PD_VALUE_DICT: return pd_jinja_among(name, dict_methods);
    case PD_VALUE_LIST: return pd_jinja_among(name, list_methods);
    case PD_VALUE_LOOP: return pd_jinja_among(name, loop_methods);
    default: return false;
    }
}

static pd_value loop_attr(const pd_loop_state *loop, const char *name)
{
    size_t i = loop->index0, count = loop->items->count;

    if (strcmp(name, "index") == 0)
        return pd_value_integer((int64_t)i + 1);
    if (strcmp(name, "index0") == 0)
        return pd_value_integer((int64_t)i);
    if (strcmp(name, "revindex") == 0)
        return pd_value_integer((int64_t)(count - i));
    if (strcmp(name, "revindex0") == 0)
        return pd_value_integer((int64_t)(count - i) - 1);
    if (strcmp(name, "first") == 0)
        return pd_value_bool(i == 0);
    if (strcmp(name, "last") == 0)
        return pd_value_bool(i + 1 == count);
    if (strcmp(name, "length") == 0)
        return pd_value_integer((int64_t)count);
    if (strcmp(name, "depth") == 0) /* of recursion, which is not supported */
        return pd_value_integer(1);
    if (strcmp(name, "depth0") == 0)
        return pd_value_integer(0);
    if (strcmp(name, "previtem") == 0)
        return i > 0 ? loop->items->items[i - 1] : pd_value_undefined("loop.previtem");
    if (strcmp(name, "nextitem") == 0)
        return i + 1 < count ? loop->items->items[i + 1] : pd_value_undefined("loop.nextitem");
    return pd_value_undefined(name);
}

pd_value pd_jinja_attr(pd_jinja_run *run, const pd_value *value, const char *name)
{
    const pd_value *item = NULL;

    if (value->kind == PD_VALUE_UNDEFINED) {
        pd_value_fail(&run->values, PD_E_INVALID, "'%s' is undefined",
                      value->as.missing != NULL ? value->as.missing : "value");
        return undefined();
    }
    if (pd_jinja_is_method_of(value, name)) {
        pd_method *method = pd_value_alloc(&run->values, 1, sizeof *method);
        if (method == NULL)
            return undefined();
        *method = (pd_method){*value, name};
        return (pd_value){.kind = PD_VALUE_METHOD, .as.method = method};
    }
    if (value->kind == PD_VALUE_LOOP)
        return loop_attr(value->as.loop, name);
    if (value->kind == PD_VALUE_DICT || value->kind == PD_VALUE_NAMESPACE)
        item = pd_value_get_text(&run->values, value->as.dict, name);
    return item != NULL ? *item : pd_value_undefined(name);
}

pd_value pd_jinja_item(pd_jinja_run *run, const pd_value *value, const pd_value *key)
{
    bool whole = pd_value_is_number(key) && key->kind != PD_VALUE_REAL;

    if (run->values.status != PD_OK)
        return undefined();
    if (value->kind == PD_VALUE_DICT) {
        const pd_value *item = pd_value_get(&run->values, value->as.dict, *key);
        if (item != NULL)
            return *item;
    } else if (whole && (value->kind == PD_VALUE_LIST || value->kind == PD_VALUE_STRING)) {
        bool text = value->kind == PD_VALUE_STRING;
        int64_t count = (int64_t)(text ? pd_value_length(value->as.string) : value->as.list->count);
        int64_t at = pd_value_whole(key);
        at = at < 0 ? at + count : at;
        if (at < 0 || at >= count)
            return pd_value_undefined("item");
        if (!text)
            return value->as.list->items[at];
        return pd_value_substring(&run->values, value->as.string,
                                  pd_value_byte_at(value->as.string, (size_t)at),
                                  pd_value_byte_at(value->as.string, (size_t)at + 1));
    }
    if (key->kind == PD_VALUE_STRING || value->kind == PD_VALUE_UNDEFINED) {
        const char *name =
            key->kind == PD_VALUE_STRING ? pd_jinja_c_string(run, key->as.string) : NULL;
        return pd_jinja_attr(run, value, name != NULL ? name : "item");
    }
    return pd_value_undefined("item");
}

bool pd_jinja_contains(pd_jinja_run *run, const pd_value *container, const pd_value *item)
{
    switch (container->kind) {
    case PD_VALUE_STRING:
        if (item->kind == PD_VALUE_STRING)
            return pd_jinja_find(container->as.string, item->as.string, 0, false) != SIZE_MAX;
        break;
    case PD_VALUE_LIST:
        for (size_t i = 0; i < container->as.list->count; i++) {
            if (pd_value_equal(&run->values, &container->as.list->items[i], item))
                return true;
        }
        return false;
    case PD_VALUE_DICT: return pd_value_get(&run->values, container->as.dict, *item) != NULL;
    case PD_VALUE_UNDEFINED: return false;
    default: break;
    }
    pd_value_fail(&run->values, PD_E_INVALID, "%s cannot be looked for in %s",
                  pd_value_kind_name(item), pd_value_kind_name(container));
    return false;
}

/* ---- methods ---- */

/* startswith("a") or startswith(("a", "b")). */
static bool has_affix(const pd_string *s, const pd_value *affix, bool end)
{
    if (affix->kind == PD_VALUE_LIST) {
        for (size_t i = 0; i < affix->as.list->count; i++) {
            if (affix->as.list->items[i].kind == PD_VALUE_STRING &&
                has_affix(s, &affix->as.list->items[i], end))
                return true;
        }
        return false;
    }
    const pd_string *a = affix->as.string;
    return a->len <= s->len && (a->len == 0 || memcmp(end ? s->bytes + s->len - a->len : s->bytes,
                                                      a->bytes, a->len) == 0);
}

static pd_value affix_method(pd_jinja_run *run, const pd_string *s, const char *name,
                             const pd_jinja_args *args)
{
    const pd_value *affix = pd_jinja_arg(args, 0, "prefix");
    bool end = strcmp(name, "endswith") == 0 || strcmp(name, "removesuffix") == 0;
    bool removes = name[0] == 'r';

    if (affix == NULL || args->count != 1 ||
        !(affix->kind == PD_VALUE_STRING || (affix->kind == PD_VALUE_LIST && !removes)))
        return pd_jinja_bad_argument(run, name);
    bool has = has_affix(s, affix, end);
    if (!removes)
        return pd_value_bool(has);
    size_t len = has ? affix->as.string->len : 0;
    return pd_value_substring(&run->values, s, end ? 0 : len, end ? s->len - len : s->len);
}

static pd_value find_method(pd_jinja_run *run, const pd_string *s, const char *name,
                            const pd_jinja_args *args)
{
    const pd_string *part = pd_jinja_string_arg(args, 0, "sub");

    if (part == NULL || args->count != 1)
        return pd_jinja_bad_argument(run, name);
    if (strcmp(name, "count") == 0) {
        int64_t count = 0;
        if (part->len == 0)
            return pd_value_integer((int64_t)pd_value_length(s) + 1);
        for (size_t at = 0; (at = pd_jinja_find(s, part, at, false)) != SIZE_MAX; at += part->len)
            count++;
        return pd_value_integer(count);
    }
    size_t hit = pd_jinja_find(s, part, 0, name[0] == 'r');
    pd_string before = {.bytes = s->bytes, .len = hit};
    return pd_value_integer(hit == SIZE_MAX ? -1 : (int64_t)pd_value_length(&before));
}

static bool all_of(const pd_string *s, bool digits)
{
    size_t len;

    for (size_t at = 0; at < s->len; at += len) {
        uint32_t c = '0';
        len = 1;
        if (digits && (s->bytes[at] < '0' || s->bytes[at] > '9'))
            return false;
        if (!digits) {
            pd_string rest = {.bytes = s->bytes + at, .len = s->len - at};
            len = pd_value_byte_at(&rest, 1);
            c = (unsigned char)s->bytes[at];
            if (len > 1 || !pd_value_is_space(c))
                return false;
        }
    }
    return s->len != 0;
}

static pd_value strip_method(pd_jinja_run *run, const pd_string *s, const char *name,
                             const pd_jinja_args *args)
{
    int sides = name[0] == 'l' ? 1 : name[0] == 'r' ? 2 : 3;
    return pd_jinja_strip(run, s, pd_jinja_string_arg(args, 0, "chars"), sides);
}

static pd_value string_method(pd_jinja_run *run, const pd_string *s, const char *name,
                              const pd_jinja_args *args)
{
    static const char *const strips[] = {"strip", "lstrip", "rstrip", NULL};
    static const char *const affixes[] = {"startswith", "endswith", "removeprefix", "removesuffix",
                                          NULL};
    static const char *const finds[] = {"find", "rfind", "count", NULL};
    const pd_value *first = pd_jinja_arg(args, 0, "iterable");

    if (pd_jinja_among(name, strips))
        return strip_method(run, s, name, args);
    if (pd_jinja_among(name, affixes))
        return affix_method(run, s, name, args);
    if (pd_jinja_among(name, finds))
        return find_method(run, s, name, args);
    if (strcmp(name, "split") == 0)
        return pd_jinja_split(run, s, pd_jinja_string_arg(args, 0, "sep"),
                              pd_jinja_integer_arg(args, 1, "maxsplit", -1));
    if (strcmp(name, "rsplit") == 0)
        return pd_jinja_rsplit(run, s, pd_jinja_string_arg(args, 0, "sep"),
                               pd_jinja_integer_arg(args, 1, "maxsplit", -1));
    if (strcmp(name, "splitlines") == 0 && args->count == 0)
        return pd_jinja_splitlines(run, s);
    if (strcmp(name, "replace") == 0) {
        pd_value value = {.kind = PD_VALUE_STRING, .as.string = s};
        return pd_jinja_filter(run, name, value, args);
    }
    if (strcmp(name, "upper") == 0)
        return pd_jinja_change_case(run, s, PD_JINJA_UPPER, false);
    if (strcmp(name, "lower") == 0)
        return pd_jinja_change_case(run, s, PD_JINJA_LOWER, false);
    if (strcmp(name, "title") == 0)
        return pd_jinja_change_case(run, s, PD_JINJA_TITLE, false);
    if (strcmp(name, "capitalize") == 0)
        return pd_jinja_change_case(run, s, PD_JINJA_CAPITALIZE, false);
    if (strcmp(name, "isdigit") == 0 || strcmp(name, "isspace") == 0)
        return pd_value_bool(all_of(s, name[2] == 'd'));
    if (strcmp(name, "join") == 0 && first != NULL) {
        const pd_list *list = pd_value_iterate(&run->values, first);
        return list != NULL ? pd_jinja_join(run, list, s, NULL) : undefined();
    }
    return pd_jinja_bad_argument(run, name);
}

static pd_value dict_method(pd_jinja_run *run, const pd_dict *dict, const char *name,
                            const pd_jinja_args *args)
{
    bool keys = strcmp(name, "keys") == 0;

    if (strcmp(name, "get") == 0) {
        const pd_value *key = pd_jinja_arg(args, 0, ""), *fallback = pd_jinja_arg(args, 1, "");
        if (key == NULL)
            return pd_jinja_bad_argument(run, name);
        const pd_value *item = pd_value_get(&run->values, dict, *key);
        return item != NULL ? *item : fallback != NULL ? *fallback : pd_value_none();
    }
    if (strcmp(name, "items") == 0)
        return pd_jinja_pairs(run, dict);
    pd_list *list = pd_value_new_list(&run->values, dict->count, false);
    for (size_t i = 0; list != NULL && i < dict->count; i++)
        list->items[i] = keys ? dict->pairs[i].key : dict->pairs[i].value;
    return pd_value_of_list(list);
}

static pd_value list_method(pd_jinja_run *run, const pd_list *list, const char *name,
                            const pd_jinja_args *args)
{
    const pd_value *item = pd_jinja_arg(args, 0, "");
    int64_t count = 0;

    if (item == NULL)
        return pd_jinja_bad_argument(run, name);
    for (size_t i = 0; i < list->count; i++) {
        if (!pd_value_equal(&run->values, &list->items[i], item))
            continue;
        if (name[0] == 'i')
            return pd_value_integer((int64_t)i);
        count++;
    }
    return name[0] == 'i' ? pd_jinja_bad_argument(run, name) : pd_value_integer(count);
}

static pd_value loop_method(pd_jinja_run *run, const pd_loop_state *loop, const char *name,
                            const pd_jinja_args *args)
{
    if (args->count == 0)
        return pd_jinja_bad_argument(run, name);
    if (strcmp(name, "cycle") == 0)
        return args->values[loop->index0 % args->count];
    pd_loop_state *state =
        (pd_loop_state *)loop; /* the one thing about a loop that is remembered */
    pd_list *seen = pd_value_new_list(&run->values, args->count, true);
    if (seen == NULL)
        return undefined();
    memcpy(seen->items, args->values, args->count * sizeof seen->items[0]);
    pd_value now = pd_value_of_list(seen);
    bool changed = !state->changed_set || !pd_value_equal(&run->values, &state->changed, &now);
    state->changed = now;
    state->changed_set = true;
    return pd_value_bool(changed);
}

pd_value pd_jinja_method(pd_jinja_run *run, const pd_method *method, const pd_jinja_args *args)
{
    const pd_value *object = &method->object;

    switch (object->kind) {
    case PD_VALUE_STRING: return string_method(run, object->as.string, method->name, args);
    case PD_VALUE_DICT: return dict_method(run, object->as.dict, method->name, args);
    case PD_VALUE_LIST: return list_method(run, object->as.list, method->name, args);
    default: return loop_method(run, object->as.loop, method->name, args);
    }
}

/* ---- functions ---- */

static pd_value do_range(pd_jinja_run *run, const pd_jinja_args *args)
{
    int64_t bounds[3] = {0, 0, 1};

    if (args->count == 0 || args->count > 3)
        return pd_jinja_bad_argument(run, "range");
    for (size_t i = 0; i < args->count; i++) {
        if (args->values[i].kind != PD_VALUE_INTEGER)
            return pd_jinja_bad_argument(run, "range");
        bounds[args->count == 1 ? 1 : i] = args->values[i].as.integer;
    }
    int64_t step = bounds[2], count = 0, span;
    if (step == 0 || step == INT64_MIN || __builtin_sub_overflow(bounds[1], bounds[0], &span))
        return pd_jinja_bad_argument(run, "range");
    if (step > 0 ? span > 0 : span < 0)
        count = (span - (step > 0 ? 1 : -1)) / step + 1;
    if (count > RANGE_MAX) {
        pd_value_fail(&run->values, PD_E_INVALID, "a range of more than %d numbers", RANGE_MAX);
        return undefined();
    }
    pd_list *list = pd_value_new_list(&run->values, (size_t)count, false);
    for (int64_t i = 0; list != NULL && i < count; i++)
        list->items[i] = pd_value_integer(bounds[0] + i * step);
    return pd_value_of_list(list);
}

/* dict(a=1), namespace(a=1), either with a dict first. */
static pd_value do_dict(pd_jinja_run *run, const pd_jinja_args *args, bool space)
{
    pd_dict *dict = pd_value_new_dict(&run->values, args->count);

    for (size_t i = 0; dict != NULL && i < args->count; i++) {
        if (args->names[i] != NULL) {
            pd_value_put(&run->values, dict, pd_value_text(&run->values, args->names[i]),
                         args->values[i]);
            continue;
        }
        if (args->values[i].kind != PD_VALUE_DICT)
            return pd_jinja_bad_argument(run, space ? "namespace" : "dict");
        const pd_dict *from = args->values[i].as.dict;
        for (size_t k = 0; k < from->count; k++)
            pd_value_put(&run->values, dict, from->pairs[k].key, from->pairs[k].value);
    }
    pd_value value = pd_value_of_dict(dict);
    if (space && value.kind == PD_VALUE_DICT)
        value.kind = PD_VALUE_NAMESPACE;
    return value;
}

/* The date is in UTC, so that it does not depend on where the service runs. */
static pd_value do_strftime_now(pd_jinja_run *run, const pd_jinja_args *args)
{
    const char *format = pd_jinja_c_string(run, pd_jinja_string_arg(args, 0, "format"));
    time_t now = (time_t)(pd_clock_unix_ms() / 1000);
    struct tm utc;
    char text[256];

    if (format == NULL || gmtime_r(&now, &utc) == NULL)
        return pd_jinja_bad_argument(run, "strftime_now");
    size_t len = strftime(text, sizeof text, format, &utc);
    char *copy = pd_value_alloc(&run->values, len, 1);
    if (copy == NULL)
        return undefined();
    memcpy(copy, text, len);
    return pd_value_string(&run->values, copy, len, PD_MARK_NONE);
}

pd_value pd_jinja_function(pd_jinja_run *run, const char *name, const pd_jinja_args *args)
{
    if (strcmp(name, "range") == 0)
        return do_range(run, args);
    if (strcmp(name, "namespace") == 0)
        return do_dict(run, args, true);
    if (strcmp(name, "dict") == 0)
        return do_dict(run, args, false);
    if (strcmp(name, "strftime_now") == 0)
        return do_strftime_now(run, args);
    pd_assert(strcmp(name, "raise_exception") == 0);
    const pd_value *message = pd_jinja_arg(args, 0, "message");
    const pd_string *text = message != NULL ? pd_jinja_soft(run, message) : NULL;
    if (text == NULL)
        return pd_jinja_bad_argument(run, name);
    pd_value_fail(&run->values, PD_E_INVALID, "%.*s", (int)(text->len < 255 ? text->len : 255),
                  text->bytes);
    return undefined();
}

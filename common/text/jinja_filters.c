#include "common/text/jinja.h"
#include "common/text/jinja_strings.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static pd_value undefined(void)
{
    return pd_value_undefined(NULL);
}

pd_value pd_jinja_bad_argument(pd_jinja_run *run, const char *name)
{
    pd_value_fail(&run->values, PD_E_INVALID, "'%s' cannot work on these arguments", name);
    return undefined();
}

/* ---- arguments ---- */

const pd_string *pd_jinja_string_arg(const pd_jinja_args *args, size_t position, const char *name)
{
    const pd_value *value = pd_jinja_arg(args, position, name);
    return value != NULL && value->kind == PD_VALUE_STRING ? value->as.string : NULL;
}

bool pd_jinja_bool_arg(const pd_jinja_args *args, size_t position, const char *name, bool fallback)
{
    const pd_value *value = pd_jinja_arg(args, position, name);
    return value != NULL ? pd_value_truth(value) : fallback;
}

int64_t pd_jinja_integer_arg(const pd_jinja_args *args, size_t position, const char *name,
                             int64_t fallback)
{
    const pd_value *value = pd_jinja_arg(args, position, name);
    bool whole = value != NULL && pd_value_is_number(value) && value->kind != PD_VALUE_REAL;
    return whole ? pd_value_whole(value) : fallback;
}

/* A C string of a value's string; NULL when it is none or holds NUL. */
const char *pd_jinja_c_string(pd_jinja_run *run, const pd_string *s)
{
    if (s == NULL || memchr(s->bytes, '\0', s->len) != NULL)
        return NULL;
    char *copy = pd_value_alloc(&run->values, s->len + 1, 1);
    if (copy != NULL)
        memcpy(copy, s->bytes, s->len);
    return copy;
}

bool pd_jinja_among(const char *name, const char *const *names)
{
    for (; *names != NULL; names++) {
        if (strcmp(*names, name) == 0)
            return true;
    }
    return false;
}

/* ---- filters ---- */

typedef pd_value filter_fn(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args);

/* A value as a string, as Jinja's string filters take it. */
const pd_string *pd_jinja_soft(pd_jinja_run *run, const pd_value *value)
{
    static const pd_string empty = {.bytes = ""};
    pd_value text = pd_value_to_string(&run->values, value);
    return text.kind == PD_VALUE_STRING ? text.as.string : &empty;
}

static pd_value do_trim(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    return pd_jinja_strip(run, pd_jinja_soft(run, value), pd_jinja_string_arg(args, 0, "chars"), 3);
}

static pd_value do_length(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    switch (value->kind) {
    case PD_VALUE_UNDEFINED: return pd_value_integer(0);
    case PD_VALUE_STRING: return pd_value_integer((int64_t)pd_value_length(value->as.string));
    case PD_VALUE_LIST: return pd_value_integer((int64_t)value->as.list->count);
    case PD_VALUE_DICT: return pd_value_integer((int64_t)value->as.dict->count);
    default: return pd_jinja_bad_argument(run, "length");
    }
}

static pd_value do_upper(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    return pd_jinja_change_case(run, pd_jinja_soft(run, value), PD_JINJA_UPPER, true);
}

static pd_value do_lower(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    return pd_jinja_change_case(run, pd_jinja_soft(run, value), PD_JINJA_LOWER, true);
}

static pd_value do_capitalize(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    return pd_jinja_change_case(run, pd_jinja_soft(run, value), PD_JINJA_CAPITALIZE, true);
}

static pd_value do_title(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    return pd_jinja_change_case(run, pd_jinja_soft(run, value), PD_JINJA_TITLE, true);
}

static pd_value do_default(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_value *fallback = pd_jinja_arg(args, 0, "default_value");
    bool falsy = pd_jinja_bool_arg(args, 1, "boolean", false) && !pd_value_truth(value);

    if (value->kind != PD_VALUE_UNDEFINED && !falsy)
        return *value;
    return fallback != NULL ? *fallback : pd_value_text(&run->values, "");
}

static pd_value do_first(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    const pd_list *list = pd_value_iterate(&run->values, value);
    return list != NULL && list->count != 0 ? list->items[0] : pd_value_undefined("first");
}

static pd_value do_last(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    const pd_list *list = pd_value_iterate(&run->values, value);
    return list != NULL && list->count != 0 ? list->items[list->count - 1]
                                            : pd_value_undefined("last");
}

static pd_value do_list(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    const pd_list *from = pd_value_iterate(&run->values, value);
    pd_list *list = from != NULL ? pd_value_new_list(&run->values, from->count, false) : NULL;
    if (list != NULL && from->count != 0)
        memcpy(list->items, from->items, from->count * sizeof list->items[0]);
    return pd_value_of_list(list);
}

static pd_value do_reverse(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    const pd_list *from = pd_value_iterate(&run->values, value);
    pd_list *list = from != NULL ? pd_value_new_list(&run->values, from->count, false) : NULL;
    for (size_t i = 0; list != NULL && i < from->count; i++)
        list->items[i] = from->items[from->count - 1 - i];
    if (value->kind != PD_VALUE_STRING || list == NULL)
        return pd_value_of_list(list);
    static const pd_string nothing = {.bytes = ""};
    return pd_jinja_join(run, list, &nothing, NULL);
}

static pd_value do_string(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    return pd_value_to_string(&run->values, value);
}

static pd_value do_safe(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    return do_string(run, value, args);
}

static pd_value do_escape(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    return pd_jinja_escape(run, pd_jinja_soft(run, value));
}

/* A string as a number; false when it is none. */
static bool parse_number(pd_jinja_run *run, const pd_string *s, pd_value *out)
{
    pd_value stripped = pd_jinja_strip(run, s, NULL, 3);
    const char *text =
        stripped.kind == PD_VALUE_STRING ? pd_jinja_c_string(run, stripped.as.string) : NULL;
    char *end;

    if (text == NULL || *text == '\0' || strpbrk(text, "xXpP") != NULL)
        return false;
    errno = 0;
    int64_t whole = strtoll(text, &end, 10);
    if (*end == '\0' && errno == 0) {
        *out = pd_value_integer(whole);
        return true;
    }
    double real = strtod(text, &end);
    *out = pd_value_real(real);
    return *end == '\0';
}

static bool is_defined(pd_jinja_run *run, const pd_value *value)
{
    if (value->kind == PD_VALUE_UNDEFINED)
        pd_value_fail(&run->values, PD_E_INVALID, "'%s' is undefined",
                      value->as.missing != NULL ? value->as.missing : "value");
    return value->kind != PD_VALUE_UNDEFINED;
}

static pd_value do_int(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_value *fallback = pd_jinja_arg(args, 0, "default");
    pd_value number = *value;

    if (!is_defined(run, value))
        return undefined();

    bool known = pd_value_is_number(value) ||
                 (value->kind == PD_VALUE_STRING && parse_number(run, value->as.string, &number));
    if (known && number.kind == PD_VALUE_REAL) {
        known = fabs(number.as.real) < 9e18; /* NaN too is not */
        if (known)
            number = pd_value_integer((int64_t)number.as.real);
    }
    if (known)
        return pd_value_integer(pd_value_whole(&number));
    return fallback != NULL ? *fallback : pd_value_integer(0);
}

static pd_value do_float(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_value *fallback = pd_jinja_arg(args, 0, "default");
    pd_value number = *value;

    if (!is_defined(run, value))
        return undefined();

    if (pd_value_is_number(value) ||
        (value->kind == PD_VALUE_STRING && parse_number(run, value->as.string, &number)))
        return pd_value_real(pd_value_number(&number));
    return fallback != NULL ? *fallback : pd_value_real(0);
}

static pd_value do_abs(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    if (value->kind == PD_VALUE_REAL)
        return pd_value_real(fabs(value->as.real));
    if (!pd_value_is_number(value) || pd_value_whole(value) == INT64_MIN)
        return pd_jinja_bad_argument(run, "abs");
    return pd_value_integer(llabs(pd_value_whole(value)));
}

static pd_value do_replace(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_string *from = pd_jinja_string_arg(args, 0, "old"),
                    *to = pd_jinja_string_arg(args, 1, "new");

    if (from == NULL || to == NULL)
        return pd_jinja_bad_argument(run, "replace");
    return pd_jinja_replace(run, pd_jinja_soft(run, value), from, to,
                            pd_jinja_integer_arg(args, 2, "count", -1));
}

static pd_value do_join(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    static const pd_string nothing = {.bytes = ""};
    const pd_value *given = pd_jinja_arg(args, 0, "d");
    const pd_list *list = pd_value_iterate(&run->values, value);
    const pd_string *separator = given != NULL ? pd_jinja_soft(run, given) : &nothing;
    const char *attribute = pd_jinja_c_string(run, pd_jinja_string_arg(args, 1, "attribute"));

    return list != NULL ? pd_jinja_join(run, list, separator, attribute) : undefined();
}

static pd_value do_tojson(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    int64_t indent = pd_jinja_integer_arg(args, 1, "indent", -1);
    bool ascii = pd_jinja_bool_arg(args, 0, "ensure_ascii", false);

    if (indent > 64 || ascii || pd_jinja_arg(args, 2, "separators") != NULL)
        return pd_jinja_bad_argument(run, "tojson");
    return pd_value_to_json(&run->values, value, (int)indent,
                            pd_jinja_bool_arg(args, 3, "sort_keys", false));
}

static pd_value do_indent(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    static const char spaces[] = "                                                                ";
    const pd_string *by = pd_jinja_string_arg(args, 0, "width");
    int64_t width = pd_jinja_integer_arg(args, 0, "width", 4);
    pd_string blanks = {.bytes = spaces, .len = (size_t)width};

    const pd_value *given = pd_jinja_arg(args, 0, "width");
    if (given != NULL && by == NULL && given->kind != PD_VALUE_INTEGER)
        return pd_jinja_bad_argument(run, "indent");
    if (by == NULL && (width < 0 || width > (int64_t)sizeof spaces - 1))
        return pd_jinja_bad_argument(run, "indent");
    return pd_jinja_indent(run, pd_jinja_soft(run, value), by != NULL ? by : &blanks,
                           pd_jinja_bool_arg(args, 1, "first", false),
                           pd_jinja_bool_arg(args, 2, "blank", false));
}

pd_value pd_jinja_pairs(pd_jinja_run *run, const pd_dict *dict)
{
    pd_list *list = pd_value_new_list(&run->values, dict->count, false);

    for (size_t i = 0; list != NULL && i < dict->count; i++) {
        pd_list *pair = pd_value_new_list(&run->values, 2, true);
        if (pair == NULL)
            return undefined();
        pair->items[0] = dict->pairs[i].key;
        pair->items[1] = dict->pairs[i].value;
        list->items[i] = pd_value_of_list(pair);
    }
    return pd_value_of_list(list);
}

static pd_value do_items(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    (void)args;
    if (value->kind == PD_VALUE_UNDEFINED)
        return pd_value_of_list(pd_value_new_list(&run->values, 0, false));
    return value->kind == PD_VALUE_DICT ? pd_jinja_pairs(run, value->as.dict)
                                        : pd_jinja_bad_argument(run, "items");
}

/* ---- sorting ---- */

/* A stable sort by keys: merging, so that n items take n log n comparisons. */
static void sort_by(pd_jinja_run *run, pd_value *items, pd_value *keys, size_t count, bool reverse,
                    pd_value *spare)
{
    if (count < 2 || run->values.status != PD_OK)
        return;
    size_t half = count / 2, a = 0, b = half, n = 0;
    sort_by(run, items, keys, half, reverse, spare);
    sort_by(run, items + half, keys + half, count - half, reverse, spare);
    while ((a < half || b < count) && pd_value_work(&run->values, 1)) {
        bool left = b == count;
        if (a < half && b < count) {
            int order = pd_value_compare(&run->values, &keys[a], &keys[b]);
            left = reverse ? order >= 0 : order <= 0;
        }
        size_t from = left ? a++ : b++;
        spare[2 * n] = items[from];
        spare[2 * n + 1] = keys[from];
        n++;
    }
    for (size_t i = 0; i < n; i++) {
        items[i] = spare[2 * i];
        keys[i] = spare[2 * i + 1];
    }
}

static pd_value sort_list(pd_jinja_run *run, const pd_list *from, const char *attribute,
                          bool case_sensitive, bool reverse)
{
    pd_list *list = pd_value_new_list(&run->values, from->count, false);
    pd_value *keys = pd_value_alloc(&run->values, from->count, sizeof *keys);
    pd_value *spare = pd_value_alloc(&run->values, from->count, 2 * sizeof *spare);

    for (size_t i = 0; spare != NULL && i < from->count; i++) {
        list->items[i] = keys[i] = from->items[i];
        if (attribute != NULL && keys[i].kind == PD_VALUE_LIST) {
            pd_value at = pd_value_integer(strtol(attribute, NULL, 10));
            keys[i] = pd_jinja_item(run, &keys[i], &at);
        } else if (attribute != NULL) {
            keys[i] = pd_jinja_attr(run, &keys[i], attribute);
        }
        if (!case_sensitive && keys[i].kind == PD_VALUE_STRING)
            keys[i] = pd_jinja_change_case(run, keys[i].as.string, PD_JINJA_LOWER, true);
    }
    if (run->values.status != PD_OK)
        return undefined();
    sort_by(run, list->items, keys, list->count, reverse, spare);
    return pd_value_of_list(list);
}

static pd_value do_sort(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_list *list = pd_value_iterate(&run->values, value);

    if (list == NULL)
        return undefined();
    return sort_list(run, list, pd_jinja_c_string(run, pd_jinja_string_arg(args, 2, "attribute")),
                     pd_jinja_bool_arg(args, 1, "case_sensitive", false),
                     pd_jinja_bool_arg(args, 0, "reverse", false));
}

static pd_value do_dictsort(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_string *by = pd_jinja_string_arg(args, 1, "by");

    if (value->kind != PD_VALUE_DICT)
        return pd_jinja_bad_argument(run, "dictsort");
    pd_value pairs = pd_jinja_pairs(run, value->as.dict);
    if (pairs.kind != PD_VALUE_LIST)
        return undefined();
    bool values = by != NULL && by->len == 5 && memcmp(by->bytes, "value", 5) == 0;
    return sort_list(run, pairs.as.list, values ? "1" : "0",
                     pd_jinja_bool_arg(args, 0, "case_sensitive", false),
                     pd_jinja_bool_arg(args, 2, "reverse", false));
}

static pd_value do_unique(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_list *from = pd_value_iterate(&run->values, value);
    pd_list *list = from != NULL ? pd_value_new_list(&run->values, from->count, false) : NULL;
    size_t count = 0;

    if (args->count != 0)
        return pd_jinja_bad_argument(run, "unique");
    for (size_t i = 0; list != NULL && i < from->count; i++) {
        pd_value key = from->items[i], seen = undefined();
        bool fresh = true;
        if (key.kind == PD_VALUE_STRING)
            key = pd_jinja_change_case(run, key.as.string, PD_JINJA_LOWER, true);
        for (size_t k = 0; k < count && fresh; k++) {
            seen = list->items[k];
            if (seen.kind == PD_VALUE_STRING)
                seen = pd_jinja_change_case(run, seen.as.string, PD_JINJA_LOWER, true);
            fresh = !pd_value_equal(&run->values, &key, &seen);
        }
        if (fresh)
            list->items[count++] = from->items[i];
    }
    if (list != NULL)
        list->count = count;
    return pd_value_of_list(list);
}

/* ---- map, select and their kind ---- */

/* What these filters work on: nothing at all where the value is none, 0, empty, ... */
static const pd_list *items_of(pd_jinja_run *run, const pd_value *value)
{
    if (!pd_value_truth(value))
        return pd_value_new_list(&run->values, 0, false);
    return pd_value_iterate(&run->values, value);
}

/* The arguments behind the first skip ones by position. */
static pd_jinja_args rest_of(const pd_jinja_args *args, size_t skip)
{
    size_t n = skip < args->count ? skip : args->count;
    return (pd_jinja_args){args->count - n, args->values + n,
                           args->names != NULL ? args->names + n : NULL};
}

static pd_value do_map(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    const pd_list *from = items_of(run, value);
    const char *attribute = NULL, *filter = NULL;
    const pd_value *fallback = NULL;

    if (args->count != 0 && args->names[0] == NULL) {
        filter = pd_jinja_c_string(run, pd_jinja_string_arg(args, 0, ""));
    } else {
        attribute = pd_jinja_c_string(run, pd_jinja_string_arg(args, SIZE_MAX, "attribute"));
        fallback = pd_jinja_arg(args, SIZE_MAX, "default");
    }
    if (from == NULL)
        return undefined();
    if ((attribute == NULL && (filter == NULL || !pd_jinja_has_filter(filter))))
        return pd_jinja_bad_argument(run, "map");
    pd_list *list = pd_value_new_list(&run->values, from->count, false);
    pd_jinja_args rest = rest_of(args, 1);
    for (size_t i = 0; list != NULL && i < from->count && run->values.status == PD_OK; i++) {
        pd_value item = from->items[i];
        item = attribute != NULL ? pd_jinja_attr(run, &item, attribute)
                                 : pd_jinja_filter(run, filter, item, &rest);
        if (item.kind == PD_VALUE_UNDEFINED && fallback != NULL)
            item = *fallback;
        list->items[i] = item;
    }
    return pd_value_of_list(list);
}

/* keep: what the test says about an item that stays. */
static pd_value choose(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args,
                       bool by_attribute, bool keep)
{
    const pd_list *from = items_of(run, value);
    size_t skip = by_attribute ? 1 : 0;
    const char *attribute =
        by_attribute ? pd_jinja_c_string(run, pd_jinja_string_arg(args, 0, "")) : NULL;
    const char *test = pd_jinja_c_string(run, pd_jinja_string_arg(args, skip, ""));
    pd_jinja_args rest = rest_of(args, skip + 1);
    size_t count = 0;

    if (from == NULL || (by_attribute && attribute == NULL) ||
        (args->count > skip && (test == NULL || !pd_jinja_has_test(test))))
        return pd_jinja_bad_argument(run, "select");
    pd_list *list = pd_value_new_list(&run->values, from->count, false);
    for (size_t i = 0; list != NULL && i < from->count && run->values.status == PD_OK; i++) {
        pd_value item = from->items[i];
        if (attribute != NULL)
            item = pd_jinja_attr(run, &item, attribute);
        bool holds = test != NULL ? pd_jinja_test(run, test, &item, &rest) : pd_value_truth(&item);
        if (holds == keep)
            list->items[count++] = from->items[i];
    }
    if (list != NULL)
        list->count = count;
    return pd_value_of_list(list);
}

static pd_value do_select(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    return choose(run, value, args, false, true);
}

static pd_value do_reject(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    return choose(run, value, args, false, false);
}

static pd_value do_selectattr(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    return choose(run, value, args, true, true);
}

static pd_value do_rejectattr(pd_jinja_run *run, const pd_value *value, const pd_jinja_args *args)
{
    return choose(run, value, args, true, false);
}

typedef struct filter {
    const char *name;
    filter_fn *fn;
    const char *params; /* names with commas between; NULL: any */
} filter;

static const filter filters[] = {
    {"abs", do_abs, ""},
    {"capitalize", do_capitalize, ""},
    {"count", do_length, ""},
    {"d", do_default, "default_value,boolean"},
    {"default", do_default, "default_value,boolean"},
    {"dictsort", do_dictsort, "case_sensitive,by,reverse"},
    {"e", do_escape, ""},
    {"escape", do_escape, ""},
    {"first", do_first, ""},
    {"float", do_float, "default"},
    {"indent", do_indent, "width,first,blank"},
    {"int", do_int, "default"},
    {"items", do_items, ""},
    {"join", do_join, "d,attribute"},
    {"last", do_last, ""},
    {"length", do_length, ""},
    {"list", do_list, ""},
    {"lower", do_lower, ""},
    {"map", do_map, NULL},
    {"reject", do_reject, NULL},
    {"rejectattr", do_rejectattr, NULL},
    {"replace", do_replace, "old,new,count"},
    {"reverse", do_reverse, ""},
    {"safe", do_safe, ""},
    {"select", do_select, NULL},
    {"selectattr", do_selectattr, NULL},
    {"sort", do_sort, "reverse,case_sensitive,attribute"},
    {"string", do_string, ""},
    {"title", do_title, ""},
    {"tojson", do_tojson, "ensure_ascii,indent,separators,sort_keys"},
    {"trim", do_trim, "chars"},
    {"unique", do_unique, ""},
    {"upper", do_upper, ""},
};

static const filter *find_filter(const char *name)
{
    for (size_t i = 0; i < sizeof filters / sizeof filters[0]; i++) {
        if (strcmp(filters[i].name, name) == 0)
            return &filters[i];
    }
    return NULL;
}

/* Whether params ("a,b") take so many arguments, of these names where they have some. */
static bool params_take(const char *params, size_t count, const char *const *names)
{
    size_t params_count = *params != '\0', positional = 0;

    if (count == 0)
        return true;
    for (const char *c = params; *c != '\0'; c++)
        params_count += *c == ',';
    for (size_t i = 0; i < count; i++) {
        const char *name = names != NULL ? names[i] : NULL;
        bool found = name == NULL && positional++ < params_count;
        for (const char *at = params; name != NULL && *at != '\0' && !found;) {
            size_t len = strcspn(at, ",");
            found = strlen(name) == len && strncmp(at, name, len) == 0;
            at += len + (at[len] == ',');
        }
        if (!found)
            return false;
    }
    return true;
}

bool pd_jinja_filter_takes(const char *name, size_t count, const char *const *names)
{
    const filter *f = find_filter(name);
    return f != NULL && (f->params == NULL || params_take(f->params, count, names));
}

bool pd_jinja_has_filter(const char *name)
{
    return find_filter(name) != NULL;
}

pd_value pd_jinja_filter(pd_jinja_run *run, const char *name, pd_value value,
                         const pd_jinja_args *args)
{
    const filter *f = find_filter(name);
    pd_assert(f != NULL);
    if (!pd_jinja_filter_takes(name, args->count, args->names))
        return pd_jinja_bad_argument(run, name); /* from map; others were checked when compiled */
    return f->fn(run, &value, args);
}

/* ---- tests ---- */

static const char *const test_names[] = {
    "defined", "undefined",   "none",        "string",   "number",   "integer",  "float",
    "boolean", "true",        "false",       "mapping",  "sequence", "iterable", "callable",
    "odd",     "even",        "divisibleby", "in",       "eq",       "equalto",  "==",
    "ne",      "!=",          "lt",          "lessthan", "<",        "le",       "<=",
    "gt",      "greaterthan", ">",           "ge",       ">=",       "sameas",   "upper",
    "lower",   NULL};

bool pd_jinja_has_test(const char *name)
{
    return pd_jinja_among(name, test_names);
}

bool pd_jinja_test_takes(const char *name, size_t count, const char *const *names)
{
    static const char *const alone[] = {"defined", "undefined", "none",     "string",   "number",
                                        "integer", "float",     "boolean",  "true",     "false",
                                        "mapping", "sequence",  "iterable", "callable", "odd",
                                        "even",    "upper",     "lower",    NULL};

    if (pd_jinja_among(name, alone))
        return count == 0;
    return count == 1 &&
           params_take(strcmp(name, "divisibleby") == 0 ? "num" : "other", count, names);
}

static bool test_kind(const pd_value *v, const char *name, bool *result)
{
    bool many = v->kind == PD_VALUE_LIST || v->kind == PD_VALUE_STRING ||
                v->kind == PD_VALUE_DICT || v->kind == PD_VALUE_UNDEFINED;
    const struct {
        const char *name;
        bool holds;
    } kinds[] = {
        {"defined", v->kind != PD_VALUE_UNDEFINED},
        {"undefined", v->kind == PD_VALUE_UNDEFINED},
        {"none", v->kind == PD_VALUE_NONE},
        {"string", v->kind == PD_VALUE_STRING},
        {"number", pd_value_is_number(v)},
        {"integer", v->kind == PD_VALUE_INTEGER},
        {"float", v->kind == PD_VALUE_REAL},
        {"boolean", v->kind == PD_VALUE_BOOL},
        {"true", v->kind == PD_VALUE_BOOL && v->as.boolean},
        {"false", v->kind == PD_VALUE_BOOL && !v->as.boolean},
        {"mapping", v->kind == PD_VALUE_DICT},
        {"sequence", many},
        {"iterable", many},
        {"callable", v->kind >= PD_VALUE_FUNCTION},
    };

    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strcmp(kinds[i].name, name) == 0) {
            *result = kinds[i].holds;
            return true;
        }
    }
    return false;
}

/* Tests that compare with an argument: the index of a name in each row tells which. */
static bool test_against(pd_jinja_run *run, const char *name, const pd_value *v, const pd_value *w)
{
    static const char *const eq[] = {"eq", "equalto", "==", NULL}, *const ne[] = {"ne", "!=", NULL},
                             *const lt[] = {"lt", "lessthan", "<", NULL},
                             *const le[] = {"le", "<=", NULL},
                             *const gt[] = {"gt", "greaterthan", ">", NULL};

    if (pd_jinja_among(name, eq))
        return pd_value_equal(&run->values, v, w);
    if (pd_jinja_among(name, ne))
        return !pd_value_equal(&run->values, v, w);
    if (strcmp(name, "in") == 0)
        return pd_jinja_contains(run, w, v);
    if (strcmp(name, "sameas") == 0)
        return v->kind == w->kind && pd_value_equal(&run->values, v, w);
    int order = pd_value_compare(&run->values, v, w);
    return pd_jinja_among(name, lt)   ? order < 0
           : pd_jinja_among(name, le) ? order <= 0
           : pd_jinja_among(name, gt) ? order > 0
                                      : order >= 0;
}

bool pd_jinja_test(pd_jinja_run *run, const char *name, const pd_value *value,
                   const pd_jinja_args *args)
{
    bool result = false, whole = pd_value_is_number(value) && value->kind != PD_VALUE_REAL;

    if (!pd_jinja_test_takes(name, args->count, args->names)) {
        pd_jinja_bad_argument(run, name); /* from select; others were checked when compiled */
        return false;
    }
    if (test_kind(value, name, &result))
        return result;
    if (strcmp(name, "odd") == 0 || strcmp(name, "even") == 0) {
        if (whole)
            return (pd_value_whole(value) % 2 != 0) == (name[0] == 'o');
    } else if (strcmp(name, "divisibleby") == 0) {
        int64_t by = pd_jinja_integer_arg(args, 0, "num", 0);
        if (whole && by != 0)
            return by == -1 || pd_value_whole(value) % by == 0;
    } else if (strcmp(name, "upper") == 0 || strcmp(name, "lower") == 0) {
        const pd_string *s = pd_jinja_soft(run, value);
        bool up = name[0] == 'u';
        pd_value same = pd_jinja_change_case(run, s, up ? PD_JINJA_UPPER : PD_JINJA_LOWER, true);
        pd_value other = pd_jinja_change_case(run, s, up ? PD_JINJA_LOWER : PD_JINJA_UPPER, true);
        pd_value text = pd_value_to_string(&run->values, value);
        return pd_value_equal(&run->values, &same, &text) &&
               !pd_value_equal(&run->values, &other, &text);
    } else if (pd_jinja_arg(args, 0, "other") != NULL) {
        return test_against(run, name, value, pd_jinja_arg(args, 0, "other"));
    }
    pd_jinja_bad_argument(run, name);
    return false;
}

#include "common/text/jinja.h"

#include <math.h>
#include <string.h>

static pd_value eval(pd_jinja_run *run, const pd_jinja_node *node);

static pd_value undefined(void)
{
    return pd_value_undefined(NULL);
}

static void fail_undefined(pd_jinja_run *run, const pd_value *value)
{
    pd_value_fail(&run->values, PD_E_INVALID, "'%s' is undefined",
                  value->as.missing != NULL ? value->as.missing : "value");
}

/* ---- variables ---- */

void pd_jinja_bind(pd_jinja_run *run, const char *name, pd_value value)
{
    for (pd_jinja_binding *b = run->frame->bindings; b != NULL; b = b->next) {
        if (strcmp(b->name, name) == 0) {
            b->value = value;
            return;
        }
    }
    pd_jinja_binding *binding = pd_value_alloc(&run->values, 1, sizeof *binding);
    if (binding == NULL)
        return;
    *binding = (pd_jinja_binding){run->frame->bindings, name, value};
    run->frame->bindings = binding;
}

static pd_value look_up(pd_jinja_run *run, const char *name)
{
    for (const pd_jinja_frame *frame = run->frame; frame != NULL; frame = frame->outer) {
        for (const pd_jinja_binding *b = frame->bindings; b != NULL; b = b->next) {
            if (strcmp(b->name, name) == 0)
                return b->value;
        }
    }
    if (pd_jinja_has_function(name))
        return (pd_value){.kind = PD_VALUE_FUNCTION, .as.function = name};
    return pd_value_undefined(name);
}

/* Gives value to a name, to several, or to a namespace's attribute. */
static void assign(pd_jinja_run *run, const pd_jinja_node *target, pd_value value)
{
    if (target->kind == PD_JINJA_VAR) {
        pd_jinja_bind(run, target->name, value);
    } else if (target->kind == PD_JINJA_ATTR) {
        pd_value space = look_up(run, target->a->name);
        if (space.kind == PD_VALUE_NAMESPACE)
            pd_value_put(&run->values, space.as.dict, pd_value_text(&run->values, target->name),
                         value);
        else
            pd_value_fail(&run->values, PD_E_INVALID,
                          "an attribute of %s cannot be set, only of a namespace",
                          pd_value_kind_name(&space));
    } else {
        const pd_list *list = pd_value_iterate(&run->values, &value);
        if (list != NULL && list->count != target->count)
            pd_value_fail(&run->values, PD_E_INVALID, "%zu values cannot be given to %zu names",
                          list->count, target->count);
        for (size_t i = 0; run->values.status == PD_OK && i < target->count; i++)
            assign(run, target->items[i], list->items[i]);
    }
}

/* ---- text ---- */

static void add_span(pd_jinja_run *run, size_t start, size_t end)
{
    pd_template_spans *spans = run->sink.spans;

    if (start == end)
        return;
    if (spans->count != 0 && spans->spans[spans->count - 1].end == start) {
        spans->spans[spans->count - 1].end = end;
        return;
    }
    if (spans->count == spans->size) {
        size_t size = spans->size * 2 + 16;
        pd_template_span *grown = pd_realloc(spans->spans, size * sizeof *grown);
        if (grown == NULL) {
            pd_value_fail(&run->values, PD_E_NOMEM, "out of memory");
            return;
        }
        spans->spans = grown;
        spans->size = size;
    }
    spans->spans[spans->count++] = (pd_template_span){start, end};
}

static void emit(pd_jinja_run *run, const pd_value *value)
{
    pd_value text = pd_value_to_string(&run->values, value);
    size_t base = run->sink.text->len;

    if (text.kind != PD_VALUE_STRING || run->values.status != PD_OK)
        return;
    const pd_string *s = text.as.string;
    pd_buf_append(run->sink.text, s->bytes, s->len);
    pd_status status = pd_buf_status(run->sink.text);
    if (status != PD_OK) {
        pd_value_fail(&run->values, status, "the rendered text is too large");
        return;
    }
    if (s->mark == PD_MARK_ALL)
        add_span(run, base, base + s->len);
    for (size_t i = 0; s->mark == PD_MARK_MIXED && i < s->len;) {
        size_t start = i;
        while (i < s->len && s->marks[i] == s->marks[start])
            i++;
        if (s->marks[start] != 0)
            add_span(run, base + start, base + i);
    }
}

/* Runs a statement and gives what it wrote as a string. */
static pd_value capture(pd_jinja_run *run, const pd_jinja_node *body)
{
    pd_jinja_sink outer = run->sink;
    pd_buf text;
    pd_template_spans spans = {0};
    pd_value result = undefined();

    pd_buf_init(&text, outer.text->max);
    run->sink = (pd_jinja_sink){&text, &spans};
    pd_jinja_exec(run, body);
    run->sink = outer;
    char *bytes = pd_value_alloc(&run->values, text.len, 1);
    unsigned char *marks = spans.count != 0 ? pd_value_alloc(&run->values, text.len, 1) : NULL;
    pd_string *string = pd_value_alloc(&run->values, 1, sizeof *string);
    if (string != NULL) {
        memcpy(bytes, pd_buf_text(&text), text.len);
        for (size_t i = 0; i < spans.count; i++)
            memset(marks + spans.spans[i].start, 1, spans.spans[i].end - spans.spans[i].start);
        *string = (pd_string){.bytes = bytes,
                              .len = text.len,
                              .mark = spans.count != 0 ? PD_MARK_MIXED : PD_MARK_NONE,
                              .marks = marks};
        result = (pd_value){.kind = PD_VALUE_STRING, .as.string = string};
    }
    pd_template_spans_fini(&spans);
    pd_buf_fini(&text);
    return result;
}

/* ---- operators ---- */

static pd_value repeat(pd_jinja_run *run, const pd_value *value, int64_t times)
{
    size_t count = times > 0 ? (size_t)times : 0;

    if (!pd_value_work(&run->values, count))
        return undefined();
    if (value->kind == PD_VALUE_STRING) {
        const pd_string **parts = pd_value_alloc(&run->values, count, sizeof *parts);
        for (size_t i = 0; parts != NULL && i < count; i++)
            parts[i] = value->as.string;
        return parts != NULL ? pd_value_joined(&run->values, parts, count) : undefined();
    }
    const pd_list *list = value->as.list;
    size_t total;
    if (__builtin_mul_overflow(list->count, count, &total)) {
        pd_value_fail(&run->values, PD_E_TOO_LARGE, "a list is too long");
        return undefined();
    }
    pd_list *all = pd_value_new_list(&run->values, total, list->tuple);
    for (size_t i = 0; all != NULL && i < total; i++)
        all->items[i] = list->items[i % list->count];
    return pd_value_of_list(all);
}

static bool power(int64_t base, int64_t exponent, int64_t *out)
{
    int64_t result = 1;

    if (exponent > 64 && base != 0 && base != 1 && base != -1)
        return false;
    if (exponent > 64) /* 0, 1, -1: by its evenness alone */
        exponent = 2 + exponent % 2;
    for (; exponent > 0; exponent--) {
        if (__builtin_mul_overflow(result, base, &result))
            return false;
    }
    *out = result;
    return true;
}

/* Python's rules: // and % round down, / is real. */
static pd_value whole_arithmetic(pd_jinja_run *run, pd_jinja_op op, int64_t a, int64_t b)
{
    int64_t r = 0;
    bool fits = true;

    if (b == 0 && (op == PD_JINJA_DIV || op == PD_JINJA_FLOORDIV || op == PD_JINJA_MOD)) {
        pd_value_fail(&run->values, PD_E_INVALID, "division by zero");
        return undefined();
    }
    switch (op) {
    case PD_JINJA_ADD: fits = !__builtin_add_overflow(a, b, &r); break;
    case PD_JINJA_SUB: fits = !__builtin_sub_overflow(a, b, &r); break;
    case PD_JINJA_MUL: fits = !__builtin_mul_overflow(a, b, &r); break;
    case PD_JINJA_DIV: return pd_value_real((double)a / (double)b);
    case PD_JINJA_FLOORDIV:
        fits = !(a == INT64_MIN && b == -1);
        if (fits)
            r = a / b - (a % b != 0 && (a < 0) != (b < 0));
        break;
    case PD_JINJA_MOD:
        if (b != -1)
            r = a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
        break;
    default:
        if (b < 0)
            return pd_value_real(pow((double)a, (double)b));
        fits = power(a, b, &r);
    }
    if (!fits)
        pd_value_fail(&run->values, PD_E_INVALID, "an integer is too large");
    return pd_value_integer(r);
}

static pd_value real_arithmetic(pd_jinja_run *run, pd_jinja_op op, double a, double b)
{
    if (b == 0 && (op == PD_JINJA_DIV || op == PD_JINJA_FLOORDIV || op == PD_JINJA_MOD)) {
        pd_value_fail(&run->values, PD_E_INVALID, "division by zero");
        return undefined();
    }
    switch (op) {
    case PD_JINJA_ADD: return pd_value_real(a + b);
    case PD_JINJA_SUB: return pd_value_real(a - b);
    case PD_JINJA_MUL: return pd_value_real(a * b);
    case PD_JINJA_DIV: return pd_value_real(a / b);
    case PD_JINJA_FLOORDIV: return pd_value_real(floor(a / b));
    case PD_JINJA_MOD: {
        double r = fmod(a, b);
        return pd_value_real(r != 0 && (r < 0) != (b < 0) ? r + b : r);
    }
    default: return pd_value_real(pow(a, b));
    }
}

static pd_value add_lists(pd_jinja_run *run, const pd_list *a, const pd_list *b)
{
    pd_list *all = pd_value_new_list(&run->values, a->count + b->count, a->tuple);

    for (size_t i = 0; all != NULL && i < all->count; i++)
        all->items[i] = i < a->count ? a->items[i] : b->items[i - a->count];
    return pd_value_of_list(all);
}

static pd_value eval_binary(pd_jinja_run *run, const pd_jinja_node *node)
{
    static const char *const signs[] = {"+", "-", "*", "/", "//", "%", "**"};
    pd_value a = eval(run, node->a), b = eval(run, node->b);
    pd_jinja_op op = node->op;

    if (run->values.status != PD_OK)
        return undefined();
    if (pd_value_is_number(&a) && pd_value_is_number(&b)) {
        if (a.kind == PD_VALUE_REAL || b.kind == PD_VALUE_REAL)
            return real_arithmetic(run, op, pd_value_number(&a), pd_value_number(&b));
        return whole_arithmetic(run, op, pd_value_whole(&a), pd_value_whole(&b));
    }
    if (op == PD_JINJA_ADD && a.kind == PD_VALUE_STRING && b.kind == PD_VALUE_STRING) {
        const pd_string *parts[] = {a.as.string, b.as.string};
        return pd_value_joined(&run->values, parts, 2);
    }
    if (op == PD_JINJA_ADD && a.kind == PD_VALUE_LIST && b.kind == PD_VALUE_LIST &&
        a.as.list->tuple == b.as.list->tuple)
        return add_lists(run, a.as.list, b.as.list);
    bool a_many = a.kind == PD_VALUE_STRING || a.kind == PD_VALUE_LIST;
    bool b_many = b.kind == PD_VALUE_STRING || b.kind == PD_VALUE_LIST;
    if (op == PD_JINJA_MUL && a_many && b.kind <= PD_VALUE_INTEGER && pd_value_is_number(&b))
        return repeat(run, &a, pd_value_whole(&b));
    if (op == PD_JINJA_MUL && b_many && a.kind <= PD_VALUE_INTEGER && pd_value_is_number(&a))
        return repeat(run, &b, pd_value_whole(&a));
    if (a.kind == PD_VALUE_UNDEFINED || b.kind == PD_VALUE_UNDEFINED)
        fail_undefined(run, a.kind == PD_VALUE_UNDEFINED ? &a : &b);
    else
        pd_value_fail(&run->values, PD_E_INVALID, "'%s' cannot work on %s and %s", signs[op],
                      pd_value_kind_name(&a), pd_value_kind_name(&b));
    return undefined();
}

static bool holds(pd_jinja_run *run, pd_jinja_op op, const pd_value *a, const pd_value *b)
{
    switch (op) {
    case PD_JINJA_EQ: return pd_value_equal(&run->values, a, b);
    case PD_JINJA_NE: return !pd_value_equal(&run->values, a, b);
    case PD_JINJA_LT: return pd_value_compare(&run->values, a, b) < 0;
    case PD_JINJA_LE: return pd_value_compare(&run->values, a, b) <= 0;
    case PD_JINJA_GT: return pd_value_compare(&run->values, a, b) > 0;
    case PD_JINJA_GE: return pd_value_compare(&run->values, a, b) >= 0;
    case PD_JINJA_IN: return pd_jinja_contains(run, b, a);
    default: return !pd_jinja_contains(run, b, a);
    }
}

/* a < b < c asks both, and each operand is evaluated once. */
static pd_value eval_compare(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value left = eval(run, node->a);

    for (size_t i = 0; i < node->count && run->values.status == PD_OK; i++) {
        pd_value right = eval(run, node->items[i]);
        if (run->values.status != PD_OK || !holds(run, node->ops[i], &left, &right))
            return pd_value_bool(false);
        left = right;
    }
    return pd_value_bool(true);
}

static pd_value eval_concat(pd_jinja_run *run, const pd_jinja_node *node)
{
    const pd_string **parts = pd_value_alloc(&run->values, node->count, sizeof *parts);

    for (size_t i = 0; parts != NULL && i < node->count; i++) {
        pd_value item = eval(run, node->items[i]);
        pd_value text = pd_value_to_string(&run->values, &item);
        if (text.kind != PD_VALUE_STRING || run->values.status != PD_OK)
            return undefined();
        parts[i] = text.as.string;
    }
    return parts != NULL ? pd_value_joined(&run->values, parts, node->count) : undefined();
}

static pd_value eval_sign(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value value = eval(run, node->a);

    if (value.kind == PD_VALUE_REAL)
        return node->op == PD_JINJA_SUB ? pd_value_real(-value.as.real) : value;
    if (pd_value_is_number(&value))
        return whole_arithmetic(run, node->op, 0, pd_value_whole(&value));
    if (value.kind == PD_VALUE_UNDEFINED)
        fail_undefined(run, &value);
    else
        pd_value_fail(&run->values, PD_E_INVALID, "%s has no sign", pd_value_kind_name(&value));
    return undefined();
}

/* ---- slices ---- */

/* A bound of a slice over count items, as Python clips it. */
static bool bound(pd_jinja_run *run, const pd_jinja_node *node, int64_t count, int64_t fallback,
                  bool backwards, int64_t *out)
{
    pd_value value = node != NULL ? eval(run, node) : pd_value_none();

    *out = fallback;
    if (value.kind == PD_VALUE_NONE)
        return true;
    if (value.kind != PD_VALUE_INTEGER && value.kind != PD_VALUE_BOOL) {
        pd_value_fail(&run->values, PD_E_INVALID, "a slice needs integers, not %s",
                      pd_value_kind_name(&value));
        return false;
    }
    int64_t at = pd_value_whole(&value), low = backwards ? -1 : 0,
            high = backwards ? count - 1 : count;
    if (at < 0)
        at = at < -count ? low : at + count;
    *out = at < low ? low : at > high ? high : at;
    return true;
}

static pd_value eval_slice(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value of = eval(run, node->a);
    pd_value step_value = node->items[2] != NULL ? eval(run, node->items[2]) : pd_value_none();
    int64_t from, to, step = 1;

    if (run->values.status != PD_OK)
        return undefined();
    if (of.kind == PD_VALUE_UNDEFINED) {
        fail_undefined(run, &of);
        return undefined();
    }
    if (of.kind != PD_VALUE_STRING && of.kind != PD_VALUE_LIST)
        return undefined();
    if (step_value.kind == PD_VALUE_INTEGER)
        step = step_value.as.integer;
    if (step == 0 || (step_value.kind != PD_VALUE_INTEGER && step_value.kind != PD_VALUE_NONE)) {
        pd_value_fail(&run->values, PD_E_INVALID, "a slice's step has to be an integer, not 0");
        return undefined();
    }
    bool text = of.kind == PD_VALUE_STRING;
    int64_t count = (int64_t)(text ? pd_value_length(of.as.string) : of.as.list->count);
    if (!bound(run, node->items[0], count, step < 0 ? count - 1 : 0, step < 0, &from) ||
        !bound(run, node->items[1], count, step < 0 ? -1 : count, step < 0, &to))
        return undefined();
    if (text && step == 1) {
        size_t start = pd_value_byte_at(of.as.string, (size_t)from);
        size_t end = to > from ? pd_value_byte_at(of.as.string, (size_t)to) : start;
        return pd_value_substring(&run->values, of.as.string, start, end);
    }
    const pd_list *all = pd_value_iterate(&run->values, &of);
    uint64_t span = step > 0 ? (to > from ? (uint64_t)(to - from) : 0)
                             : (from > to ? (uint64_t)(from - to) : 0);
    uint64_t stride = step > 0 ? (uint64_t)step : -(uint64_t)step;
    size_t taken = span == 0 ? 0 : (size_t)((span - 1) / stride + 1);
    pd_list *part = all != NULL ? pd_value_new_list(&run->values, taken, all->tuple) : NULL;
    for (size_t i = 0; part != NULL && i < taken; i++)
        part->items[i] = all->items[from + (int64_t)i * step];
    if (!text || part == NULL)
        return pd_value_of_list(part);
    const pd_string **parts = pd_value_alloc(&run->values, taken, sizeof *parts);
    for (size_t i = 0; parts != NULL && i < taken; i++)
        parts[i] = part->items[i].as.string;
    return parts != NULL ? pd_value_joined(&run->values, parts, taken) : undefined();
}

/* ---- calls ---- */

static bool eval_arguments(pd_jinja_run *run, const pd_jinja_node *node, pd_jinja_args *args)
{
    pd_value *values = pd_value_alloc(&run->values, node->count, sizeof *values);

    for (size_t i = 0; values != NULL && i < node->count; i++)
        values[i] = eval(run, node->items[i]);
    *args = (pd_jinja_args){node->count, values, node->names};
    return run->values.status == PD_OK;
}

const pd_value *pd_jinja_arg(const pd_jinja_args *args, size_t position, const char *name)
{
    size_t seen = 0;

    for (size_t i = 0; i < args->count; i++) {
        if (args->names == NULL || args->names[i] == NULL) {
            if (seen++ == position)
                return &args->values[i];
        } else if (strcmp(args->names[i], name) == 0) {
            return &args->values[i];
        }
    }
    return NULL;
}

/* Every argument has to meet a parameter. */
static bool arguments_fit(pd_jinja_run *run, const pd_jinja_node *macro, const pd_jinja_args *args)
{
    size_t positional = 0;

    for (size_t i = 0; i < args->count; i++) {
        bool found = args->names[i] == NULL && positional++ < macro->count;
        for (size_t k = 0; args->names[i] != NULL && k < macro->count; k++)
            found = found || strcmp(macro->names[k], args->names[i]) == 0;
        if (!found) {
            pd_value_fail(&run->values, PD_E_INVALID, "the macro '%s' takes no such argument",
                          macro->name);
            return false;
        }
    }
    return true;
}

static pd_value call_macro(pd_jinja_run *run, const pd_jinja_node *macro, const pd_jinja_args *args)
{
    pd_jinja_frame frame = {.outer = &run->globals}, *outer = run->frame;
    uint32_t line = run->line;

    if (!arguments_fit(run, macro, args))
        return undefined();
    run->frame = &frame;
    for (size_t i = 0; i < macro->count && run->values.status == PD_OK; i++) {
        const pd_value *given = pd_jinja_arg(args, i, macro->names[i]);
        pd_value value = given != NULL             ? *given
                         : macro->items[i] != NULL ? eval(run, macro->items[i])
                                                   : pd_value_undefined(macro->names[i]);
        pd_jinja_bind(run, macro->names[i], value);
    }
    pd_value text = run->values.status == PD_OK ? capture(run, macro->b) : undefined();
    run->frame = outer;
    run->line = line;
    return text;
}

static pd_value eval_call(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value callee = eval(run, node->a);
    pd_jinja_args args;

    if (run->values.status != PD_OK || !eval_arguments(run, node, &args))
        return undefined();
    switch (callee.kind) {
    case PD_VALUE_FUNCTION: return pd_jinja_function(run, callee.as.function, &args);
    case PD_VALUE_METHOD: return pd_jinja_method(run, callee.as.method, &args);
    case PD_VALUE_MACRO: return call_macro(run, callee.as.macro, &args);
    case PD_VALUE_UNDEFINED: fail_undefined(run, &callee); break;
    default:
        pd_value_fail(&run->values, PD_E_INVALID, "%s cannot be called",
                      pd_value_kind_name(&callee));
    }
    return undefined();
}

/* ---- expressions ---- */

static pd_value eval_list(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_list *list = pd_value_new_list(&run->values, node->count, node->op == 1);

    for (size_t i = 0; list != NULL && i < node->count; i++)
        list->items[i] = eval(run, node->items[i]);
    return pd_value_of_list(list);
}

static pd_value eval_dict(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_dict *dict = pd_value_new_dict(&run->values, node->count / 2);

    for (size_t i = 0; dict != NULL && i + 1 < node->count; i += 2) {
        pd_value key = eval(run, node->items[i]);
        pd_value_put(&run->values, dict, key, eval(run, node->items[i + 1]));
    }
    return pd_value_of_dict(dict);
}

static pd_value eval_applied(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value value = eval(run, node->a);
    pd_jinja_args args;

    if (run->values.status != PD_OK || !eval_arguments(run, node, &args))
        return undefined();
    if (node->kind == PD_JINJA_FILTER)
        return pd_jinja_filter(run, node->name, value, &args);
    return pd_value_bool(pd_jinja_test(run, node->name, &value, &args));
}

static pd_value eval_inner(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value a;

    switch (node->kind) {
    case PD_JINJA_CONST: return node->value;
    case PD_JINJA_VAR: return look_up(run, node->name);
    case PD_JINJA_LIST: return eval_list(run, node);
    case PD_JINJA_DICT: return eval_dict(run, node);
    case PD_JINJA_ATTR: a = eval(run, node->a); return pd_jinja_attr(run, &a, node->name);
    case PD_JINJA_ITEM: {
        a = eval(run, node->a);
        pd_value key = eval(run, node->b);
        return pd_jinja_item(run, &a, &key);
    }
    case PD_JINJA_SLICE: return eval_slice(run, node);
    case PD_JINJA_CALL: return eval_call(run, node);
    case PD_JINJA_FILTER:
    case PD_JINJA_TEST: return eval_applied(run, node);
    case PD_JINJA_NOT: a = eval(run, node->a); return pd_value_bool(!pd_value_truth(&a));
    case PD_JINJA_SIGN: return eval_sign(run, node);
    case PD_JINJA_BINARY: return eval_binary(run, node);
    case PD_JINJA_AND: a = eval(run, node->a); return pd_value_truth(&a) ? eval(run, node->b) : a;
    case PD_JINJA_OR: a = eval(run, node->a); return pd_value_truth(&a) ? a : eval(run, node->b);
    case PD_JINJA_COMPARE: return eval_compare(run, node);
    case PD_JINJA_CONCAT: return eval_concat(run, node);
    case PD_JINJA_COND:
        a = eval(run, node->b);
        if (pd_value_truth(&a))
            return eval(run, node->a);
        return node->c != NULL ? eval(run, node->c) : undefined();
    case PD_JINJA_BODY: pd_assert(run->captured != NULL); return *run->captured;
    default: pd_assert(!"an expression"); return undefined();
    }
}

static bool enter(pd_jinja_run *run)
{
    if (!pd_value_work(&run->values, 1))
        return false;
    if (run->depth >= PD_JINJA_DEPTH_MAX) {
        pd_value_fail(&run->values, PD_E_INVALID, "the template calls itself too deep");
        return false;
    }
    run->depth++;
    return true;
}

static pd_value eval(pd_jinja_run *run, const pd_jinja_node *node)
{
    if (!enter(run))
        return undefined();
    pd_value value = eval_inner(run, node);
    run->depth--;
    return value;
}

/* ---- statements ---- */

/* The items of a for: all, or those that its own "if" keeps. */
static const pd_list *loop_items(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value what = eval(run, node->b);
    const pd_list *all = run->values.status == PD_OK ? pd_value_iterate(&run->values, &what) : NULL;

    if (all == NULL || node->d == NULL)
        return all;
    pd_list *kept = pd_value_new_list(&run->values, all->count, false);
    pd_jinja_frame frame = {.outer = run->frame}, *outer = run->frame;
    size_t count = 0;
    run->frame = &frame;
    for (size_t i = 0; kept != NULL && i < all->count && run->values.status == PD_OK; i++) {
        frame.bindings = NULL;
        assign(run, node->a, all->items[i]);
        pd_value keep = eval(run, node->d);
        if (pd_value_truth(&keep))
            kept->items[count++] = all->items[i];
    }
    run->frame = outer;
    if (kept != NULL)
        kept->count = count;
    return kept;
}

static void exec_for(pd_jinja_run *run, const pd_jinja_node *node)
{
    const pd_list *items = loop_items(run, node);
    pd_jinja_frame frame = {.outer = run->frame}, *outer = run->frame;
    pd_loop_state *loop = pd_value_alloc(&run->values, 1, sizeof *loop);

    if (items == NULL || loop == NULL)
        return;
    if (items->count == 0) {
        if (node->c != NULL)
            pd_jinja_exec(run, node->c);
        return;
    }
    *loop = (pd_loop_state){.items = items};
    run->frame = &frame;
    for (size_t i = 0; i < items->count && run->values.status == PD_OK && !run->leave_for; i++) {
        frame.bindings = NULL; /* what one round sets, the next does not see */
        loop->index0 = i;
        pd_jinja_bind(run, "loop", (pd_value){.kind = PD_VALUE_LOOP, .as.loop = loop});
        assign(run, node->a, items->items[i]);
        pd_jinja_exec(run, node->items[0]);
        run->leave = false;
    }
    run->leave_for = false;
    run->frame = outer;
}

static void exec_if(pd_jinja_run *run, const pd_jinja_node *node)
{
    while (node != NULL && node->kind == PD_JINJA_IF) {
        pd_value condition = eval(run, node->a);
        if (run->values.status != PD_OK)
            return;
        if (pd_value_truth(&condition)) {
            pd_jinja_exec(run, node->b);
            return;
        }
        node = node->c;
    }
    if (node != NULL)
        pd_jinja_exec(run, node);
}

static void exec_set_block(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value text = capture(run, node->b);
    const pd_value *outer = run->captured;

    run->captured = &text;
    pd_value value = node->c != NULL && run->values.status == PD_OK ? eval(run, node->c) : text;
    run->captured = outer;
    if (run->values.status == PD_OK)
        assign(run, node->a, value);
}

static void exec_inner(pd_jinja_run *run, const pd_jinja_node *node)
{
    pd_value value;

    switch (node->kind) {
    case PD_JINJA_TEXT: emit(run, &node->value); break;
    case PD_JINJA_OUTPUT:
        value = eval(run, node->a);
        emit(run, &value);
        break;
    case PD_JINJA_IF: exec_if(run, node); break;
    case PD_JINJA_FOR: exec_for(run, node); break;
    case PD_JINJA_SET:
        value = eval(run, node->b);
        if (run->values.status == PD_OK)
            assign(run, node->a, value);
        break;
    case PD_JINJA_SET_BLOCK: exec_set_block(run, node); break;
    case PD_JINJA_MACRO:
        pd_jinja_bind(run, node->name, (pd_value){.kind = PD_VALUE_MACRO, .as.macro = node});
        break;
    case PD_JINJA_BREAK:
    case PD_JINJA_CONTINUE:
        run->leave = true;
        run->leave_for = node->kind == PD_JINJA_BREAK;
        break;
    case PD_JINJA_BLOCK:
        for (size_t i = 0; i < node->count && run->values.status == PD_OK && !run->leave; i++)
            pd_jinja_exec(run, node->items[i]);
        break;
    default: pd_assert(!"a statement");
    }
}

void pd_jinja_exec(pd_jinja_run *run, const pd_jinja_node *node)
{
    if (!enter(run))
        return;
    if (node->kind != PD_JINJA_BLOCK)
        run->line = node->line;
    exec_inner(run, node);
    run->depth--;
}

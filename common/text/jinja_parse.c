#include "common/text/jinja.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { DEPTH_MAX = 100, DECLARED_MAX = 256 };

typedef struct parser {
    pd_value_context *ctx;
    const pd_jinja_token *token; /* the next one */
    pd_status status;
    pd_template_error *error;
    int depth, loops;
    const char *declared[DECLARED_MAX]; /* names that the template sets: they may be called */
    size_t declared_count;
    const pd_jinja_node *called[DECLARED_MAX]; /* names that it calls, checked at the end */
    size_t called_count;
    pd_jinja_node spare; /* stands in for nodes after a failure */
} parser;

static void fail(parser *p, pd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void fail(parser *p, pd_status status, const char *format, ...)
{
    va_list args;

    if (p->status != PD_OK)
        return;
    p->status = status;
    p->error->line = p->token->line;
    va_start(args, format);
    vsnprintf(p->error->message, sizeof p->error->message, format, args);
    va_end(args);
}

static bool is_op(const parser *p, const char *text)
{
    return p->token->kind == PD_JINJA_OPERATOR && strcmp(p->token->text, text) == 0;
}

static bool is_name(const parser *p, const char *text)
{
    return p->token->kind == PD_JINJA_NAME && strcmp(p->token->text, text) == 0;
}

/* The last token is PD_JINJA_END and is never left. */
static void step(parser *p)
{
    if (p->token->kind != PD_JINJA_END)
        p->token++;
}

static bool take_op(parser *p, const char *text)
{
    bool there = is_op(p, text);
    if (there)
        step(p);
    return there;
}

static bool take_name(parser *p, const char *text)
{
    bool there = is_name(p, text);
    if (there)
        step(p);
    return there;
}

static const char *describe(const parser *p)
{
    switch (p->token->kind) {
    case PD_JINJA_END: return "the end of the template";
    case PD_JINJA_DATA: return "text";
    case PD_JINJA_VARIABLE_BEGIN: return "{{";
    case PD_JINJA_VARIABLE_END: return "}}";
    case PD_JINJA_BLOCK_BEGIN: return "{%";
    case PD_JINJA_BLOCK_END: return "%}";
    default: return p->token->text;
    }
}

static void expect_op(parser *p, const char *text)
{
    if (!take_op(p, text))
        fail(p, PD_E_INVALID, "expected '%s', found '%s'", text, describe(p));
}

static const char *expect_any_name(parser *p)
{
    const char *name = p->token->text;

    if (p->token->kind != PD_JINJA_NAME) {
        fail(p, PD_E_INVALID, "expected a name, found '%s'", describe(p));
        return "";
    }
    step(p);
    return name;
}

static void expect_block_end(parser *p)
{
    if (p->token->kind != PD_JINJA_BLOCK_END)
        fail(p, PD_E_INVALID, "expected the end of the tag, found '%s'", describe(p));
    step(p);
}

/* Never NULL: after a failure a node that nobody will look at. */
static pd_jinja_node *make(parser *p, pd_jinja_kind kind)
{
    pd_jinja_node *node = pd_value_alloc(p->ctx, 1, sizeof *node);

    if (node == NULL) {
        fail(p, PD_E_NOMEM, "out of memory");
        p->spare = (pd_jinja_node){0};
        return &p->spare;
    }
    node->kind = kind;
    node->line = p->token->line;
    return node;
}

static void add_item(parser *p, pd_jinja_node *node, pd_jinja_node *item, const char *name)
{
    size_t count = node->count;

    if (p->status != PD_OK)
        return;
    if ((count & (count - 1)) == 0) { /* room doubles at 0, 1, 2, 4, ... */
        size_t size = count == 0 ? 1 : count * 2;
        pd_jinja_node **items = pd_value_alloc(p->ctx, size, sizeof *items);
        const char **names = pd_value_alloc(p->ctx, size, sizeof *names);
        pd_jinja_op *ops = pd_value_alloc(p->ctx, size, sizeof *ops);
        if (items == NULL || names == NULL || ops == NULL) {
            fail(p, PD_E_NOMEM, "out of memory");
            return;
        }
        if (count != 0) {
            memcpy(items, node->items, count * sizeof *items);
            memcpy(names, node->names, count * sizeof *names);
            memcpy(ops, node->ops, count * sizeof *ops);
        }
        node->items = items;
        node->names = names;
        node->ops = ops;
    }
    node->items[count] = item;
    node->names[count] = name;
    node->count = count + 1;
}

static void declare(parser *p, const char *name)
{
    if (p->declared_count == DECLARED_MAX) {
        fail(p, PD_E_UNSUPPORTED, "the template sets more than %d names", DECLARED_MAX);
        return;
    }
    p->declared[p->declared_count++] = name;
}

static pd_jinja_node *parse_expression(parser *p);
static pd_jinja_node *parse_tuple(parser *p, bool with_cond);
static pd_jinja_node *parse_unary(parser *p, bool with_filter);

/* ---- expressions ---- */

static pd_jinja_node *make_const(parser *p, pd_value value)
{
    pd_jinja_node *node = make(p, PD_JINJA_CONST);
    if (p->status == PD_OK)
        node->value = value;
    return node;
}

static pd_jinja_node *parse_string(parser *p)
{
    const pd_jinja_token *first = p->token;
    pd_value value = pd_value_string(p->ctx, first->text, first->len, PD_MARK_NONE);

    step(p);
    while (p->token->kind == PD_JINJA_STRING && value.kind == PD_VALUE_STRING) {
        pd_value more = pd_value_string(p->ctx, p->token->text, p->token->len, PD_MARK_NONE);
        if (more.kind != PD_VALUE_STRING)
            break;
        const pd_string *parts[] = {value.as.string, more.as.string};
        value = pd_value_joined(p->ctx, parts, 2);
        step(p);
    }
    if (value.kind != PD_VALUE_STRING)
        fail(p, PD_E_NOMEM, "out of memory");
    return make_const(p, value);
}

static pd_jinja_node *parse_list(parser *p)
{
    pd_jinja_node *node = make(p, PD_JINJA_LIST);

    while (!is_op(p, "]") && p->status == PD_OK) {
        if (node->count != 0)
            expect_op(p, ",");
        if (is_op(p, "]"))
            break;
        add_item(p, node, parse_expression(p), NULL);
    }
    expect_op(p, "]");
    return node;
}

static pd_jinja_node *parse_dict(parser *p)
{
    pd_jinja_node *node = make(p, PD_JINJA_DICT);

    while (!is_op(p, "}") && p->status == PD_OK) {
        if (node->count != 0)
            expect_op(p, ",");
        if (is_op(p, "}"))
            break;
        add_item(p, node, parse_expression(p), NULL);
        expect_op(p, ":");
        add_item(p, node, parse_expression(p), NULL);
    }
    expect_op(p, "}");
    return node;
}

static pd_jinja_node *parse_primary(parser *p)
{
    const pd_jinja_token *token = p->token;

    switch (token->kind) {
    case PD_JINJA_NAME: {
        step(p);
        if (strcmp(token->text, "true") == 0 || strcmp(token->text, "True") == 0)
            return make_const(p, pd_value_bool(true));
        if (strcmp(token->text, "false") == 0 || strcmp(token->text, "False") == 0)
            return make_const(p, pd_value_bool(false));
        if (strcmp(token->text, "none") == 0 || strcmp(token->text, "None") == 0)
            return make_const(p, pd_value_none());
        pd_jinja_node *node = make(p, PD_JINJA_VAR);
        node->name = token->text;
        return node;
    }
    case PD_JINJA_STRING: return parse_string(p);
    case PD_JINJA_INTEGER: step(p); return make_const(p, pd_value_integer(token->integer));
    case PD_JINJA_REAL: step(p); return make_const(p, pd_value_real(token->real));
    default: break;
    }
    pd_jinja_node *node;
    if (take_op(p, "(")) {
        if (take_op(p, ")")) {
            node = make(p, PD_JINJA_LIST);
            node->op = 1;
            return node;
        }
        node = parse_tuple(p, true);
        expect_op(p, ")");
        return node;
    }
    if (take_op(p, "["))
        return parse_list(p);
    if (take_op(p, "{"))
        return parse_dict(p);
    fail(p, PD_E_INVALID, "expected an expression, found '%s'", describe(p));
    return make(p, PD_JINJA_CONST);
}

static pd_jinja_node *parse_subscript(parser *p, pd_jinja_node *of)
{
    pd_jinja_node *parts[3] = {NULL, NULL, NULL};
    int part = 0;

    if (!is_op(p, ":"))
        parts[0] = parse_expression(p);
    while (part < 2 && take_op(p, ":")) {
        part++;
        if (!is_op(p, ":") && !is_op(p, "]"))
            parts[part] = parse_expression(p);
    }
    if (is_op(p, ","))
        fail(p, PD_E_UNSUPPORTED, "a subscript of several indices is not supported");
    expect_op(p, "]");
    pd_jinja_node *node = make(p, part == 0 ? PD_JINJA_ITEM : PD_JINJA_SLICE);
    node->a = of;
    if (part == 0) {
        node->b = parts[0];
    } else {
        for (int i = 0; i < 3; i++)
            add_item(p, node, parts[i], NULL);
    }
    return node;
}

static void parse_arguments(parser *p, pd_jinja_node *node)
{
    while (!is_op(p, ")") && p->status == PD_OK) {
        const char *name = NULL;
        if (node->count != 0)
            expect_op(p, ",");
        if (is_op(p, ")"))
            break;
        if (is_op(p, "*") || is_op(p, "**"))
            fail(p, PD_E_UNSUPPORTED, "arguments unpacked with * are not supported");
        if (p->token->kind == PD_JINJA_NAME && p->token[1].kind == PD_JINJA_OPERATOR &&
            strcmp(p->token[1].text, "=") == 0) {
            name = expect_any_name(p);
            step(p);
        }
        add_item(p, node, parse_expression(p), name);
    }
    expect_op(p, ")");
}

static pd_jinja_node *parse_call(parser *p, pd_jinja_node *of)
{
    pd_jinja_node *node = make(p, PD_JINJA_CALL);

    node->a = of;
    if (of->kind == PD_JINJA_ATTR && !pd_jinja_has_method(of->name))
        fail(p, PD_E_UNSUPPORTED, "the method '%s' is not supported", of->name);
    if (of->kind != PD_JINJA_ATTR && of->kind != PD_JINJA_VAR)
        fail(p, PD_E_UNSUPPORTED, "only a name or a method can be called");
    if (of->kind == PD_JINJA_VAR && p->status == PD_OK) {
        if (p->called_count == DECLARED_MAX)
            fail(p, PD_E_UNSUPPORTED, "the template calls more than %d times", DECLARED_MAX);
        else
            p->called[p->called_count++] = of;
    }
    parse_arguments(p, node);
    return node;
}

static pd_jinja_node *parse_postfix(parser *p, pd_jinja_node *node)
{
    while (p->status == PD_OK) {
        if (take_op(p, ".")) {
            if (p->token->kind == PD_JINJA_INTEGER) {
                pd_jinja_node *item = make(p, PD_JINJA_ITEM);
                item->a = node;
                item->b = make_const(p, pd_value_integer(p->token->integer));
                step(p);
                node = item;
            } else {
                pd_jinja_node *attr = make(p, PD_JINJA_ATTR);
                attr->a = node;
                attr->name = expect_any_name(p);
                node = attr;
            }
        } else if (take_op(p, "[")) {
            node = parse_subscript(p, node);
        } else if (take_op(p, "(")) {
            node = parse_call(p, node);
        } else {
            break;
        }
    }
    return node;
}

/* map('upper'), select('string'): what they name must be here too. */
static void check_named(parser *p, const pd_jinja_node *node)
{
    bool map = strcmp(node->name, "map") == 0;
    bool attr = strcmp(node->name, "selectattr") == 0 || strcmp(node->name, "rejectattr") == 0;
    bool plain = strcmp(node->name, "select") == 0 || strcmp(node->name, "reject") == 0;
    size_t at = attr ? 1 : 0;

    if ((!map && !attr && !plain) || node->count <= at || node->names[at] != NULL)
        return;
    const pd_jinja_node *arg = node->items[at];
    if (arg->kind != PD_JINJA_CONST || arg->value.kind != PD_VALUE_STRING)
        return;
    const char *name = arg->value.as.string->bytes;
    if (map ? !pd_jinja_has_filter(name) : !pd_jinja_has_test(name))
        fail(p, PD_E_UNSUPPORTED, "the %s '%s' is not supported", map ? "filter" : "test", name);
}

static pd_jinja_node *parse_filter(parser *p, pd_jinja_node *of)
{
    pd_jinja_node *node = make(p, PD_JINJA_FILTER);

    node->a = of;
    node->name = expect_any_name(p);
    if (!pd_jinja_has_filter(node->name))
        fail(p, PD_E_UNSUPPORTED, "the filter '%s' is not supported", node->name);
    if (take_op(p, "("))
        parse_arguments(p, node);
    if (p->status == PD_OK && !pd_jinja_filter_takes(node->name, node->count, node->names))
        fail(p, PD_E_UNSUPPORTED, "these arguments of the filter '%s' are not supported",
             node->name);
    if (p->status == PD_OK)
        check_named(p, node);
    return node;
}

/* A test's single argument may stand without parentheses: "x is divisibleby 3". */
static bool bare_argument(const parser *p)
{
    switch (p->token->kind) {
    case PD_JINJA_STRING:
    case PD_JINJA_INTEGER:
    case PD_JINJA_REAL: return true;
    case PD_JINJA_NAME: return !is_name(p, "else") && !is_name(p, "or") && !is_name(p, "and");
    default: return is_op(p, "(") || is_op(p, "[") || is_op(p, "{");
    }
}

static pd_jinja_node *parse_test(parser *p, pd_jinja_node *of)
{
    pd_jinja_node *node = make(p, PD_JINJA_TEST);
    bool negated = take_name(p, "not");

    node->a = of;
    node->name = expect_any_name(p);
    if (!pd_jinja_has_test(node->name))
        fail(p, PD_E_UNSUPPORTED, "the test '%s' is not supported", node->name);
    if (take_op(p, "(")) {
        parse_arguments(p, node);
    } else if (bare_argument(p)) {
        if (is_name(p, "is"))
            fail(p, PD_E_INVALID, "tests cannot be chained with 'is'");
        pd_jinja_node *arg = parse_primary(p);
        add_item(p, node, parse_postfix(p, arg), NULL);
    }
    if (p->status == PD_OK && !pd_jinja_test_takes(node->name, node->count, node->names))
        fail(p, PD_E_UNSUPPORTED, "these arguments of the test '%s' are not supported", node->name);
    if (!negated)
        return node;
    pd_jinja_node *not_ = make(p, PD_JINJA_NOT);
    not_->a = node;
    return not_;
}

static pd_jinja_node *parse_unary(parser *p, bool with_filter)
{
    pd_jinja_node *node;

    if (++p->depth > DEPTH_MAX)
        fail(p, PD_E_UNSUPPORTED, "an expression is nested deeper than %d", DEPTH_MAX);
    if (p->status != PD_OK) {
        p->depth--;
        return make(p, PD_JINJA_CONST);
    }
    if (is_op(p, "-") || is_op(p, "+")) {
        node = make(p, PD_JINJA_SIGN);
        node->op = is_op(p, "-") ? PD_JINJA_SUB : PD_JINJA_ADD;
        step(p);
        node->a = parse_unary(p, false);
    } else {
        node = parse_primary(p);
    }
    node = parse_postfix(p, node);
    while (with_filter && p->status == PD_OK) {
        if (take_op(p, "|"))
            node = parse_filter(p, node);
        else if (take_name(p, "is"))
            node = parse_test(p, node);
        else if (take_op(p, "("))
            node = parse_call(p, node);
        else
            break;
    }
    p->depth--;
    return node;
}

static pd_jinja_node *make_binary(parser *p, pd_jinja_op op, pd_jinja_node *a, pd_jinja_node *b)
{
    pd_jinja_node *node = make(p, PD_JINJA_BINARY);
    node->op = op;
    node->a = a;
    node->b = b;
    return node;
}

static pd_jinja_node *parse_pow(parser *p)
{
    pd_jinja_node *left = parse_unary(p, true);
    while (p->status == PD_OK && take_op(p, "**"))
        left = make_binary(p, PD_JINJA_POW, left, parse_unary(p, true));
    return left;
}

static pd_jinja_node *parse_product(parser *p)
{
    static const struct {
        const char *text;
        pd_jinja_op op;
    } ops[] = {
        {"*", PD_JINJA_MUL}, {"/", PD_JINJA_DIV}, {"//", PD_JINJA_FLOORDIV}, {"%", PD_JINJA_MOD}};
    pd_jinja_node *left = parse_pow(p);

    for (size_t i = 0; i < 4 && p->status == PD_OK;) {
        if (take_op(p, ops[i].text)) {
            left = make_binary(p, ops[i].op, left, parse_pow(p));
            i = 0;
        } else {
            i++;
        }
    }
    return left;
}

static pd_jinja_node *parse_concat(parser *p)
{
    pd_jinja_node *first = parse_product(p);

    if (!is_op(p, "~"))
        return first;
    pd_jinja_node *node = make(p, PD_JINJA_CONCAT);
    add_item(p, node, first, NULL);
    while (p->status == PD_OK && take_op(p, "~"))
        add_item(p, node, parse_product(p), NULL);
    return node;
}

static pd_jinja_node *parse_sum(parser *p)
{
    pd_jinja_node *left = parse_concat(p);

    while (p->status == PD_OK && (is_op(p, "+") || is_op(p, "-"))) {
        pd_jinja_op op = is_op(p, "+") ? PD_JINJA_ADD : PD_JINJA_SUB;
        step(p);
        left = make_binary(p, op, left, parse_concat(p));
    }
    return left;
}

static bool take_comparison(parser *p, pd_jinja_op *op)
{
    static const struct {
        const char *text;
        pd_jinja_op op;
    } ops[] = {{"==", PD_JINJA_EQ}, {"!=", PD_JINJA_NE}, {"<", PD_JINJA_LT},
               {"<=", PD_JINJA_LE}, {">", PD_JINJA_GT},  {">=", PD_JINJA_GE}};

    for (size_t i = 0; i < 6; i++) {
        if (take_op(p, ops[i].text)) {
            *op = ops[i].op;
            return true;
        }
    }
    if (take_name(p, "in")) {
        *op = PD_JINJA_IN;
        return true;
    }
    if (is_name(p, "not") && p->token[1].kind == PD_JINJA_NAME &&
        strcmp(p->token[1].text, "in") == 0) {
        step(p);
        step(p);
        *op = PD_JINJA_NOT_IN;
        return true;
    }
    return false;
}

static pd_jinja_node *parse_compare(parser *p)
{
    pd_jinja_node *first = parse_sum(p), *node = NULL;
    pd_jinja_op op = PD_JINJA_EQ;

    while (p->status == PD_OK && take_comparison(p, &op)) {
        if (node == NULL) {
            node = make(p, PD_JINJA_COMPARE);
            node->a = first;
        }
        add_item(p, node, parse_sum(p), NULL);
        if (p->status == PD_OK)
            node->ops[node->count - 1] = op;
    }
    return node != NULL ? node : first;
}

static pd_jinja_node *parse_not(parser *p)
{
    pd_jinja_node *node, *inner;

    if (!take_name(p, "not"))
        return parse_compare(p);
    if (++p->depth > DEPTH_MAX)
        fail(p, PD_E_UNSUPPORTED, "an expression is nested deeper than %d", DEPTH_MAX);
    inner = p->status == PD_OK ? parse_not(p) : make(p, PD_JINJA_CONST);
    p->depth--;
    node = make(p, PD_JINJA_NOT);
    node->a = inner;
    return node;
}

static pd_jinja_node *parse_and(parser *p)
{
    pd_jinja_node *left = parse_not(p);

    while (p->status == PD_OK && take_name(p, "and")) {
        pd_jinja_node *node = make(p, PD_JINJA_AND);
        node->a = left;
        node->b = parse_not(p);
        left = node;
    }
    return left;
}

static pd_jinja_node *parse_or(parser *p)
{
    pd_jinja_node *left = parse_and(p);

    while (p->status == PD_OK && take_name(p, "or")) {
        pd_jinja_node *node = make(p, PD_JINJA_OR);
        node->a = left;
        node->b = parse_and(p);
        left = node;
    }
    return left;
}

static pd_jinja_node *parse_expression(parser *p)
{
    if (++p->depth > DEPTH_MAX)
        fail(p, PD_E_UNSUPPORTED, "an expression is nested deeper than %d", DEPTH_MAX);
    pd_jinja_node *left = p->status == PD_OK ? parse_or(p) : make(p, PD_JINJA_CONST);
    while (p->status == PD_OK && take_name(p, "if")) {
        pd_jinja_node *node = make(p, PD_JINJA_COND);
        node->a = left;
        node->b = parse_or(p);
        if (take_name(p, "else"))
            node->c = parse_expression(p);
        left = node;
    }
    p->depth--;
    return left;
}

/* "a, b": a tuple; without a comma just a. */
static pd_jinja_node *parse_tuple(parser *p, bool with_cond)
{
    pd_jinja_node *first = with_cond ? parse_expression(p) : parse_or(p);

    if (!is_op(p, ","))
        return first;
    pd_jinja_node *node = make(p, PD_JINJA_LIST);
    node->op = 1;
    add_item(p, node, first, NULL);
    while (p->status == PD_OK && take_op(p, ",")) {
        if (is_op(p, ")") || p->token->kind == PD_JINJA_BLOCK_END ||
            p->token->kind == PD_JINJA_VARIABLE_END)
            break;
        add_item(p, node, with_cond ? parse_expression(p) : parse_or(p), NULL);
    }
    return node;
}

/* ---- statements ---- */

static pd_jinja_node *parse_until(parser *p, const char *const *ends);

/* What is set: a name, several names, or an attribute of a namespace. */
static pd_jinja_node *parse_one_target(parser *p)
{
    pd_jinja_node *node = make(p, PD_JINJA_VAR);

    if (take_op(p, "(")) {
        node->kind = PD_JINJA_LIST;
        do {
            add_item(p, node, parse_one_target(p), NULL);
        } while (p->status == PD_OK && take_op(p, ","));
        expect_op(p, ")");
        return node;
    }
    node->name = expect_any_name(p);
    if (take_op(p, ".")) {
        pd_jinja_node *attr = make(p, PD_JINJA_ATTR);
        attr->a = node;
        attr->name = expect_any_name(p);
        return attr;
    }
    declare(p, node->name);
    return node;
}

static pd_jinja_node *parse_target(parser *p)
{
    pd_jinja_node *first = parse_one_target(p);

    if (!is_op(p, ","))
        return first;
    pd_jinja_node *node = make(p, PD_JINJA_LIST);
    add_item(p, node, first, NULL);
    while (p->status == PD_OK && take_op(p, ","))
        add_item(p, node, parse_one_target(p), NULL);
    return node;
}

static pd_jinja_node *parse_for(parser *p)
{
    static const char *const body_ends[] = {"endfor", "else", NULL}, *const ends[] = {"endfor",
                                                                                      NULL};
    pd_jinja_node *node = make(p, PD_JINJA_FOR);

    node->a = parse_target(p);
    if (!take_name(p, "in"))
        fail(p, PD_E_INVALID, "expected 'in', found '%s'", describe(p));
    node->b = parse_tuple(p, false);
    if (take_name(p, "if"))
        node->d = parse_expression(p);
    if (is_name(p, "recursive"))
        fail(p, PD_E_UNSUPPORTED, "a recursive for is not supported");
    expect_block_end(p);
    p->loops++;
    add_item(p, node, parse_until(p, body_ends), NULL);
    p->loops--;
    if (take_name(p, "else")) {
        expect_block_end(p);
        node->c = parse_until(p, ends);
    }
    step(p);
    expect_block_end(p);
    return node;
}

static pd_jinja_node *parse_if(parser *p)
{
    static const char *const then_ends[] = {"elif", "else", "endif", NULL}, *const ends[] = {
                                                                                "endif", NULL};
    pd_jinja_node *first = make(p, PD_JINJA_IF), *node = first;

    for (;;) {
        node->a = parse_tuple(p, true);
        expect_block_end(p);
        node->b = parse_until(p, then_ends);
        if (p->status != PD_OK || !take_name(p, "elif"))
            break;
        node->c = make(p, PD_JINJA_IF);
        node = node->c;
    }
    if (take_name(p, "else")) {
        expect_block_end(p);
        node->c = parse_until(p, ends);
    }
    step(p);
    expect_block_end(p);
    return first;
}

static pd_jinja_node *parse_set(parser *p)
{
    static const char *const ends[] = {"endset", NULL};
    pd_jinja_node *node = make(p, PD_JINJA_SET);

    node->a = parse_target(p);
    if (take_op(p, "=")) {
        node->b = parse_tuple(p, true);
        expect_block_end(p);
        return node;
    }
    node->kind = PD_JINJA_SET_BLOCK;
    while (p->status == PD_OK && take_op(p, "|")) {
        if (node->c == NULL)
            node->c = make(p, PD_JINJA_BODY);
        node->c = parse_filter(p, node->c);
    }
    expect_block_end(p);
    node->b = parse_until(p, ends);
    step(p);
    expect_block_end(p);
    return node;
}

static pd_jinja_node *parse_macro(parser *p)
{
    static const char *const ends[] = {"endmacro", NULL};
    pd_jinja_node *node = make(p, PD_JINJA_MACRO);

    node->name = expect_any_name(p);
    declare(p, node->name);
    expect_op(p, "(");
    while (p->status == PD_OK && !is_op(p, ")")) {
        if (node->count != 0)
            expect_op(p, ",");
        const char *param = expect_any_name(p);
        declare(p, param);
        add_item(p, node, take_op(p, "=") ? parse_expression(p) : NULL, param);
    }
    expect_op(p, ")");
    expect_block_end(p);
    int loops = p->loops;
    p->loops = 0;
    node->b = parse_until(p, ends);
    p->loops = loops;
    step(p);
    expect_block_end(p);
    return node;
}

static pd_jinja_node *parse_statement(parser *p)
{
    static const char *const generation_ends[] = {"endgeneration", NULL};
    const char *name = expect_any_name(p);
    pd_jinja_node *node = NULL;

    if (strcmp(name, "for") == 0) {
        node = parse_for(p);
    } else if (strcmp(name, "if") == 0) {
        node = parse_if(p);
    } else if (strcmp(name, "set") == 0) {
        node = parse_set(p);
    } else if (strcmp(name, "macro") == 0) {
        node = parse_macro(p);
    } else if (strcmp(name, "break") == 0 || strcmp(name, "continue") == 0) {
        node = make(p, name[0] == 'b' ? PD_JINJA_BREAK : PD_JINJA_CONTINUE);
        if (p->loops == 0)
            fail(p, PD_E_INVALID, "'%s' stands outside a for", name);
        expect_block_end(p);
    } else if (strcmp(name, "generation") == 0) { /* marks answers for training: no effect here */
        expect_block_end(p);
        node = parse_until(p, generation_ends);
        step(p);
        expect_block_end(p);
    } else if (strncmp(name, "end", 3) == 0 || strcmp(name, "else") == 0 ||
               strcmp(name, "elif") == 0) {
        fail(p, PD_E_INVALID, "'%s' without its begin", name);
    } else {
        fail(p, PD_E_UNSUPPORTED, "the statement '%s' is not supported", name);
    }
    return node != NULL ? node : make(p, PD_JINJA_BLOCK);
}

/* Statements up to {% with one of the ends, whose name is then the next token; ends NULL: up to
 * the end of the template. */
static pd_jinja_node *parse_until(parser *p, const char *const *ends)
{
    pd_jinja_node *block = make(p, PD_JINJA_BLOCK);

    if (++p->depth > DEPTH_MAX)
        fail(p, PD_E_UNSUPPORTED, "statements are nested deeper than %d", DEPTH_MAX);
    while (p->status == PD_OK) {
        const pd_jinja_token *token = p->token;
        pd_jinja_node *node = NULL;
        if (token->kind == PD_JINJA_END) {
            if (ends != NULL)
                fail(p, PD_E_INVALID, "the template ends before '%s'", ends[0]);
            break;
        }
        step(p);
        if (token->kind == PD_JINJA_DATA) {
            node = make(p, PD_JINJA_TEXT);
            node->value = pd_value_string(p->ctx, token->text, token->len, PD_MARK_NONE);
        } else if (token->kind == PD_JINJA_VARIABLE_BEGIN) {
            node = make(p, PD_JINJA_OUTPUT);
            node->a = parse_tuple(p, true);
            if (p->token->kind != PD_JINJA_VARIABLE_END)
                fail(p, PD_E_INVALID, "expected '}}', found '%s'", describe(p));
            step(p);
        } else {
            pd_assert(token->kind == PD_JINJA_BLOCK_BEGIN);
            for (size_t i = 0; ends != NULL && ends[i] != NULL; i++) {
                if (is_name(p, ends[i])) {
                    p->depth--;
                    return block;
                }
            }
            node = parse_statement(p);
        }
        if (p->ctx->status != PD_OK)
            fail(p, p->ctx->status, "%s", p->ctx->message);
        add_item(p, block, node, NULL);
    }
    p->depth--;
    return block;
}

/* Chains ("a + b + c + ...") are read in a loop but walked by recursion. */
static void check_depth(parser *p, const pd_jinja_node *node, int depth)
{
    if (node == NULL || p->status != PD_OK)
        return;
    if (depth > PD_JINJA_DEPTH_MAX) {
        fail(p, PD_E_UNSUPPORTED, "the template is nested deeper than %d", PD_JINJA_DEPTH_MAX);
        return;
    }
    check_depth(p, node->a, depth + 1);
    check_depth(p, node->b, depth + 1);
    check_depth(p, node->c, depth + 1);
    check_depth(p, node->d, depth + 1);
    for (size_t i = 0; i < node->count; i++)
        check_depth(p, node->items[i], depth + 1);
}

/* A name that is called has to be a function of ours or something the template made. */
static void check_calls(parser *p)
{
    for (size_t i = 0; i < p->called_count && p->status == PD_OK; i++) {
        const pd_jinja_node *call = p->called[i];
        bool known = pd_jinja_has_function(call->name);
        for (size_t k = 0; k < p->declared_count && !known; k++)
            known = strcmp(p->declared[k], call->name) == 0;
        if (!known) {
            fail(p, PD_E_UNSUPPORTED, "the function '%s' is not supported", call->name);
            p->error->line = call->line;
        }
    }
}

pd_status pd_jinja_parse(pd_value_context *ctx, const char *source, size_t len,
                         pd_jinja_node **root_out, pd_template_error *error)
{
    pd_jinja_token *tokens = NULL;

    pd_status status = pd_jinja_lex(ctx->arena, source, len, &tokens, error);
    if (status != PD_OK)
        return status;
    parser p = {.ctx = ctx, .token = tokens, .error = error};
    pd_jinja_node *root = parse_until(&p, NULL);
    check_calls(&p);
    check_depth(&p, root, 0);
    if (p.status == PD_OK)
        *root_out = root;
    return p.status;
}

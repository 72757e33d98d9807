#pragma once

/* common/text/jinja.h - a chat template as a tree of nodes: reading it and walking it.
 *
 * jinja_lex cuts the source into tokens (with trim_blocks and lstrip_blocks on and the last
 * newline dropped, as the usual chat-template environment has it), jinja_parse makes the tree and
 * refuses by name what is not here, jinja_eval walks it, jinja_filters has filters and tests,
 * jinja_objects attributes, methods and functions. A tree is immutable: any thread may walk it. */

#include "common/base/mem.h"
#include "common/text/template.h"
#include "common/text/value.h"

/* ---- tokens ---- */

typedef enum pd_jinja_token_kind {
    PD_JINJA_END,
    PD_JINJA_DATA,
    PD_JINJA_VARIABLE_BEGIN,
    PD_JINJA_VARIABLE_END,
    PD_JINJA_BLOCK_BEGIN,
    PD_JINJA_BLOCK_END,
    PD_JINJA_NAME,
    PD_JINJA_STRING,
    PD_JINJA_INTEGER,
    PD_JINJA_REAL,
    PD_JINJA_OPERATOR, /* text holds it */
} pd_jinja_token_kind;

typedef struct pd_jinja_token {
    pd_jinja_token_kind kind;
    uint32_t line;
    const char *text; /* NUL-terminated too; a string's escapes are undone */
    size_t len;
    int64_t integer;
    double real;
} pd_jinja_token;

/* Cuts source; the tokens are the arena's, the last one is PD_JINJA_END. */
PD_CHECKED pd_status pd_jinja_lex(pd_arena *arena, const char *source, size_t len,
                                  pd_jinja_token **tokens_out, pd_template_error *error);

/* ---- nodes ---- */

#define PD_JINJA_DEPTH_MAX 500 /* of a tree, and of calls within calls */

typedef enum pd_jinja_kind {
    /* expressions */
    PD_JINJA_CONST,  /* value */
    PD_JINJA_VAR,    /* name */
    PD_JINJA_LIST,   /* items; op 1: a tuple */
    PD_JINJA_DICT,   /* items: key, value, key, value, ... */
    PD_JINJA_ATTR,   /* a.name */
    PD_JINJA_ITEM,   /* a[b] */
    PD_JINJA_SLICE,  /* a[items[0]:items[1]:items[2]], each may be NULL */
    PD_JINJA_CALL,   /* a(items, names) */
    PD_JINJA_FILTER, /* a|name(items, names) */
    PD_JINJA_TEST,   /* a is name(items, names) */
    PD_JINJA_NOT,    /* not a */
    PD_JINJA_SIGN,   /* op a */
    PD_JINJA_BINARY, /* a op b */
    PD_JINJA_AND,
    PD_JINJA_OR,
    PD_JINJA_COMPARE, /* a ops[0] items[0] ops[1] items[1] ... */
    PD_JINJA_CONCAT,  /* items joined */
    PD_JINJA_COND,    /* a if b else c (NULL: undefined) */
    /* statements */
    PD_JINJA_TEXT,      /* value */
    PD_JINJA_OUTPUT,    /* a */
    PD_JINJA_IF,        /* a: condition, b: then, c: else or NULL */
    PD_JINJA_FOR,       /* a: target, b: what, d: filter or NULL, c: else or NULL; items: body */
    PD_JINJA_SET,       /* a: target, b: value */
    PD_JINJA_SET_BLOCK, /* a: target, b: body, c: filters around a PD_JINJA_BODY, or NULL */
    PD_JINJA_MACRO,     /* name; params (names), items: defaults, b: body */
    PD_JINJA_BREAK,
    PD_JINJA_CONTINUE,
    PD_JINJA_BLOCK, /* items in turn */
    PD_JINJA_BODY,  /* the text that a set block captured */
} pd_jinja_kind;

typedef enum pd_jinja_op {
    PD_JINJA_ADD,
    PD_JINJA_SUB,
    PD_JINJA_MUL,
    PD_JINJA_DIV,
    PD_JINJA_FLOORDIV,
    PD_JINJA_MOD,
    PD_JINJA_POW,
    PD_JINJA_EQ,
    PD_JINJA_NE,
    PD_JINJA_LT,
    PD_JINJA_LE,
    PD_JINJA_GT,
    PD_JINJA_GE,
    PD_JINJA_IN,
    PD_JINJA_NOT_IN,
} pd_jinja_op;

typedef struct pd_jinja_node pd_jinja_node;
struct pd_jinja_node {
    pd_jinja_kind kind;
    pd_jinja_op op;
    uint32_t line;
    const char *name;
    pd_value value;
    pd_jinja_node *a, *b, *c, *d;
    pd_jinja_node **items; /* [count] */
    size_t count;
    const char **names; /* [count] of a call's arguments, NULL: by position; of a macro's params */
    pd_jinja_op *ops;   /* [count] of a comparison */
};

/* Makes the tree. Errors: PD_E_UNSUPPORTED, PD_E_INVALID (not Jinja), PD_E_NOMEM. */
PD_CHECKED pd_status pd_jinja_parse(pd_value_context *ctx, const char *source, size_t len,
                                    pd_jinja_node **root_out, pd_template_error *error);

/* ---- walking ---- */

typedef struct pd_jinja_binding {
    struct pd_jinja_binding *next;
    const char *name;
    pd_value value;
} pd_jinja_binding;

typedef struct pd_jinja_frame {
    struct pd_jinja_frame *outer;
    pd_jinja_binding *bindings;
} pd_jinja_frame;

/* Where text goes: the answer, or what a set block or a macro captures. */
typedef struct pd_jinja_sink {
    pd_buf *text;
    pd_template_spans *spans;
} pd_jinja_sink;

typedef struct pd_jinja_run {
    pd_value_context values;
    pd_jinja_frame globals;
    pd_jinja_frame *frame;
    pd_jinja_sink sink;
    uint32_t line;            /* of the statement being run */
    int depth;                /* of macro calls */
    bool leave;               /* a break or continue is on its way up ... */
    bool leave_for;           /* ... and it was a break */
    const pd_value *captured; /* what PD_JINJA_BODY stands for */
} pd_jinja_run;

/* Binds a variable in the innermost frame. */
void pd_jinja_bind(pd_jinja_run *run, const char *name, pd_value value);
/* Runs a statement; failures show in run->values.status. */
void pd_jinja_exec(pd_jinja_run *run, const pd_jinja_node *node);

/* Arguments of a call. */
typedef struct pd_jinja_args {
    size_t count;
    const pd_value *values;   /* [count] */
    const char *const *names; /* [count]; NULL: by position */
} pd_jinja_args;
/* The argument at a position or of a name; NULL when it was not given. */
const pd_value *pd_jinja_arg(const pd_jinja_args *args, size_t position, const char *name);

/* The same when it is of that kind, else NULL or fallback. */
const pd_string *pd_jinja_string_arg(const pd_jinja_args *args, size_t position, const char *name);
bool pd_jinja_bool_arg(const pd_jinja_args *args, size_t position, const char *name, bool fallback);
int64_t pd_jinja_integer_arg(const pd_jinja_args *args, size_t position, const char *name,
                             int64_t fallback);
/* Notes that name cannot work on its arguments; undefined. */
pd_value pd_jinja_bad_argument(pd_jinja_run *run, const char *name);
/* A C string of s; NULL when s is NULL or holds NUL. */
const char *pd_jinja_c_string(pd_jinja_run *run, const pd_string *s);
/* A value as a string, as string filters take it; never NULL. */
const pd_string *pd_jinja_soft(pd_jinja_run *run, const pd_value *value);
/* A dict as a list of (key, value). */
pd_value pd_jinja_pairs(pd_jinja_run *run, const pd_dict *dict);
/* Whether name is one of names, which ends with NULL. */
bool pd_jinja_among(const char *name, const char *const *names);

bool pd_jinja_has_filter(const char *name);
bool pd_jinja_has_test(const char *name);
/* Whether it takes so many arguments, of these names (NULL: by position). */
bool pd_jinja_filter_takes(const char *name, size_t count, const char *const *names);
bool pd_jinja_test_takes(const char *name, size_t count, const char *const *names);
/* A method of any kind of value. */
bool pd_jinja_has_method(const char *name);
bool pd_jinja_has_function(const char *name);
/* Whether value.name is a method rather than a key. */
bool pd_jinja_is_method_of(const pd_value *value, const char *name);
pd_value pd_jinja_filter(pd_jinja_run *run, const char *name, pd_value value,
                         const pd_jinja_args *args);
bool pd_jinja_test(pd_jinja_run *run, const char *name, const pd_value *value,
                   const pd_jinja_args *args);
pd_value pd_jinja_method(pd_jinja_run *run, const pd_method *method, const pd_jinja_args *args);
pd_value pd_jinja_function(pd_jinja_run *run, const char *name, const pd_jinja_args *args);
/* value.name and value[key], undefined when there is none. */
pd_value pd_jinja_attr(pd_jinja_run *run, const pd_value *value, const char *name);
pd_value pd_jinja_item(pd_jinja_run *run, const pd_value *value, const pd_value *key);
/* True when container holds item; notes a failure when it cannot be asked. */
bool pd_jinja_contains(pd_jinja_run *run, const pd_value *container, const pd_value *item);

#pragma once

/* common/text/value.h - what a chat template works on: Python-like values in an arena.
 *
 * Every string knows which of its bytes a user wrote (its marks), and every operation carries
 * that along. Values are immutable but namespaces. A failure is noted once in the context and
 * shows at its status; operations after it return undefined. One thread a context. */

#include "common/base/buf.h"
#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef enum pd_value_kind {
    PD_VALUE_UNDEFINED,
    PD_VALUE_NONE,
    PD_VALUE_BOOL,
    PD_VALUE_INTEGER,
    PD_VALUE_REAL,
    PD_VALUE_STRING,
    PD_VALUE_LIST,
    PD_VALUE_DICT,
    PD_VALUE_NAMESPACE,
    PD_VALUE_LOOP,     /* the variable "loop" */
    PD_VALUE_FUNCTION, /* one of the template's globals */
    PD_VALUE_MACRO,
    PD_VALUE_METHOD, /* "x.strip" before it is called */
} pd_value_kind;

typedef enum pd_mark {
    PD_MARK_NONE,  /* all of it is the template's */
    PD_MARK_ALL,   /* all of it a user wrote */
    PD_MARK_MIXED, /* marks[i] != 0: byte i a user wrote */
} pd_mark;

typedef struct pd_string {
    const char *bytes; /* UTF-8, may hold NUL */
    size_t len;
    pd_mark mark;
    const unsigned char *marks; /* [len] when mixed, else NULL */
} pd_string;

typedef struct pd_value {
    pd_value_kind kind;
    union {
        const char *missing; /* undefined: the name that was looked for, or NULL */
        bool boolean;
        int64_t integer;
        double real;
        const pd_string *string;
        const struct pd_list *list;
        struct pd_dict *dict; /* of a namespace too */
        const struct pd_loop_state *loop;
        const char *function;
        const struct pd_jinja_node *macro;
        const struct pd_method *method;
    } as;
} pd_value;

typedef struct pd_list {
    size_t count;
    bool tuple;
    pd_value *items; /* [count] */
} pd_list;

typedef struct pd_pair {
    pd_value key, value;
} pd_pair;

typedef struct pd_dict {
    size_t count, size;
    pd_pair *pairs; /* [size], in the order put */
} pd_dict;

typedef struct pd_method {
    pd_value object;
    const char *name;
} pd_method;

/* The variable "loop" of one for statement. */
typedef struct pd_loop_state {
    const pd_list *items;
    size_t index0;
    pd_value changed; /* what loop.changed() saw last */
    bool changed_set;
} pd_loop_state;

typedef struct pd_value_context {
    pd_arena *arena;
    size_t bytes_left;  /* of what values may take */
    uint64_t work_left; /* steps until the template is judged to run away */
    pd_status status;
    char message[256]; /* of the first failure */
} pd_value_context;

/* Notes a failure, the first one only. */
void pd_value_fail(pd_value_context *ctx, pd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Spends work; false (noted) when none is left, or something failed before. */
bool pd_value_work(pd_value_context *ctx, uint64_t steps);
/* Zeroed memory of the context; NULL is noted. */
void *pd_value_alloc(pd_value_context *ctx, size_t count, size_t bytes);

pd_value pd_value_undefined(const char *missing);
pd_value pd_value_none(void);
pd_value pd_value_bool(bool boolean);
pd_value pd_value_integer(int64_t integer);
pd_value pd_value_real(double real);
/* Borrows bytes. */
pd_value pd_value_string(pd_value_context *ctx, const char *bytes, size_t len, pd_mark mark);
pd_value pd_value_text(pd_value_context *ctx, const char *text);
/* A part of a string; shares its bytes. */
pd_value pd_value_substring(pd_value_context *ctx, const pd_string *string, size_t start,
                            size_t end);
/* The strings one after the other. */
pd_value pd_value_joined(pd_value_context *ctx, const pd_string *const *parts, size_t count);
/* Room for count items; NULL is noted. */
pd_list *pd_value_new_list(pd_value_context *ctx, size_t count, bool tuple);
pd_value pd_value_of_list(const pd_list *list);
pd_dict *pd_value_new_dict(pd_value_context *ctx, size_t size);
pd_value pd_value_of_dict(pd_dict *dict);
/* Sets, replacing an equal key. */
void pd_value_put(pd_value_context *ctx, pd_dict *dict, pd_value key, pd_value value);
/* NULL when the key is absent. */
const pd_value *pd_value_get(pd_value_context *ctx, const pd_dict *dict, pd_value key);
const pd_value *pd_value_get_text(pd_value_context *ctx, const pd_dict *dict, const char *key);
/* Deep copy of a JSON value with every string marked so. */
pd_value pd_value_of_json(pd_value_context *ctx, const pd_json *json, pd_mark mark);

bool pd_value_truth(const pd_value *value);
bool pd_value_equal(pd_value_context *ctx, const pd_value *a, const pd_value *b);
/* < 0, 0, > 0; notes a failure when the two have no order. */
int pd_value_compare(pd_value_context *ctx, const pd_value *a, const pd_value *b);
bool pd_value_is_number(const pd_value *value); /* bools are integers, as in Python */
double pd_value_number(const pd_value *value);
int64_t pd_value_whole(const pd_value *value); /* of a bool or an integer */
/* "an integer", for messages. */
const char *pd_value_kind_name(const pd_value *value);
/* Code points of a string. */
size_t pd_value_length(const pd_string *string);
/* The byte where code point index begins, len when it is past the end. */
size_t pd_value_byte_at(const pd_string *string, size_t index);
/* As Python's str(): what {{ }} writes. A string is itself. */
pd_value pd_value_to_string(pd_value_context *ctx, const pd_value *value);
/* A list over what iterating the value yields; notes a failure when it cannot be iterated. */
const pd_list *pd_value_iterate(pd_value_context *ctx, const pd_value *value);
/* JSON as Python's json.dumps(ensure_ascii=False) writes it; indent < 0: on one line. */
pd_value pd_value_to_json(pd_value_context *ctx, const pd_value *value, int indent, bool sort_keys);
/* White space as Python's str.isspace has it. */
bool pd_value_is_space(uint32_t code_point);

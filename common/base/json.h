#pragma once

/* common/base/json.h - the door to jansson: strict JSON in, and pieces of JSON text out.
 *
 * The reader refuses duplicate keys, invalid UTF-8, lone surrogates, NaN, trailing bytes and
 * nesting over PD_JSON_DEPTH_MAX; strings may hold NUL (use the length). Values belong to the
 * document they were read from. Different documents on different threads are fine. */

#include "common/base/buf.h"
#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define PD_JSON_DEPTH_MAX 64

typedef struct json_t pd_json; /* jansson's struct, opaque here */

typedef enum pd_json_type {
    PD_JSON_NULL,
    PD_JSON_BOOL,
    PD_JSON_INTEGER,
    PD_JSON_REAL,
    PD_JSON_STRING,
    PD_JSON_ARRAY,
    PD_JSON_OBJECT,
} pd_json_type;

typedef struct pd_json_error {
    size_t offset;     /* bytes into the text, where it went wrong */
    bool number_range; /* a number is beyond what can be held (1e999, 2^63) */
    char message[160];
} pd_json_error;

/* On PD_OK the caller owns *root_out: pd_json_free. PD_E_INVALID fills *error. */
PD_CHECKED pd_status pd_json_parse(const char *text, size_t len, pd_json **root_out,
                                   pd_json_error *error);
void pd_json_free(pd_json *root);

pd_json_type pd_json_type_of(const pd_json *value);
const char *pd_json_type_name(pd_json_type type); /* "a string", "an array", ... */
/* NULL when the key is absent or object is no object. key is NUL-terminated. */
pd_json *pd_json_get(const pd_json *object, const char *key);
/* Iterates an object: *iter starts NULL; false at the end. */
bool pd_json_next(pd_json *object, void **iter, const char **key_out, pd_json **value_out);
size_t pd_json_count(const pd_json *value); /* items of an array or keys of an object, else 0 */
pd_json *pd_json_at(const pd_json *array, size_t index);
const char *pd_json_string(const pd_json *value, size_t *len_out); /* NULL: no string */
int64_t pd_json_integer(const pd_json *value);                     /* 0: no integer */
double pd_json_number(const pd_json *value);                       /* integer or real, else 0 */
bool pd_json_bool(const pd_json *value);
/* Appends the value as compact JSON text, keys in the order read. */
void pd_json_dump(const pd_json *value, pd_buf *buf);

/* Appends a quoted, escaped string. Bytes that are no UTF-8 become U+FFFD, so that the output is
 * always valid. */
void pd_json_write_string(pd_buf *buf, const char *text, size_t len);

#pragma once

/* common/model_file/gguf.h - the GGUF container, versions 2 and 3, little-endian: keys and tensors.
 *
 *   magic "GGUF", u32 version, u64 tensors, u64 keys
 *   keys:    string key, u32 type, value (an array: u32 item type, u64 count, items)
 *   tensors: string name, u32 dimensions, u64 each, u32 format, u64 offset into the data
 *   padding to general.alignment, then the data
 *
 * Every count, length, product and extent is checked against the file's size before it is used or
 * allocated for. Pointers lead into the mapping or into memory of the pd_gguf. One thread while
 * parsing, any thread afterwards. */

#include "common/model_file/model_file.h"

typedef enum pd_gguf_type {
    PD_GGUF_U8,
    PD_GGUF_I8,
    PD_GGUF_U16,
    PD_GGUF_I16,
    PD_GGUF_U32,
    PD_GGUF_I32,
    PD_GGUF_F32,
    PD_GGUF_BOOL,
    PD_GGUF_STRING,
    PD_GGUF_ARRAY,
    PD_GGUF_U64,
    PD_GGUF_I64,
    PD_GGUF_F64,
    PD_GGUF_TYPES,
} pd_gguf_type;

typedef struct pd_gguf_key {
    const char *name; /* NUL-terminated copy */
    pd_gguf_type type;
    pd_gguf_type item_type;     /* of an array */
    uint64_t count;             /* items of an array, else 1 */
    const unsigned char *value; /* first byte of the scalar, string bytes, or array items */
    uint64_t value_bytes;       /* a string: its length without the length field */
} pd_gguf_key;

typedef struct pd_gguf {
    const char *path; /* for messages; borrowed */
    const unsigned char *bytes;
    uint64_t size;
    uint64_t header_bytes; /* up to the end of the tensor list */
    uint32_t keys_count, tensors_count;
    pd_gguf_key *keys;  /* sorted by name */
    pd_tensor *tensors; /* sorted by name */
    char *names;        /* all names, NUL-terminated */
} pd_gguf;

/* Reads size bytes at bytes; logs what is wrong. On failure nothing is held. Errors:
 * PD_E_INVALID, PD_E_UNSUPPORTED (version or number format), PD_E_NOMEM. */
PD_CHECKED pd_status pd_gguf_parse(const char *path, const void *bytes, uint64_t size,
                                   pd_gguf *gguf_out);
void pd_gguf_fini(pd_gguf *gguf);

/* NULL when absent. */
const pd_gguf_key *pd_gguf_find(const pd_gguf *gguf, const char *name);
const pd_tensor *pd_gguf_tensor(const pd_gguf *gguf, const char *name);
const char *pd_gguf_type_name(pd_gguf_type type);

/* The next string of an array of strings: *at begins at key->value; the parser has checked that
 * count strings lie there. */
const char *pd_gguf_next_string(const unsigned char **at, uint64_t *len_out);

#pragma once

/* common/model_file/model_file.h - a model as a file holds it: its shape, tensors and text tables.
 *
 * The file is mapped read-only; every pointer here points into the mapping (or memory owned by the
 * model file) and lives until pd_model_file_close. Nothing in the file is believed: sizes, counts
 * and types are checked when it is opened, so a reader needs no further bounds checks. Immutable
 * after opening: any thread. */

#include "common/base/hash.h"
#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pd_model_file pd_model_file;

/* Number formats, named as GGUF names them. Blocks are along the first dimension (columns). */
typedef enum pd_dtype {
    PD_F32,
    PD_F16,
    PD_BF16,
    PD_Q4_0, /* 32 weights, 18 bytes: f16 d, 16 bytes of nibbles; w = (q - 8) * d */
    PD_Q4_1, /* 32 weights, 20 bytes: f16 d, f16 m, nibbles; w = q * d + m */
    PD_Q8_0, /* 32 weights, 34 bytes: f16 d, 32 int8; w = q * d */
    PD_Q4_K, /* 256 weights, 144 bytes: f16 d, f16 m, 8 scales and minima of 6 bits, nibbles */
    PD_Q6_K, /* 256 weights, 210 bytes: nibbles, bit pairs, 16 int8 scales, f16 d */
    /* of KV alone (common/kv/layout.h) */
    PD_INT8,
    PD_FP8_E4M3,
    PD_DTYPES,
} pd_dtype;

typedef struct pd_dtype_info {
    const char *name;
    uint32_t block_weights; /* weights a block */
    uint32_t block_bytes;
} pd_dtype_info;
const pd_dtype_info *pd_dtype_info_of(pd_dtype dtype);

typedef struct pd_tensor {
    const char *name;
    pd_dtype dtype;
    uint32_t dims_count;
    uint64_t dims[4]; /* dims[0] is the contiguous one: columns; dims[1] rows; unused are 1 */
    const void *data;
    uint64_t bytes;
} pd_tensor;

/* What the forward pass needs to know. Filled from the file's keys, every field checked (heads
 * divide, sizes are not 0 and below stated maxima). */
typedef struct pd_model_shape {
    char architecture[32]; /* "llama" */
    uint32_t layers;
    uint32_t hidden;   /* embedding length */
    uint32_t heads;    /* query heads */
    uint32_t kv_heads; /* divides heads */
    uint32_t head_dim;
    uint32_t ffn;       /* feed-forward length */
    uint32_t vocab;     /* rows of the embedding == number of tokens */
    uint32_t context;   /* trained context */
    uint32_t rope_dims; /* rotated dimensions of a head */
    double rope_base;
    float rms_eps;
    bool tied_embeddings; /* no output tensor: the head is the embedding */
} pd_model_shape;

/* The tokenizer's tables as they stand in the file. */
typedef struct pd_text_tables {
    const char *model; /* "gpt2": byte-level BPE */
    const char *pre;   /* pre-tokenizer's name, "" when the file has none ("smollm", ...) */
    uint32_t tokens_count;
    const char **tokens;        /* [tokens_count], NUL-terminated copies; lengths beside */
    const uint32_t *tokens_len; /* bytes; a token may contain NUL */
    const int32_t *types;       /* [tokens_count] GGUF token types (1 normal, 2 unknown, 3 control,
                                   4 user defined, 5 unused, 6 byte), NULL when the file has none */
    uint32_t merges_count;
    const char **merges; /* "left right" */
    const uint32_t *merges_len;
    int64_t bos_id, eos_id, eot_id, unk_id, pad_id; /* -1: none */
    bool add_bos, add_eos;
    const char *chat_template; /* NULL when the file has none */
    size_t chat_template_len;
} pd_text_tables;

/* Maps and checks path. Whatever is wrong is logged once, as one line with the file, the tensor or
 * key, and the reason (a file that is cut off: its size and the size needed).
 * Errors: PD_E_IO (cannot be read), PD_E_INVALID (not a sound model file), PD_E_UNSUPPORTED (sound,
 * but an architecture or format we do not run), PD_E_NOMEM. */
PD_CHECKED pd_status pd_model_file_open(const char *path, pd_model_file **file_out);
void pd_model_file_close(pd_model_file *file);

/* The container only (for files that hold no whole model): pd_model_file_open without the checks
 * of shape, tensors and text tables. */
PD_CHECKED pd_status pd_model_file_open_container(const char *path, pd_model_file **file_out);

const char *pd_model_file_path(const pd_model_file *file);
const pd_model_shape *pd_model_file_shape(const pd_model_file *file);
const pd_text_tables *pd_model_file_text(const pd_model_file *file);
/* "general.name", or the file's name without folder and ending. */
const char *pd_model_file_name(const pd_model_file *file);
/* NULL when there is none of that name. */
const pd_tensor *pd_model_file_tensor(const pd_model_file *file, const char *name);
/* Tells this model's results from another's: a hash over the file's size, header (keys, tensor
 * list) and a sample of every tensor's bytes. The same file gives the same value everywhere. */
pd_hash128 pd_model_file_fingerprint(const pd_model_file *file);

/* Of the file as it was when it was mapped. The kernel sets `changed` (ctime) at every change of
 * bytes, name or mode, and lets nobody choose it: a file whose identity is the same has the same
 * bytes, unless it was written within the clock's grain of the time it was looked at, or a disk
 * is written beside the kernel. */
typedef struct pd_file_identity {
    uint64_t device, inode, bytes;
    int64_t modified_ns, changed_ns; /* since 1970 */
} pd_file_identity;
pd_file_identity pd_model_file_identity(const pd_model_file *file);
/* False: the path's file is the one that is mapped, and has been changed since. */
bool pd_model_file_is_unchanged(const pd_model_file *file);
/* Of all bytes: reads the whole file. */
pd_hash128 pd_model_file_hash(const pd_model_file *file);

#ifdef __cplusplus
}
#endif

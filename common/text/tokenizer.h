#pragma once

/* common/text/tokenizer.h - text to token ids: byte-level BPE over PCRE2, from the model file's
 * own tables.
 *
 * Equal to the `tokenizers` library's result on every string. Merging is O(n log n) in the length
 * of a pre-token (a heap, not rescans), so that 100,000 characters without a word border take well
 * under a second. Immutable after creation; any number of threads may encode at once. */

#include "common/model_file/model_file.h"

typedef struct pd_tokenizer pd_tokenizer;

typedef struct pd_token_ids {
    uint32_t *ids; /* owned; pd_token_ids_fini */
    size_t count, size;
} pd_token_ids;
void pd_token_ids_fini(pd_token_ids *ids);

/* The tables must outlive the tokenizer. Duplicate tokens and merges of unknown pieces: the first
 * stands, a warning is logged. Errors: PD_E_UNSUPPORTED (a pre-tokenizer or model we do not have,
 * named in the log), PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status pd_tokenizer_create(const pd_text_tables *tables,
                                         pd_tokenizer **tokenizer_out);
void pd_tokenizer_destroy(pd_tokenizer *tokenizer);

/* Appends text's ids to *ids (zero-initialised or already in use). special: control tokens written
 * in the text ("<|im_end|>") become their ids; without it they are ordinary characters.
 * ids_max bounds ids->count. Never adds BOS. Errors: PD_E_TOO_LARGE, PD_E_NOMEM, PD_E_INVALID
 * (text is no UTF-8). On error *ids is as before. */
PD_CHECKED pd_status pd_tokenizer_encode(const pd_tokenizer *tokenizer, const char *text,
                                         size_t len, bool special, size_t ids_max,
                                         pd_token_ids *ids);

/* The same with special tokens, but never one that touches a byte of the ranges in plain
 * (ascending, disjoint): what stands there is characters, whatever it spells. */
typedef struct pd_text_range {
    size_t start, end; /* bytes of the text, end exclusive */
} pd_text_range;
PD_CHECKED pd_status pd_tokenizer_encode_ranges(const pd_tokenizer *tokenizer, const char *text,
                                                size_t len, const pd_text_range *plain,
                                                size_t plain_count, size_t ids_max,
                                                pd_token_ids *ids);

/* The bytes a token stands for (byte-level alphabet undone); may be no whole character.
 * Control tokens: empty unless special. Borrowed from the tokenizer. id < vocab. */
const char *pd_tokenizer_bytes(const pd_tokenizer *tokenizer, uint32_t id, bool special,
                               size_t *len_out);
bool pd_tokenizer_is_control(const pd_tokenizer *tokenizer, uint32_t id);
uint32_t pd_tokenizer_vocab(const pd_tokenizer *tokenizer);
/* PD_E_NOT_FOUND when no token is written so. */
PD_CHECKED pd_status pd_tokenizer_find(const pd_tokenizer *tokenizer, const char *text, size_t len,
                                       uint32_t *id_out);
/* Ids that end an answer: eos, eot and every control token known as an end of turn. */
const uint32_t *pd_tokenizer_end_ids(const pd_tokenizer *tokenizer, size_t *count_out);
bool pd_tokenizer_is_end(const pd_tokenizer *tokenizer, uint32_t id);
/* bos_id when the file says that BOS is added, else -1. Chat prompts never use it: the template
 * writes its own. */
int64_t pd_tokenizer_added_bos(const pd_tokenizer *tokenizer);

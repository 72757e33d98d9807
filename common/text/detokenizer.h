#pragma once

/* common/text/detokenizer.h - token ids to text as they come, never half a character.
 *
 * Bytes that may still become a character are held back; bytes that cannot become U+FFFD, one for
 * each maximal ill-formed part (Unicode 3.9). One detokenizer an answer; one thread at a time. */

#include "common/base/buf.h"
#include "common/text/tokenizer.h"

typedef struct pd_detokenizer {
    const pd_tokenizer *tokenizer;
    bool special; /* control tokens are shown */
    unsigned char held_len;
    char held[4]; /* the start of a character */
} pd_detokenizer;

void pd_detokenizer_init(pd_detokenizer *detokenizer, const pd_tokenizer *tokenizer, bool special);
/* Appends what the token completes; may append nothing. Failures show in pd_buf_status(text). */
void pd_detokenizer_push(pd_detokenizer *detokenizer, uint32_t id, pd_buf *text);
/* The same for raw bytes. */
void pd_detokenizer_push_bytes(pd_detokenizer *detokenizer, const char *bytes, size_t len,
                               pd_buf *text);
/* The end of the answer: an unfinished tail is written as U+FFFD, once. */
void pd_detokenizer_finish(pd_detokenizer *detokenizer, pd_buf *text);

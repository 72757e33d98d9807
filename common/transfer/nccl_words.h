#pragma once

/* common/transfer/nccl_words.h - words on their way to a link's other end, in order. Inside
 * common/transfer only, for nccl*.c. Engine's thread. A word is on the heap from when it is said
 * until the carrier of messages has ended with it. */

#include "common/transfer/nccl_link.h"

/* head and bytes as one word. PD_E_NOMEM, logged: it was not said. word_out may be NULL. */
PD_CHECKED pd_status pd_nccl_say_bytes(nccl_link *link, const void *head, size_t head_len,
                                       const void *bytes, size_t len, word **word_out);
/* The same, and without memory the link is broken. */
void pd_nccl_say(nccl_link *link, const void *bytes, size_t len);
void pd_nccl_say_kind(nccl_link *link, word_kind kind);
/* Posts what waits, as far as there is room; true if something went. Not from within the carrier of
 * messages. */
bool pd_nccl_words_post(pd_carrier *carrier, nccl_link *link);
/* Forgets what was not posted. */
void pd_nccl_words_drop(nccl_link *link);
/* The carrier of messages has ended with a word. */
void pd_nccl_posted_remove(pd_carrier *carrier, word *w);

#pragma once

/* common/base/buf.h - a growable byte buffer with a maximum; always NUL-terminated.
 *
 * A failed append marks the buffer and every later append is ignored, so that a writer checks
 * once, at the end, with pd_buf_status(). Not shared between threads. */

#include "common/base/status.h"

#include <stddef.h>

typedef struct pd_buf {
    char *bytes; /* [len] then NUL; NULL while nothing was appended */
    size_t len;
    size_t size;
    size_t max; /* len never exceeds it */
    pd_status status;
} pd_buf;

void pd_buf_init(pd_buf *buf, size_t max);
void pd_buf_fini(pd_buf *buf);
void pd_buf_clear(pd_buf *buf); /* keeps the memory, forgets a failure */
void pd_buf_append(pd_buf *buf, const void *bytes, size_t len);
void pd_buf_puts(pd_buf *buf, const char *text);
void pd_buf_printf(pd_buf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Removes the first len bytes (len <= buf->len). */
void pd_buf_consume(pd_buf *buf, size_t len);
/* PD_OK, PD_E_TOO_LARGE (over max) or PD_E_NOMEM. */
PD_CHECKED pd_status pd_buf_status(const pd_buf *buf);
/* The text, never NULL. */
const char *pd_buf_text(const pd_buf *buf);

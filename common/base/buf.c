#include "common/base/buf.h"
#include "common/base/mem.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

void pd_buf_init(pd_buf *buf, size_t max)
{
    *buf = (pd_buf){.max = max};
}

void pd_buf_fini(pd_buf *buf)
{
    pd_free(buf->bytes);
    *buf = (pd_buf){0};
}

void pd_buf_clear(pd_buf *buf)
{
    buf->len = 0;
    buf->status = PD_OK;
    if (buf->bytes != NULL)
        buf->bytes[0] = '\0';
}

static bool reserve(pd_buf *buf, size_t more)
{
    if (buf->status != PD_OK)
        return false;
    if (more > buf->max - buf->len) {
        buf->status = PD_E_TOO_LARGE;
        return false;
    }
    if (more >
        SIZE_MAX / 4 - buf->len) { /* no memory is that large, and sizes below must not wrap */
        buf->status = PD_E_NOMEM;
        return false;
    }
    size_t need = buf->len + more + 1;
    if (need <= buf->size)
        return true;
    size_t size = buf->size != 0 ? buf->size : 256;
    while (size < need)
        size *= 2;
    char *bytes = pd_realloc(buf->bytes, size);
    if (bytes == NULL) {
        buf->status = PD_E_NOMEM;
        return false;
    }
    buf->bytes = bytes;
    buf->size = size;
    return true;
}

void pd_buf_append(pd_buf *buf, const void *bytes, size_t len)
{
    if (!reserve(buf, len))
        return;
    if (len != 0)
        memcpy(buf->bytes + buf->len, bytes, len);
    buf->len += len;
    buf->bytes[buf->len] = '\0';
}

void pd_buf_puts(pd_buf *buf, const char *text)
{
    pd_buf_append(buf, text, strlen(text));
}

void pd_buf_printf(pd_buf *buf, const char *format, ...)
{
    va_list args, again;

    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n >= 0 && reserve(buf, (size_t)n)) {
        vsnprintf(buf->bytes + buf->len, (size_t)n + 1, format, again);
        buf->len += (size_t)n;
    }
    va_end(again);
}

void pd_buf_consume(pd_buf *buf, size_t len)
{
    pd_assert(len <= buf->len);
    if (len == 0)
        return;
    memmove(buf->bytes, buf->bytes + len, buf->len - len);
    buf->len -= len;
    buf->bytes[buf->len] = '\0';
}

pd_status pd_buf_status(const pd_buf *buf)
{
    return buf->status;
}

const char *pd_buf_text(const pd_buf *buf)
{
    return buf->bytes != NULL ? buf->bytes : "";
}

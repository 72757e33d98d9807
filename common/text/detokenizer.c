#include "common/text/detokenizer.h"
#include "common/base/utf8.h"

#include <string.h>

void pd_detokenizer_init(pd_detokenizer *d, const pd_tokenizer *tokenizer, bool special)
{
    *d = (pd_detokenizer){.tokenizer = tokenizer, .special = special};
}

void pd_detokenizer_push(pd_detokenizer *d, uint32_t id, pd_buf *text)
{
    size_t len;
    const char *bytes = pd_tokenizer_bytes(d->tokenizer, id, d->special, &len);
    pd_detokenizer_push_bytes(d, bytes, len, text);
}

/* Goes on with a held start of a character; how many of the bytes that took. */
static size_t complete(pd_detokenizer *d, const char *bytes, size_t len, pd_buf *text)
{
    size_t used = 0;

    while (d->held_len != 0 && used < len) {
        size_t with = d->held_len + 1u;
        d->held[d->held_len] = bytes[used];
        if (pd_utf8_len(d->held, with) == with) {
            pd_buf_append(text, d->held, with);
            d->held_len = 0;
            used++;
        } else if (pd_utf8_is_prefix(d->held, with)) {
            d->held_len = (unsigned char)with;
            used++;
        } else { /* a start that nothing completes is one ill-formed part */
            pd_buf_puts(text, PD_UTF8_REPLACEMENT);
            d->held_len = 0;
        }
    }
    return used;
}

void pd_detokenizer_push_bytes(pd_detokenizer *d, const char *bytes, size_t len, pd_buf *text)
{
    size_t at = complete(d, bytes, len, text);

    while (at < len) {
        size_t start = at, step;
        while (at < len && (step = pd_utf8_len(bytes + at, len - at)) != 0)
            at += step;
        pd_buf_append(text, bytes + start, at - start);
        if (at == len)
            break;
        if (pd_utf8_is_prefix(bytes + at, len - at)) {
            d->held_len = (unsigned char)(len - at);
            memcpy(d->held, bytes + at, len - at);
            break;
        }
        pd_buf_puts(text, PD_UTF8_REPLACEMENT);
        at += pd_utf8_bad_len(bytes + at, len - at);
    }
}

void pd_detokenizer_finish(pd_detokenizer *d, pd_buf *text)
{
    if (d->held_len != 0)
        pd_buf_puts(text, PD_UTF8_REPLACEMENT);
    d->held_len = 0;
}

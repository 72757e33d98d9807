#include "common/base/utf8.h"
#include "common/base/status.h"

/* The number of leading bytes that fit a well-formed character, and the length it would have
 * (0: text[0] cannot begin one). */
static size_t match(const unsigned char *text, size_t len, size_t *want_out)
{
    unsigned char lead = text[0], low = 0x80, high = 0xbf;
    size_t want = lead < 0x80                    ? 1
                  : lead >= 0xc2 && lead <= 0xdf ? 2
                  : lead >= 0xe0 && lead <= 0xef ? 3
                  : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                 : 0;
    *want_out = want;
    if (want == 0)
        return 0;
    if (lead == 0xe0)
        low = 0xa0; /* no overlong forms */
    else if (lead == 0xed)
        high = 0x9f; /* no surrogates */
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f; /* not above U+10FFFF */
    size_t n = 1;
    while (n < want && n < len && text[n] >= low && text[n] <= high) {
        n++;
        low = 0x80;
        high = 0xbf;
    }
    return n;
}

size_t pd_utf8_len(const char *text, size_t len)
{
    size_t want;
    if (len == 0)
        return 0;
    size_t n = match((const unsigned char *)text, len, &want);
    return want != 0 && n == want ? want : 0;
}

size_t pd_utf8_bad_len(const char *text, size_t len)
{
    size_t want;
    pd_assert(len > 0);
    size_t n = match((const unsigned char *)text, len, &want);
    return n == 0 ? 1 : n;
}

bool pd_utf8_is_prefix(const char *text, size_t len)
{
    size_t want;
    if (len == 0)
        return false;
    return match((const unsigned char *)text, len, &want) == len && len < want;
}

bool pd_utf8_valid(const char *text, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = pd_utf8_len(text + i, len - i);
        if (n == 0)
            return false;
        i += n;
    }
    return true;
}

uint32_t pd_utf8_decode(const char *text, size_t len, size_t *len_out)
{
    const unsigned char *b = (const unsigned char *)text;
    size_t n = pd_utf8_len(text, len);
    pd_assert(n != 0);
    *len_out = n;
    switch (n) {
    case 1: return b[0];
    case 2: return (b[0] & 0x1fu) << 6 | (b[1] & 0x3fu);
    case 3: return (b[0] & 0x0fu) << 12 | (b[1] & 0x3fu) << 6 | (b[2] & 0x3fu);
    default:
        return (b[0] & 0x07u) << 18 | (b[1] & 0x3fu) << 12 | (b[2] & 0x3fu) << 6 | (b[3] & 0x3fu);
    }
}

size_t pd_utf8_encode(uint32_t code_point, char out[4])
{
    if (code_point < 0x80) {
        out[0] = (char)code_point;
        return 1;
    }
    if (code_point < 0x800) {
        out[0] = (char)(0xc0 | code_point >> 6);
        out[1] = (char)(0x80 | (code_point & 0x3f));
        return 2;
    }
    if (code_point < 0x10000) {
        out[0] = (char)(0xe0 | code_point >> 12);
        out[1] = (char)(0x80 | (code_point >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code_point & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | code_point >> 18);
    out[1] = (char)(0x80 | (code_point >> 12 & 0x3f));
    out[2] = (char)(0x80 | (code_point >> 6 & 0x3f));
    out[3] = (char)(0x80 | (code_point & 0x3f));
    return 4;
}

#pragma once

/* common/base/utf8.h - what is a character in UTF-8 (Unicode 15, table 3-7). Any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PD_UTF8_REPLACEMENT "\xef\xbf\xbd" /* U+FFFD */

/* Bytes of the well-formed character at text[0], 1 to 4; 0 when it is ill-formed or cut off by
 * len. */
size_t pd_utf8_len(const char *text, size_t len);
/* text[0] begins an ill-formed sequence: the bytes that one U+FFFD stands for (the maximal
 * subpart, Unicode 3.9), at least 1. */
size_t pd_utf8_bad_len(const char *text, size_t len);
/* True when the len bytes are a proper start of a well-formed character that more bytes could
 * complete. */
bool pd_utf8_is_prefix(const char *text, size_t len);
bool pd_utf8_valid(const char *text, size_t len);
/* The code point of the well-formed character at text; *len_out its bytes. */
uint32_t pd_utf8_decode(const char *text, size_t len, size_t *len_out);
/* Writes 1 to 4 bytes; returns how many. code_point is a scalar value. */
size_t pd_utf8_encode(uint32_t code_point, char out[4]);

#pragma once

/* common/config/value.h - one scalar's text to a value of the type that the schema wants.
 *
 * On PD_E_INVALID, why holds what is wrong and what was expected, as the end of a sentence that
 * begins with the key ("must be a whole number ..."); outputs are untouched. Nothing is guessed:
 * a text that some reader takes for another value (0123, 1_0, 2GB) is refused with a hint.
 * No allocation; any thread. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define PD_VALUE_WHY_BYTES 256

typedef struct pd_scalar_why {
    char text[PD_VALUE_WHY_BYTES];
} pd_scalar_why;

/* Plain decimal: 0 or digits without a leading zero. */
PD_CHECKED pd_status pd_scalar_integer(const char *text, uint64_t min, uint64_t max,
                                       uint64_t *value_out, pd_scalar_why *why);
/* true or false. */
PD_CHECKED pd_status pd_scalar_bool(const char *text, bool *value_out, pd_scalar_why *why);
/* A whole number with ms, s, m or h; in nanoseconds, as are min and max. */
PD_CHECKED pd_status pd_scalar_duration(const char *text, uint64_t min_ns, uint64_t max_ns,
                                        uint64_t *ns_out, pd_scalar_why *why);
/* A whole number with KiB, MiB, GiB, TiB or nothing (bytes); in bytes, as are min and max. */
PD_CHECKED pd_status pd_scalar_size(const char *text, uint64_t min_bytes, uint64_t max_bytes,
                                    uint64_t *bytes_out, pd_scalar_why *why);
/* N:M, both 1 to max. */
PD_CHECKED pd_status pd_scalar_ratio(const char *text, uint32_t max, uint32_t *left_out,
                                     uint32_t *right_out, pd_scalar_why *why);
/* One of "a|b|c"; which, from 0. "a:N" stands for a:0 to a:999. */
PD_CHECKED pd_status pd_scalar_choice(const char *text, const char *choices, uint32_t *index_out,
                                      pd_scalar_why *why);
/* HOST:PORT, port 0 to 65535: an IPv4 address, an IPv6 address in brackets, or a name. host_out
 * gets the host without brackets (a C string of at most 255 bytes). */
PD_CHECKED pd_status pd_scalar_listen(const char *text, char host_out[256], uint16_t *port_out,
                                      bool *ipv6_out, pd_scalar_why *why);
/* tcp://HOST:PORT or ipc://PATH, a path that fits a Unix socket. */
PD_CHECKED pd_status pd_scalar_endpoint(const char *text, pd_scalar_why *why);
/* 1 to max bytes of UTF-8 without control characters. */
PD_CHECKED pd_status pd_scalar_string(const char *text, size_t max, pd_scalar_why *why);
/* 1 to 63 of a-z, 0-9, '-'; not '-' first or last. */
PD_CHECKED pd_status pd_scalar_label(const char *text, pd_scalar_why *why);

/* Writes a duration or size in the largest unit that holds it exactly ("200ms", "8MiB"). */
void pd_scalar_write_duration(uint64_t ns, char out[32]);
void pd_scalar_write_size(uint64_t bytes, char out[32]);

/* Edits (insert, delete, change, swap of neighbours) from a to b; texts over 64 bytes: 64. */
uint32_t pd_scalar_distance(const char *a, const char *b);

#include "common/config/value.h"

#include "common/base/clock.h"
#include "common/base/utf8.h"
#include "common/config/yaml.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define IPC_PATH_MAX 100 /* sun_path is 108; ZeroMQ needs a little */

static pd_status because(pd_scalar_why *why, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static pd_status because(pd_scalar_why *why, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why->text, sizeof why->text, format, args);
    va_end(args);
    return PD_E_INVALID;
}

static size_t digits_of(const char *text)
{
    return strspn(text, "0123456789");
}

/* The number that len digits make; UINT64_MAX when it is too large to hold. */
static uint64_t number_of(const char *text, size_t len)
{
    uint64_t value = 0;

    for (size_t i = 0; i < len; i++) {
        if (__builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(text[i] - '0'), &value))
            return UINT64_MAX;
    }
    return value;
}

static bool all_of(const char *text, const char *set)
{
    return text[0] != '\0' && text[strspn(text, set)] == '\0';
}

/* What a text that is no plain decimal was probably meant to be. */
static pd_status not_plain_decimal(const char *text, pd_scalar_why *why)
{
    char shown[72];
    size_t digits = digits_of(text);

    pd_yaml_show(text, shown);
    if (text[0] == '\0')
        return because(why, "is empty; a whole number is expected");
    if (digits > 1 && text[digits] == '\0') {
        size_t zeros = strspn(text, "0");
        zeros = zeros == digits ? zeros - 1 : zeros;
        return because(why,
                       "'%s' has a leading zero, which some readers take for octal; write %.60s",
                       shown, text + zeros);
    }
    if (text[0] == '+')
        return because(why, "'%s': write the number without a sign", shown);
    if (text[0] == '0' && text[1] != '\0' && strchr("xXoObB", text[1]) != NULL)
        return because(why, "'%s': only plain decimal numbers are read (no 0x, 0o, 0b)", shown);
    if (digits > 0 && all_of(text, "0123456789_")) {
        char joined[72];
        size_t n = 0;
        for (size_t i = 0; text[i] != '\0' && n < sizeof joined - 1; i++) {
            if (text[i] != '_')
                joined[n++] = text[i];
        }
        joined[n] = '\0';
        return because(why, "'%s': only plain decimal numbers are read; write %.60s", shown,
                       joined);
    }
    if (digits > 0 && all_of(text, "0123456789."))
        return because(why, "'%s' is no whole number", shown);
    if (digits > 0 && all_of(text, "0123456789.eE+-"))
        return because(why, "'%s': only plain decimal numbers are read (no exponent)", shown);
    return because(why, "must be a whole number, not '%s'", shown);
}

pd_status pd_scalar_integer(const char *text, uint64_t min, uint64_t max, uint64_t *value_out,
                            pd_scalar_why *why)
{
    char shown[72];
    size_t digits = digits_of(text);
    bool negative = text[0] == '-' && all_of(text + 1, "0123456789");

    pd_yaml_show(text, shown);
    if (!negative && (digits == 0 || text[digits] != '\0' || (text[0] == '0' && digits > 1)))
        return not_plain_decimal(text, why);
    uint64_t value = negative ? 0 : number_of(text, digits);
    if (negative || value < min || value > max)
        return because(why, "must be %llu to %llu, not %s", (unsigned long long)min,
                       (unsigned long long)max, shown);
    *value_out = value;
    return PD_OK;
}

pd_status pd_scalar_bool(const char *text, bool *value_out, pd_scalar_why *why)
{
    char shown[72];

    if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0) {
        pd_yaml_show(text, shown);
        return because(why, "must be true or false, not '%s'", shown);
    }
    *value_out = text[0] == 't';
    return PD_OK;
}

typedef struct unit {
    const char *name;
    uint64_t factor;
} unit;

static const unit durations[] = {
    {"ms", PD_NS_PER_MS},
    {"s", PD_NS_PER_S},
    {"m", 60 * PD_NS_PER_S},
    {"h", 3600 * PD_NS_PER_S},
};

static const unit sizes[] = {
    {"", 1}, {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40},
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const unit *unit_find(const unit *units, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(units[i].name, name) == 0)
            return &units[i];
    }
    return NULL;
}

static void unit_write(const unit *units, size_t count, uint64_t value, char out[32])
{
    size_t best = 0;

    for (size_t i = 1; i < count; i++) {
        if (value != 0 && value % units[i].factor == 0)
            best = i;
    }
    snprintf(out, 32, "%llu%s", (unsigned long long)(value / units[best].factor), units[best].name);
}

void pd_scalar_write_duration(uint64_t ns, char out[32])
{
    unit_write(durations, COUNT(durations), ns, out);
}

void pd_scalar_write_size(uint64_t bytes, char out[32])
{
    unit_write(sizes, COUNT(sizes), bytes, out);
}

pd_status pd_scalar_duration(const char *text, uint64_t min_ns, uint64_t max_ns, uint64_t *ns_out,
                             pd_scalar_why *why)
{
    char shown[72], min_text[32], max_text[32];
    size_t digits = digits_of(text);
    const unit *u = unit_find(durations, COUNT(durations), text + digits);
    uint64_t ns = 0;

    pd_yaml_show(text, shown);
    pd_scalar_write_duration(min_ns, min_text);
    pd_scalar_write_duration(max_ns, max_text);
    if (digits > 0 && text[digits] == '\0')
        return because(why, "'%s' has no unit; write %s%s, %s%s or %s%s", shown, shown, "ms", shown,
                       "s", shown, "m");
    if (digits > 0 && text[digits] == '.' && all_of(text, "0123456789.msh"))
        return because(why, "'%s' is no whole number; use a smaller unit (1500ms, not 1.5s)",
                       shown);
    if (digits == 0 || u == NULL)
        return because(why, "must be a duration such as 200ms, 2s or 1m, not '%s'", shown);
    if (text[0] == '0' && digits > 1)
        return because(why, "'%s' has a leading zero; write the number without", shown);
    if (__builtin_mul_overflow(number_of(text, digits), u->factor, &ns) || ns < min_ns ||
        ns > max_ns)
        return because(why, "must be %s to %s, not %s", min_text, max_text, shown);
    *ns_out = ns;
    return PD_OK;
}

pd_status pd_scalar_size(const char *text, uint64_t min_bytes, uint64_t max_bytes,
                         uint64_t *bytes_out, pd_scalar_why *why)
{
    char shown[72], min_text[32], max_text[32];
    size_t digits = digits_of(text);
    const unit *u = unit_find(sizes, COUNT(sizes), text + digits);
    uint64_t bytes = 0;

    pd_yaml_show(text, shown);
    pd_scalar_write_size(min_bytes, min_text);
    pd_scalar_write_size(max_bytes, max_text);
    if (digits > 0 && u == NULL && strchr("kKmMgGtT", text[digits]) != NULL &&
        strcspn(text + digits, "0123456789. ") == strlen(text + digits))
        return because(why, "'%s': units are KiB, MiB, GiB, TiB (powers of 1024); write %.*s%ciB",
                       shown, (int)(digits < 20 ? digits : 20), text, text[digits] & ~0x20);
    if (digits > 0 && text[digits] == '.')
        return because(why, "'%s' is no whole number; use a smaller unit (1536MiB, not 1.5GiB)",
                       shown);
    if (digits == 0 || u == NULL)
        return because(why, "must be a size such as 512KiB, 64MiB or 2GiB, not '%s'", shown);
    if (text[0] == '0' && digits > 1)
        return because(why, "'%s' has a leading zero; write the number without", shown);
    if (__builtin_mul_overflow(number_of(text, digits), u->factor, &bytes) || bytes < min_bytes ||
        bytes > max_bytes)
        return because(why, "must be %s to %s, not %s", min_text, max_text, shown);
    *bytes_out = bytes;
    return PD_OK;
}

pd_status pd_scalar_ratio(const char *text, uint32_t max, uint32_t *left_out, uint32_t *right_out,
                          pd_scalar_why *why)
{
    char shown[72];
    size_t left = digits_of(text);
    size_t right = text[left] == ':' ? digits_of(text + left + 1) : 0;

    pd_yaml_show(text, shown);
    if (left == 0 || right == 0 || text[left + 1 + right] != '\0')
        return because(why, "must be PREFILL:DECODE such as \"2:1\", not '%s'", shown);
    uint64_t a = number_of(text, left), b = number_of(text + left + 1, right);
    if (text[0] == '0' || text[left + 1] == '0' || a > max || b > max)
        return because(why, "both sides must be 1 to %u without leading zeros, not '%s'", max,
                       shown);
    *left_out = (uint32_t)a;
    *right_out = (uint32_t)b;
    return PD_OK;
}

/* Is text this name of the choices? A name "cuda:N" is any such text with a number for N. */
static bool is_choice(const char *name, const char *text)
{
    size_t head = strcspn(name, ":");

    if (strcmp(name + head, ":N") != 0)
        return strcmp(name, text) == 0;
    if (strncmp(name, text, head + 1) != 0)
        return false;
    const char *number = text + head + 1;
    size_t digits = digits_of(number);
    return digits > 0 && digits <= 3 && number[digits] == '\0' && (digits == 1 || number[0] != '0');
}

pd_status pd_scalar_choice(const char *text, const char *choices, uint32_t *index_out,
                           pd_scalar_why *why)
{
    char shown[72], nearest[32] = "", listed[160];
    uint32_t index = 0, nearest_distance = 3;
    size_t listed_len = 0;

    for (const char *at = choices; at[0] != '\0'; index++) {
        size_t len = strcspn(at, "|");
        char name[32];
        pd_assert(len < sizeof name);
        memcpy(name, at, len);
        name[len] = '\0';
        if (is_choice(name, text)) {
            *index_out = index;
            return PD_OK;
        }
        uint32_t distance = pd_scalar_distance(name, text);
        if (distance < nearest_distance) {
            nearest_distance = distance;
            memcpy(nearest, name, len + 1);
        }
        int n = snprintf(listed + listed_len, sizeof listed - listed_len, "%s%s",
                         index == 0 ? "" : ", ", name);
        pd_assert(n > 0 && (size_t)n < sizeof listed - listed_len);
        listed_len += (size_t)n;
        at += len + (at[len] == '|');
    }
    pd_yaml_show(text, shown);
    if (nearest[0] != '\0')
        return because(why, "unknown value '%s', did you mean '%s'? (%s%s)", shown, nearest,
                       index > 1 ? "one of " : "only ", listed);
    return because(why, "must be %s%s, not '%s'", index > 1 ? "one of " : "", listed, shown);
}

static bool is_host_name(const char *host)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._";
    return all_of(host, letters) && host[0] != '-' && host[0] != '.';
}

static pd_status check_host(const char *host, bool ipv6, const char *shown, pd_scalar_why *why)
{
    struct in6_addr ignored;

    if (ipv6)
        return inet_pton(AF_INET6, host, &ignored) == 1
                   ? PD_OK
                   : because(why, "'%s': what stands in brackets is no IPv6 address", shown);
    if (strchr(host, '.') != NULL && all_of(host, "0123456789."))
        return inet_pton(AF_INET, host, &ignored) == 1
                   ? PD_OK
                   : because(why, "'%s' holds no valid IPv4 address", shown);
    return is_host_name(host) ? PD_OK : because(why, "'%s' holds no valid host name", shown);
}

pd_status pd_scalar_listen(const char *text, char host_out[256], uint16_t *port_out, bool *ipv6_out,
                           pd_scalar_why *why)
{
    char shown[72], host[256];
    const char *colon = strrchr(text, ':');
    bool ipv6 = text[0] == '[';
    uint64_t port = 0;
    pd_scalar_why port_why;

    pd_yaml_show(text, shown);
    if (colon == NULL || colon[1] == '\0' || (ipv6 && colon[-1] != ']'))
        return because(why, "must be HOST:PORT such as 127.0.0.1:8080, not '%s'", shown);
    if (colon == text)
        return because(why, "'%s' has no host; write 0.0.0.0%s for every address", shown, shown);
    size_t host_len = (size_t)(colon - text) - (ipv6 ? 2 : 0);
    if (host_len >= sizeof host)
        return because(why, "the host is longer than 255 characters");
    memcpy(host, text + (ipv6 ? 1 : 0), host_len);
    host[host_len] = '\0';
    if (!ipv6 && strchr(host, ':') != NULL)
        return because(why, "'%s': write an IPv6 address in brackets, [::1]:8080", shown);
    pd_status status = check_host(host, ipv6, shown, why);
    if (status != PD_OK)
        return status;
    if (pd_scalar_integer(colon + 1, 0, 65535, &port, &port_why) != PD_OK)
        return because(why, "the port %.200s", port_why.text);
    memcpy(host_out, host, host_len + 1);
    *port_out = (uint16_t)port;
    *ipv6_out = ipv6;
    return PD_OK;
}

pd_status pd_scalar_endpoint(const char *text, pd_scalar_why *why)
{
    char shown[72], host[256];
    uint16_t port;
    bool ipv6;
    pd_scalar_why listen_why;

    pd_yaml_show(text, shown);
    if (strncmp(text, "ipc://", 6) == 0) {
        size_t len = strlen(text + 6);
        if (len == 0 || len > IPC_PATH_MAX)
            return because(why, "the path after ipc:// must have 1 to %d bytes, not %zu",
                           IPC_PATH_MAX, len);
        return pd_scalar_string(text, 6 + IPC_PATH_MAX, why);
    }
    if (strncmp(text, "tcp://", 6) != 0)
        return because(why, "must be tcp://HOST:PORT or ipc://PATH, not '%s'", shown);
    if (pd_scalar_listen(text + 6, host, &port, &ipv6, &listen_why) != PD_OK)
        return because(why, "after tcp://, %.200s", listen_why.text);
    return PD_OK;
}

pd_status pd_scalar_string(const char *text, size_t max, pd_scalar_why *why)
{
    size_t len = strlen(text);

    if (len == 0)
        return because(why, "is empty; a text is expected");
    if (len > max)
        return because(why, "has %zu bytes; at most %zu are read", len, max);
    if (!pd_utf8_valid(text, len))
        return because(why, "is no valid UTF-8");
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == 0x7f)
            return because(why, "holds a control character (byte %zu)", i);
    }
    return PD_OK;
}

pd_status pd_scalar_label(const char *text, pd_scalar_why *why)
{
    char shown[72];
    size_t len = strlen(text);

    pd_yaml_show(text, shown);
    if (len == 0 || len > 63 || !all_of(text, "abcdefghijklmnopqrstuvwxyz0123456789-") ||
        text[0] == '-' || text[len - 1] == '-')
        return because(why,
                       "must be 1 to 63 of a-z, 0-9 and '-' ('-' neither first nor last), not '%s'",
                       shown);
    return PD_OK;
}

uint32_t pd_scalar_distance(const char *a, const char *b)
{
    enum { MAX = 64 };
    size_t a_len = strlen(a), b_len = strlen(b);
    uint32_t rows[3][MAX + 1]; /* two before, before, now: optimal string alignment */

    if (a_len > MAX || b_len > MAX)
        return MAX;
    for (size_t j = 0; j <= b_len; j++)
        rows[0][j] = (uint32_t)j;
    for (size_t i = 1; i <= a_len; i++) {
        uint32_t *now = rows[i % 3];
        const uint32_t *before = rows[(i + 2) % 3], *two_before = rows[(i + 1) % 3];
        now[0] = (uint32_t)i;
        for (size_t j = 1; j <= b_len; j++) {
            uint32_t best = before[j - 1] + (a[i - 1] != b[j - 1]);
            best = before[j] + 1 < best ? before[j] + 1 : best;
            best = now[j - 1] + 1 < best ? now[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                two_before[j - 2] + 1 < best)
                best = two_before[j - 2] + 1;
            now[j] = best;
        }
    }
    return rows[a_len % 3][b_len];
}

#include "common/base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};
static const char *log_service = "kvferry";
static pd_log_level log_level = PD_LOG_INFO;

void pd_log_init(const char *service, pd_log_level level)
{
    log_service = service;
    log_level = level;
}

const char *pd_log_service(void)
{
    return log_service;
}

pd_log_level pd_log_level_set(void)
{
    return log_level;
}

bool pd_log_enabled(pd_log_level level)
{
    return level <= log_level;
}

pd_status pd_log_level_parse(const char *name, pd_log_level *level_out)
{
    for (int i = 0; i <= PD_LOG_TRACE; i++) {
        if (strcmp(name, level_names[i]) == 0) {
            *level_out = (pd_log_level)i;
            return PD_OK;
        }
    }
    return PD_E_INVALID;
}

static size_t write_prefix(char *line, size_t size, pd_log_level level, const char *req)
{
    struct timespec now;
    struct tm utc;
    char ts[32];

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(ts, sizeof ts, "%Y-%m-%dT%H:%M:%S", &utc);
    int n = snprintf(line, size, "level=%s ts=%s.%03ldZ svc=%s%s%s ", level_names[level], ts,
                     now.tv_nsec / 1000000, log_service, req != NULL ? " req=" : "",
                     req != NULL ? req : "");
    return n < 0 ? 0 : ((size_t)n < size ? (size_t)n : size - 1);
}

void pd_log_at(pd_log_level level, const char *req, const char *format, ...)
{
    if (!pd_log_enabled(level))
        return;
    int saved_errno = errno; /* %m below must see the caller's */
    char line[2048];
    size_t used = write_prefix(line, sizeof line - 1, level, req);
    va_list args;

    va_start(args, format);
    errno = saved_errno;
    int n = vsnprintf(line + used, sizeof line - 1 - used, format, args);
    va_end(args);
    if (n > 0)
        used += (size_t)n < sizeof line - 1 - used ? (size_t)n : sizeof line - 2 - used;
    for (size_t i = 0; i < used; i++) {
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?';
    }
    line[used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used); /* one write: lines never interleave */
    (void)written;                                      /* nowhere to report a broken log to */
    errno = saved_errno;
}

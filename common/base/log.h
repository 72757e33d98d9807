#pragma once

/* common/base/log.h - one line an event, to stderr, in logfmt:
 *
 *   level=info ts=2026-01-02T03:04:05.678Z svc=router req=cmpl-1 msg="..." key=value
 *
 * error = someone must act, warn = we coped, info = life cycle, debug = per request,
 * trace = per step. Never prompt text above trace. A control character that came in with a value
 * is written as '?', so that no value can forge a second line. Any thread. */

#include "common/base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pd_log_level {
    PD_LOG_ERROR,
    PD_LOG_WARN,
    PD_LOG_INFO,
    PD_LOG_DEBUG,
    PD_LOG_TRACE,
} pd_log_level;

/* The service's name in every line; borrowed, must outlive the process' logging. */
void pd_log_init(const char *service, pd_log_level level);
/* What pd_log_init was given last. */
const char *pd_log_service(void);
pd_log_level pd_log_level_set(void);
bool pd_log_enabled(pd_log_level level);
/* PD_E_INVALID for an unknown name; names are the enum's in lower case. */
PD_CHECKED pd_status pd_log_level_parse(const char *name, pd_log_level *level_out);

/* req: the request's id, or NULL when the event is about no request. %m is allowed. */
void pd_log_at(pd_log_level level, const char *req, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define pd_log_error(...)          pd_log_at(PD_LOG_ERROR, NULL, __VA_ARGS__)
#define pd_log_warn(...)           pd_log_at(PD_LOG_WARN, NULL, __VA_ARGS__)
#define pd_log_info(...)           pd_log_at(PD_LOG_INFO, NULL, __VA_ARGS__)
#define pd_log_debug(...)          pd_log_at(PD_LOG_DEBUG, NULL, __VA_ARGS__)
#define pd_log_req_error(req, ...) pd_log_at(PD_LOG_ERROR, (req), __VA_ARGS__)
#define pd_log_req_warn(req, ...)  pd_log_at(PD_LOG_WARN, (req), __VA_ARGS__)
#define pd_log_req_info(req, ...)  pd_log_at(PD_LOG_INFO, (req), __VA_ARGS__)
#define pd_log_req_debug(req, ...) pd_log_at(PD_LOG_DEBUG, (req), __VA_ARGS__)

#ifdef __cplusplus
}
#endif

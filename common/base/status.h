#pragma once

/* common/base/status.h - the one status type of the project.
 *
 * 0 is success. Errors are grouped by the largest thing the failure damages, since that is what
 * decides what to do next:
 *   request  answer the client, everything else goes on
 *   peer     drop the link, move its requests elsewhere
 *   worker   this process cannot go on: drain, exit, be restarted
 * Any thread. */

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PD_CHECKED __attribute__((warn_unused_result))

typedef enum pd_status {
    PD_OK = 0,
    /* request */
    PD_E_INVALID = -1,   /* outside bytes or an argument that cannot be meant */
    PD_E_TOO_LARGE = -2, /* over a configured limit */
    PD_E_OVERLOAD = -3,  /* full for now: try later or elsewhere */
    PD_E_NOT_FOUND = -4,
    PD_E_CANCELLED = -5,
    PD_E_TIMEOUT = -6,
    PD_E_AGAIN = -7, /* nothing there yet; not a failure */
    /* peer */
    PD_E_PEER = -20,     /* the other side is gone or broke the protocol */
    PD_E_MISMATCH = -21, /* the other side has another model, layout or version */
    /* worker */
    PD_E_IO = -40,
    PD_E_NOMEM = -41,
    PD_E_UNSUPPORTED = -42, /* this build or machine cannot do it */
    PD_E_INTERNAL = -43,
} pd_status;

/* A lower-case name such as "invalid"; never NULL. */
const char *pd_status_name(pd_status status);

/* On in release builds too: a promise between our own functions, never a check of outside input. */
#define pd_assert(condition)                                                                       \
    ((condition) ? (void)0 : pd_assert_failed(#condition, __FILE__, __LINE__))
__attribute__((noreturn)) void pd_assert_failed(const char *condition, const char *file, int line);

#ifdef __cplusplus
}
#endif

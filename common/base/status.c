#include "common/base/status.h"

#include <stdio.h>
#include <stdlib.h>

const char *pd_status_name(pd_status status)
{
    switch (status) {
    case PD_OK: return "ok";
    case PD_E_INVALID: return "invalid";
    case PD_E_TOO_LARGE: return "too_large";
    case PD_E_OVERLOAD: return "overload";
    case PD_E_NOT_FOUND: return "not_found";
    case PD_E_CANCELLED: return "cancelled";
    case PD_E_TIMEOUT: return "timeout";
    case PD_E_AGAIN: return "again";
    case PD_E_PEER: return "peer";
    case PD_E_MISMATCH: return "mismatch";
    case PD_E_IO: return "io";
    case PD_E_NOMEM: return "no_memory";
    case PD_E_UNSUPPORTED: return "unsupported";
    case PD_E_INTERNAL: return "internal";
    }
    return "unknown";
}

void pd_assert_failed(const char *condition, const char *file, int line)
{
    fprintf(stderr, "level=fatal msg=\"broken promise: %s\" at=%s:%d\n", condition, file, line);
    abort();
}

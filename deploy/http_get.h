#pragma once

/* deploy/http_get.h - one GET to a service on this host, for readiness and status.
 * Blocks up to timeout_ms. Any thread. */

#include "common/base/buf.h"
#include "common/config/deployment.h"

#include <stdint.h>

/* Asks listen's address (0.0.0.0 and :: stand for this host's loopback). On PD_OK *code_out is the
 * HTTP status and the body has been appended to body (bounded by body's maximum).
 * Errors: PD_E_PEER (nobody answers, or no HTTP), PD_E_TIMEOUT, PD_E_TOO_LARGE, PD_E_NOMEM,
 * PD_E_NOT_FOUND (the host's name). */
PD_CHECKED pd_status http_get(const pd_listen *listen, const char *path, int timeout_ms,
                              int *code_out, pd_buf *body);

/* Tries to bind the address as a server would. *port_out is the port (the one picked for 0).
 * Errors: PD_E_IO with why (errno's text), PD_E_NOT_FOUND. */
PD_CHECKED pd_status http_probe_listen(const char *host, uint16_t port, uint16_t *port_out,
                                       char why[128]);

#pragma once

/* common/transfer/lanes.h - what carries a connection, out of the text in which UCX tells it.
 * Inside common/transfer only. Pure. */

#include "common/base/status.h"

#include <stddef.h>

/* Collects "sysv+posix" from lines such as
 *   #   lane[0]:  1:sysv/memory.0 md[1]  -> md[1]/sysv/sysdev[255] am am_bw#0 keepalive
 * PD_E_INTERNAL when the text is not as known. */
PD_CHECKED pd_status pd_lanes_read(const char *text, char *lane, size_t size);

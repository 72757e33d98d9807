#pragma once

/* common/transfer/ucx_context.h - UCX made ready in this process: its version checked, its log
 * lines made ours, its signal handlers taken back, and a context with the lanes that are asked for.
 * Inside common/transfer only.
 *
 * Settings are given to UCX's configuration object, not to the process' environment. UCX 1.13
 * accepts any key here and tells only later, by a warning, that nobody wanted it. */

#include "common/transfer/transfer.h"

#include <ucp/api/ucp.h>

/* A send is done when its call returns, in this version: see send_message in ucx.c. */
#define SENDS_AT_ONCE (UCP_API_MINOR < 14)

/* Does cuda_ipc export memory that has a fabric handle? From the version on whose sources do, if it
 * was built with them: that it does not say. */
bool pd_ucx_knows_fabric(void);

/* Errors (logged): PD_E_MISMATCH (built for another version than the one that was loaded),
 * PD_E_UNSUPPORTED (a setting, transport or device that there is not). *context_out is NULL then.
 */
/* For a pool in a GPU's memory (options->pool_kind) this UCX must have support for such memory,
 * unless tcp carries it, as messages: else it is PD_E_UNSUPPORTED, and with transport "auto"
 * becomes "tcp" in *options, with a warning. A context of the GPU is current on the calling thread.
 */
PD_CHECKED pd_status pd_ucx_context_create(pd_transfer_options *options,
                                           ucp_context_h *context_out);

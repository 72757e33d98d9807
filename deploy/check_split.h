#pragma once

/* deploy/check_split.h - whether a deployment's model can be cut among the ranks it asks for,
 * before any worker is started. */

#include "common/config/deployment.h"

/* Opens the model file, if there are ranks and the file can be read; else there is nothing to say
 * yet. PD_E_INVALID: one line in why, "decode.tensor_parallel: 9 heads do not divide among 2
 * ranks". Another error: the file is no model (logged). */
PD_CHECKED pd_status check_split(const pd_deployment *deployment, char *why, size_t why_size);

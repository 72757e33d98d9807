#pragma once

/* kernels/model/runner.h - a worker's step plans on the model's engine. */

#include "common/worker/engine.h"

extern const pd_worker_engine_ops kern_runner;

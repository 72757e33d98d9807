#pragma once

/* kernels/model/sample.h - logits to a token, on the CPU.
 *
 * Deterministic: what is drawn depends on the logits and on (seed, choice, position) only. What it
 * is exactly, kernels/sampling.h says; GPUs draw the same tokens. */

#include "common/base/status.h"

#include <stdint.h>

typedef struct kern_sampling {
    float temperature; /* 0: the largest logit, the lowest id among equals */
    float top_p;       /* 1: off */
    uint32_t top_k;    /* 0: off */
    uint64_t seed;
    uint32_t choice; /* index among the choices of one request */
} kern_sampling;

/* logits: [vocab], finite, at most KERN_SAMPLE_VOCAB_MAX. scratch: [vocab] uint64_t, the caller's.
 * position: that of the token being drawn. Never fails. */
uint32_t kern_sample(const kern_sampling *sampling, const float *logits, uint32_t vocab,
                     uint32_t position, uint64_t *scratch);

#pragma once

/* common/base/spec_method.h - the ways of speculative decoding. Any thread. */

#include <stdint.h>

typedef enum pd_spec_method {
    PD_SPEC_OFF,
    PD_SPEC_PROMPT_LOOKUP, /* what followed the same tokens earlier in the text */
    PD_SPEC_DRAFT_MODEL,   /* a smaller model with the same vocabulary */
    PD_SPEC_LOOKAHEAD,     /* n-grams of a Jacobi iteration beside the text */
    PD_SPEC_METHODS,
} pd_spec_method;

/* As in YAML: "prompt_lookup"; "unknown" for a number that is none. */
const char *pd_spec_method_name(uint32_t method);

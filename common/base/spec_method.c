#include "common/base/spec_method.h"

const char *pd_spec_method_name(uint32_t method)
{
    static const char *const names[] = {"off", "prompt_lookup", "draft_model", "lookahead"};

    return method < PD_SPEC_METHODS ? names[method] : "unknown";
}

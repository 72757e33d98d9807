#include "kernels/backend.h"

#include "common/base/log.h"
#include "kernels/backends.h"
#include "kernels/number.h"

const kern_backend *kern_backend_at(uint32_t index)
{
    const kern_backend *found = kern_backends[0];

    for (uint32_t i = 0; i < index && found != NULL; i++)
        found = kern_backends[i + 1];
    return found;
}

static const kern_backend *choose_best(void)
{
    const kern_backend *best = NULL;
    char reason[128];
    int best_score = 0;

    for (uint32_t i = 0; kern_backends[i] != NULL; i++) {
        int score = kern_backends[i]->probe(reason, sizeof reason);
        if (score > best_score) {
            best = kern_backends[i];
            best_score = score;
        }
    }
    return best;
}

pd_status kern_backend_choose(const char *device, const kern_backend **backend_out)
{
    const kern_backend *backend = strcmp(device, "cpu") == 0 ? choose_best() : NULL;
    char reason[128] = "no such backend in this build";

    for (uint32_t i = 0; backend == NULL && kern_backends[i] != NULL; i++)
        if (strcmp(kern_backends[i]->name, device) == 0)
            backend = kern_backends[i];
    if (backend == NULL || backend->probe(reason, sizeof reason) == 0) {
        pd_log_error("msg=\"kernels: device not usable here\" device=%s reason=\"%s\"", device,
                     reason);
        return PD_E_UNSUPPORTED;
    }
    pd_assert(backend->abi == KERN_BACKEND_ABI && backend->struct_bytes == sizeof *backend);
    *backend_out = backend;
    return PD_OK;
}

static float half_at(pd_dtype dtype, const uint8_t *bytes)
{
    uint16_t half;

    memcpy(&half, bytes, sizeof half);
    return dtype == PD_BF16 ? kern_bf16_to_f32(half) : kern_f16_to_f32(half);
}

static void block_to_f32(pd_dtype dtype, const uint8_t *block, float *out)
{
    float d = half_at(PD_F16, block);

    for (int i = 0; i < KERN_BLOCK; i++) {
        int shift = i < 16 ? 0 : 4;
        switch (dtype) {
        case PD_Q8_0: out[i] = (float)(int8_t)block[2 + i] * d; break;
        case PD_Q4_0: out[i] = (float)((block[2 + i % 16] >> shift & 15) - 8) * d; break;
        default:
            out[i] = (float)(block[4 + i % 16] >> shift & 15) * d + half_at(PD_F16, block + 2);
            break;
        }
    }
}

void kern_row_to_f32(pd_dtype dtype, const void *row, uint32_t cols, float *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    const uint8_t *bytes = row;

    pd_assert(dtype <= PD_Q8_0 && cols % info->block_weights == 0);
    if (dtype == PD_F32) {
        memcpy(out, row, cols * sizeof *out);
        return;
    }
    for (uint32_t col = 0; col < cols; col += info->block_weights, bytes += info->block_bytes) {
        if (info->block_weights == 1)
            out[col] = half_at(dtype, bytes);
        else
            block_to_f32(dtype, bytes, out + col);
    }
}

#include "kernels/ops.h"

#include "common/base/log.h"
#include "kernels/number.h"
#include "kernels/ops_list.h"

const kern_ops *kern_ops_at(uint32_t index)
{
    const kern_ops *found = kern_ops_list[0];

    for (uint32_t i = 0; i < index && found != NULL; i++)
        found = kern_ops_list[i + 1];
    return found;
}

static const kern_ops *choose_best(void)
{
    const kern_ops *best = NULL;
    char reason[128];
    int best_score = 0;

    for (uint32_t i = 0; kern_ops_list[i] != NULL; i++) {
        int score = kern_ops_list[i]->probe(reason, sizeof reason);
        if (score > best_score) {
            best = kern_ops_list[i];
            best_score = score;
        }
    }
    return best;
}

pd_status kern_ops_choose(const char *device, const kern_ops **ops_out)
{
    const kern_ops *ops = strcmp(device, "cpu") == 0 ? choose_best() : NULL;
    char reason[128] = "no such instruction set in this build";

    for (uint32_t i = 0; ops == NULL && kern_ops_list[i] != NULL; i++)
        if (strcmp(kern_ops_list[i]->name, device) == 0)
            ops = kern_ops_list[i];
    if (ops == NULL || ops->probe(reason, sizeof reason) == 0) {
        pd_log_error("msg=\"kernels: device not usable here\" device=%s reason=\"%s\"", device,
                     reason);
        return PD_E_UNSUPPORTED;
    }
    *ops_out = ops;
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

/* What the lanes of a warp do together; the last to come computes it for all. Fragments are laid
 * out as in the PTX ISA, "Matrix Fragments for mma.m16n8k16" and ".m16n8k32", and "ldmatrix". */

#include "kernels/cuda/emu/block.h"
#include "kernels/cuda/emu/check.h"

#include "kernels/number.h"

#include <string.h>

static unsigned lane_of(emu_op *const ops[EMU_LANES], unsigned from)
{
    while (ops[from] == NULL)
        from++;
    return from;
}

static void shuffle(emu_op *ops[EMU_LANES], emu_kind kind)
{
    uint64_t values[EMU_LANES] = {0};

    for (unsigned i = 0; i < EMU_LANES; i++)
        if (ops[i] != NULL)
            values[i] = ops[i]->value;
    for (unsigned i = 0; i < EMU_LANES; i++) {
        if (ops[i] == NULL)
            continue;
        uint32_t number = ops[i]->number;
        unsigned from = i; /* past the warp's end: the lane's own */
        if (kind == EMU_SHUFFLE)
            from = number % EMU_LANES;
        else if (kind == EMU_SHUFFLE_XOR && number < EMU_LANES)
            from = i ^ number;
        else if (kind == EMU_SHUFFLE_DOWN && number < EMU_LANES - i)
            from = i + number;
        else if (kind == EMU_SHUFFLE_UP && number <= i)
            from = i - number;
        if (ops[from] == NULL)
            emu_fail(ops[i]->file, ops[i]->line,
                     "lane %u reads lane %u, which mask %08x leaves out", i, from, ops[i]->mask);
        ops[i]->value = values[from];
    }
}

static void ballot(emu_op *ops[EMU_LANES])
{
    uint64_t votes = 0;

    for (unsigned i = 0; i < EMU_LANES; i++)
        if (ops[i] != NULL && ops[i]->value != 0)
            votes |= 1u << i;
    for (unsigned i = 0; i < EMU_LANES; i++)
        if (ops[i] != NULL)
            ops[i]->value = votes;
}

static float f16_values[65536];

static const float *f16_table(void)
{
    if (f16_values[1] == 0)
        for (uint32_t i = 0; i < 65536; i++)
            f16_values[i] = kern_f16_to_f32((uint16_t)i);
    return f16_values;
}

static void unpack(float out[2], uint32_t pair, const float *table)
{
    uint16_t lo = (uint16_t)pair, hi = (uint16_t)(pair >> 16);

    out[0] = table != NULL ? table[lo] : kern_bf16_to_f32(lo);
    out[1] = table != NULL ? table[hi] : kern_bf16_to_f32(hi);
}

/* Products are exact in f64 and their sum nearly so: what a tensor core does to the last bits is
 * its own affair. A row of the result depends on that row of a alone. */
static void mma_halves(emu_op *ops[EMU_LANES], const float *table)
{
    float a[16][16], b[16][8];

    for (unsigned lane = 0; lane < EMU_LANES; lane++) {
        unsigned g = lane / 4, t = lane % 4;
        const uint32_t *ra = static_cast<const uint32_t *>(ops[lane]->a);
        const uint32_t *rb = static_cast<const uint32_t *>(ops[lane]->b);
        unpack(&a[g][2 * t], ra[0], table);
        unpack(&a[g + 8][2 * t], ra[1], table);
        unpack(&a[g][2 * t + 8], ra[2], table);
        unpack(&a[g + 8][2 * t + 8], ra[3], table);
        for (unsigned i = 0; i < 2; i++) {
            float pair[2];
            unpack(pair, rb[i], table);
            b[2 * t + 8 * i][g] = pair[0];
            b[2 * t + 8 * i + 1][g] = pair[1];
        }
    }
    for (unsigned row = 0; row < 16; row++) {
        double sums[8] = {0};
        for (unsigned k = 0; k < 16; k++)
            for (unsigned n = 0; n < 8; n++)
                sums[n] += (double)a[row][k] * (double)b[k][n];
        for (unsigned n = 0; n < 8; n++) {
            float *c = static_cast<float *>(ops[row % 8 * 4 + n / 2]->out);
            float *at = &c[row / 8 * 2 + n % 2];
            *at = (float)((double)*at + sums[n]);
        }
    }
}

static void mma_s8(emu_op *ops[EMU_LANES])
{
    int8_t a[16][32], b[8][32];

    for (unsigned lane = 0; lane < EMU_LANES; lane++) {
        unsigned g = lane / 4, t = lane % 4;
        const uint32_t *ra = static_cast<const uint32_t *>(ops[lane]->a);
        const uint32_t *rb = static_cast<const uint32_t *>(ops[lane]->b);
        memcpy(&a[g][4 * t], &ra[0], 4);
        memcpy(&a[g + 8][4 * t], &ra[1], 4);
        memcpy(&a[g][4 * t + 16], &ra[2], 4);
        memcpy(&a[g + 8][4 * t + 16], &ra[3], 4);
        memcpy(&b[g][4 * t], &rb[0], 4);
        memcpy(&b[g][4 * t + 16], &rb[1], 4);
    }
    for (unsigned row = 0; row < 16; row++)
        for (unsigned n = 0; n < 8; n++) {
            int32_t sum = 0;
            for (unsigned k = 0; k < 32; k++)
                sum += (int32_t)a[row][k] * b[n][k];
            int32_t *c = static_cast<int32_t *>(ops[row % 8 * 4 + n / 2]->out);
            int32_t *at = &c[row / 8 * 2 + n % 2];
            *at = (int32_t)((uint32_t)*at + (uint32_t)sum);
        }
}

static void ldmatrix(emu_op *ops[EMU_LANES], unsigned matrices, bool transposed)
{
    unsigned first = emu_self->linear / EMU_LANES * EMU_LANES;
    uint16_t m[8][8];

    for (unsigned i = 0; i < matrices * 8; i++) {
        const void *row = ops[i]->a;
        if (((uintptr_t)row & 15) != 0)
            emu_fail(ops[i]->file, ops[i]->line,
                     "ldmatrix: the row of lane %u is not 16-byte aligned", i);
        if (!emu_is_shared(row, 16))
            emu_fail(ops[i]->file, ops[i]->line,
                     "ldmatrix: the row of lane %u is not in shared memory", i);
        emu_check_access_of(first + i, row, 16, EMU_READ, ops[i]->file, ops[i]->line);
    }
    for (unsigned j = 0; j < matrices; j++) {
        for (unsigned row = 0; row < 8; row++)
            memcpy(m[row], ops[j * 8 + row]->a, 16);
        for (unsigned lane = 0; lane < EMU_LANES; lane++) {
            unsigned g = lane / 4, t = lane % 4;
            uint32_t lo = transposed ? m[2 * t][g] : m[g][2 * t];
            uint32_t hi = transposed ? m[2 * t + 1][g] : m[g][2 * t + 1];
            static_cast<uint32_t *>(ops[lane]->out)[j] = lo | hi << 16;
        }
    }
}

void emu_collective_compute(emu_op *ops[EMU_LANES])
{
    emu_kind kind = ops[lane_of(ops, 0)]->kind;

    switch (kind) {
    case EMU_SYNC_WARP: emu_check_sync_warp(ops[lane_of(ops, 0)]->mask); break;
    case EMU_SHUFFLE:
    case EMU_SHUFFLE_XOR:
    case EMU_SHUFFLE_DOWN:
    case EMU_SHUFFLE_UP: shuffle(ops, kind); break;
    case EMU_BALLOT: ballot(ops); break;
    case EMU_MMA_F16: mma_halves(ops, f16_table()); break;
    case EMU_MMA_BF16: mma_halves(ops, NULL); break;
    case EMU_MMA_S8: mma_s8(ops); break;
    case EMU_LDMATRIX_X1: ldmatrix(ops, 1, false); break;
    case EMU_LDMATRIX_X2: ldmatrix(ops, 2, false); break;
    case EMU_LDMATRIX_X4: ldmatrix(ops, 4, false); break;
    case EMU_LDMATRIX_X2_TRANS: ldmatrix(ops, 2, true); break;
    case EMU_LDMATRIX_X4_TRANS: ldmatrix(ops, 4, true); break;
    }
}

#include "tests/gpu-emu/planted.h"

#include "kernels/cuda/words.h"

/* A launcher for each number that the template takes. */
#define PLANTS(kernel, ...)                                                                        \
    switch (plant) {                                                                               \
    case 0: return CU_LAUNCH(kernel<0>, __VA_ARGS__);                                              \
    case 1: return CU_LAUNCH(kernel<1>, __VA_ARGS__);                                              \
    case 2: return CU_LAUNCH(kernel<2>, __VA_ARGS__);                                              \
    case 3: return CU_LAUNCH(kernel<3>, __VA_ARGS__);                                              \
    case 4: return CU_LAUNCH(kernel<4>, __VA_ARGS__);                                              \
    case 5: return CU_LAUNCH(kernel<5>, __VA_ARGS__);                                              \
    case 6: return CU_LAUNCH(kernel<6>, __VA_ARGS__);                                              \
    case 7: return CU_LAUNCH(kernel<7>, __VA_ARGS__);                                              \
    case 8: return CU_LAUNCH(kernel<8>, __VA_ARGS__);                                              \
    case 9: return CU_LAUNCH(kernel<9>, __VA_ARGS__);                                              \
    default: return CU_LAUNCH(kernel<10>, __VA_ARGS__);                                            \
    }

template <int PLANT> CU_KERNEL(128, 1) reverse_kernel(const float *in, float *out)
{
    CU_SHARED float tile[128];
    uint32_t i = threadIdx.x, at = blockIdx.x * 128;

    tile[i] = cu_load<float>(in + at + i);
    if constexpr (PLANT == 1) /* no barrier at all */
        (void)0;
    else if constexpr (PLANT == 2) { /* half of the block: the others end, and are not waited for */
        if (i < 64)
            cu_sync();
    } else if constexpr (PLANT == 3) { /* two barriers where one was meant */
        if (i < 64)
            cu_sync();
        else
            cu_sync();
    } else
        cu_sync();
    cu_store(out + at + i, tile[127 - i]);
}

pd_status planted_reverse(gpu_stream *stream, int plant, uint32_t count, const float *in,
                          float *out){
    PLANTS(reverse_kernel, dim3(count / 128), dim3(128), 0, stream, in, out)}

/* Each of 4 warps computes 16 rows; k in steps of 16, two stages of both tiles. Rows of 16 halves
 * are 48 bytes apart, so that ldmatrix meets no bank twice. */
#define GEMM_STRIDE 24

CU_DEVICE void gemm_fill(uint16_t *tile, const uint16_t *from, uint32_t k)
{
    uint32_t row = threadIdx.x / 2, col = threadIdx.x % 2 * 8;

    /* wavefronts 2: 8 lanes are 4 rows, and the fourth lies on the first one's banks */
    cu_async_16(tile + row * GEMM_STRIDE + col, from + row * 64 + k + col, true);
}

template <int PLANT> CU_KERNEL(128, 1) gemm_kernel(const uint16_t *a, const uint16_t *b, float *c)
{
    CU_SHARED_DYNAMIC(bytes);
    uint16_t *tiles = (uint16_t *)bytes; /* [stage][a, b][64][GEMM_STRIDE] */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[8][4] = {};

    gemm_fill(tiles, a, 0);
    gemm_fill(tiles + 64 * GEMM_STRIDE, b, 0);
    cu_async_commit();
    for (uint32_t k = 0; k < 64; k += 16) {
        uint16_t *now = tiles + k / 16 % 2 * (128 * GEMM_STRIDE);
        uint16_t *then = tiles + (k / 16 + 1) % 2 * (128 * GEMM_STRIDE);
        if (k + 16 < 64) {
            gemm_fill(then, a, k + 16);
            gemm_fill(then + 64 * GEMM_STRIDE, b, k + 16);
        }
        cu_async_commit();
        if constexpr (PLANT == 1) /* one group too many may be under way */
            cu_async_wait<2>();
        else
            cu_async_wait<1>();
        if constexpr (PLANT != 2) /* others' copies are not waited for */
            cu_sync();
        uint32_t fa[4];
        uint32_t row = warp * 16 + lane % 16, half = lane / 16 * 8;
        const uint16_t *row_at = now + row * GEMM_STRIDE + half;
        if constexpr (PLANT == 4) /* no multiple of 16 bytes */
            row_at += lane == 5;
        if constexpr (PLANT == 5) /* device memory */
            row_at = lane == 5 ? a : row_at;
        cu_ldmatrix_x4(fa, row_at);
        for (uint32_t n = 0; n < 8; n++) {
            uint32_t fb[2];
            const uint16_t *tile_b = now + 64 * GEMM_STRIDE;
            cu_ldmatrix_x2(fb, tile_b + (n * 8 + lane % 8) * GEMM_STRIDE + lane / 8 % 2 * 8);
            cu_mma_f16(sums[n], fa, fb);
        }
        if constexpr (PLANT != 3) /* the buffer is refilled while others read it */
            cu_sync();
    }
    for (uint32_t n = 0; n < 8; n++)
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t row = warp * 16 + lane / 4 + i * 8, col = n * 8 + lane % 4 * 2;
            cu_store(c + row * 64 + col, float2{sums[n][2 * i], sums[n][2 * i + 1]});
        }
}

pd_status planted_gemm(gpu_stream *stream, int plant, const uint16_t *a, const uint16_t *b,
                       float *c)
{
    uint64_t shared = 2 * 2 * 64 * GEMM_STRIDE * sizeof(uint16_t);

    PLANTS(gemm_kernel, dim3(1), dim3(128), shared, stream, a, b, c)
}

template <int PLANT> CU_KERNEL(128, 1) warps_kernel(const float *in, float *out)
{
    CU_SHARED float values[4][32];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t mask = CU_ALL;
    float *mine = values[warp];

    if (PLANT != 10 || threadIdx.x > 0) /* 10: reads what nobody wrote; it would be 0 */
        mine[lane] = cu_load<float>(in + threadIdx.x);
    if constexpr (PLANT == 1) /* a ballot orders no memory */
        cu_ballot(CU_ALL, true);
    else if constexpr (PLANT == 2) /* half of the warp */
        cu_sync_warp(lane < 16 ? 0x0000ffffu : 0xffff0000u);
    else
        cu_sync_warp(CU_ALL);
    float sum = mine[31 - lane];
    if constexpr (PLANT == 3) /* without itself */
        mask = CU_ALL ^ 1u << lane;
    if constexpr (PLANT == 4) /* each half another mask, each naming the other half's lanes */
        mask = lane < 16 ? CU_ALL : 0xfffffff0u;
    if constexpr (PLANT == 5) /* a lane ends before the others are done */
        if (lane == 7)
            return;
    for (uint32_t bits = 16; bits > 0; bits /= 2) {
        if constexpr (PLANT == 6) { /* two operations where one was meant */
            if (lane < 16)
                sum += cu_shuffle_xor(mask, sum, bits);
            else
                sum += cu_shuffle_down(mask, sum, bits);
        } else
            sum += cu_shuffle_xor(mask, sum, bits);
    }
    if constexpr (PLANT == 7) { /* reads a lane that the mask leaves out */
        if (lane < 16)
            sum += 0 * cu_shuffle(0x0000ffffu, sum, 16);
    }
    if constexpr (PLANT == 8) { /* some at the block's barrier, some at the warp's */
        if (lane < 16)
            cu_sync();
        else
            cu_sync_warp(CU_ALL);
    }
    if constexpr (PLANT == 9) /* a float that is read as two */
        sum += cu_load<float2>(in + 1).x * 0;
    if (lane == 0)
        cu_store(out + warp, sum);
}

pd_status planted_warps(gpu_stream *stream, int plant, const float *in, float *out)
{
    PLANTS(warps_kernel, dim3(1), dim3(128), 0, stream, in, out)
}

#define RING_STAGES 3
#define RING_FLOATS 256

template <int PLANT> CU_KERNEL(160, 1) ring_kernel(uint32_t pages, const float *in, float *out)
{
    CU_SHARED_DYNAMIC(bytes);
    float *ring = (float *)bytes; /* [RING_STAGES][RING_FLOATS] */
    CU_SHARED cu_barrier full[RING_STAGES], empty[RING_STAGES];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < RING_STAGES; i++) {
            cu_barrier_init(&full[i], 1);
            cu_barrier_init(&empty[i], 4);
        }
        cu_fence_barrier();
    }
    cu_sync();
    if (warp == 4) {
        for (uint32_t page = 0; page < pages && lane == 0; page++) {
            uint32_t stage = page % RING_STAGES;
            if constexpr (PLANT != 1) /* refills what may still be read */
                cu_barrier_wait(&empty[stage], (page / RING_STAGES + 1) % 2);
            if constexpr (PLANT == 6) /* expects less than comes */
                cu_barrier_expect(&full[stage], RING_FLOATS * 2);
            else
                cu_barrier_expect(&full[stage], RING_FLOATS * 4);
            cu_bulk_copy(ring + stage * RING_FLOATS, in + page * RING_FLOATS, RING_FLOATS * 4,
                         &full[stage]);
        }
        return;
    }
    float sums[2] = {};
    for (uint32_t page = 0; page < pages; page++) {
        uint32_t stage = page % RING_STAGES;
        if constexpr (PLANT != 2) /* reads what has not come */
            cu_barrier_wait(&full[stage], page / RING_STAGES % 2);
        for (uint32_t i = 0; i < 2; i++)
            sums[i] += ring[stage * RING_FLOATS + threadIdx.x + 128 * i];
        if constexpr (PLANT != 3) /* one lane says that all have read */
            cu_sync_warp(CU_ALL);
        if (lane == 0 && !(PLANT == 4 && warp == 2)) /* one arrival is left out */
            cu_barrier_arrive(&empty[stage]);
        if (PLANT == 5 && lane == 1) /* one too many */
            cu_barrier_arrive(&empty[stage]);
    }
    for (uint32_t i = 0; i < 2; i++)
        cu_store(out + threadIdx.x + 128 * i, sums[i]);
}

pd_status planted_ring(gpu_stream *stream, int plant, uint32_t pages, const float *in, float *out)
{
    PLANTS(ring_kernel, dim3(1), dim3(160), RING_STAGES * RING_FLOATS * 4, stream, pages, in, out)
}

template <int PLANT>
CU_KERNEL(256, 1)
total_kernel(uint32_t count, const uint32_t *in, uint32_t *total)
{
    CU_SHARED uint32_t sum;
    uint32_t at = blockIdx.x * 256 + threadIdx.x;

    if (threadIdx.x == 0)
        sum = 0;
    cu_sync();
    if (at < count + (PLANT == 1)) /* reads one past the end */
        cu_atomic_add(&sum, cu_load<uint32_t>(in + at));
    cu_sync();
    if (threadIdx.x > 0)
        return;
    if constexpr (PLANT == 2) /* blocks read and write one word */
        cu_store(total, cu_load<uint32_t>(total) + sum);
    else
        cu_atomic_add(total, sum);
    if constexpr (PLANT == 3) /* writes one past the end */
        if (blockIdx.x == 0)
            total[1] = 5;
    if constexpr (PLANT == 4) /* and before it */
        if (blockIdx.x == 0)
            cu_store(total - 1, 5u);
    if constexpr (PLANT == 5) { /* shared memory that the launch did not ask for */
        CU_SHARED_DYNAMIC(bytes);
        bytes[0] = 1;
    }
}

pd_status planted_total(gpu_stream *stream, int plant, uint32_t count, const uint32_t *in,
                        uint32_t *total)
{
    PLANTS(total_kernel, dim3((count + 255) / 256), dim3(256), 0, stream, count, in, total)
}

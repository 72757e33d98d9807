/* Products on matrix tiles: what the tiles in plain C compute, what they refuse, and that the code
 * for the processor's own tiles gives the reference's bits also where a processor has none: each of
 * its instructions traps there, and is carried out here on the tiles in plain C. */

#include "kernels/cpu/ops_list.h"
#include "kernels/cpu/tile_plain.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- tiles in plain C ---- */

static void plain_dots_are_sums_of_products(void **state)
{
    static tile_state tiles;
    static int8_t x[16][64];
    static int8_t w[16][64];
    uint64_t random = 9;

    (void)state;
    for (uint32_t round = 0; round < 300; round++) {
        uint32_t rows = 1 + (uint32_t)(pd_random_next(&random) % 16);
        uint32_t runs = 1 + (uint32_t)(pd_random_next(&random) % 16);
        uint32_t cols = 1 + (uint32_t)(pd_random_next(&random) % 16);
        int32_t sums[16][16] = {{0}};
        tile_config config = {
            .palette = 1,
            .row_bytes = {(uint16_t)(4 * cols), (uint16_t)(4 * runs), (uint16_t)(4 * cols)},
            .rows = {(uint8_t)rows, (uint8_t)rows, (uint8_t)runs}};
        for (uint32_t i = 0; i < 16 * 64; i++) { /* the largest products now and then */
            x[i / 64][i % 64] = round % 7 == 0 ? -128 : (int8_t)pd_random_next(&random);
            w[i / 64][i % 64] = round % 7 == 0 ? -128 : (int8_t)pd_random_next(&random);
        }
        TILE_CONFIGURE(&tiles, &config);
        TILE_ZERO(&tiles, 0);
        TILE_LOAD(&tiles, 1, x, 64);
        TILE_LOAD(&tiles, 2, w, 64);
        TILE_DOT(&tiles, 0, 1, 2);
        TILE_DOT(&tiles, 0, 1, 2);
        TILE_STORE(&tiles, 0, sums, 64);
        for (uint32_t row = 0; row < 16; row++)
            for (uint32_t col = 0; col < 16; col++) {
                int32_t sum = 0;
                for (uint32_t k = 0; k < 4 * runs && row < rows && col < cols; k++)
                    sum += 2 * x[row][k] * w[k / 4][4 * col + k % 4];
                assert_int_equal(sums[row][col], sum);
            }
    }
}

/* Runs it in a child: a wrong use of tiles ends the process. */
static bool ends(void (*wrong)(tile_state *tiles, tile_config *config))
{
    tile_config config = {.palette = 1, .row_bytes = {64, 32, 64, 64}, .rows = {16, 16, 8, 4}};
    int status = 0;
    pid_t child = fork();

    if (child == 0) {
        tile_state tiles;
        if (freopen("/dev/null", "w", stderr) == NULL)
            _exit(1);
        signal(SIGABRT, SIG_DFL);
        TILE_CONFIGURE(&tiles, &config);
        TILE_DOT(&tiles, 0, 1, 2);
        wrong(&tiles, &config);
        _exit(0);
    }
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    return !WIFEXITED(status);
}

static void nothing(tile_state *tiles, tile_config *config)
{
    (void)tiles, (void)config;
}
static void one_tile_twice(tile_state *tiles, tile_config *config)
{
    (void)config;
    TILE_DOT(tiles, 0, 1, 1);
}
static void shapes_that_do_not_fit(tile_state *tiles, tile_config *config)
{
    (void)config;
    TILE_DOT(tiles, 0, 1, 3);
}
static void no_such_tile(tile_state *tiles, tile_config *config)
{
    (void)config;
    TILE_ZERO(tiles, 4);
}
static void rows_too_long(tile_state *tiles, tile_config *config)
{
    config->row_bytes[0] = 65;
    TILE_CONFIGURE(tiles, config);
}
static void reserved_bytes(tile_state *tiles, tile_config *config)
{
    config->reserved[13] = 1;
    TILE_CONFIGURE(tiles, config);
}

static void what_the_instructions_would_not_do_ends_the_process(void **state)
{
    (void)state;
    assert_false(ends(nothing));
    assert_true(ends(one_tile_twice));
    assert_true(ends(shapes_that_do_not_fit));
    assert_true(ends(no_such_tile));
    assert_true(ends(rows_too_long));
    assert_true(ends(reserved_bytes));
}

/* ---- the processor's instructions, trapped ---- */

static tile_state trapped_tiles;
static uint64_t trapped_count;

static uint64_t register_of(const ucontext_t *context, uint32_t number)
{
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                   REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                   REG_R12, REG_R13, REG_R14, REG_R15};

    return (uint64_t)context->uc_mcontext.gregs[places[number]];
}

typedef struct instruction {
    uint32_t opcode, prefix; /* 0 none, 2 F3, 3 F2 */
    bool is_memory;
    uint32_t reg, rm, third; /* tiles */
    uint8_t *base;
    uint64_t stride;
    uint32_t bytes;
} instruction;

/* A three-byte VEX prefix of map 0F38, ModRM, SIB, displacement. */
static bool decode(const ucontext_t *context, instruction *out)
{
    const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    uint32_t mod = at[4] >> 6, bytes = 5;
    int32_t displacement = 0;

    if (at[0] != 0xc4 || (at[1] & 31) != 2)
        return false;
    uint32_t index_high = (~at[1] >> 6 & 1) << 3, base_high = (~at[1] >> 5 & 1) << 3;
    *out = (instruction){.opcode = at[3],
                         .prefix = at[2] & 3,
                         .is_memory = mod != 3,
                         .reg = at[4] >> 3 & 7,
                         .rm = at[4] & 7,
                         .third = ~at[2] >> 3 & 15};
    if (mod != 3) {
        uint32_t base = out->rm;
        if (out->rm == 4) {
            uint8_t sib = at[bytes++];
            uint32_t index = (sib >> 3 & 7) | index_high;
            out->stride = index == 4 ? 0 : register_of(context, index) << (sib >> 6);
            base = sib & 7;
        }
        if (mod == 0 && base == 5)
            return false; /* of the instruction's own place: not what this code has */
        if (mod == 1)
            displacement = (int8_t)at[bytes++];
        if (mod == 2) {
            memcpy(&displacement, at + bytes, 4);
            bytes += 4;
        }
        out->base =
            (uint8_t *)(register_of(context, base | base_high) + (uint64_t)(int64_t)displacement);
    }
    out->bytes = bytes;
    return true;
}

static bool carry_out(const instruction *is)
{
    tile_state *tiles = &trapped_tiles;

    switch (is->opcode << 4 | is->prefix << 1 | is->is_memory) {
    case 0x49 << 4 | 0 << 1 | 1: {
        tile_config config;
        memcpy(&config, is->base, sizeof config);
        tile_plain_configure(tiles, &config);
        return true;
    }
    case 0x49 << 4 | 0 << 1 | 0: TILE_RELEASE(tiles); return true;
    case 0x49 << 4 | 3 << 1 | 0: tile_plain_zero(tiles, is->reg); return true;
    case 0x4b << 4 | 3 << 1 | 1: tile_plain_load(tiles, is->reg, is->base, is->stride); return true;
    case 0x4b << 4 | 2 << 1 | 1:
        tile_plain_store(tiles, is->reg, is->base, is->stride);
        return true;
    case 0x5e << 4 | 3 << 1 | 0: tile_plain_dot(tiles, is->reg, is->rm, is->third); return true;
    case 0x5c << 4 | 2 << 1 | 0:
        tile_plain_dot_bf16(tiles, is->reg, is->rm, is->third);
        return true;
    default: return false;
    }
}

static void on_illegal(int number, siginfo_t *info, void *context_of)
{
    ucontext_t *context = context_of;
    instruction is;

    (void)info;
    if (!decode(context, &is) || !carry_out(&is)) {
        signal(number, SIG_DFL); /* no tile's: comes again, and ends the test */
        return;
    }
    context->uc_mcontext.gregs[REG_RIP] += is.bytes;
    trapped_count++;
}

static void check_native(pd_dtype dtype, uint32_t rows, uint32_t cols, uint32_t segments,
                         uint32_t acts_rows)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    const kern_ops *ref = kern_ops_at(0);
    size_t count = (size_t)acts_rows * cols;
    uint8_t *weights = malloc((size_t)rows * (cols / info->block_weights) * info->block_bytes);
    void *packed = aligned_alloc(64, kern_ops_amx.pack_bytes(dtype, rows, cols));
    kern_acts acts = {.cols = cols,
                      .values = malloc(count * 4),
                      .quants = malloc(count),
                      .scales = malloc(count / 8),
                      .sums = malloc(count / 8),
                      .quant_sums = malloc(count / 8),
                      .low_sums = malloc(count / 8)};
    float *out[2] = {calloc(acts_rows * (size_t)rows, 4), calloc(acts_rows * (size_t)rows, 4)};
    float *places[2][64];
    uint64_t random = cols + acts_rows;

    tiny_fill(dtype, rows + cols, rows, cols, weights);
    kern_ops_amx.pack(dtype, rows, cols, weights, packed);
    for (size_t i = 0; i < count; i++)
        acts.values[i] = tiny_random(&random);
    for (uint32_t n = 0; n < acts_rows; n++) {
        ref->quantize(&acts, n, 0, cols);
        places[0][n] = out[0] + (size_t)n * rows;
        places[1][n] = out[1] + (size_t)n * rows;
    }
    kern_matrix matrix = {
        .dtype = dtype, .rows = rows, .cols = cols, .segments = segments, .data = weights};
    ref->matmul(&matrix, 0, rows, &acts, 0, acts_rows, places[0], true);
    matrix.data = packed;
    kern_amx_matmul(&matrix, 0, rows, &acts, 0, acts_rows, places[1], true);
    assert_memory_equal(out[0], out[1], (size_t)acts_rows * rows * sizeof(float));
    free(weights);
    free(packed);
    free(acts.values);
    free(acts.quants);
    free(acts.scales);
    free(acts.sums);
    free(acts.quant_sums);
    free(acts.low_sums);
    free(out[0]);
    free(out[1]);
}

static void native_products_are_the_references(void **state)
{
    const struct sigaction trap = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO};
    struct sigaction before;
    char reason[128];

    (void)state;
    if (kern_probe_avx512(reason, sizeof reason) == 0) {
        print_message("# skipped: %s\n", reason);
        skip();
    }
    bool has_tiles = kern_probe_amx(reason, sizeof reason) > 0;
    print_message("# AMX here: %s\n", reason);
    assert_int_equal(sigaction(SIGILL, &trap, &before), 0);
    for (pd_dtype dtype = PD_Q4_0; dtype <= PD_Q6_K; dtype++) {
        check_native(dtype, 37, 768, 1, 16);
        check_native(dtype, 17, 512, 4, 35);
        check_native(dtype, 16, 1280, 5, 64);
    }
    assert_int_equal(sigaction(SIGILL, &before, NULL), 0);
    assert_true(has_tiles == (trapped_count == 0));
}

static void tiles_in_plain_c_are_never_chosen_by_themselves(void **state)
{
    const kern_ops *best = NULL;

    (void)state;
    assert_int_equal(kern_ops_choose("cpu", &best), PD_OK);
    assert_true(best != &kern_ops_amx_plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_dots_are_sums_of_products),
        cmocka_unit_test(what_the_instructions_would_not_do_ends_the_process),
        cmocka_unit_test(native_products_are_the_references),
        cmocka_unit_test(tiles_in_plain_c_are_never_chosen_by_themselves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

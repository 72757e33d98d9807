/* Products on matrix tiles: what the tiles in plain C compute, what they refuse, and that the code
 * for the processor's own tiles gives the reference's bits also where a processor has none: each of
 * its instructions traps there, and is carried out here on the tiles in plain C. Where one has
 * them: that threads, signals and children do not get at one another's. */

#include "kernels/cpu/ops_list.h"
#include "kernels/cpu/tile_plain.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
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

/* A product to be made: its matrix packed, activations, and what the reference makes of them. */
typedef struct sample {
    kern_matrix matrix;
    kern_acts acts;
    uint32_t row_first, rows, acts_rows;
    void *packed;
    float *expected;
    size_t out_bytes;
} sample;

static void multiply(const sample *s, const kern_ops *ops, float *out)
{
    float *places[128];

    for (uint32_t n = 0; n < s->acts_rows; n++)
        places[n] = out + (size_t)n * s->matrix.rows;
    ops->matmul(&s->matrix, s->row_first, s->rows, &s->acts, 0, s->acts_rows, places, true);
}

static sample make_sample(pd_dtype dtype, uint32_t rows, uint32_t cols, uint32_t segments,
                          uint32_t acts_rows)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    const kern_ops *ref = kern_ops_at(0);
    size_t count = (size_t)acts_rows * cols;
    uint8_t *weights = malloc((size_t)rows * (cols / info->block_weights) * info->block_bytes);
    uint64_t random = cols + acts_rows;
    sample s = {
        .matrix = {.dtype = dtype, .rows = rows, .cols = cols, .segments = segments},
        .acts = {.cols = cols,
                 .values = malloc(count * 4),
                 .quants = malloc(count),
                 .scales = malloc(count / 8),
                 .sums = malloc(count / 8),
                 .quant_sums = malloc(count / 8),
                 .low_sums = malloc(count / 8)},
        .acts_rows = acts_rows,
        .packed = aligned_alloc(64, kern_ops_amx.pack_bytes(dtype, rows, cols)),
        .out_bytes = (size_t)acts_rows * rows * sizeof(float),
    };

    tiny_fill(dtype, rows + cols, rows, cols, weights);
    kern_ops_amx.pack(dtype, rows, cols, weights, s.packed);
    for (size_t i = 0; i < count; i++)
        s.acts.values[i] = tiny_random(&random);
    for (uint32_t n = 0; n < acts_rows; n++)
        ref->quantize(&s.acts, n, 0, cols);
    s.expected = calloc(1, s.out_bytes);
    s.matrix.data = weights;
    if (segments == 4) { /* a part of the columns, not from the first on */
        s.matrix.segment_from = 1;
        s.matrix.segment_count = 2;
    }
    s.row_first = rows > 32 ? 16 : 0;
    s.rows = rows - s.row_first;
    multiply(&s, ref, s.expected);
    s.matrix.data = s.packed;
    free(weights);
    return s;
}

static void free_sample(sample *s)
{
    free(s->acts.values);
    free(s->acts.quants);
    free(s->acts.scales);
    free(s->acts.sums);
    free(s->acts.quant_sums);
    free(s->acts.low_sums);
    free(s->packed);
    free(s->expected);
}

static bool is_right(const sample *s)
{
    float *out = calloc(1, s->out_bytes);
    multiply(s, &kern_ops_amx, out);
    bool same = memcmp(out, s->expected, s->out_bytes) == 0;

    free(out);
    return same;
}

static void check_native(pd_dtype dtype, uint32_t rows, uint32_t cols, uint32_t segments,
                         uint32_t acts_rows)
{
    sample s = make_sample(dtype, rows, cols, segments, acts_rows);
    bool right = is_right(&s);

    if (!right)
        print_message("# wrong: format %d, %u x %u in %u, %u rows\n", (int)dtype, rows, cols,
                      segments, acts_rows);
    free_sample(&s);
    assert_true(right);
}

static void native_products_are_the_references(void **state)
{
    const struct sigaction trap = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO};
    /* what 16 leave over: none, few, half, most; more than a group of 64 */
    const uint32_t acts_rows[] = {12, 15, 16, 17, 21, 24, 25, 64, 77};
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
        check_native(dtype, 16, 1280, 2, 64);
        for (uint32_t i = 0; i < sizeof acts_rows / sizeof *acts_rows; i++)
            check_native(dtype, 33, 256, 2, acts_rows[i]);
        check_native(dtype, 33, 1792, 1, 19); /* parts of a panel, of 28 blocks */
        check_native(dtype, 33, 1792, 2, 19);
        check_native(dtype, 17, 3840, 5, 49);  /* of 24, a segment each, and of 40 */
        check_native(dtype, 17, 4608, 2, 49);  /* 144: three parts of 48, segments of 72 */
        check_native(dtype, 49, 8192, 1, 37);  /* the last part shorter; two tiles together */
        check_native(dtype, 16, 16640, 1, 16); /* not by tiles */
    }
    check_native(PD_Q4_1, 16, 128, 1, 16); /* the shortest row, and below */
    check_native(PD_Q4_1, 16, 96, 1, 16);
    assert_int_equal(sigaction(SIGILL, &before, NULL), 0);
    assert_true(has_tiles == (trapped_count == 0));
}

/* ---- each thread's own tiles, where a processor has them ---- */

static sample mixed[3]; /* of two shapes of tiles */
static atomic_bool stop_threads;
static atomic_uint wrong, signalled;

static void *multiply_on(void *arg)
{
    uint32_t which = (uint32_t)(uintptr_t)arg;

    while (!stop_threads)
        wrong += !is_right(&mixed[which++ % 3]);
    return NULL;
}

/* Right in the middle of a product by tiles, another one of another shape; into memory that is
 * there already. */
static _Thread_local float *handler_out;

static void on_signal(int number)
{
    const sample *s = &mixed[signalled % 3];

    (void)number;
    if (handler_out == NULL)
        return;
    memset(handler_out, 0, s->out_bytes);
    multiply(s, &kern_ops_amx, handler_out);
    wrong += memcmp(handler_out, s->expected, s->out_bytes) != 0;
    signalled++;
}

static void make_mixed(void)
{
    mixed[0] = make_sample(PD_Q4_1, 64, 768, 1, 64);
    mixed[1] = make_sample(PD_Q6_K, 64, 768, 3, 48);
    mixed[2] = make_sample(PD_Q8_0, 64, 512, 1, 21);
    wrong = 0;
    stop_threads = false;
}

static void free_mixed(void)
{
    for (int i = 0; i < 3; i++)
        free_sample(&mixed[i]);
}

static void skip_without_tiles(void)
{
    char reason[128];

    if (kern_probe_amx(reason, sizeof reason) > 0)
        return;
    print_message("# skipped: %s\n", reason);
    skip();
}

static void threads_have_tiles_of_their_own(void **state)
{
    pthread_t threads[3];
    uint32_t mine = 0;

    (void)state;
    skip_without_tiles();
    make_mixed();
    for (uintptr_t i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, multiply_on, (void *)i), 0);
    for (int i = 0; i < 3000; i++)
        mine += !is_right(&mixed[i % 3]);
    stop_threads = true;
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    free_mixed();
    assert_int_equal(mine, 0);
    assert_int_equal(wrong, 0);
}

static void signals_and_children_find_and_leave_tiles_as_they_were(void **state)
{
    const struct sigaction action = {.sa_handler = on_signal};
    const struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    struct sigaction before;
    uint32_t mine = 0;
    int status = 0;

    (void)state;
    skip_without_tiles();
    make_mixed();
    handler_out = malloc(mixed[0].out_bytes + mixed[1].out_bytes + mixed[2].out_bytes);
    signalled = 0;
    assert_int_equal(sigaction(SIGALRM, &action, &before), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
    for (int i = 0; i < 3000 || signalled < 100; i++)
        mine += !is_right(&mixed[i % 3]);
    assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
    assert_int_equal(sigaction(SIGALRM, &before, NULL), 0);
    pid_t child = fork();
    if (child == 0)
        _exit(is_right(&mixed[0]) && is_right(&mixed[1]) && is_right(&mixed[2]) ? 0 : 1);
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    free(handler_out);
    handler_out = NULL;
    free_mixed();
    print_message("# products in a signal's handler: %u\n", signalled);
    assert_int_equal(mine, 0);
    assert_int_equal(wrong, 0);
    assert_int_equal(status, 0);
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
        cmocka_unit_test(threads_have_tiles_of_their_own),
        cmocka_unit_test(signals_and_children_find_and_leave_tiles_as_they_were),
        cmocka_unit_test(tiles_in_plain_c_are_never_chosen_by_themselves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

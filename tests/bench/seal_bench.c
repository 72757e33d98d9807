/* tests/bench/seal_bench.c - what seals cost: where K and V are written, when blocks leave, and
 * when they have landed.
 *
 *   seal_bench MODEL DEVICE THREADS PREFILL DECODE PAIRS
 *
 * Prefill (one prompt of PREFILL tokens in one step) and decode (DECODE steps of one sequence) with
 * and without the hashing of tiles, in turns whose order alternates; the share is the median over
 * PAIRS of (with / without - 1). Then bytes a second over 512 MiB of blocks, far more than any
 * cache: seals from the bytes, checks on the caller's thread, checks through the verifier's thread;
 * and seals by tiles, in nanoseconds a block of a layer group. One JSON object on stdout. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/worker/verifier.h"
#include "kernels/model/forward.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAIRS_MAX   201
#define COLD_BYTES  ((uint64_t)512 << 20)
#define COLD_ROUNDS 5
#define CHECK       64 /* blocks of a check */

typedef struct bench {
    pd_model_file *file;
    kern_model *model;
    pd_kv_layout layout;
    unsigned char *pool;
    pd_seal_tiles *tiles;
    pd_block *blocks;
    uint32_t *prompt;
    uint32_t prefill, decode;
} bench;

/* Sums that nobody else reads, so that the compiler may not leave them out. */
static volatile uint64_t sink;

static void die(const char *what)
{
    fprintf(stderr, "seal_bench: %s failed\n", what);
    exit(1);
}

static int by_value(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof *values, by_value);
    return values[count / 2];
}

/* ---- with and without ---- */

static double step_ms(bench *b, uint32_t position, uint32_t count, pd_seal_tiles *tiles)
{
    kern_slice slice = {.tokens = b->prompt + position,
                        .count = count,
                        .position = position,
                        .blocks = b->blocks,
                        .logits_from = count};
    kern_step step = {
        .layout = &b->layout, .pool = b->pool, .tiles = tiles, .slices = &slice, .slices_count = 1};
    uint64_t start_ns = pd_clock_now_ns();

    if (kern_model_step(b->model, &step) != PD_OK)
        die("a step");
    return (double)(pd_clock_now_ns() - start_ns) / 1e6;
}

static double run_ms(bench *b, bool decode, pd_seal_tiles *tiles)
{
    double ms = 0;

    if (!decode)
        return step_ms(b, 0, b->prefill, tiles);
    for (uint32_t i = 0; i < b->decode; i++)
        ms += step_ms(b, i, 1, tiles);
    return ms / b->decode;
}

static void compare(bench *b, bool decode, uint32_t pairs, double *plain_ms_out, double *share_out)
{
    double plain[PAIRS_MAX], shares[PAIRS_MAX];

    run_ms(b, decode, b->tiles);
    for (uint32_t i = 0; i < pairs; i++) {
        double first = run_ms(b, decode, i % 2 == 0 ? NULL : b->tiles);
        double second = run_ms(b, decode, i % 2 == 0 ? b->tiles : NULL);
        double with = i % 2 == 0 ? second : first;
        plain[i] = i % 2 == 0 ? first : second;
        shares[i] = with / plain[i] - 1;
    }
    *plain_ms_out = median(plain, pairs);
    *share_out = median(shares, pairs);
}

/* The hashing of one prompt's tiles alone, on one thread. */
static double hash_ms(bench *b)
{
    double ms[COLD_ROUNDS];

    for (uint32_t round = 0; round < COLD_ROUNDS; round++) {
        uint64_t start_ns = pd_clock_now_ns();
        for (uint32_t layer = 0; layer < b->layout.layers; layer++)
            for (pd_block block = 0; block < b->prefill / b->layout.block_tokens; block++)
                for (uint32_t head = 0; head < b->layout.kv_heads; head++)
                    pd_seal_tiles_wrote(b->tiles, b->pool, layer, block, head, 0,
                                        b->layout.block_tokens);
        ms[round] = (double)(pd_clock_now_ns() - start_ns) / 1e6;
    }
    return median(ms, COLD_ROUNDS);
}

/* ---- bytes a second ---- */

typedef struct rates {
    double compute, check, verifier; /* GB/s */
    double by_tiles_ns;              /* a block of a group */
} rates;

static pd_seal_place place_of(const bench *b, uint32_t group, pd_block block)
{
    const pd_request_key key = {.router = 1, .number = 1};

    return (pd_seal_place){.request = pd_ship_seal_request(&key),
                           .group = group,
                           .block_index = block,
                           .valid_tokens = b->layout.block_tokens,
                           .layout_fingerprint = pd_kv_layout_fingerprint(&b->layout)};
}

static double seal_all_ns(bench *b, const pd_seal_tiles *tiles, uint64_t *seals)
{
    uint64_t start_ns = pd_clock_now_ns();

    for (uint32_t group = 0; group < b->layout.groups; group++) {
        for (pd_block block = 0; block < b->layout.blocks; block++) {
            pd_seal_place place = place_of(b, group, block);
            pd_seal_of(&b->layout, b->pool, tiles, block, &place, 1,
                       &seals[(size_t)group * b->layout.blocks + block]);
        }
    }
    sink += seals[0];
    return (double)(pd_clock_now_ns() - start_ns);
}

static double check_all_ns(bench *b, const uint64_t *seals)
{
    uint64_t start_ns = pd_clock_now_ns();

    for (uint32_t group = 0; group < b->layout.groups; group++) {
        for (pd_block block = 0; block < b->layout.blocks; block++) {
            pd_seal_place place = place_of(b, group, block);
            if (pd_seal_check(&b->layout, b->pool, b->tiles, block, &place, 1,
                              &seals[(size_t)group * b->layout.blocks + block]) != PD_OK)
                die("a check");
        }
    }
    return (double)(pd_clock_now_ns() - start_ns);
}

static uint32_t take_answers(pd_verifier *verifier)
{
    struct pollfd ready = {.fd = pd_verifier_fd(verifier), .events = POLLIN};
    pd_checked checked;
    uint32_t taken = 0;

    poll(&ready, 1, -1);
    for (; pd_verifier_poll(verifier, &checked) == PD_OK; taken++) {
        if (!checked.good)
            die("the verifier's check");
    }
    return taken;
}

static double verify_all_ns(bench *b, pd_verifier *verifier, const uint64_t *seals)
{
    uint64_t start_ns = pd_clock_now_ns();
    uint32_t open = 0;

    for (uint32_t group = 0; group < b->layout.groups; group++) {
        for (pd_block first = 0; first + CHECK <= b->layout.blocks; first += CHECK) {
            pd_check check = {.key = {.router = 1, .number = 1},
                              .group_first = group,
                              .groups = 1,
                              .first = first,
                              .count = CHECK,
                              .blocks = b->blocks + first,
                              .valid_tokens = b->layout.block_tokens,
                              .slices = 1,
                              .seals = &seals[(size_t)group * b->layout.blocks + first]};
            while (pd_verifier_submit(verifier, &check) != PD_OK)
                open -= take_answers(verifier);
            open++;
        }
    }
    while (open > 0)
        open -= take_answers(verifier);
    return (double)(pd_clock_now_ns() - start_ns);
}

static rates measure_rates(bench *b)
{
    double compute[COLD_ROUNDS], check[COLD_ROUNDS], verify[COLD_ROUNDS], tiles[COLD_ROUNDS];
    double bytes = (double)b->layout.pool_bytes;
    double block_groups = (double)b->layout.groups * b->layout.blocks;
    uint64_t *seals = pd_calloc((size_t)b->layout.groups * b->layout.blocks, sizeof *seals);
    pd_host_pool host = {.layout = &b->layout, .pool = b->pool, .tiles = b->tiles};
    pd_verifier_options options = {.layout = &b->layout, .sealer = pd_host_sealer(&host)};
    pd_verifier *verifier = NULL;

    if (seals == NULL || pd_verifier_create(&options, &verifier) != PD_OK)
        die("memory");
    for (uint32_t round = 0; round < COLD_ROUNDS; round++) {
        compute[round] = seal_all_ns(b, NULL, seals);
        check[round] = check_all_ns(b, seals);
        verify[round] = verify_all_ns(b, verifier, seals);
        tiles[round] = seal_all_ns(b, b->tiles, seals);
    }
    pd_verifier_destroy(verifier);
    pd_free(seals);
    return (rates){.compute = bytes / median(compute, COLD_ROUNDS),
                   .check = bytes / median(check, COLD_ROUNDS),
                   .verifier = bytes / median(verify, COLD_ROUNDS),
                   .by_tiles_ns = median(tiles, COLD_ROUNDS) / block_groups};
}

/* ---- */

/* A plain decimal number; 0, which no argument may be, when it is none. */
static uint32_t number(const char *text)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0' && value <= UINT32_MAX ? (uint32_t)value
                                                                               : 0;
}

static void open_all(bench *b, char **argv)
{
    uint32_t longest = b->prefill > b->decode ? b->prefill : b->decode;
    kern_options options = {.device = argv[2],
                            .threads = number(argv[3]),
                            .context_max = longest,
                            .rows_max = longest,
                            .logits_rows_max = 1};
    pd_kv_layout_options kv = {.dtype = PD_F16, .block_tokens = 16, .memory_bytes = COLD_BYTES};

    if (pd_model_file_open(argv[1], &b->file) != PD_OK)
        die("opening the model");
    const pd_model_shape *shape = pd_model_file_shape(b->file);
    if (pd_kv_layout_make(shape, &kv, &b->layout) != PD_OK ||
        (uint64_t)b->layout.blocks * b->layout.block_tokens < longest)
        die("laying out blocks for so many tokens");
    /* whole checks only */
    b->layout.blocks -= b->layout.blocks % CHECK;
    b->layout.pool_bytes = b->layout.blocks * b->layout.block_bytes_all;
    b->pool = pd_malloc(b->layout.pool_bytes);
    b->blocks = pd_calloc(b->layout.blocks, sizeof *b->blocks);
    b->prompt = pd_calloc(longest, sizeof *b->prompt);
    if (b->pool == NULL || b->blocks == NULL || b->prompt == NULL ||
        pd_seal_tiles_create(&b->layout, &b->tiles) != PD_OK)
        die("memory");
    memset(b->pool, 1, b->layout.pool_bytes);
    for (pd_block i = 0; i < b->layout.blocks; i++)
        b->blocks[i] = i;
    for (uint32_t i = 0; i < longest; i++)
        b->prompt[i] = 100 + i * 7919 % (shape->vocab - 100);
    if (kern_model_create(b->file, &options, &b->model) != PD_OK)
        die("loading the model");
}

int main(int argc, char **argv)
{
    bench b = {0};
    double prefill_ms, prefill_share, decode_ms, decode_share;

    pd_log_init("seal_bench", PD_LOG_WARN);
    if (argc != 7) {
        fprintf(stderr, "usage: seal_bench MODEL DEVICE THREADS PREFILL DECODE PAIRS\n");
        return 2;
    }
    b.prefill = number(argv[4]);
    b.decode = number(argv[5]);
    uint32_t pairs = number(argv[6]);
    if (number(argv[3]) == 0 || b.prefill == 0 || b.decode == 0 || pairs == 0 ||
        pairs > PAIRS_MAX) {
        fprintf(stderr, "seal_bench: threads, lengths and pairs (1 to %d)\n", PAIRS_MAX);
        return 2;
    }
    open_all(&b, argv);
    compare(&b, false, pairs, &prefill_ms, &prefill_share);
    compare(&b, true, pairs, &decode_ms, &decode_share);
    double alone_ms = hash_ms(&b);
    rates r = measure_rates(&b);
    printf("{\"backend\": \"%s\", \"threads\": %s, \"prefill_ms\": %.3f, \"prefill_share\": %.5f, "
           "\"hash_ms\": %.3f, \"decode_ms\": %.3f, \"decode_share\": %.5f, \"compute_gbs\": %.2f, "
           "\"check_gbs\": %.2f, \"verifier_gbs\": %.2f, \"by_tiles_ns\": %.0f, "
           "\"block_bytes\": %llu}\n",
           kern_model_backend(b.model), argv[3], prefill_ms, prefill_share, alone_ms, decode_ms,
           decode_share, r.compute, r.check, r.verifier, r.by_tiles_ns,
           (unsigned long long)pd_kv_layout_block_bytes(&b.layout, 0));
    kern_model_destroy(b.model);
    pd_model_file_close(b.file);
    pd_seal_tiles_destroy(b.tiles);
    pd_free(b.pool);
    pd_free(b.blocks);
    pd_free(b.prompt);
    return 0;
}

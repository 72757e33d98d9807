/* The GPU draws what kern_sample draws, whatever order its threads run in. */

#include "kernels/cuda/launch.h"
#include "kernels/model/sample.h"
#include "tests/gpu-emu/device.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 6, VOCAB_MAX = 4099 }; /* more than a block's span, and than a gathered bin */

typedef struct batch {
    uint32_t vocab;
    float logits[ROWS * VOCAB_MAX];
    cu_sampling sampling[ROWS];
    uint32_t expected[ROWS];
} batch;

static void make_row(float *row, uint32_t vocab, int shape, uint64_t *random)
{
    for (uint32_t id = 0; id < vocab; id++) {
        float u = (float)device_random(random) * 0x1p-32f;
        switch (shape) {
        case 0: row[id] = 10 * device_float(random); break;
        case 1: row[id] = -7.5f; break;                          /* all equal: one bin, all ids */
        case 2: row[id] = (float)(int)(5 * u); break;            /* runs of equals */
        case 3: row[id] = (id & 1) != 0 ? 0.0f : -0.0f; break;   /* zeros of both signs */
        case 4: row[id] = 30 * logf(u + 1e-7f); break;           /* most without weight */
        default: row[id] = 100 - 1e-4f * (float)(id % 7); break; /* one bin, few values */
        }
    }
}

/* What the CPU draws from the same. */
static uint32_t expect(const batch *b, uint32_t row)
{
    static uint64_t scratch[VOCAB_MAX];
    const cu_sampling *s = &b->sampling[row];
    kern_sampling sampling = {.temperature = s->temperature,
                              .top_p = s->top_p,
                              .top_k = s->top_k,
                              .seed = s->seed,
                              .choice = s->choice};

    return kern_sample(&sampling, b->logits + (size_t)row * b->vocab, b->vocab, s->position,
                       scratch);
}

static void make_batch(batch *b, uint32_t vocab, int turn, uint64_t *random)
{
    static const float temperatures[] = {1, 0, 0.5f, 3, 1e-20f, 0.9f};
    static const float top_ps[] = {1, 0.9f, 0.5f, 1, 1e-9f, 0.99f, 0};

    b->vocab = vocab;
    for (uint32_t row = 0; row < ROWS; row++) {
        make_row(b->logits + (size_t)row * vocab, vocab, (int)(row + (uint32_t)turn) % 6, random);
        uint32_t word = device_random(random);
        b->sampling[row] = (cu_sampling){
            .temperature = temperatures[word % 6],
            .top_p = top_ps[(word >> 8) % 7],
            .top_k = (word >> 16) % 3 == 0 ? (word >> 20) % (vocab + 2) : 0,
            .choice = row,
            .seed = (uint64_t)word << 20,
            .position = 17 * row,
        };
        b->expected[row] = expect(b, row);
    }
}

static pd_status queue(device *d, const batch *b, uint32_t *tokens, uint32_t *broken)
{
    float *logits = device_upload(d, b->logits, (size_t)ROWS * b->vocab * sizeof *b->logits);
    cu_sampling *sampling = device_upload(d, b->sampling, sizeof b->sampling);
    void *scratch = device_space(d, cu_sample_scratch_bytes(ROWS, b->vocab));

    return cu_sample(d->stream, ROWS, b->vocab, logits, sampling, tokens, broken, scratch);
}

static void draw(device *d, void *ctx)
{
    const batch *b = ctx;
    uint32_t zero = 0, broken = 7, tokens[ROWS];
    uint32_t *device_broken = device_upload(d, &zero, sizeof zero);
    uint32_t *device_tokens = device_space(d, sizeof tokens);

    assert_int_equal(queue(d, b, device_tokens, device_broken), PD_OK);
    device_download(d, tokens, device_tokens, sizeof tokens);
    device_download(d, &broken, device_broken, sizeof broken);
    assert_int_equal(broken, 0);
    for (uint32_t row = 0; row < ROWS; row++)
        if (tokens[row] != b->expected[row])
            fail_msg("vocab %u row %u: token %u, not %u (T %g top_p %g top_k %u)", b->vocab, row,
                     tokens[row], b->expected[row], (double)b->sampling[row].temperature,
                     (double)b->sampling[row].top_p, b->sampling[row].top_k);
}

static void draws_are_the_cpus(void **state)
{
    static const uint32_t sizes[] = {1, 2, 31, 33, 255, 257, 1025, 2049};
    static batch b;
    uint64_t random = 11;

    for (int turn = 0; turn < 8; turn++) {
        make_batch(&b, sizes[turn], turn, &random);
        device_each(*state, 1, draw, &b);
    }
}

/* Bins of more keys than shared memory has room for, rows that several blocks look at. */
static void draws_from_large_vocabularies_are_the_cpus(void **state)
{
    static batch b;
    uint64_t random = 23;

    for (int turn = 0; turn < 2; turn++) {
        make_batch(&b, VOCAB_MAX - (uint32_t)turn, turn, &random);
        for (uint32_t row = 0; row < ROWS; row++) { /* nobody takes the short way */
            b.sampling[row].temperature = 0.8f;
            b.sampling[row].top_p = row % 2 != 0 ? 0.7f : 1;
            b.expected[row] = expect(&b, row);
        }
        device_each(*state, 1, draw, &b);
    }
}

static void draw_broken(device *d, void *ctx)
{
    static const float wrong[] = {NAN, INFINITY, -INFINITY, -NAN};
    static batch b;
    uint64_t random = 5;

    (void)ctx;
    for (int i = 0; i < 4; i++) {
        uint32_t zero = 0, broken = 0, tokens[ROWS];
        uint32_t *device_broken = device_upload(d, &zero, sizeof zero);
        uint32_t *device_tokens = device_space(d, sizeof tokens);
        make_batch(&b, 33, i, &random);
        b.logits[(size_t)(i % ROWS) * 33 + 32] = wrong[i];
        assert_int_equal(queue(d, &b, device_tokens, device_broken), PD_OK);
        device_download(d, tokens, device_tokens, sizeof tokens);
        device_download(d, &broken, device_broken, sizeof broken);
        assert_int_equal(broken, 1);
        for (uint32_t row = 0; row < ROWS; row++) {
            assert_true(tokens[row] < 33); /* no token, but none that hurts */
            if (row != (uint32_t)(i % ROWS))
                assert_int_equal(tokens[row], b.expected[row]); /* the others are as ever */
        }
    }
}

static void a_logit_that_is_no_number_is_told(void **state)
{
    device_each(*state, 1, draw_broken, NULL);
}

static void draw_recorded(device *d, void *ctx)
{
    static batch b;
    uint64_t random = 3;
    uint32_t zero = 0, tokens[ROWS];
    gpu_graph *graph = NULL;

    (void)ctx;
    make_batch(&b, 257, 0, &random);
    uint32_t *broken = device_upload(d, &zero, sizeof zero);
    uint32_t *device_tokens = device_space(d, sizeof tokens);
    float *logits = device_upload(d, b.logits, sizeof(float) * ROWS * 257);
    cu_sampling *sampling = device_upload(d, b.sampling, sizeof b.sampling);
    void *scratch = device_space(d, cu_sample_scratch_bytes(ROWS, 257));
    assert_int_equal(gpu_graph_begin(d->stream), PD_OK);
    assert_int_equal(
        cu_sample(d->stream, ROWS, 257, logits, sampling, device_tokens, broken, scratch), PD_OK);
    assert_int_equal(gpu_graph_end(d->stream, &graph), PD_OK);
    for (int turn = 0; turn < 3; turn++) { /* other numbers in the same memory each time */
        make_batch(&b, 257, turn, &random);
        assert_int_equal(gpu_copy_in(d->stream, logits, b.logits, sizeof(float) * ROWS * 257),
                         PD_OK);
        assert_int_equal(gpu_copy_in(d->stream, sampling, b.sampling, sizeof b.sampling), PD_OK);
        assert_int_equal(gpu_graph_launch(graph, d->stream), PD_OK);
        device_download(d, tokens, device_tokens, sizeof tokens);
        assert_memory_equal(tokens, b.expected, sizeof tokens);
    }
    gpu_graph_destroy(graph);
}

static void a_recorded_draw_reads_what_is_there_when_it_runs(void **state)
{
    device_each(*state, 1, draw_recorded, NULL);
}

/* Logits are read in whole sectors. (What all lanes read at one place counts as less than ideal,
 * which the first kernel has none of.) */
static void logits_are_read_in_whole_sectors(void **state)
{
    static const char *const kernels[] = {"sample_best", "sample_weigh", "sample_pick"};
    static batch b;
    device *d = *state;
    uint64_t random = 41;
    uint32_t zero = 0;

    make_batch(&b, 2048, 0, &random);
    for (uint32_t row = 0; row < ROWS; row++)
        b.sampling[row].temperature = 1;
    uint32_t *broken = device_upload(d, &zero, sizeof zero);
    uint32_t *tokens = device_space(d, sizeof(uint32_t) * ROWS);
    device_traffic_clear(d);
    assert_int_equal(queue(d, &b, tokens, broken), PD_OK);
    for (int i = 0; i < 3; i++) {
        device_traffic t = device_traffic_of(d, kernels[i]);
        if (t.sectors > t.sectors_ideal || (i == 0 && t.sectors < t.sectors_ideal))
            fail_msg("%s: %llu sectors, ideally %llu", kernels[i], (unsigned long long)t.sectors,
                     (unsigned long long)t.sectors_ideal);
    }
    device_clear(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_are_the_cpus),
        cmocka_unit_test(draws_from_large_vocabularies_are_the_cpus),
        cmocka_unit_test(a_logit_that_is_no_number_is_told),
        cmocka_unit_test(a_recorded_draw_reads_what_is_there_when_it_runs),
        cmocka_unit_test(logits_are_read_in_whole_sectors),
    };
    return cmocka_run_group_tests_name("gpu-emu-sample", tests, device_setup, device_teardown);
}

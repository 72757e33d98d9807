/* Every operation at the shapes of tests/gpu/cases, timed on the device, against what the device
 * was measured to copy and to multiply in the same minute. A line an operation, then the floors:
 * the exit status is 1 where one is missed, 77 where there is no GPU.
 *
 * A case is recorded REPEATS times in one graph, so that the host's part does not count; the best
 * of ROUNDS graphs. Weights are others each time, over more than twice the L2 cache, as in a model.
 * Activations may be in it: that is so in a model, too, where one kernel reads what the one before
 * wrote. */

#include "kernels/cuda/blaslt.h"
#include "kernels/cuda/wide.h"
#include "tests/gpu/cases.h"
#include "tests/gpu/rates.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REPEATS    10
#define ROUNDS     5
#define COPY_BYTES ((uint64_t)1 << 30)

static struct {
    gpu *gpu;
    gpu_stream *stream;
    gpu_event *from, *to;
    double copy, bf16, int8; /* bytes/s, multiplications/s */
    int missed;
} bench;

static void must(pd_status status, const char *what)
{
    if (status == PD_OK)
        return;
    fprintf(stderr, "bench: %s: %s\n", what, pd_status_name(status));
    exit(1);
}

static void *get(void *ctx, const void *host, uint64_t bytes)
{
    void *memory = NULL;

    (void)ctx;
    must(gpu_alloc(bench.gpu, bytes, &memory), "gpu_alloc");
    if (host == NULL)
        must(gpu_fill(bench.stream, memory, 0, bytes), "gpu_fill");
    else
        must(gpu_copy_in(bench.stream, memory, host, bytes), "gpu_copy_in");
    must(gpu_stream_wait(bench.stream), "gpu_stream_wait");
    return memory;
}

/* Seconds of one call of queue(), by the device's clock. The first call is not recorded: it loads
 * its kernels, which a recording stream forbids. */
static double seconds_of(pd_status (*queue)(const void *what), const void *what)
{
    gpu_graph *graph = NULL;
    float best = 0;

    must(queue(what), "a launch");
    must(gpu_stream_wait(bench.stream), "gpu_stream_wait");
    must(gpu_graph_begin(bench.stream), "gpu_graph_begin");
    for (int i = 0; i < REPEATS; i++)
        must(queue(what), "a launch");
    must(gpu_graph_end(bench.stream, &graph), "gpu_graph_end");
    for (int round = 0; round <= ROUNDS; round++) { /* the first warms up */
        float ms = 0;
        must(gpu_event_record(bench.from, bench.stream), "gpu_event_record");
        must(gpu_graph_launch(graph, bench.stream), "gpu_graph_launch");
        must(gpu_event_record(bench.to, bench.stream), "gpu_event_record");
        must(gpu_event_wait(bench.to), "gpu_event_wait");
        must(gpu_event_ms(bench.from, bench.to, &ms), "gpu_event_ms");
        best = round == 1 || (round > 1 && ms < best) ? ms : best;
    }
    gpu_graph_destroy(graph);
    return (double)best / 1000 / REPEATS;
}

static pd_status queue_case(const void *what)
{
    const gpu_case *c = what;
    return c->queue(bench.stream, c);
}

/* --- what the device can --- */

static struct {
    unsigned char *a, *b;
    uint32_t blocks, rounds;
    void *sums;
} rate;

static pd_status queue_copy(const void *what)
{
    (void)what;
    return gpu_copy(bench.stream, rate.b, rate.a, COPY_BYTES);
}

static pd_status queue_bf16(const void *what)
{
    (void)what;
    return rate_bf16(bench.stream, rate.blocks, rate.rounds, rate.sums);
}

static pd_status queue_int8(const void *what)
{
    (void)what;
    return rate_int8(bench.stream, rate.blocks, rate.rounds, rate.sums);
}

static void measure_device(void)
{
    const gpu_info *info = gpu_info_of(bench.gpu);

    rate.a = get(NULL, NULL, COPY_BYTES);
    rate.b = get(NULL, NULL, COPY_BYTES);
    rate.blocks = info->processors * 4;
    rate.rounds = 1000;
    rate.sums = get(NULL, NULL, (uint64_t)rate.blocks * RATE_WARPS * 32 * 4);
    double mmas = (double)rate.blocks * RATE_WARPS * RATE_MMAS * rate.rounds;
    bench.copy = 2.0 * (double)COPY_BYTES / seconds_of(queue_copy, NULL);
    bench.bf16 = mmas * 16 * 8 * 16 / seconds_of(queue_bf16, NULL);
    bench.int8 = mmas * 16 * 8 * 32 / seconds_of(queue_int8, NULL);
    gpu_free(bench.gpu, rate.a);
    gpu_free(bench.gpu, rate.b);
    printf("%s, %u SMs, sm_%u: copies %.0f GB/s, mma.sync multiplies %.0f TFLOP/s bf16, "
           "%.0f TOP/s int8\n",
           info->name, info->processors, info->arch, bench.copy / 1e9, 2 * bench.bf16 / 1e12,
           2 * bench.int8 / 1e12);
}

/* --- the operations --- */

/* Of the device's rate: what a case must reach; 0: told only. */
static double floor_of(const gpu_case *c, const char **what_out)
{
    bool decodes = c->rows < CASE_PREFILL_ROWS && c->rows != 512;

    *what_out = "copy rate";
    if (strcmp(c->name, "decode 32: attention, 4096 tokens each") == 0)
        return 0.80;
    if (decodes && c->rows == 1)
        return 0.80; /* a matrix times one vector */
    *what_out = "bf16 rate";
    return c->dtype == PD_BF16 && c->rows == CASE_PREFILL_ROWS ? 0.70 : 0;
}

static void time_case(const gpu_case *c)
{
    double seconds = seconds_of(queue_case, c);
    double moved = c->work.bytes / seconds, multiplied = c->work.macs / seconds;
    bool quantised = c->dtype == PD_Q4_0 || c->dtype == PD_Q4_1 || c->dtype == PD_Q8_0;
    double of_copy = moved / bench.copy;
    double of_products = multiplied / (quantised ? bench.int8 : bench.bf16);
    const char *what;
    double least = floor_of(c, &what);
    double reached = what[0] == 'c' ? of_copy : of_products;
    bool missed = least > 0 && reached < least;

    printf("%-42s %9.1f us %7.0f GB/s %3.0f %%", c->name, 1e6 * seconds, moved / 1e9,
           100 * of_copy);
    if (c->work.macs > 0)
        printf(" %7.1f T/s %3.0f %%", 2 * multiplied / 1e12, 100 * of_products);
    if (least > 0)
        printf("  %s: %.0f %% of the %s, floor %.0f %%", missed ? "MISSED" : "reached",
               100 * reached, what, 100 * least);
    printf("\n");
    fflush(stdout);
    bench.missed += missed;
}

/* --- the library --- */

static struct {
    case_product product;
    cu_wide *wide;
    blaslt_plan *plan;
    void *plain;
} library;

static pd_status queue_plan(const void *what)
{
    (void)what;
    return blaslt_matmul(library.plan, bench.stream, library.plain, library.product.acts.halves,
                         library.product.out);
}

static pd_status queue_wide(const void *what)
{
    const case_product *p = &library.product;

    (void)what;
    return cu_wide_matmul(library.wide, bench.stream, &p->matrix, &p->acts, CASE_PREFILL_ROWS,
                          p->out, p->matrix.rows);
}

static void tell_products(const char *name, double seconds)
{
    const cu_matrix *m = &library.product.matrix;
    double products = (double)m->rows * m->cols * CASE_PREFILL_ROWS / seconds;

    printf("%-42s %9.1f us %35.1f T/s %3.0f %%\n", name, 1e6 * seconds, 2 * products / 1e12,
           100 * products / bench.bf16);
}

/* cuBLASLt's first algorithm, whatever its bits, on weights in its own order. */
static void time_first_algorithm(void)
{
    const cu_matrix *m = &library.product.matrix;
    const blaslt_shape shape = {.bf16 = true,
                                .weight_rows = m->rows,
                                .cols = m->cols,
                                .rows = CASE_PREFILL_ROWS,
                                .out_stride = m->rows};
    char reason[256];
    blaslt *b = NULL;

    pd_status status = blaslt_open(bench.gpu, &b, reason, sizeof reason);
    if (status != PD_OK) {
        printf("no cuBLASLt: %s\n", reason);
        return;
    }
    library.plain = get(NULL, NULL, 2 * (uint64_t)m->rows * m->cols);
    must(cu_unpack(bench.stream, m->rows, m->cols, m->data, library.plain), "cu_unpack");
    must(blaslt_plan_create(b, &shape, 0, &library.plan), "blaslt_plan_create");
    tell_products("prefill 2048: gate and up, cuBLASLt's first", seconds_of(queue_plan, NULL));
    blaslt_plan_destroy(library.plan);
    gpu_free(bench.gpu, library.plain);
    blaslt_close(b);
}

/* What a model takes: the one with our bits, with the turning of the weights; else our kernel. */
static void time_library(void)
{
    cu_layer_weights layer = {0};
    cu_weights weights = {.shape = {.layers = 1}, .layers = &layer};
    char text[96];

    library.product = cases_wide();
    layer.gate_up = (cu_group){
        .count = 1, .rows = library.product.matrix.rows, .matrix = {library.product.matrix}};
    time_first_algorithm();
    must(cu_wide_create(bench.gpu, &weights, CASE_PREFILL_ROWS, &library.wide, text, sizeof text),
         "cu_wide_create");
    printf("%s\n", text);
    if (library.wide != NULL)
        tell_products("prefill 2048: gate and up, as in a model", seconds_of(queue_wide, NULL));
    cu_wide_destroy(library.wide);
}

int main(void)
{
    char reason[256];
    uint32_t count = 0;
    case_memory memory = {.get = get};

    if (gpu_count(reason, sizeof reason) == 0) {
        fprintf(stderr, "skipped: %s\n", reason);
        return 77;
    }
    must(gpu_open(0, &bench.gpu), "gpu_open");
    gpu_use(bench.gpu);
    must(gpu_stream_create(bench.gpu, &bench.stream), "gpu_stream_create");
    must(gpu_event_create(bench.gpu, &bench.from), "gpu_event_create");
    must(gpu_event_create(bench.gpu, &bench.to), "gpu_event_create");
    measure_device();
    memory.l2_bytes = gpu_info_of(bench.gpu)->l2_bytes;
    const gpu_case *cases = cases_make(&memory, &count);
    for (uint32_t i = 0; i < count; i++)
        time_case(&cases[i]);
    time_library();
    printf("%d floors missed\n", bench.missed);
    return bench.missed == 0 ? 0 : 1; /* device memory goes with the process */
}

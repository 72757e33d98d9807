/* tests/bench/engine_bench.c - how fast the engine prefills and decodes, alone on its threads.
 *
 *   engine_bench MODEL DEVICE THREADS PREFILL DECODE REPEATS [BATCH [CONTEXT [SHARED [FORMAT]]]]
 *
 * Prefill: one prompt of PREFILL tokens in one step, logits of the last. Decode: DECODE steps of
 * BATCH sequences (1), each after a context of CONTEXT tokens (0) whose K and V are zeros, the
 * likeliest token fed back; their first SHARED positions (0) are the same blocks. Read: as many
 * bytes as a step's weights, in huge pages, by as many threads, before each decode: what the
 * machine's memory gives at that minute. DEVICE as in a deployment,
 * FORMAT of KV as kv.dtype (f16). One JSON object on stdout:
 * tokens a second, the median of REPEATS, after one unmeasured round. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/big_memory.h"
#include "kernels/plugins.h"
#include "kernels/team.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REPEATS_MAX 101
#define BATCH_MAX   64

typedef struct bench {
    pd_model_file *file;
    const kern_backend *backend;
    kern_loaded *model;
    pd_dtype dtype; /* of KV */
    pd_kv_layout layout;
    kern_memory memory; /* of the pool, where the backend has none of its own */
    void *pool;
    pd_block *blocks;
    uint32_t blocks_each; /* of one sequence */
    uint32_t *prompt;
    uint32_t prefill, decode, batch, context, shared;
    uint64_t weights_bytes, layer_macs;
} bench;

static void step(bench *b, kern_job_slice *slices, uint32_t count)
{
    kern_backend_step run = {.slices = slices, .slices_count = count};

    if (b->backend->step(b->model, &run) != PD_OK)
        exit(1);
}

static double run_prefill(bench *b)
{
    kern_job_slice slice = {.slice = {.tokens = b->prompt,
                                      .count = b->prefill,
                                      .blocks = b->blocks,
                                      .logits_from = b->prefill},
                            .want_token = true};
    uint64_t begin = pd_clock_now_ns();

    step(b, &slice, 1);
    return b->prefill * 1e9 / (double)(pd_clock_now_ns() - begin);
}

static double run_decode(bench *b)
{
    uint32_t tokens[BATCH_MAX];
    kern_job_slice slices[BATCH_MAX];

    for (uint32_t s = 0; s < b->batch; s++)
        tokens[s] = b->prompt[s];
    uint64_t begin = pd_clock_now_ns();
    for (uint32_t position = 0; position < b->decode; position++) {
        for (uint32_t s = 0; s < b->batch; s++)
            slices[s] = (kern_job_slice){.slice = {.tokens = &tokens[s],
                                                   .count = 1,
                                                   .position = b->context + position,
                                                   .blocks = b->blocks + (size_t)s * b->blocks_each,
                                                   .logits_from = 1},
                                         .want_token = true};
        step(b, slices, b->batch);
        for (uint32_t s = 0; s < b->batch; s++)
            tokens[s] = slices[s].token_out;
    }
    return (double)b->decode * b->batch * 1e9 / (double)(pd_clock_now_ns() - begin);
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

/* --- what the memory gives --- */

typedef struct reading {
    kern_team *team;
    kern_memory memory;
    atomic_uint_fast64_t sum; /* so that nothing is left out */
} reading;

static void read_part(void *ctx, uint32_t thread)
{
    reading *r = ctx;
    size_t words = r->memory.bytes / sizeof(uint64_t), threads = kern_team_active(r->team);
    const uint64_t *from =
        (const uint64_t *)(const void *)r->memory.base + thread * words / threads;
    const uint64_t *to =
        (const uint64_t *)(const void *)r->memory.base + (thread + 1) * words / threads;
    uint64_t sums[32] = {0};

    for (; from + 32 <= to; from += 32) {
        for (int i = 0; i < 32; i += 8)
            __builtin_prefetch(from + 512 + i);
        for (int i = 0; i < 32; i++)
            sums[i] += from[i];
    }
    for (int i = 1; i < 32; i++)
        sums[0] += sums[i];
    atomic_fetch_add(&r->sum, sums[0]);
}

/* GB/s, the median of a few passes. */
static double run_read(reading *r)
{
    double passes[5];

    for (int i = 0; i < 5; i++) {
        uint64_t begin = pd_clock_now_ns();
        kern_team_run(r->team, read_part, r);
        passes[i] = (double)r->memory.bytes / (double)(pd_clock_now_ns() - begin);
    }
    return median(passes, 5);
}

static pd_status open_reading(reading *r, const bench *b, uint32_t threads)
{
    pd_status status = kern_memory_map(b->weights_bytes, &r->memory);

    if (status != PD_OK)
        return status;
    memset(r->memory.base, 1, r->memory.bytes);
    return kern_team_create(threads, &r->team);
}

/* A plain decimal number; 0, which no argument may be, when it is none. */
static uint32_t number(const char *text)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0' && value <= UINT32_MAX ? (uint32_t)value
                                                                               : 0;
}

static pd_status load(bench *b, const char *device, uint32_t threads, uint32_t longest)
{
    kern_choice choice;
    pd_status status = kern_backend_choose(device, &choice);

    if (status != PD_OK)
        return status;
    kern_backend_options options = {.device = choice.device,
                                    .variant = choice.variant,
                                    .threads = threads,
                                    .context_max = longest,
                                    .rows_max = longest,
                                    .slices_max = b->batch};
    b->backend = choice.backend;
    status = b->backend->create(b->file, &options, &b->model);
    if (status != PD_OK)
        return status;
    if (b->backend->pool_own)
        status = b->backend->pool_alloc(b->model, b->layout.pool_bytes, &b->pool);
    else
        status = kern_memory_map(b->layout.pool_bytes, &b->memory);
    if (status != PD_OK)
        return status;
    if (!b->backend->pool_own) { /* touched: what was never written is one page of zeros */
        b->pool = b->memory.base;
        memset(b->pool, 0, b->layout.pool_bytes);
    }
    return b->backend->bind(b->model, &b->layout, b->pool, false);
}

/* What a decode step reads: the layers' matrices and the head. And what one token costs in the
 * layers' matrices alone, in multiply-accumulates: what a prompt's every token costs. */
static uint64_t weights_bytes(const pd_model_file *file, uint64_t *layer_macs_out)
{
    static const char *const names[] = {"attn_q",   "attn_k", "attn_v",  "attn_output",
                                        "ffn_gate", "ffn_up", "ffn_down"};
    const pd_model_shape *shape = pd_model_file_shape(file);
    const pd_tensor *head =
        pd_model_file_tensor(file, shape->tied_embeddings ? "token_embd.weight" : "output.weight");
    uint64_t bytes = head == NULL ? 0 : head->bytes;

    *layer_macs_out = 0;
    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            char name[64];
            snprintf(name, sizeof name, "blk.%u.%s.weight", layer, names[i]);
            const pd_tensor *tensor = pd_model_file_tensor(file, name);
            bytes += tensor == NULL ? 0 : tensor->bytes;
            *layer_macs_out += tensor == NULL ? 0 : tensor->dims[0] * tensor->dims[1];
        }
    }
    return bytes;
}

static pd_status open_all(bench *b, char **argv)
{
    pd_status status = pd_model_file_open(argv[1], &b->file);
    if (status != PD_OK)
        return status;
    uint32_t end = b->context + b->decode, longest = b->prefill > end ? b->prefill : end;
    b->blocks_each = (longest + 15) / 16;
    pd_kv_layout_options kv = {.dtype = b->dtype,
                               .block_tokens = 16,
                               .memory_bytes = (uint64_t)4 << 30,
                               .blocks_max = b->blocks_each * b->batch};
    status = pd_kv_layout_make(pd_model_file_shape(b->file), &kv, &b->layout);
    if (status != PD_OK)
        return status;
    b->weights_bytes = weights_bytes(b->file, &b->layer_macs);
    uint32_t vocab = pd_model_file_shape(b->file)->vocab;
    b->blocks = pd_calloc(b->layout.blocks, sizeof *b->blocks);
    b->prompt = pd_calloc(longest + BATCH_MAX, sizeof *b->prompt);
    if (b->blocks == NULL || b->prompt == NULL)
        return PD_E_NOMEM;
    for (uint32_t i = 0; i < b->layout.blocks; i++)
        b->blocks[i] = i % b->blocks_each < b->shared / 16 ? i % b->blocks_each : i;
    for (uint32_t i = 0; i < longest + BATCH_MAX; i++)
        b->prompt[i] = 100 + i * 7919 % (vocab - 100);
    return load(b, argv[2], number(argv[3]), longest);
}

int main(int argc, char **argv)
{
    bench b = {.batch = argc > 7 ? number(argv[7]) : 1,
               .context = argc > 8 ? number(argv[8]) : 0,
               .shared = argc > 9 ? number(argv[9]) : 0,
               .dtype = PD_F16};
    double prefill[REPEATS_MAX], decode[REPEATS_MAX], read[REPEATS_MAX];
    reading memory = {0};

    pd_log_init("engine_bench", PD_LOG_WARN);
    if (argc < 7) {
        fprintf(stderr, "usage: engine_bench MODEL DEVICE THREADS PREFILL DECODE REPEATS "
                        "[BATCH [CONTEXT [SHARED [FORMAT]]]]\n");
        return 2;
    }
    if (argc > 10 && !pd_kv_dtype_of(argv[10], &b.dtype)) {
        fprintf(stderr, "engine_bench: %s: no format of KV\n", argv[10]);
        return 2;
    }
    b.prefill = number(argv[4]);
    b.decode = number(argv[5]);
    uint32_t repeats = number(argv[6]);
    if (number(argv[3]) == 0 || b.prefill == 0 || b.decode == 0 || repeats == 0 ||
        repeats > REPEATS_MAX || b.batch == 0 || b.batch > BATCH_MAX || b.shared > b.context) {
        fprintf(stderr,
                "engine_bench: threads, lengths, repeats (1 to %d), batch (1 to %d), "
                "SHARED within CONTEXT\n",
                REPEATS_MAX, BATCH_MAX);
        return 2;
    }
    if (open_all(&b, argv) != PD_OK || open_reading(&memory, &b, number(argv[3])) != PD_OK)
        return 1;
    run_prefill(&b);
    for (uint32_t i = 0; i < repeats; i++) {
        prefill[i] = run_prefill(&b);
        read[i] = run_read(&memory);
        decode[i] = run_decode(&b);
    }
    printf("{\"backend\": \"%s\", \"threads\": %s, \"prefill\": %u, \"prefill_tok_s\": %.1f, "
           "\"decode\": %u, \"batch\": %u, \"context\": %u, \"decode_tok_s\": %.1f, "
           "\"weights_mb\": %.1f, \"read_gb_s\": %.1f, \"layer_m_macs\": %.2f}\n",
           b.backend->describe(b.model), argv[3], b.prefill, median(prefill, repeats), b.decode,
           b.batch, b.context, median(decode, repeats), (double)b.weights_bytes * 1e-6,
           median(read, repeats), (double)b.layer_macs * 1e-6);
    kern_team_destroy(memory.team);
    kern_memory_unmap(&memory.memory);
    if (b.backend->pool_own)
        b.backend->pool_free(b.model);
    else
        kern_memory_unmap(&b.memory);
    b.backend->destroy(b.model);
    pd_model_file_close(b.file);
    pd_free(b.blocks);
    pd_free(b.prompt);
    return 0;
}

/* tests/golden/kv_formats.c - what KV of one byte a value costs in accuracy, against f16.
 *
 *   kv_formats MODEL FOLDER [DEVICE [THREADS [TOKENS [CHUNK]]]]
 *
 * FOLDER's text.json is read teacher-forced (its first TOKENS tokens), a format after the other,
 * on weights that are loaded once. Prints for each: perplexity; of the difference of logits from
 * f16's, the mean and the largest at a position, and how often the best token is another. Right
 * means: perplexity within 1 % of f16's with int8, 2 % with fp8_e4m3; the best token is f16's at 93
 * and 90 % of the positions; and something differs at all. Exit status 0 right, 1 wrong, 77 no
 * model. */

#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/plugins.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define JSON_MAX (16u << 20)

typedef struct kv_format {
    const char *name;
    double perplexity_within, best_least; /* of f16's; of all positions */
} kv_format;

static const kv_format formats[] = {{"f16", 0, 1}, {"int8", 0.01, 0.93}, {"fp8_e4m3", 0.02, 0.90}};
#define FORMATS (sizeof formats / sizeof *formats)

typedef struct runs {
    pd_model_file *file;
    kern_choice choice;
    kern_backend_options options;
    uint32_t *ids; /* [tokens + 1] */
    uint32_t vocab, tokens, chunk;
    float *logits;   /* [chunk][vocab] */
    float *expected; /* [tokens][vocab], f16's */
} runs;

/* What a format's run has come to. */
typedef struct figures {
    double logprobs, mean, largest;
    uint32_t other_best;
    uint64_t pool_block_bytes;
} figures;

static bool read_ids(const char *folder, runs *r)
{
    pd_json_error error;
    pd_json *root = NULL;
    char *path = pd_asprintf("%s/text.json", folder), *text = pd_malloc(JSON_MAX);
    FILE *file = path != NULL ? fopen(path, "rb") : NULL;
    size_t len = file != NULL && text != NULL ? fread(text, 1, JSON_MAX, file) : 0;
    bool right = len > 0 && pd_json_parse(text, len, &root, &error) == PD_OK;

    if (file != NULL)
        fclose(file);
    const pd_json *array = right ? pd_json_get(root, "ids") : NULL;
    size_t count = array != NULL ? pd_json_count(array) : 0;
    if (count < 2)
        fprintf(stderr, "%s: no token ids\n", path);
    else if (r->tokens == 0 || r->tokens > count - 1)
        r->tokens = (uint32_t)count - 1;
    r->ids = pd_calloc(count + 1, sizeof *r->ids);
    for (size_t i = 0; r->ids != NULL && i < count; i++)
        r->ids[i] = (uint32_t)pd_json_integer(pd_json_at(array, i));
    pd_json_free(root);
    pd_free(text);
    pd_free(path);
    return count >= 2 && r->ids != NULL;
}

static uint32_t best_of(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

static double logprob_of(const float *logits, uint32_t vocab, uint32_t token)
{
    double top = (double)logits[best_of(logits, vocab)], sum = 0;

    for (uint32_t i = 0; i < vocab; i++)
        sum += exp((double)logits[i] - top);
    return (double)logits[token] - top - log(sum);
}

/* One position's logits against f16's. */
static void compare(const runs *r, uint32_t position, const float *logits, figures *f)
{
    const float *expected = r->expected + (size_t)position * r->vocab;
    double sum = 0;

    for (uint32_t i = 0; i < r->vocab; i++) {
        double difference = fabs((double)logits[i] - (double)expected[i]);
        sum += difference;
        f->largest = difference > f->largest ? difference : f->largest;
    }
    f->mean += sum / r->vocab / r->tokens;
    f->other_best += best_of(logits, r->vocab) != best_of(expected, r->vocab);
}

static pd_status read_text(const runs *r, kern_loaded *model, const pd_block *blocks, bool is_first,
                           figures *f)
{
    pd_status status = PD_OK;

    for (uint32_t at = 0; status == PD_OK && at < r->tokens; at += r->chunk) {
        uint32_t count = r->tokens - at < r->chunk ? r->tokens - at : r->chunk;
        kern_job_slice slice = {.slice = {.tokens = r->ids + at,
                                          .count = count,
                                          .position = at,
                                          .blocks = blocks,
                                          .logits = r->logits}};
        kern_backend_step step = {.slices = &slice, .slices_count = 1};
        status = r->choice.backend->step(model, &step);
        for (uint32_t i = 0; status == PD_OK && i < count; i++) {
            const float *logits = r->logits + (size_t)i * r->vocab;
            if (is_first)
                memcpy(r->expected + (size_t)(at + i) * r->vocab, logits,
                       r->vocab * sizeof *logits);
            compare(r, at + i, logits, f);
            f->logprobs += logprob_of(logits, r->vocab, r->ids[at + i + 1]);
        }
    }
    return status;
}

static pd_status run(const runs *r, const kv_format *format, figures *f)
{
    const kern_backend *backend = r->choice.backend;
    uint32_t count = (r->tokens + 15) / 16;
    pd_kv_layout_options kv = {
        .block_tokens = 16, .memory_bytes = (uint64_t)1 << 30, .blocks_max = count};
    pd_kv_layout layout;
    kern_loaded *model = NULL;
    void *pool = NULL;

    pd_assert(pd_kv_dtype_of(format->name, &kv.dtype));
    pd_status status = pd_kv_layout_make(pd_model_file_shape(r->file), &kv, &layout);
    if (status != PD_OK)
        return status;
    pd_block *blocks = pd_calloc(count, sizeof *blocks);
    for (uint32_t i = 0; blocks != NULL && i < count; i++)
        blocks[i] = count - 1 - i;
    status = backend->create(r->file, &r->options, &model);
    if (status == PD_OK)
        pool = pd_malloc(layout.pool_bytes);
    if (status == PD_OK)
        status = blocks == NULL || pool == NULL ? PD_E_NOMEM
                                                : backend->bind(model, &layout, pool, false);
    f->pool_block_bytes = layout.block_bytes_all;
    if (status == PD_OK)
        status = read_text(r, model, blocks, format == formats, f);
    if (model != NULL)
        backend->destroy(model);
    pd_free(pool);
    pd_free(blocks);
    return status;
}

static bool judge(const runs *r, const kv_format *format, const figures *f, const figures *f16)
{
    double perplexity = exp(-f->logprobs / r->tokens), expected = exp(-f16->logprobs / r->tokens);
    bool right = fabs(perplexity / expected - 1) <= format->perplexity_within &&
                 f->other_best <= (1 - format->best_least) * r->tokens &&
                 (f->largest > 0) == (f != f16);

    printf("%-8s %s: %llu bytes a token; perplexity %.4f (%+.3f %%); logits differ by %.4f in the "
           "mean, %.3f at most; another best token at %u of %u positions\n",
           format->name, right ? "right" : "WRONG", (unsigned long long)f->pool_block_bytes / 16,
           perplexity, 100 * (perplexity / expected - 1), f->mean, f->largest, f->other_best,
           r->tokens);
    return right;
}

static uint32_t number(int argc, char **argv, int at, uint32_t otherwise)
{
    return argc > at ? (uint32_t)strtoul(argv[at], NULL, 10) : otherwise;
}

static bool run_all(runs *r)
{
    figures found[FORMATS] = {0};
    bool right = true;

    for (size_t i = 0; i < FORMATS; i++) {
        if (run(r, &formats[i], &found[i]) != PD_OK)
            return false;
        right = judge(r, &formats[i], &found[i], &found[0]) && right;
    }
    return right;
}

int main(int argc, char **argv)
{
    runs r = {.tokens = number(argc, argv, 5, 0), .chunk = number(argc, argv, 6, 128)};

    pd_log_init("kv_formats", PD_LOG_WARN);
    if (argc < 3 || r.chunk == 0 || r.chunk > 4096) {
        fprintf(stderr, "usage: kv_formats MODEL FOLDER [DEVICE [THREADS [TOKENS [CHUNK]]]]\n");
        return 2;
    }
    if (access(argv[1], R_OK) != 0) {
        printf("skipped: no model at %s\n", argv[1]);
        return 77;
    }
    if (!read_ids(argv[2], &r) || pd_model_file_open(argv[1], &r.file) != PD_OK ||
        kern_backend_choose(argc > 3 ? argv[3] : "cpu", &r.choice) != PD_OK)
        return 1;
    r.vocab = pd_model_file_shape(r.file)->vocab;
    r.options = (kern_backend_options){.device = r.choice.device,
                                       .variant = r.choice.variant,
                                       .threads = number(argc, argv, 4, 0),
                                       .context_max = r.tokens,
                                       .rows_max = r.chunk,
                                       .slices_max = 1,
                                       .logits_rows_max = r.chunk};
    r.logits = pd_malloc((size_t)r.chunk * r.vocab * sizeof *r.logits);
    r.expected = pd_malloc((size_t)r.tokens * r.vocab * sizeof *r.expected);
    bool right = r.logits != NULL && r.expected != NULL && run_all(&r);
    pd_free(r.logits);
    pd_free(r.expected);
    pd_free(r.ids);
    pd_model_file_close(r.file);
    return right ? 0 : 1;
}

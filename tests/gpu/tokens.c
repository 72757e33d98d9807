/* tests/gpu/tokens.c - a device's tokens against the reference's, on the same weights.
 *
 *   tokens MODEL DEVICE          answers to prompts of 5, 257 and 700 tokens, each token judged
 *   tokens --judge MODEL         a line an answer on stdin: how many tokens its prompt has, then
 * the ids of prompt and answer; a line on stdout: of each token of the answer the reference's first
 * and second choice and their gap
 *
 * The reference is the host's ("cpu"), which is the scalar one bit for bit: that is looked at
 * first, on the shortest prompt. Every token of an answer is judged, after those that the device
 * itself gave before it: it is the reference's first choice, or its second where their logits are
 * less than GAP apart. Attention's sums, and products of 16-bit floats, are not the reference's
 * bits, so that logits differ by some thousandths of a logit. Exit status: 0 right, 1 wrong, 77 no
 * such device. */

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/plugins.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GAP 0.1

enum { CONTEXT = 1024, CHUNK = 256, ANSWER = 24, BLOCK = 16, LINE_BYTES = 1 << 16 };

typedef struct engine {
    const kern_backend *backend;
    kern_loaded *model;
    pd_kv_layout layout;
    void *pool;
    pd_block blocks[CONTEXT / BLOCK];
    float *logits; /* [CHUNK][vocab], of the latest rows that were asked for */
} engine;

typedef struct choice {
    uint32_t first, second;
    double gap;
} choice;

static pd_model_file *file;
static uint32_t vocab;

static void must(bool right, const char *what)
{
    if (right)
        return;
    fprintf(stderr, "tokens: %s\n", what);
    exit(1);
}

/* False: there is no such device. */
static bool engine_open(const char *device, engine *e)
{
    kern_backend_options options = {
        .context_max = CONTEXT, .rows_max = CHUNK, .slices_max = 1, .logits_rows_max = CHUNK};
    pd_kv_layout_options kv = {.dtype = PD_F16,
                               .block_tokens = BLOCK,
                               .memory_bytes = (uint64_t)1 << 32,
                               .blocks_max = CONTEXT / BLOCK};
    kern_choice found;

    if (kern_backend_choose(device, &found) != PD_OK)
        return false;
    options.device = found.device;
    options.variant = found.variant;
    e->backend = found.backend;
    must(e->backend->create(file, &options, &e->model) == PD_OK, "no model on the device");
    must(pd_kv_layout_make(pd_model_file_shape(file), &kv, &e->layout) == PD_OK, "no layout");
    if (e->backend->pool_own)
        must(e->backend->pool_alloc(e->model, e->layout.pool_bytes, &e->pool) == PD_OK, "no pool");
    else
        e->pool = pd_malloc(e->layout.pool_bytes);
    e->logits = pd_malloc((size_t)CHUNK * vocab * sizeof *e->logits);
    must(e->pool != NULL && e->logits != NULL, "no memory");
    for (uint32_t i = 0; i < CONTEXT / BLOCK; i++) /* neighbours lie far apart */
        e->blocks[i] = i * 37 % (CONTEXT / BLOCK);
    must(e->backend->bind(e->model, &e->layout, e->pool, true) == PD_OK, "no bind");
    return true;
}

static void engine_close(engine *e)
{
    if (e->backend->pool_own)
        e->backend->pool_free(e->model);
    else
        pd_free(e->pool);
    e->backend->destroy(e->model);
    pd_free(e->logits);
}

/* Logits of the rows from logits_from on. */
static void step(engine *e, const uint32_t *tokens, uint32_t count, uint32_t position,
                 uint32_t logits_from)
{
    kern_job_slice slice = {.slice = {.tokens = tokens,
                                      .count = count,
                                      .position = position,
                                      .blocks = e->blocks,
                                      .logits_from = logits_from,
                                      .logits = logits_from < count ? e->logits : NULL}};
    kern_backend_step run = {.slices = &slice, .slices_count = 1};

    must(e->backend->step(e->model, &run) == PD_OK, "a step failed");
}

static choice choice_of(const float *logits)
{
    choice c = {0};
    float second = -INFINITY;

    for (uint32_t i = 1; i < vocab; i++)
        c.first = logits[i] > logits[c.first] ? i : c.first;
    for (uint32_t i = 0; i < vocab; i++) {
        if (i != c.first && logits[i] > second) {
            second = logits[i];
            c.second = i;
        }
    }
    c.gap = (double)logits[c.first] - (double)second;
    return c;
}

/* What e would say at each of ids[prompt .. count - 1], after those before. choices: [count -
 * prompt]. */
static void judge(engine *e, const uint32_t *ids, uint32_t prompt, uint32_t count, choice *choices)
{
    for (uint32_t from = 0; from + 1 < count; from += CHUNK) {
        uint32_t rows = count - 1 - from < CHUNK ? count - 1 - from : CHUNK;
        uint32_t first = prompt - 1 > from ? prompt - 1 - from : 0;
        step(e, ids + from, rows, from, first < rows ? first : rows);
        for (uint32_t row = first; row < rows; row++)
            choices[from + row + 1 - prompt] = choice_of(e->logits + (size_t)(row - first) * vocab);
    }
}

static void answer(engine *e, uint32_t *ids, uint32_t prompt)
{
    for (uint32_t from = 0; from < prompt; from += CHUNK) {
        uint32_t rows = prompt - from < CHUNK ? prompt - from : CHUNK;
        step(e, ids + from, rows, from, from + rows < prompt ? rows : rows - 1);
    }
    for (uint32_t n = prompt; n < prompt + ANSWER; n++) {
        ids[n] = choice_of(e->logits).first;
        step(e, &ids[n], 1, n, 0);
    }
}

/* --- the two ways to call it --- */

static void check_reference(engine *reference, const uint32_t *ids, uint32_t count)
{
    engine scalar;

    must(engine_open("cpu-ref", &scalar), "no scalar reference");
    step(&scalar, ids, count, 0, 0);
    step(reference, ids, count, 0, 0);
    must(memcmp(scalar.logits, reference->logits, (size_t)count * vocab * sizeof(float)) == 0,
         "the host's logits are not the scalar reference's");
    engine_close(&scalar);
}

static int compare(engine *reference, engine *device)
{
    static const uint32_t prompts[] = {5, 257, 700};
    uint32_t ids[CONTEXT];
    uint64_t random = 7;
    int wrong = 0;

    for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
        choice choices[ANSWER];
        uint32_t prompt = prompts[i], first = 0, second = 0;
        double widest = 0;
        for (uint32_t n = 0; n < prompt; n++)
            ids[n] = (uint32_t)(pd_random_next(&random) % (vocab < 256 ? vocab : 256));
        if (i == 0)
            check_reference(reference, ids, prompt);
        answer(device, ids, prompt);
        judge(reference, ids, prompt, prompt + ANSWER, choices);
        for (uint32_t n = 0; n < ANSWER; n++) {
            first += ids[prompt + n] == choices[n].first;
            if (ids[prompt + n] == choices[n].first)
                continue;
            second += ids[prompt + n] == choices[n].second && choices[n].gap < GAP;
            widest = choices[n].gap > widest ? choices[n].gap : widest;
        }
        printf("prompt of %u tokens: of %u tokens %u are the reference's first choice, %u its "
               "second where the first is less than %g ahead (most: %.4f), %u neither\n",
               prompt, ANSWER, first, second, GAP, widest, ANSWER - first - second);
        /* a device that computes something else would guess, too: most are to be the first */
        wrong += first + second < ANSWER || 4 * first < 3 * ANSWER;
    }
    return wrong == 0 ? 0 : 1;
}

static int judge_lines(engine *reference)
{
    static char line[LINE_BYTES];
    static uint32_t ids[CONTEXT];
    static choice choices[CONTEXT];

    while (fgets(line, sizeof line, stdin) != NULL) {
        uint32_t count = 0;
        char *at = line, *end = NULL;
        unsigned long prompt = strtoul(at, &end, 10);
        for (at = end; count < CONTEXT; at = end) {
            unsigned long id = strtoul(at, &end, 10);
            if (end == at)
                break;
            must(id < vocab, "an id is not of the vocabulary");
            ids[count++] = (uint32_t)id;
        }
        must(prompt > 0 && prompt < count && count < CONTEXT, "a line is no answer");
        judge(reference, ids, (uint32_t)prompt, count, choices);
        for (uint32_t i = 0; i < count - prompt; i++)
            printf("%s%u %u %.6f", i > 0 ? " " : "", choices[i].first, choices[i].second,
                   choices[i].gap);
        printf("\n");
    }
    return 0;
}

int main(int argc, char **argv)
{
    engine reference, device;
    bool judges = argc == 3 && strcmp(argv[1], "--judge") == 0;
    int status;

    pd_log_init("tokens", PD_LOG_WARN);
    if (argc != 3) {
        fprintf(stderr, "usage: tokens MODEL DEVICE | tokens --judge MODEL\n");
        return 2;
    }
    must(pd_model_file_open(argv[judges ? 2 : 1], &file) == PD_OK, "no model");
    vocab = pd_model_file_shape(file)->vocab;
    must(pd_model_file_shape(file)->context >= CONTEXT, "the model's context is under 1024");
    must(engine_open("cpu", &reference), "no host");
    if (judges) {
        status = judge_lines(&reference);
    } else if (engine_open(argv[2], &device)) {
        status = compare(&reference, &device);
        engine_close(&device);
    } else {
        status = 77;
    }
    engine_close(&reference);
    pd_model_file_close(file);
    return status;
}

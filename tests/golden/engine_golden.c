/* tests/golden/engine_golden.c - the engine against tokens of fp32 engines on the same file.
 *
 *   engine_golden MODEL FOLDER [DEVICE [THREADS [CHUNK]]]
 *
 * DEVICE as in a deployment: cpu, cpu-ref, cuda, cuda-emu, ...
 *
 * FOLDER holds text.json (2,048 tokens, teacher-forced: fp32's best and second token at each
 * position, their gap, perplexity) and golden.json (greedy continuations). Right means, with 8-bit
 * activations: the argmax is fp32's wherever fp32's gap is at least 0.4, and its first or second
 * choice at 98 % of the other positions; perplexity within 1 %; greedy tokens equal fp32's up to
 * its first gap under 0.4. Prints the figures; exit status 0 right, 1 wrong, 77 no model. */

#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/plugins.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define GAP_SURE    0.4
#define CONTEXT_MAX 2048
#define JSON_MAX    (16u << 20)

typedef struct golden {
    pd_model_file *file;
    const kern_backend *backend;
    kern_loaded *model;
    pd_kv_layout layout;
    void *pool;
    pd_block *blocks;
    float *logits; /* [chunk][vocab] */
    uint32_t vocab, chunk;
} golden;

static pd_json *read_json(const char *folder, const char *name)
{
    pd_json_error error;
    pd_json *root = NULL;
    char *path = pd_asprintf("%s/%s", folder, name);
    char *text = pd_malloc(JSON_MAX);
    FILE *file = path != NULL ? fopen(path, "rb") : NULL;

    if (file == NULL || text == NULL) {
        fprintf(stderr, "%s/%s: cannot be read\n", folder, name);
        exit(1);
    }
    size_t len = fread(text, 1, JSON_MAX, file);
    if (pd_json_parse(text, len, &root, &error) != PD_OK) {
        fprintf(stderr, "%s: byte %zu: %s\n", path, error.offset, error.message);
        exit(1);
    }
    fclose(file);
    pd_free(text);
    pd_free(path);
    return root;
}

static void step(golden *g, const uint32_t *tokens, uint32_t count, uint32_t position,
                 uint32_t logits_from)
{
    kern_job_slice slice = {.slice = {.tokens = tokens,
                                      .count = count,
                                      .position = position,
                                      .blocks = g->blocks,
                                      .logits_from = logits_from,
                                      .logits = logits_from < count ? g->logits : NULL}};
    kern_backend_step run = {.slices = &slice, .slices_count = 1};

    if (g->backend->step(g->model, &run) != PD_OK)
        exit(1);
}

static uint32_t best_of(const float *logits, uint32_t vocab)
{
    kern_sampling greedy = {.temperature = 0};
    return kern_sample(&greedy, logits, vocab, 0, NULL);
}

static double logprob_of(const float *logits, uint32_t vocab, uint32_t token)
{
    double top = logits[best_of(logits, vocab)], sum = 0;

    for (uint32_t i = 0; i < vocab; i++)
        sum += exp(logits[i] - top);
    return logits[token] - top - log(sum);
}

static uint32_t *read_ids(const pd_json *array)
{
    size_t count = pd_json_count(array);
    uint32_t *ids = pd_calloc(count + 1, sizeof *ids);

    for (size_t i = 0; ids != NULL && i < count; i++)
        ids[i] = (uint32_t)pd_json_integer(pd_json_at(array, i));
    return ids;
}

/* Teacher-forced, in chunks. Returns whether it is right. */
static bool check_text(golden *g, const char *folder)
{
    pd_json *text = read_json(folder, "text.json");
    uint32_t *ids = read_ids(pd_json_get(text, "ids"));
    uint32_t *argmax = read_ids(pd_json_get(text, "argmax"));
    uint32_t *runner_up = read_ids(pd_json_get(text, "runner_up"));
    uint32_t positions = (uint32_t)pd_json_count(pd_json_get(text, "argmax"));
    uint32_t sure = 0, sure_wrong = 0, near = 0, near_first = 0, near_wrong = 0;
    double sum = 0, worst_missed_gap = 0;

    for (uint32_t first = 0; first < positions; first += g->chunk) {
        uint32_t count = positions - first < g->chunk ? positions - first : g->chunk;
        step(g, ids + first, count, first, 0);
        for (uint32_t i = first; i < first + count; i++) {
            const float *logits = g->logits + (size_t)(i - first) * g->vocab;
            uint32_t best = best_of(logits, g->vocab);
            double gap = pd_json_number(pd_json_at(pd_json_get(text, "gap"), i));
            sum += logprob_of(logits, g->vocab, ids[i + 1]);
            sure += gap >= GAP_SURE;
            near += gap < GAP_SURE;
            sure_wrong += gap >= GAP_SURE && best != argmax[i];
            near_first += gap < GAP_SURE && best == argmax[i];
            near_wrong += gap < GAP_SURE && best != argmax[i] && best != runner_up[i];
            if (best != argmax[i] && gap > worst_missed_gap)
                worst_missed_gap = gap;
        }
    }
    double perplexity = exp(-sum / positions);
    double expected = pd_json_number(pd_json_get(text, "perplexity"));
    printf("text: positions=%u gap>=0.4: %u, wrong %u; nearer: %u, first %u, neither %u (%.2f%%); "
           "largest gap missed %.3f; perplexity %.5f, fp32 %.5f (%+.3f%%)\n",
           positions, sure, sure_wrong, near, near_first, near_wrong, 100.0 * near_wrong / near,
           worst_missed_gap, perplexity, expected, 100 * (perplexity / expected - 1));
    pd_free(ids);
    pd_free(argmax);
    pd_free(runner_up);
    pd_json_free(text);
    return positions > 2000 && sure_wrong == 0 && near_wrong <= 0.02 * near &&
           fabs(perplexity / expected - 1) <= 0.01;
}

/* Greedy from one prompt; true when it equals fp32's up to the first small gap. */
static bool check_prompt(golden *g, const pd_json *entry)
{
    const pd_json *fp32 = pd_json_get(entry, "hf_fp32");
    const pd_json *gaps = pd_json_get(fp32, "top2_gap_and_runner_up");
    uint32_t *prompt = read_ids(pd_json_get(entry, "prompt_ids"));
    uint32_t *ids = read_ids(pd_json_get(fp32, "ids"));
    uint32_t prompt_count = (uint32_t)pd_json_count(pd_json_get(entry, "prompt_ids"));
    uint32_t count = (uint32_t)pd_json_count(pd_json_get(fp32, "ids"));
    uint32_t position = 0, same = 0;
    const char *ended = "equal";
    bool right = true;

    for (; position < prompt_count; position += g->chunk) {
        uint32_t chunk = prompt_count - position < g->chunk ? prompt_count - position : g->chunk;
        step(g, prompt + position, chunk, position,
             position + chunk < prompt_count ? chunk : chunk - 1);
    }
    for (position = prompt_count; same < count; same++, position++) {
        double gap = pd_json_number(pd_json_at(pd_json_at(gaps, same), 0));
        uint32_t token = best_of(g->logits, g->vocab);
        if (token != ids[same]) {
            right = gap < GAP_SURE;
            ended = right ? "parted at a small gap" : "WRONG";
            break;
        }
        step(g, &token, 1, position, 0);
    }
    printf("greedy: %s: prompt %u, equal %u of %u, %s\n",
           pd_json_string(pd_json_get(entry, "name"), NULL), prompt_count, same, count, ended);
    pd_free(prompt);
    pd_free(ids);
    return right;
}

static bool check_greedy(golden *g, const char *folder)
{
    pd_json *root = read_json(folder, "golden.json");
    const pd_json *entries = pd_json_get(root, "golden");
    size_t count = pd_json_count(entries);
    bool right = count > 0;

    for (size_t i = 0; i < count; i++)
        right = check_prompt(g, pd_json_at(entries, i)) && right;
    pd_json_free(root);
    return right;
}

static pd_status load(golden *g, const char *device, const kern_backend_options *limits)
{
    kern_backend_options options = *limits;
    kern_choice choice;
    pd_status status = kern_backend_choose(device, &choice);

    if (status != PD_OK)
        return status;
    options.device = choice.device;
    options.variant = choice.variant;
    g->backend = choice.backend;
    status = g->backend->create(g->file, &options, &g->model);
    if (status != PD_OK)
        return status;
    if (g->backend->pool_own)
        status = g->backend->pool_alloc(g->model, g->layout.pool_bytes, &g->pool);
    else
        g->pool = pd_malloc(g->layout.pool_bytes);
    if (g->pool == NULL)
        return status != PD_OK ? status : PD_E_NOMEM;
    return g->backend->bind(g->model, &g->layout, g->pool, false);
}

static void unload(golden *g)
{
    if (g->backend->pool_own)
        g->backend->pool_free(g->model);
    else
        pd_free(g->pool);
    g->backend->destroy(g->model);
}

static pd_status open_model(golden *g, const char *path)
{
    pd_status status = pd_model_file_open(path, &g->file);
    if (status != PD_OK)
        return status;
    const pd_model_shape *shape = pd_model_file_shape(g->file);
    pd_kv_layout_options kv = {.dtype = PD_F16,
                               .block_tokens = 16,
                               .memory_bytes = (uint64_t)1 << 30,
                               .blocks_max = CONTEXT_MAX / 16};
    status = pd_kv_layout_make(shape, &kv, &g->layout);
    if (status != PD_OK)
        return status;
    g->vocab = shape->vocab;
    g->blocks = pd_calloc(CONTEXT_MAX / 16, sizeof *g->blocks);
    g->logits = pd_malloc((size_t)g->chunk * g->vocab * sizeof *g->logits);
    if (g->blocks == NULL || g->logits == NULL)
        return PD_E_NOMEM;
    for (uint32_t i = 0; i < CONTEXT_MAX / 16; i++)
        g->blocks[i] = i * 37 % (CONTEXT_MAX / 16); /* no order may matter */
    return PD_OK;
}

/* 0: not a number. */
static uint32_t number(const char *text)
{
    char *end = NULL;
    unsigned long value = strtoul(text, &end, 10);

    return end == text || *end != '\0' || value > UINT32_MAX ? 0 : (uint32_t)value;
}

int main(int argc, char **argv)
{
    golden g = {.chunk = argc > 5 ? number(argv[5]) : 128};
    kern_backend_options options = {.threads = argc > 4 ? number(argv[4]) : 0,
                                    .context_max = CONTEXT_MAX,
                                    .rows_max = g.chunk,
                                    .slices_max = 1,
                                    .logits_rows_max = g.chunk};

    pd_log_init("engine_golden", PD_LOG_INFO);
    if (argc < 3 || g.chunk == 0) {
        fprintf(stderr, "usage: engine_golden MODEL FOLDER [DEVICE [THREADS [CHUNK]]]\n");
        return 2;
    }
    if (access(argv[1], R_OK) != 0) {
        printf("skipped: no model at %s\n", argv[1]);
        return 77;
    }
    if (open_model(&g, argv[1]) != PD_OK || load(&g, argc > 3 ? argv[3] : "cpu", &options) != PD_OK)
        return 1;
    bool right = check_greedy(&g, argv[2]);
    right = check_text(&g, argv[2]) && right;
    printf("%s: backend=%s\n", right ? "right" : "WRONG", g.backend->describe(g.model));
    unload(&g);
    pd_model_file_close(g.file);
    pd_free(g.blocks);
    pd_free(g.logits);
    return right ? 0 : 1;
}

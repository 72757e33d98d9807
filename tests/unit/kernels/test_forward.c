/* The forward pass gives the same bits whatever the company, the chunks, the threads and the
 * instruction set. test_forward [FORMAT]: of KV; f16 when not given. */

#include "kernels/model/engine.h"
#include "kernels/model/forward.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <linux/seccomp.h>
#include <malloc.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define TOKENS    531 /* more than two splits of 256, and no whole tile */
#define BLOCKS    256
#define SEQUENCES 8
#define BATCH_MAX 64 /* of four blocks each */

static pd_model_file *file;
static pd_dtype dtype = PD_F16; /* of KV */
static pd_kv_layout layout;
static uint32_t tokens[TOKENS];
static float *expected; /* [TOKENS][TINY_VOCAB], the reference in one chunk */

typedef struct rig {
    kern_model *model;
    void *pool;
    pd_block blocks[BLOCKS];
} rig;

static rig rig_make(const char *device, uint32_t threads)
{
    kern_options options = {.device = device,
                            .threads = threads,
                            .context_max = 1024,
                            .rows_max = 600,
                            .logits_rows_max = 600};
    rig r = {0};

    assert_int_equal(kern_model_create(file, &options, &r.model), PD_OK);
    r.pool = pd_malloc(layout.pool_bytes);
    memset(r.pool, 0xff,
           layout.pool_bytes); /* NaN, or scales that are: what was not written must not be read */
    for (uint32_t i = 0; i < BLOCKS; i++)
        r.blocks[i] = i * 101 % BLOCKS;
    return r;
}

static void rig_end(rig *r)
{
    kern_model_destroy(r->model);
    pd_free(r->pool);
}

static void step(rig *r, const kern_slice *slices, uint32_t count)
{
    kern_step run = {.layout = &layout, .pool = r->pool, .slices = slices, .slices_count = count};
    assert_int_equal(kern_model_step(r->model, &run), PD_OK);
}

/* All logits of the text, in chunks. */
static void run_text(rig *r, uint32_t chunk, float *logits)
{
    for (uint32_t first = 0; first < TOKENS; first += chunk) {
        uint32_t count = TOKENS - first < chunk ? TOKENS - first : chunk;
        kern_slice slice = {.tokens = tokens + first,
                            .count = count,
                            .position = first,
                            .blocks = r->blocks,
                            .logits = logits + (size_t)first * TINY_VOCAB};
        step(r, &slice, 1);
    }
}

static int set_up(void **state)
{
    uint64_t seed = 7;

    (void)state;
    file = tiny_open();
    layout = tiny_layout_of(file, BLOCKS, dtype);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)(pd_random_next(&seed) % TINY_VOCAB);
    expected = pd_malloc(sizeof(float) * TOKENS * TINY_VOCAB);
    rig r = rig_make("cpu-ref", 1);
    run_text(&r, TOKENS, expected);
    rig_end(&r);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    pd_free(expected);
    pd_model_file_close(file);
    return pd_mem_live() == 0 ? 0 : -1;
}

static bool usable(const kern_ops *backend)
{
    char reason[128];
    return backend->probe(reason, sizeof reason) > 0;
}

static void logits_are_equal_for_every_backend_thread_count_and_chunk(void **state)
{
    static const uint32_t chunks[] = {100, 16, 1, 512, TOKENS};
    float *logits = pd_malloc(sizeof(float) * TOKENS * TINY_VOCAB);

    (void)state;
    for (uint32_t i = 0; kern_ops_at(i) != NULL; i++) {
        /* the reference is slow, and one run of it is what the others are compared with */
        uint32_t threads_min = i == 0 ? 3 : 1;
        size_t chunks_count = i == 0 ? 2 : sizeof chunks / sizeof *chunks;
        for (uint32_t threads = threads_min; usable(kern_ops_at(i)) && threads <= 3; threads++) {
            rig r = rig_make(kern_ops_at(i)->name, threads);
            for (size_t c = 0; c < chunks_count; c++) {
                memset(r.pool, 0xff, layout.pool_bytes);
                memset(logits, 0, sizeof(float) * TOKENS * TINY_VOCAB);
                run_text(&r, chunks[c], logits);
                assert_memory_equal(logits, expected, sizeof(float) * TOKENS * TINY_VOCAB);
            }
            rig_end(&r);
        }
    }
    pd_free(logits);
}

/* Sequence s has the text's first 17 s + 1 tokens in blocks of its own; all take the next token in
 * one step, in which one of them takes a chunk of 40. */
static void a_row_is_the_same_alone_and_in_a_batch(void **state)
{
    static float logits[SEQUENCES][TINY_VOCAB];
    kern_slice slices[SEQUENCES];

    (void)state;
    for (uint32_t i = 0; kern_ops_at(i) != NULL; i++) {
        if (!usable(kern_ops_at(i)))
            continue;
        rig r = rig_make(kern_ops_at(i)->name, 2);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            kern_slice prompt = {.tokens = tokens,
                                 .count = 17 * s + 1,
                                 .blocks = r.blocks + 16 * s,
                                 .logits_from = 17 * s + 1};
            step(&r, &prompt, 1);
        }
        for (uint32_t mixed = 0; mixed < 2; mixed++) {
            for (uint32_t s = 0; s < SEQUENCES; s++) {
                uint32_t count = mixed == 1 && s == 3 ? 40 : 1;
                slices[s] = (kern_slice){.tokens = tokens + 17 * s + 1,
                                         .count = count,
                                         .position = 17 * s + 1,
                                         .blocks = r.blocks + 16 * s,
                                         .logits_from = count - 1,
                                         .logits = logits[s]};
            }
            step(&r, slices, SEQUENCES);
            for (uint32_t s = 0; s < SEQUENCES; s++)
                assert_memory_equal(logits[s],
                                    expected + (size_t)(17 * s + slices[s].count) * TINY_VOCAB,
                                    sizeof logits[s]);
        }
        rig_end(&r);
    }
}

/* Sequence s of a batch: its context, and where its blocks are. */
static uint32_t context_of(uint32_t s)
{
    return 7 * s % 61 + 1;
}

static void decode_batch(rig *r, uint32_t count, float (*logits)[TINY_VOCAB])
{
    kern_slice slices[BATCH_MAX];

    memset(logits, 0, count * sizeof *logits);
    for (uint32_t s = 0; s < count; s++)
        slices[s] = (kern_slice){.tokens = tokens + context_of(s),
                                 .count = 1,
                                 .position = context_of(s),
                                 .blocks = r->blocks + 4 * s,
                                 .logits = logits[s]};
    step(r, slices, count);
}

/* Tails of tiles, and few and many rows for the threads. */
static void a_row_is_the_same_in_batches_of_any_size(void **state)
{
    static const uint32_t batches[] = {1, 2, 3, 5, 6, 7, 8, 9, 17, 31, 33, 48, BATCH_MAX};
    static float logits[BATCH_MAX][TINY_VOCAB];

    (void)state;
    for (uint32_t i = 1; kern_ops_at(i) != NULL; i++) {
        for (uint32_t threads = 1; usable(kern_ops_at(i)) && threads <= 3; threads++) {
            rig r = rig_make(kern_ops_at(i)->name, threads);
            for (uint32_t s = 0; s < BATCH_MAX; s++) {
                kern_slice prompt = {.tokens = tokens,
                                     .count = context_of(s),
                                     .blocks = r.blocks + 4 * s,
                                     .logits_from = context_of(s)};
                step(&r, &prompt, 1);
            }
            for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
                decode_batch(&r, batches[b], logits);
                for (uint32_t s = 0; s < batches[b]; s++)
                    assert_memory_equal(logits[s], expected + (size_t)context_of(s) * TINY_VOCAB,
                                        sizeof logits[s]);
            }
            rig_end(&r);
        }
    }
}

/* With every allocation failing, and nothing more in use by the C library afterwards. */
static void a_step_takes_nothing_from_the_heap(void **state)
{
    static float logits[BATCH_MAX][TINY_VOCAB];
    rig r = rig_make("cpu", 2);
    kern_slice prompt = {.tokens = tokens,
                         .count = TOKENS,
                         .blocks = r.blocks,
                         .logits_from = TOKENS - 1,
                         .logits = logits[0]};

    (void)state;
    memset(r.pool, 0, layout.pool_bytes); /* sequences without a prompt: any numbers will do */
    step(&r, &prompt, 1);                 /* the C library's own, once */
    size_t before = mallinfo2().uordblks;
    pd_mem_fail_at(0);
    step(&r, &prompt, 1);
    decode_batch(&r, 1, logits);
    decode_batch(&r, BATCH_MAX, logits);
    pd_mem_fail_at(-1);
    assert_int_equal(mallinfo2().uordblks, before);
    rig_end(&r);
}

/* In strict seccomp a thread may read, write and exit, and is killed at any other system call. */
static int decode_in_strict_seccomp(bool one_call_more)
{
    static float logits[BATCH_MAX][TINY_VOCAB];
    pid_t child = fork();
    int status = 0;

    if (child == 0) {
        rig r = rig_make("cpu", 1);
        memset(r.pool, 0, layout.pool_bytes);
        decode_batch(&r, BATCH_MAX, logits);
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0)
            _exit(2);
        decode_batch(&r, 1, logits);
        decode_batch(&r, BATCH_MAX, logits);
        if (one_call_more)
            syscall(SYS_getppid);
        syscall(SYS_exit, 0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

/* On one thread; several meet by futexes where one has to sleep. */
static void a_step_makes_no_system_call(void **state)
{
    (void)state;
    int status = decode_in_strict_seccomp(false);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2) {
        print_message("skipped: no seccomp here\n");
        skip();
    }
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    status = decode_in_strict_seccomp(true); /* it would be seen */
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

typedef struct group_log {
    uint32_t groups[16];
    uint32_t count;
} group_log;

static void note_group(void *ctx, uint32_t group)
{
    group_log *seen = ctx;
    seen->groups[seen->count++ % 16] = group;
}

static void each_group_is_reported_once_and_in_order(void **state)
{
    rig r = rig_make("cpu", 2);

    (void)state;
    for (uint32_t count = 1; count < 40; count += 19) {
        for (uint32_t wanted = 0; wanted < 2; wanted++) {
            static float logits[TINY_VOCAB];
            group_log seen = {.count = 0};
            kern_slice slice = {.tokens = tokens,
                                .count = count,
                                .blocks = r.blocks,
                                .logits_from = count - wanted,
                                .logits = wanted ? logits : NULL};
            kern_step run = {.layout = &layout,
                             .pool = r.pool,
                             .slices = &slice,
                             .slices_count = 1,
                             .group_done = note_group,
                             .group_done_ctx = &seen};
            assert_int_equal(kern_model_step(r.model, &run), PD_OK);
            assert_int_equal(seen.count, layout.groups);
            for (uint32_t g = 0; g < seen.count; g++)
                assert_int_equal(seen.groups[g], g);
        }
    }
    rig_end(&r);
}

static void what_is_out_of_range_is_refused(void **state)
{
    rig r = rig_make("cpu", 1);
    uint32_t bad_token = TINY_VOCAB;
    kern_slice slices[2] = {
        {.tokens = &bad_token, .count = 1, .blocks = r.blocks, .logits_from = 1},
        {.tokens = tokens, .count = 10, .position = 1015, .blocks = r.blocks, .logits_from = 10},
    };

    (void)state;
    for (int i = 0; i < 2; i++) {
        kern_step run = {
            .layout = &layout, .pool = r.pool, .slices = &slices[i], .slices_count = 1};
        assert_int_equal(kern_model_step(r.model, &run), PD_E_INVALID);
    }
    rig_end(&r);
    kern_options options = {
        .device = "cpu-none", .context_max = 1, .rows_max = 1, .logits_rows_max = 1};
    assert_int_equal(kern_model_create(file, &options, &r.model), PD_E_UNSUPPORTED);
}

static void broken_numbers_are_an_error_not_an_answer(void **state)
{
    static float logits[TINY_VOCAB];
    rig r = rig_make("cpu", 1);
    kern_slice slice = {.tokens = tokens,
                        .count = 1,
                        .position = 16, /* positions before it hold NaN */
                        .blocks = r.blocks,
                        .logits = logits};
    kern_step run = {.layout = &layout, .pool = r.pool, .slices = &slice, .slices_count = 1};

    (void)state;
    assert_int_equal(kern_model_step(r.model, &run), PD_E_INTERNAL);
    rig_end(&r);
}

static void creation_survives_every_failed_allocation(void **state)
{
    kern_options options = {
        .device = "cpu", .threads = 2, .context_max = 64, .rows_max = 8, .logits_rows_max = 2};
    kern_model *model = NULL;

    (void)state;
    for (long n = 0; model == NULL; n++) {
        pd_mem_fail_at(n);
        pd_status status = kern_model_create(file, &options, &model);
        pd_mem_fail_at(-1);
        assert_int_equal(status, model == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 100);
    }
    kern_model_destroy(model);
}

static kern_job *wait_job(kern_engine *engine)
{
    kern_job *job = NULL;

    while (kern_engine_poll(engine, &job) == PD_E_AGAIN) {
        struct pollfd ready = {.fd = kern_engine_fd(engine), .events = POLLIN};
        assert_int_equal(poll(&ready, 1, 20000), 1);
    }
    return job;
}

static kern_engine *engine_make(rig *r)
{
    kern_engine_options options = {
        .device = "cpu", .threads = 1, .context_max = 1024, .rows_max = 600, .slices_max = 4};
    kern_engine *engine = NULL;
    uint32_t pieces = 9;
    void *own = NULL;

    assert_int_equal(kern_engine_create(file, &options, &engine), PD_OK);
    assert_int_equal(kern_engine_pool_kind(engine), PD_MEMORY_HOST);
    assert_int_equal(kern_engine_pool_alloc(engine, layout.pool_bytes, &own, &pieces), PD_OK);
    assert_null(own);
    assert_int_equal(pieces, 0);
    assert_int_equal(kern_engine_bind(engine, &layout, r->pool, false), PD_OK);
    return engine;
}

static void engine_hands_jobs_back_in_order_with_their_tokens(void **state)
{
    rig r = rig_make("cpu", 1);
    kern_engine *engine = engine_make(&r);
    kern_job_slice slices[6];
    kern_job jobs[6];

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        slices[i] = (kern_job_slice){.slice = {.tokens = tokens + 10 * i,
                                               .count = 10,
                                               .position = 10 * i,
                                               .blocks = r.blocks},
                                     .want_token = true};
        jobs[i] = (kern_job){.slices = &slices[i], .slices_count = 1, .user = &slices[i]};
        assert_int_equal(kern_engine_submit(engine, &jobs[i]), PD_OK);
    }
    for (uint32_t i = 0; i < 6; i++) {
        kern_sampling greedy = {.temperature = 0};
        const float *logits = expected + (size_t)(10 * i + 9) * TINY_VOCAB;
        assert_ptr_equal(wait_job(engine), &jobs[i]);
        assert_int_equal(jobs[i].status, PD_OK);
        assert_true(jobs[i].finished_ns >= jobs[i].started_ns && jobs[i].started_ns > 0);
        assert_int_equal(slices[i].token_out, kern_sample(&greedy, logits, TINY_VOCAB, 0, NULL));
    }
    kern_engine_destroy(engine);
    rig_end(&r);
}

static void engine_refuses_when_eight_wait_and_ends_with_work_left(void **state)
{
    enum { JOBS = 12 };
    rig r = rig_make("cpu", 1);
    kern_engine *engine = engine_make(&r);
    kern_job_slice slices[JOBS];
    kern_job jobs[JOBS];
    uint32_t refused = 0;

    (void)state;
    for (uint32_t i = 0; i < JOBS; i++) {
        slices[i] = (kern_job_slice){
            .slice = {
                .tokens = tokens, .count = TOKENS, .blocks = r.blocks, .logits_from = TOKENS}};
        jobs[i] = (kern_job){.slices = &slices[i], .slices_count = 1};
        pd_status status = kern_engine_submit(engine, &jobs[i]);
        assert_true(status == PD_OK || status == PD_E_OVERLOAD);
        refused += status == PD_E_OVERLOAD;
    }
    assert_true(refused >= 1); /* 12 jobs of milliseconds against one started and eight waiting */
    kern_engine_destroy(engine);
    rig_end(&r);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_equal_for_every_backend_thread_count_and_chunk),
        cmocka_unit_test(a_row_is_the_same_alone_and_in_a_batch),
        cmocka_unit_test(a_row_is_the_same_in_batches_of_any_size),
        cmocka_unit_test(a_step_takes_nothing_from_the_heap),
        cmocka_unit_test(a_step_makes_no_system_call),
        cmocka_unit_test(each_group_is_reported_once_and_in_order),
        cmocka_unit_test(what_is_out_of_range_is_refused),
        cmocka_unit_test(broken_numbers_are_an_error_not_an_answer),
        cmocka_unit_test(creation_survives_every_failed_allocation),
        cmocka_unit_test(engine_hands_jobs_back_in_order_with_their_tokens),
        cmocka_unit_test(engine_refuses_when_eight_wait_and_ends_with_work_left),
    };
    if (argc > 1 && !pd_kv_dtype_of(argv[1], &dtype))
        return 2;
    choice_filter();
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

/* Tensor-parallel ranks: whatever their number, logits, KV, hashes and tokens are those of one
 * rank, bit for bit; and when a rank is gone, nobody waits for it. Ranks are threads here, and
 * processes where they have to die. test_ranks [FORMAT]: of KV; f16 when not given. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/comm.h"
#include "kernels/model/engine.h"
#include "kernels/model/split.h"
#include "tests/unit/kernels/rank_processes.h"
#include "tests/unit/kernels/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    BLOCKS = 24,
    RANKS_MAX = 8,
    ROWS_MAX = 64,
    SLICES_MAX = 6,
    PROMPT = 40,
    ANSWER = 12,
    DRAFTS = 3
};

static pd_model_file *file;
static pd_dtype dtype = PD_F16; /* of KV */

typedef struct rank {
    kern_comm *comm;
    kern_engine *engine;
    pthread_t thread;
} rank;

typedef struct group {
    uint32_t ranks, threads;
    const char *device;
    pd_kv_layout layout;
    void *pool, *memory;
    uint64_t bytes;
    rank rank[RANKS_MAX];
} group;

static void *shared_memory(uint64_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(memory, MAP_FAILED);
    return memory;
}

static kern_engine_options options_of(const group *g, uint32_t number)
{
    return (kern_engine_options){
        .device = g->device,
        .threads = g->threads,
        .context_max = 512,
        .rows_max = ROWS_MAX,
        .slices_max = SLICES_MAX,
        .sampled_rows_max = SLICES_MAX + 2 * DRAFTS,
        .logits_rows_max = ROWS_MAX,
        .rank = number,
        .ranks = g->ranks,
        .comm = g->rank[number].comm,
    };
}

static void rank_make_still(group *g, uint32_t number, const int *pidfds, uint64_t still_ns)
{
    kern_comm_options comm = {.rank = number,
                              .ranks = g->ranks,
                              .memory = g->memory,
                              .bytes = g->bytes,
                              .pidfds = pidfds,
                              .still_ns = still_ns};

    if (g->ranks > 1)
        assert_int_equal(kern_comm_create(&comm, &g->rank[number].comm), PD_OK);
    kern_engine_options options = options_of(g, number);
    assert_int_equal(kern_engine_create(file, &options, &g->rank[number].engine), PD_OK);
    assert_int_equal(kern_engine_bind(g->rank[number].engine, &g->layout, g->pool, true), PD_OK);
}

static void rank_make(group *g, uint32_t number, const int *pidfds)
{
    rank_make_still(g, number, pidfds, 0);
}

static void *serve(void *arg)
{
    kern_engine_serve(arg);
    return NULL;
}

static void group_init(group *g, const char *device, uint32_t ranks, uint32_t threads)
{
    *g = (group){.ranks = ranks, .threads = threads, .device = device};
    pd_kv_layout_options options = {.dtype = dtype,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = 1 << 30,
                                    .blocks_max = BLOCKS,
                                    .ranks = ranks};
    assert_int_equal(pd_kv_layout_make(pd_model_file_shape(file), &options, &g->layout), PD_OK);
    g->pool = shared_memory(g->layout.pool_bytes);
    if (ranks > 1) {
        kern_engine_options engine = options_of(g, 0);
        bool pool_own = true;
        g->bytes = kern_engine_shared_bytes(file, &engine, &g->layout, true, &pool_own);
        assert_false(pool_own);
        g->memory = shared_memory(g->bytes);
    }
}

static void group_start(group *g)
{
    for (uint32_t i = 0; i < g->ranks; i++)
        rank_make(g, i, NULL);
    for (uint32_t i = 1; i < g->ranks; i++)
        assert_int_equal(pthread_create(&g->rank[i].thread, NULL, serve, g->rank[i].engine), 0);
}

static void group_end(group *g)
{
    kern_engine_stop(g->rank[0].engine);
    if (g->ranks > 1)
        kern_comm_end(g->rank[0].comm);
    for (uint32_t i = 1; i < g->ranks; i++)
        pthread_join(g->rank[i].thread, NULL);
    for (uint32_t i = 0; i < g->ranks; i++) {
        kern_engine_destroy(g->rank[i].engine);
        kern_comm_destroy(g->rank[i].comm);
    }
    munmap(g->pool, g->layout.pool_bytes);
    if (g->memory != NULL)
        munmap(g->memory, g->bytes);
}

static pd_status run(group *g, kern_job *job)
{
    kern_job *done = NULL;
    struct pollfd ready = {.fd = kern_engine_fd(g->rank[0].engine), .events = POLLIN};

    assert_int_equal(kern_engine_submit(g->rank[0].engine, job), PD_OK);
    while (kern_engine_poll(g->rank[0].engine, &done) != PD_OK)
        assert_true(poll(&ready, 1, 20000) > 0);
    assert_ptr_equal(done, job);
    return job->status;
}

/* What a conversation leaves behind. */
typedef struct result {
    uint32_t tokens[2][ANSWER + 1 + DRAFTS]; /* the last of them of one step, with drafts */
    float *logits;                           /* [PROMPT][vocab] of the first sequence */
    uint64_t groups;
} result;

static void count_group(void *ctx, uint32_t number)
{
    result *r = ctx;

    r->groups = r->groups * 10 + number + 1;
}

/* Two sequences: prompts in chunks, all logits of the first, then answers together. */
static void converse(group *g, result *r)
{
    uint32_t vocab = pd_model_file_shape(file)->vocab, prompt[2][PROMPT], last[2];
    pd_block blocks[2][4] = {{3, 4, 17, 9}, {20, 1, 2, 23}};
    uint64_t random = 5;

    r->logits = calloc((size_t)PROMPT * vocab, sizeof(float));
    for (int i = 0; i < 2 * PROMPT; i++)
        prompt[i / PROMPT][i % PROMPT] = (uint32_t)(pd_random_next(&random) % vocab);
    for (uint32_t from = 0; from < PROMPT; from += PROMPT / 2) {
        kern_job_slice slices[2] = {0};
        for (int s = 0; s < 2; s++)
            slices[s] = (kern_job_slice){.slice = {.tokens = prompt[s] + from,
                                                   .count = PROMPT / 2,
                                                   .position = from,
                                                   .blocks = blocks[s],
                                                   .logits_from = PROMPT / 2},
                                         .want_token = from > 0};
        slices[0].slice.logits_from = 0;
        slices[0].slice.logits = r->logits + (size_t)from * vocab;
        kern_job job = {
            .slices = slices, .slices_count = 2, .group_done = count_group, .group_done_ctx = r};
        assert_int_equal(run(g, &job), PD_OK);
        for (int s = 0; s < 2; s++)
            last[s] = slices[s].token_out;
    }
    for (uint32_t n = 0; n < ANSWER; n++) {
        kern_job_slice slices[2] = {0};
        for (int s = 0; s < 2; s++) {
            r->tokens[s][n] = last[s];
            slices[s] = (kern_job_slice){.slice = {.tokens = &last[s],
                                                   .count = 1,
                                                   .position = PROMPT + n,
                                                   .blocks = blocks[s],
                                                   .logits_from = 1},
                                         .want_token = true,
                                         .sampling = {.temperature = (float)s, .seed = 7}};
        }
        kern_job job = {.slices = slices, .slices_count = 2};
        assert_int_equal(run(g, &job), PD_OK);
        for (int s = 0; s < 2; s++)
            last[s] = slices[s].token_out;
    }
    kern_job_slice slices[2] = {0};
    for (int s = 0; s < 2; s++) {

        prompt[s][0] = last[s]; /* the drafts that follow it are of the prompt */
        slices[s] = (kern_job_slice){.slice = {.tokens = prompt[s],
                                               .count = 1 + DRAFTS,
                                               .position = PROMPT + ANSWER,
                                               .blocks = blocks[s],
                                               .logits_from = 1 + DRAFTS},
                                     .want_token = true,
                                     .drafts = DRAFTS,
                                     .drafts_out = &r->tokens[s][ANSWER],
                                     .sampling = {.temperature = (float)s, .seed = 7}};
    }
    kern_job job = {.slices = slices, .slices_count = 2};
    assert_int_equal(run(g, &job), PD_OK);
    for (int s = 0; s < 2; s++)
        r->tokens[s][ANSWER + DRAFTS] = slices[s].token_out;
}

/* Every head's slice of every block is the same, wherever it lies; and so are the seals made of the
 * hashes that its rank made. */
static void compare_pools(const group *one, const group *many)
{
    for (uint32_t number = 0; number < one->layout.groups; number++) {
        for (pd_block block = 0; block < BLOCKS; block++) {
            for (uint32_t head = 0; head < one->layout.kv_heads; head++)
                assert_memory_equal(
                    (char *)one->pool + pd_kv_layout_head_offset(&one->layout, number, block, head),
                    (char *)many->pool +
                        pd_kv_layout_head_offset(&many->layout, number, block, head),
                    pd_kv_layout_head_bytes(&one->layout, number));
            uint64_t seals[2];
            pd_seal_item item = {.block = block,
                                 .head_to = one->layout.kv_heads,
                                 .place = {.group = number, .valid_tokens = 16}};
            pd_sealer a = kern_engine_sealer(one->rank[0].engine);
            pd_sealer b = kern_engine_sealer(many->rank[0].engine);
            assert_int_equal(a.seal(a.ctx, &item, 1, &seals[0]), PD_OK);
            assert_int_equal(b.seal(b.ctx, &item, 1, &seals[1]), PD_OK);
            assert_int_equal(seals[0], seals[1]);
        }
    }
}

static void compare(const char *device, uint32_t kv_heads, const uint32_t *ranks, uint32_t count)
{
    group one, many;
    result first = {0};

    file = tiny_open_for_ranks(kv_heads);
    group_init(&one, device, 1, 1);
    group_start(&one);
    converse(&one, &first);
    for (uint32_t i = 0; i < count; i++) {
        result other = {0};
        group_init(&many, device, ranks[i], 1 + i % 2);
        group_start(&many);
        converse(&many, &other);
        assert_memory_equal(first.logits, other.logits,
                            PROMPT * pd_model_file_shape(file)->vocab * sizeof(float));
        assert_memory_equal(first.tokens, other.tokens, sizeof first.tokens);
        assert_int_equal(first.groups, other.groups);
        assert_int_equal(first.groups, 1212);
        compare_pools(&one, &many);
        free(other.logits);
        group_end(&many);
    }
    group_end(&one);
    free(first.logits);
    pd_model_file_close(file);
}

static void any_number_of_ranks_is_one(void **state)
{
    (void)state;
    compare("cpu", 8, (const uint32_t[]){2, 4, 8}, 3);
    compare("cpu", 6, (const uint32_t[]){2, 3, 6}, 3);
    compare("cpu-ref", 5, (const uint32_t[]){5}, 1);
}

/* What one rank alone finds ends the step for all, and the next one goes on. */
static void a_failed_step_is_everybodys(void **state)
{
    group g;
    uint32_t tokens[] = {1, 2, 1 << 20};
    pd_block block = 1;

    (void)state;
    file = tiny_open_for_ranks(4);
    group_init(&g, "cpu", 4, 1);
    group_start(&g);
    kern_job_slice slice = {
        .slice = {.tokens = tokens, .count = 3, .blocks = &block, .logits_from = 3}};
    kern_job job = {.slices = &slice, .slices_count = 1};
    assert_int_equal(run(&g, &job), PD_E_INVALID);
    /* then a V that is no number, in rank 3's head alone */
    slice.slice.count = slice.slice.logits_from = 2;
    assert_int_equal(run(&g, &job), PD_OK);
    uint64_t value_at = pd_kv_layout_k_offset(&g.layout, 0, block, 3) + g.layout.half_bytes;
    /* a NaN of f16, or of a scale */
    size_t bytes = g.layout.scale_bytes != 0 ? g.layout.scale_bytes : g.layout.element_bytes;
    char *value = (char *)g.pool + value_at + (g.layout.scale_bytes != 0 ? g.layout.scales_at : 0);
    char was[sizeof(float)];
    memcpy(was, value, bytes);
    memset(value, 0xff, bytes);
    slice.slice.position = 2;
    slice.slice.count = slice.slice.logits_from = 1;
    slice.want_token = true;
    assert_int_equal(run(&g, &job), PD_E_INTERNAL);
    memcpy(value, was, bytes);
    slice.slice.logits_from = 1;
    assert_int_equal(run(&g, &job), PD_OK);
    group_end(&g);
    pd_model_file_close(file);
}

static int pidfd_of(pid_t pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

static void a_rank_that_dies_is_not_waited_for(void **state)
{
    group g;
    uint32_t token = 1;
    pd_block block = 1;
    pid_t pids[2];
    int pidfds[2];

    (void)state;
    file = tiny_open_for_ranks(6);
    group_init(&g, "cpu", 3, 1);
    for (uint32_t i = 0; i < 2; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            rank_make(&g, i + 1, NULL);
            kern_engine_serve(g.rank[i + 1].engine);
            _exit(7);
        }
        pidfds[i] = pidfd_of(pids[i]);
        assert_true(pidfds[i] >= 0);
    }
    rank_make(&g, 0, pidfds);
    kern_job_slice slice = {
        .slice = {.tokens = &token, .count = 1, .blocks = &block, .logits_from = 1},
        .want_token = true};
    kern_job job = {.slices = &slice, .slices_count = 1};
    assert_int_equal(run(&g, &job), PD_OK);
    kill(pids[1], SIGKILL);
    slice.slice.logits_from = 1;
    assert_int_equal(run(&g, &job), PD_E_INTERNAL);
    assert_int_equal(run(&g, &job), PD_E_INTERNAL); /* and no later one is begun */
    int how;
    assert_int_equal(waitpid(pids[0], &how, 0), pids[0]); /* the other one was released */
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 7);
    assert_int_equal(waitpid(pids[1], &how, 0), pids[1]);
    close(pidfds[0]);
    close(pidfds[1]);
    g.ranks = 1;
    group_end(&g);
    pd_model_file_close(file);
}

/* Ranks 1 and 2 of three, as processes that are ready. */
static void start_two(group *g, pid_t pids[2], int pidfds[2])
{
    int ready[2];
    char word;

    assert_int_equal(pipe(ready), 0);
    file = tiny_open_for_ranks(6);
    group_init(g, "cpu", 3, 1);
    for (uint32_t i = 0; i < 2; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            rank_make(g, i + 1, NULL);
            if (write(ready[1], "r", 1) != 1)
                _exit(8);
            kern_engine_serve(g->rank[i + 1].engine);
            _exit(7);
        }
        pidfds[i] = pidfd_of(pids[i]);
        assert_true(pidfds[i] >= 0);
    }
    close(ready[1]);
    for (int i = 0; i < 2; i++)
        assert_int_equal(read(ready[0], &word, 1), 1);
    close(ready[0]);
}

static int exit_of(pid_t pid)
{
    int how;

    assert_int_equal(waitpid(pid, &how, 0), pid);
    return WIFEXITED(how) ? WEXITSTATUS(how) : 1000 + WTERMSIG(how);
}

static pd_status step_once(group *g)
{
    uint32_t token = 1;
    pd_block block = 1;
    kern_job_slice slice = {
        .slice = {.tokens = &token, .count = 1, .blocks = &block, .logits_from = 1},
        .want_token = true};
    kern_job job = {.slices = &slice, .slices_count = 1};

    return run(g, &job);
}

static void two_end(group *g, const int pidfds[2])
{
    close(pidfds[0]);
    close(pidfds[1]);
    g->ranks = 1;
    group_end(g);
    pd_model_file_close(file);
}

static void a_rank_that_stands_still_is_killed_and_named(void **state)
{
    group g;
    pid_t pids[2];
    int pidfds[2];

    (void)state;
    start_two(&g, pids, pidfds);
    rank_make_still(&g, 0, pidfds, 2 * PD_NS_PER_S);
    assert_int_equal(step_once(&g), PD_OK);
    usleep(2500 * 1000); /* nobody is late while there is nothing to do */
    assert_int_equal(step_once(&g), PD_OK);
    assert_null(kern_engine_broken(g.rank[0].engine));
    kill(pids[1], SIGSTOP);
    uint64_t begun_ns = pd_clock_now_ns();
    assert_int_equal(step_once(&g), PD_E_INTERNAL);
    assert_true(pd_clock_now_ns() - begun_ns >= 2 * PD_NS_PER_S);
    assert_int_equal(step_once(&g), PD_E_INTERNAL);
    const char *why = kern_engine_broken(g.rank[0].engine);
    assert_non_null(why);
    assert_non_null(strstr(why, "rank 2 stood still"));
    assert_int_equal(exit_of(pids[0]), 7); /* it came, and was released */
    assert_int_equal(exit_of(pids[1]), 1000 + SIGKILL);
    two_end(&g, pidfds);
}

static void where_nobody_is_judged_a_rank_may_stand_still(void **state)
{
    group g;
    pid_t pids[2];
    int pidfds[2];
    kern_job *done = NULL;
    uint32_t token = 1;
    pd_block block = 1;
    kern_job_slice slice = {
        .slice = {.tokens = &token, .count = 1, .blocks = &block, .logits_from = 1},
        .want_token = true};
    kern_job job = {.slices = &slice, .slices_count = 1};

    (void)state;
    start_two(&g, pids, pidfds);
    rank_make_still(&g, 0, pidfds, 0);
    assert_int_equal(step_once(&g), PD_OK);
    assert_int_equal(kern_engine_poll(g.rank[0].engine, &done), PD_E_AGAIN); /* quiets the fd */
    kill(pids[0], SIGSTOP);
    assert_int_equal(kern_engine_submit(g.rank[0].engine, &job), PD_OK);
    struct pollfd ready = {.fd = kern_engine_fd(g.rank[0].engine), .events = POLLIN};
    assert_int_equal(poll(&ready, 1, 1000), 0);
    kill(pids[0], SIGCONT);
    assert_true(poll(&ready, 1, 20000) > 0);
    assert_int_equal(kern_engine_poll(g.rank[0].engine, &done), PD_OK);
    assert_int_equal(done->status, PD_OK);
    assert_null(kern_engine_broken(g.rank[0].engine));
    kern_comm_end(g.rank[0].comm);
    assert_int_equal(exit_of(pids[0]), 7);
    assert_int_equal(exit_of(pids[1]), 7);
    two_end(&g, pidfds);
}

enum { WORKED_MS = 100, LATE_MS = 1500, STILL_MS = 200 };

/* Rank 0 has computed for a tenth of a second itself, when another takes far longer. */
static void one_takes_longer(rank_process *process)
{
    struct timespec worked = {0};

    kern_comm_begin(process->comm);
    while (process->rank == 0 && worked.tv_sec == 0 && worked.tv_nsec < WORKED_MS * 1000000)
        NEED(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &worked) == 0);
    if (process->rank == 1)
        usleep(LATE_MS * 1000);
    NEED(kern_comm_barrier(process->comm));
    NEED(process->rank != 0 || kern_comm_why(process->comm) == NULL);
    if (process->rank == 0)
        rank_processes_await(process);
}

static void who_computes_long_is_waited_for_longer(void **state)
{
    (void)state;
    rank_processes_run_judged("one takes longer", 2, kern_comm_own_bytes(), STILL_MS * PD_NS_PER_MS,
                              one_takes_longer, NULL);
}

/* Rank 0 in a process of its own: steps until the word comes, and 20 more. */
static void lead(group *g, const int pidfds[2], int steps_fd, int word_fd)
{
    struct pollfd word = {.fd = word_fd, .events = POLLIN};

    rank_make_still(g, 0, pidfds, 2 * PD_NS_PER_S);
    for (int left = 20; left > 0; left -= poll(&word, 1, 0) > 0) {
        if (step_once(g) != PD_OK)
            _exit(1);
        if (write(steps_fd, "s", 1) != 1)
            _exit(2);
    }
    _exit(0);
}

/* A debugger, or a machine that was paused. */
static void when_all_stand_still_and_go_on_nobody_is_late(void **state)
{
    group g;
    pid_t pids[2];
    int pidfds[2], steps[2], words[2];
    char some[1024];

    (void)state;
    start_two(&g, pids, pidfds);
    assert_int_equal(pipe(steps), 0);
    assert_int_equal(pipe(words), 0);
    pid_t leader = fork();
    assert_true(leader >= 0);
    if (leader == 0)
        lead(&g, pidfds, steps[1], words[0]);
    close(steps[1]);
    assert_int_equal(read(steps[0], some, 1), 1);
    kill(pids[1], SIGSTOP);
    usleep(100 * 1000); /* it comes to wait for that one */
    kill(leader, SIGSTOP);
    usleep(3500 * 1000);
    kill(leader, SIGCONT);
    kill(pids[1], SIGCONT);
    assert_int_equal(write(words[1], "w", 1), 1);
    while (read(steps[0], some, sizeof some) > 0)
        ;
    assert_int_equal(exit_of(leader), 0);
    for (int i = 0; i < 2; i++) {
        kill(pids[i], SIGKILL);
        assert_int_equal(exit_of(pids[i]), 1000 + SIGKILL);
        close(pidfds[i]);
    }
    close(steps[0]);
    close(words[0]);
    close(words[1]);
    munmap(g.pool, g.layout.pool_bytes);
    munmap(g.memory, g.bytes);
    pd_model_file_close(file);
}

static void what_does_not_divide_is_refused_with_the_reason(void **state)
{
    pd_model_shape shape = {.heads = 12, .kv_heads = 6, .head_dim = 64, .ffn = 384, .vocab = 1200};
    kern_split split;
    char why[256];

    (void)state;
    assert_true(kern_split_of(&shape, 1, 3, &split, why, sizeof why));
    assert_int_equal(split.heads, 4);
    assert_int_equal(split.kv_heads, 2);
    assert_int_equal(split.ffn, 128);
    assert_int_equal(split.vocab, 400);
    assert_false(kern_split_of(&shape, 0, 5, &split, why, sizeof why));
    assert_string_equal(why, "12 heads do not divide among 5 ranks");
    assert_false(kern_split_of(&shape, 0, 4, &split, why, sizeof why));
    assert_string_equal(why, "6 KV heads do not divide among 4 ranks");
    shape.vocab = 1201;
    assert_false(kern_split_of(&shape, 0, 2, &split, why, sizeof why));
    assert_string_equal(why, "1201 tokens of the vocabulary do not divide among 2 ranks");
    shape.vocab = 1200;
    shape.ffn = 400; /* not six runs of a multiple of 32 */
    assert_false(kern_split_of(&shape, 0, 2, &split, why, sizeof why));
    assert_non_null(strstr(why, "400 of the feed-forward layer cannot be cut into 6 runs"));
    assert_true(kern_split_of(&shape, 0, 1, &split, why, sizeof why));
}

int main(int argc, char **argv)
{
    pd_log_init("test", PD_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_ranks_is_one),
        cmocka_unit_test(a_failed_step_is_everybodys),
        cmocka_unit_test(a_rank_that_dies_is_not_waited_for),
        cmocka_unit_test(a_rank_that_stands_still_is_killed_and_named),
        cmocka_unit_test(where_nobody_is_judged_a_rank_may_stand_still),
        cmocka_unit_test(who_computes_long_is_waited_for_longer),
        cmocka_unit_test(when_all_stand_still_and_go_on_nobody_is_late),
        cmocka_unit_test(what_does_not_divide_is_refused_with_the_reason),
    };

    if (argc > 1 && !pd_kv_dtype_of(argv[1], &dtype))
        return 2;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

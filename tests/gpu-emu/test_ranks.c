/* The ranks of a model on GPUs: whatever their number, logits, K and V, seals and groups are one
 * rank's, bit for bit; and a rank that dies or fails leaves nobody waiting and no token.
 *
 * Where a machine has fewer devices than ranks, they share one. */

#include "kernels/cuda/comm.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/model.h"
#include "kernels/sum_tree.h"
#include "tests/gpu-emu/device.h"
#include "tests/unit/kernels/rank_processes.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/clock.h"
#include "common/base/mem.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define PROMPT    37 /* two blocks and a bit; a chunk of it asks for no logits */
#define CHUNK     20
#define DECODED   3
#define TOKENS    (PROMPT + DECODED)
#define BLOCKS    8
#define VOCAB     151
#define RANKS_MAX 4
#define SOON_NS   (30 * PD_NS_PER_S) /* also where many share the cores */
/* of a gather through memory, so that most take several */
#define PART_BYTES 4096
/* how long a rank is held back, unless what it would have to be waited for has happened before */
#define HOLD_MS 300

/* four KV heads and whole 32-blocks of ffn for each, so that it splits over 2 and 4 ranks; three
 * layers in groups of two; the text's last token is the context's last */
static const tiny_shape shape = {.hidden = 128,
                                 .heads = 8,
                                 .kv_heads = 4,
                                 .head_dim = 32,
                                 .ffn = 256,
                                 .layers = 3,
                                 .vocab = VOCAB,
                                 .context = TOKENS,
                                 .embedding = PD_Q8_0,
                                 .query = PD_Q4_1,
                                 .key = PD_Q4_1,
                                 .value = PD_Q4_1,
                                 .output = PD_Q4_1,
                                 .gate = PD_Q8_0,
                                 .up = PD_Q8_0,
                                 .down = PD_F16,
                                 .head = PD_Q8_0};

/* Shared by all processes of all cases: what one rank alone computes. */
typedef struct truth {
    float logits[TOKENS][VOCAB];
    uint32_t tokens[TOKENS]; /* drawn after each that was decoded */
    atomic_uint announced;   /* groups, in a case's first step */
} truth;

static pd_model_file *file;
static uint32_t tokens[TOKENS];
static truth *one;
static unsigned char *one_pool; /* its bytes */
static pd_kv_layout one_layout;

/* A rank in its process. */
typedef struct member {
    uint32_t rank, ranks;
    rank_process *process;
    device *device;
    kern_loaded *model;
    pd_kv_layout layout;
    void *pieces[RANKS_MAX];
    pd_block blocks[BLOCKS];
    float (*logits)[VOCAB];
} member;

/* ---- a rank that is held back ---- */

static uint32_t hold_after; /* so many barriers from now; 0: not at all */

/* Of a step's first layers, where ranks exchange through memory: a barrier a part. */
static uint32_t barriers_of_layers(uint32_t layers, uint32_t ranks, uint32_t rows)
{
    uint64_t node = (uint64_t)rows * shape.hidden * sizeof(float);
    uint64_t term = kern_nodes_most(shape.kv_heads, ranks) * node;
    uint64_t output = (2 * term + PART_BYTES - 1) / PART_BYTES; /* two terms: it is quantised */
    uint64_t down = (term + PART_BYTES - 1) / PART_BYTES;

    return (uint32_t)(layers * (output + down));
}

static bool barrier_and_hold(kern_comm *comm)
{
    bool met = kern_comm_barrier(comm);

    if (hold_after > 0 && --hold_after == 0)
        for (uint32_t ms = 0; ms < HOLD_MS && atomic_load(&one->announced) < 2; ms++)
            usleep(1000);
    return met;
}

static kern_comm_calls calls; /* as ever, but for the barrier */

/* ---- exchanges that are queued (the linker's --wrap) ---- */

enum { SLOW_POLLS = 200, LOOKS = 20 };

/* As if exchanges were on the stream, which takes long: what was recorded last is not there for so
 * many polls. From so many looks on, another rank has ended. */
static struct {
    bool queued;
    const gpu_event *last;
    uint32_t polls, looks;
} slow;

bool __real_cu_comm_is_queued(const cu_comm *comm);
bool __wrap_cu_comm_is_queued(const cu_comm *comm);
pd_status __real_cu_comm_look(cu_comm *comm);
pd_status __wrap_cu_comm_look(cu_comm *comm);
pd_status __real_gpu_event_record(gpu_event *event, gpu_stream *stream);
pd_status __wrap_gpu_event_record(gpu_event *event, gpu_stream *stream);
pd_status __real_gpu_event_poll(gpu_event *event);
pd_status __wrap_gpu_event_poll(gpu_event *event);

bool __wrap_cu_comm_is_queued(const cu_comm *comm)
{
    return slow.queued || __real_cu_comm_is_queued(comm);
}

pd_status __wrap_cu_comm_look(cu_comm *comm)
{
    if (slow.queued && ++slow.looks == LOOKS)
        return PD_E_INTERNAL;
    return __real_cu_comm_look(comm);
}

pd_status __wrap_gpu_event_record(gpu_event *event, gpu_stream *stream)
{
    slow.last = event;
    slow.polls = 0;
    return __real_gpu_event_record(event, stream);
}

pd_status __wrap_gpu_event_poll(gpu_event *event)
{
    if (slow.queued && event == slow.last && ++slow.polls < SLOW_POLLS)
        return PD_E_AGAIN;
    return __real_gpu_event_poll(event);
}

/* ---- a case's processes ---- */

static cu_model_settings settings_of(void)
{
    return (cu_model_settings){.backend = "test", .part_bytes = PART_BYTES};
}

static kern_backend_options options_of(const member *m)
{
    return (kern_backend_options){.context_max = shape.context,
                                  .rows_max = CHUNK,
                                  .slices_max = 2,
                                  .logits_rows_max = CHUNK,
                                  .rank = m->rank,
                                  .ranks = m->ranks,
                                  .comm = m->process->comm,
                                  .comm_calls = &calls};
}

static pd_kv_layout layout_of(uint32_t ranks)
{
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = 1 << 20,
                                    .blocks_max = BLOCKS,
                                    .ranks = ranks};
    pd_kv_layout layout;

    NEED(pd_kv_layout_make(pd_model_file_shape(file), &options, &layout) == PD_OK);
    return layout;
}

static void share_where_too_few(uint32_t ranks)
{
    char reason[256];

    if (gpu_count(reason, sizeof reason) < ranks)
        setenv("KVFERRY_SHARE_DEVICE", "1", 1);
}

/* ctx: streams run late, if it is not NULL. */
static member join(rank_process *process)
{
    const cu_model_settings settings = settings_of();
    member m = {.process = process, .rank = process->rank, .ranks = process->ranks};
    void *state = NULL;

    NEED(device_setup(&state) == 0);
    m.device = state;
    device_run_late(process->ctx != NULL);
    share_where_too_few(m.ranks);
    kern_backend_options backend = options_of(&m);
    NEED(cu_model_create(file, &backend, &settings, &m.model) == PD_OK);
    m.layout = layout_of(m.ranks);
    if (m.rank == 0)
        NEED(cu_model_pool_alloc(m.model, m.layout.rank_bytes, m.pieces) == PD_OK);
    NEED(cu_model_bind(m.model, &m.layout, m.pieces[0], true) == PD_OK);
    for (uint32_t i = 0; i < BLOCKS; i++)
        m.blocks[i] = i * 5 % BLOCKS;
    m.logits = pd_calloc(TOKENS, sizeof *m.logits);
    NEED(m.logits != NULL);
    return m;
}

static void leave(member *m)
{
    rank_processes_await(m->process);
    pd_free(m->logits);
    cu_model_pool_free(m->model);
    cu_model_destroy(m->model);
}

static void run_case(uint32_t ranks, bool late, rank_process_body *body)
{
    calls = kern_comm_calls_here;
    calls.barrier = barrier_and_hold;
    atomic_store(&one->announced, 0);
    rank_processes_run(late ? "streams late" : "streams early", ranks,
                       kern_comm_own_bytes() + cu_comm_bytes(ranks, PART_BYTES), body,
                       late ? &late : NULL);
}

/* ---- steps ---- */

typedef struct watch {
    member *m;
    unsigned char *seen; /* the pieces when a group was announced: that group's part of each */
    uint32_t groups;
} watch;

/* Of a rank's piece: where the group begins, and its bytes. */
static uint64_t group_at(const pd_kv_layout *layout, uint32_t group)
{
    return pd_kv_layout_head_offset(layout, group, 0, 0);
}

static uint64_t group_bytes(const pd_kv_layout *layout, uint32_t group)
{
    return pd_kv_layout_head_bytes(layout, group) * layout->rank_heads * layout->blocks;
}

static void look(void *ctx, uint32_t group)
{
    watch *w = ctx;
    const pd_kv_layout *layout = &w->m->layout;

    NEED(group == w->groups++);
    for (uint32_t rank = 0; rank < layout->ranks; rank++)
        device_download(w->m->device, w->seen + rank * layout->rank_bytes + group_at(layout, group),
                        (unsigned char *)w->m->pieces[rank] + group_at(layout, group),
                        group_bytes(layout, group));
    atomic_fetch_add(&one->announced, 1);
}

static pd_status step(member *m, uint32_t position, uint32_t count, bool logits, watch *w,
                      uint32_t *token_out)
{
    kern_job_slice slice = {.slice = {.tokens = tokens + position,
                                      .count = count,
                                      .position = position,
                                      .blocks = m->blocks,
                                      .logits_from = logits ? 0 : count,
                                      .logits = logits ? m->logits[position] : NULL},
                            .want_token = token_out != NULL};
    kern_backend_step run = {.slices = &slice, .slices_count = 1};

    if (w != NULL) {
        w->groups = 0;
        run.group_done = look;
        run.group_done_ctx = w;
    }
    pd_status status = cu_model_step(m->model, &run);
    if (status == PD_OK && token_out != NULL)
        *token_out = slice.token_out;
    return status;
}

static void download(member *m, unsigned char *out)
{
    for (uint32_t rank = 0; rank < m->ranks; rank++)
        device_download(m->device, out + rank * m->layout.rank_bytes, m->pieces[rank],
                        m->layout.rank_bytes);
}

/* A chunk without logits, one with, and tokens one by one; rank 0 sees every group in all pieces as
 * it is announced. In the chunk without logits nothing is left to be exchanged after the last
 * layer's K and V: there the last rank is held back before it writes them, so that one that is not
 * waited for is one that is missed. */
static void run_text(member *m, uint32_t *tokens_out)
{
    unsigned char *after = pd_calloc(1, m->layout.pool_bytes);
    watch w = {.m = m, .seen = pd_calloc(1, m->layout.pool_bytes)};

    for (uint32_t at = 0, count = CHUNK; at < TOKENS; at += count, count = 1) {
        if (at == CHUNK)
            count = PROMPT - CHUNK;
        NEED(m->ranks == 1 || kern_comm_barrier(m->process->comm)); /* as a plan is told */
        if (at == 0 && m->ranks > 1 && m->rank + 1 == m->ranks)
            hold_after = barriers_of_layers(shape.layers - 1, m->ranks, count);
        NEED(step(m, at, count, at > 0, m->rank == 0 ? &w : NULL,
                  at >= PROMPT ? &tokens_out[at] : NULL) == PD_OK);
        NEED(hold_after == 0 || !gpu_info_of(cu_model_gpu(m->model))->emulated);
        hold_after = 0;
        NEED(m->ranks == 1 || kern_comm_barrier(m->process->comm)); /* all have written theirs */
        if (m->rank > 0)
            continue;
        NEED(w.groups == m->layout.groups);
        download(m, after);
        NEED(memcmp(w.seen, after, m->layout.pool_bytes) == 0);
    }
    pd_free(after);
    pd_free(w.seen);
}

static void compute_alone(rank_process *process)
{
    member m = join(process);
    run_text(&m, one->tokens);
    memcpy(one->logits, m.logits, sizeof one->logits);
    download(&m, one_pool);
    leave(&m);
}

/* ---- the same ---- */

/* Every head's slice of every block, wherever it lies. */
static void compare_pools(const member *m, const unsigned char *pool)
{
    for (uint32_t group = 0; group < m->layout.groups; group++)
        for (uint32_t index = 0; index * 16 < TOKENS; index++)
            for (uint32_t head = 0; head < shape.kv_heads; head++)
                NEED(memcmp(
                         pool + pd_kv_layout_head_offset(&m->layout, group, m->blocks[index], head),
                         one_pool +
                             pd_kv_layout_head_offset(&one_layout, group, m->blocks[index], head),
                         pd_kv_layout_head_bytes(&m->layout, group)) == 0);
}

enum { SEAL_ITEMS = 32 };

/* Of all blocks and groups, in runs of heads that know nothing of ranks: 0..0, 1..2, 3..3. */
static uint32_t seal_items(const member *m, pd_seal_item *items, uint64_t *seals)
{
    static const uint32_t edges[] = {0, 1, 3, 4};
    uint32_t count = 0;

    for (uint32_t group = 0; group < m->layout.groups; group++)
        for (uint32_t index = 0; index * 16 < TOKENS; index++)
            for (uint32_t part = 0; part < 3; part++, count++) {
                uint32_t left = TOKENS - index * 16;
                NEED(count < SEAL_ITEMS);
                items[count] = (pd_seal_item){.block = m->blocks[index],
                                              .head_from = edges[part],
                                              .head_to = edges[part + 1],
                                              .place = {.request = 5,
                                                        .group = group,
                                                        .block_index = index,
                                                        .valid_tokens = left < 16 ? left : 16,
                                                        .layout_fingerprint = 3}};
                seals[count] = pd_seal_compute(&one_layout, one_pool, items[count].block,
                                               &items[count].place, edges[part], edges[part + 1]);
            }
    return count;
}

static void compare_seals(member *m)
{
    pd_seal_item items[SEAL_ITEMS] = {0};
    uint64_t want[SEAL_ITEMS], made[SEAL_ITEMS];
    uint32_t count = seal_items(m, items, want), bad = 77;

    NEED(cu_model_seal(m->model, items, count, made) == PD_OK);
    NEED(memcmp(made, want, count * sizeof *made) == 0);
    NEED(cu_model_check(m->model, items, count, want, &bad) == PD_OK);
    NEED(cu_model_seal(m->model, items, count, made) == PD_OK);
    NEED(memcmp(made, want, count * sizeof *made) == 0);
    /* a byte of the last rank's piece: the last head's K of the first block */
    const pd_kv_layout *l = &m->layout;
    unsigned char *at =
        (unsigned char *)m->pieces[m->ranks - 1] +
        pd_kv_layout_head_offset(l, 0, m->blocks[0], shape.kv_heads - 1) % l->rank_bytes;
    NEED(gpu_fill(m->device->stream, at, 0x5a, 1) == PD_OK);
    device_finish(m->device);
    NEED(cu_model_check(m->model, items, count, want, &bad) == PD_E_MISMATCH);
    NEED(bad == 2);
}

static void compute_and_compare(rank_process *process)
{
    uint32_t drawn[TOKENS] = {0};

    member m = join(process);
    run_text(&m, drawn);
    if (m.rank == 0) {
        unsigned char *pool = pd_calloc(1, m.layout.pool_bytes);
        NEED(memcmp(m.logits, one->logits, sizeof one->logits) == 0);
        NEED(memcmp(drawn, one->tokens, sizeof drawn) == 0);
        download(&m, pool);
        compare_pools(&m, pool);
        compare_seals(&m);
        pd_free(pool);
    }
    leave(&m);
}

static void any_number_of_ranks_gives_the_same_bits(void **state)
{
    (void)state;
    for (uint32_t ranks = 2; ranks <= RANKS_MAX; ranks *= 2)
        for (int late = 0; late < 2; late++)
            run_case(ranks, late == 1, compute_and_compare);
}

/* ---- ends ---- */

static void fails_soon(member *m)
{
    uint64_t start_ns = pd_clock_now_ns();
    uint32_t token = 99;

    NEED(step(m, 0, CHUNK, false, NULL, &token) == PD_E_INTERNAL);
    NEED(token == 99 && pd_clock_now_ns() - start_ns < SOON_NS);
}

static void the_last_rank_dies(rank_process *process)
{
    member m = join(process);
    if (m.rank + 1 == m.ranks)
        raise(SIGKILL);
    fails_soon(&m);
    if (m.rank == 0)
        NEED(cu_model_broken(m.model) == NULL); /* its process tells */
    leave(&m);
}

static void a_rank_that_is_killed_leaves_nobody_waiting(void **state)
{
    (void)state;
    run_case(2, false, the_last_rank_dies);
    run_case(4, false, the_last_rank_dies);
}

/* Nobody may wait for a device that may itself wait for a rank which will never come. */
static void a_rank_ends_while_the_device_works(rank_process *process)
{
    member m = join(process);
    uint32_t token = 99;

    NEED(step(&m, 0, CHUNK, false, NULL, NULL) == PD_OK);
    slow.queued = m.rank == 0;
    slow.last = NULL; /* the step before is over */
    pd_status status = step(&m, CHUNK, CHUNK / 2, false, NULL, &token);
    NEED(m.rank != 0 || (status == PD_E_INTERNAL && token == 99 && slow.looks == LOOKS));
    slow.queued = false;
    /* rank 1 stays: that it has gone would be seen, too */
    NEED(kern_comm_barrier(m.process->comm) == false);
    leave(&m);
}

static void a_rank_that_ends_while_the_device_works_ends_the_step(void **state)
{
    (void)state;
    run_case(2, false, a_rank_ends_while_the_device_works);
    run_case(2, true, a_rank_ends_while_the_device_works);
}

/* A kernel is given an odd address: it faults, on a GPU as in the emulator. */
static void lose(gpu *g)
{
    gpu_stream *stream = NULL;
    unsigned char *memory = NULL;

    gpu_use(g);
    NEED(gpu_stream_create(g, &stream) == PD_OK);
    NEED(gpu_alloc(g, 4096, (void **)&memory) == PD_OK);
    const cu_acts out = {.cols = 32, .values = (float *)memory};
    pd_status status = cu_silu_mul(stream, 1, 32, (const float *)(memory + 2050), &out);
    NEED(status != PD_OK || gpu_stream_wait(stream) != PD_OK);
    NEED(gpu_broken(g) != NULL);
    gpu_stream_destroy(stream);
    gpu_free(g, memory);
}

static void the_last_rank_fails(rank_process *process)
{
    member m = join(process);
    if (m.rank + 1 == m.ranks)
        lose(cu_model_gpu(m.model));
    fails_soon(&m);
    const char *why = cu_model_broken(m.model);
    char number[16];
    snprintf(number, sizeof number, "rank %u: ", m.ranks - 1);
    NEED(why != NULL && strncmp(why, number, strlen(number)) == 0 && strlen(why) > 20);
    NEED(step(&m, 0, CHUNK, false, NULL, NULL) == PD_E_INTERNAL);
    leave(&m);
}

static void a_rank_that_fails_tells_all(void **state)
{
    (void)state;
    run_case(2, false, the_last_rank_fails);
    run_case(4, false, the_last_rank_fails);
}

/* Its memory runs out, say: its device is well, the others' steps wait for its part of a sum. A
 * step that one rank has not done is done by none, and no later one may go on without it. */
static void a_ranks_step_fails(rank_process *process, uint32_t failing)
{
    member m = join(process);
    uint64_t start_ns = pd_clock_now_ns();
    uint32_t token = 99;
    char number[16];

    if (!gpu_info_of(cu_model_gpu(m.model))->emulated) {
        leave(&m); /* a step on a device takes no memory of the host's, which could be refused */
        return;
    }
    if (m.rank == failing)
        pd_mem_fail_at(0);
    pd_status status = step(&m, 0, CHUNK, false, NULL, &token);
    pd_mem_fail_at(-1);
    NEED(status == (m.rank == failing ? PD_E_NOMEM : PD_E_INTERNAL) && token == 99);
    NEED(pd_clock_now_ns() - start_ns < SOON_NS);
    NEED(gpu_broken(cu_model_gpu(m.model)) == NULL);
    const char *why = cu_model_broken(m.model); /* the worker ends with it */
    snprintf(number, sizeof number, "rank %u: ", failing);
    NEED(why != NULL && strncmp(why, number, strlen(number)) == 0);
    NEED(step(&m, 0, CHUNK, false, NULL, &token) == PD_E_INTERNAL && token == 99);
    leave(&m);
}

static void the_first_ranks_step_fails(rank_process *process)
{
    a_ranks_step_fails(process, 0);
}

static void the_last_ranks_step_fails(rank_process *process)
{
    a_ranks_step_fails(process, process->ranks - 1);
}

static void a_step_that_one_rank_fails_is_failed_by_all_for_good(void **state)
{
    (void)state;
    for (uint32_t ranks = 2; ranks <= RANKS_MAX; ranks *= 2) {
        run_case(ranks, false, the_first_ranks_step_fails);
        run_case(ranks, false, the_last_ranks_step_fails);
    }
}

/* ---- */

static int set_up(void **state)
{
    uint64_t seed = 7;

    (void)state;
    file = tiny_open_shape(&shape);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = device_random(&seed) % VOCAB;
    one_layout = layout_of(1);
    one = mmap(NULL, sizeof *one + one_layout.pool_bytes, PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(one, MAP_FAILED);
    one_pool = (unsigned char *)(one + 1);
    run_case(1, false, compute_alone);
    assert_true(one->logits[TOKENS - 1][0] != 0);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    munmap(one, sizeof *one + one_layout.pool_bytes);
    pd_model_file_close(file);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_ranks_gives_the_same_bits),
        cmocka_unit_test(a_rank_that_is_killed_leaves_nobody_waiting),
        cmocka_unit_test(a_rank_that_ends_while_the_device_works_ends_the_step),
        cmocka_unit_test(a_rank_that_fails_tells_all),
        cmocka_unit_test(a_step_that_one_rank_fails_is_failed_by_all_for_good),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

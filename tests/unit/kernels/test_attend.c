/* Sequences whose tables begin with the same blocks read them together, and get the bits that each
 * gets alone. */

#include "kernels/model/attend.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BLOCKS    256
#define BLOCK     16 /* tokens */
#define CONTEXT   1200
#define SEQUENCES 19
#define STRANGERS 2

static pd_model_file *file;
static pd_kv_layout layout;

/* Sequences that have a prefix in common, and the last two of them nothing. */
typedef struct rig {
    kern_model *model;
    void *pool;
    uint32_t count, prefix;
    uint32_t length[SEQUENCES]; /* tokens that are in the pool */
    uint32_t tokens[SEQUENCES][CONTEXT];
    pd_block blocks[SEQUENCES][CONTEXT / BLOCK];
    float logits[SEQUENCES][TINY_VOCAB];
} rig;

static int set_up(void **state)
{
    (void)state;
    file = tiny_open();
    layout = tiny_layout(file, BLOCKS);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    pd_model_file_close(file);
    return pd_mem_live() == 0 ? 0 : -1;
}

static void run(rig *r, const kern_slice *slices, uint32_t count)
{
    kern_step step = {.layout = &layout, .pool = r->pool, .slices = slices, .slices_count = count};
    assert_int_equal(kern_model_step(r->model, &step), PD_OK);
}

static kern_slice next_of(rig *r, uint32_t s, uint32_t count)
{
    return (kern_slice){.tokens = r->tokens[s] + r->length[s],
                        .count = count,
                        .position = r->length[s],
                        .blocks = r->blocks[s],
                        .logits_from = count - 1,
                        .logits = r->logits[s]};
}

/* Tails of 3, 8, 13, ... tokens after the prefix; strangers have a text of their own. */
static void fill(rig *r)
{
    uint32_t whole = r->prefix / BLOCK, next = whole;
    uint64_t seed = 11;

    for (uint32_t s = 0; s < r->count; s++) {
        bool stranger = s + STRANGERS >= r->count;
        uint32_t tail = 3 + 5 * s % 40, first = s == 0 || stranger ? 0 : whole * BLOCK;
        uint32_t end = stranger ? 260 + s : r->prefix + tail;
        for (uint32_t i = 0; i < CONTEXT; i++)
            r->tokens[s][i] = (uint32_t)(pd_random_next(&seed) % TINY_VOCAB);
        if (!stranger)
            memcpy(r->tokens[s], r->tokens[0], r->prefix * sizeof(uint32_t));
        for (uint32_t b = 0; b <= (end + BLOCK) / BLOCK; b++) {
            r->blocks[s][b] = b < first / BLOCK || (s == 0 && b < whole) ? b : next++;
            assert_true(r->blocks[s][b] < BLOCKS);
        }
        kern_slice slice = {.tokens = r->tokens[s] + first,
                            .count = end - first,
                            .position = first,
                            .blocks = r->blocks[s],
                            .logits_from = end - first};
        run(r, &slice, 1);
        r->length[s] = end;
    }
}

static void check(const char *device, uint32_t threads, uint32_t sharers, uint32_t prefix,
                  uint32_t tokens)
{
    static rig r;
    static float alone[SEQUENCES][TINY_VOCAB];
    kern_options options = {.device = device,
                            .threads = threads,
                            .context_max = CONTEXT,
                            .rows_max = CONTEXT,
                            .logits_rows_max = SEQUENCES};
    kern_slice slices[SEQUENCES];

    r = (rig){.count = sharers + STRANGERS, .prefix = prefix};
    assert_int_equal(kern_model_create(file, &options, &r.model), PD_OK);
    r.pool = pd_malloc(layout.pool_bytes);
    memset(r.pool, 0xff, layout.pool_bytes);
    fill(&r);
    for (uint32_t s = 0; s < r.count; s++) {
        slices[s] = next_of(&r, s, tokens);
        run(&r, &slices[s], 1);
    }
    memcpy(alone, r.logits, sizeof alone);
    memset(r.logits, 0, sizeof r.logits);
    run(&r, slices, r.count);
    for (uint32_t s = 0; s < r.count; s++)
        assert_memory_equal(r.logits[s], alone[s], sizeof alone[s]);
    kern_model_destroy(r.model);
    pd_free(r.pool);
}

static const uint32_t prefixes[] = {0, 255, 256, 257, 1000};
static const uint32_t sharers[] = {2, 3, 17};

static void a_row_is_the_same_alone_and_among_sharers(void **state)
{
    char reason[128];

    (void)state;
    for (uint32_t i = 1; kern_ops_at(i) != NULL; i++) {
        if (kern_ops_at(i)->probe(reason, sizeof reason) == 0)
            continue;
        for (size_t p = 0; p < sizeof prefixes / sizeof *prefixes; p++)
            for (size_t s = 0; s < sizeof sharers / sizeof *sharers; s++)
                check(kern_ops_at(i)->name, 1 + (uint32_t)(p + s) % 2, sharers[s], prefixes[p], 1);
    }
    check("cpu-ref", 1, 3, 600, 1); /* which others are compared with elsewhere */
}

/* As when drafts are verified. */
static void a_slice_of_several_tokens_shares_too(void **state)
{
    (void)state;
    check("cpu", 1, 5, 520, 4);
    check("cpu", 2, 3, 520, 9); /* more than half a call's: these stay alone */
}

/* --- what is read together --- */

typedef struct plan {
    kern_team *team;
    kern_split split;
    kern_attend *attend;
    float row[4096];
    uint32_t token;
    pd_block tables[SEQUENCES][CONTEXT / BLOCK];
    kern_slice slices[SEQUENCES];
} plan;

static void plan_open(plan *p)
{
    const pd_model_shape *shape = pd_model_file_shape(file);
    char why[128];

    assert_int_equal(kern_team_create(1, &p->team), PD_OK);
    assert_true(kern_split_of(shape, 0, 1, &p->split, why, sizeof why));
    kern_attend_options options = {.ops = kern_ops_at(0),
                                   .team = p->team,
                                   .shape = shape,
                                   .split = &p->split,
                                   .context_max = CONTEXT,
                                   .rows_max = 64,
                                   .query = p->row,
                                   .key = p->row,
                                   .value = p->row};
    assert_int_equal(kern_attend_create(&options, &p->attend), PD_OK);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        for (uint32_t b = 0; b < CONTEXT / BLOCK; b++)
            p->tables[s][b] = (s * 31 + b) % BLOCKS;
        p->slices[s] = (kern_slice){.tokens = &p->token,
                                    .count = 1,
                                    .position = 1100,
                                    .blocks = p->tables[s],
                                    .logits_from = 1};
    }
}

static void plan_close(plan *p)
{
    kern_attend_destroy(p->attend);
    kern_team_destroy(p->team);
}

static uint32_t sets_of(plan *p, uint32_t count)
{
    kern_step step = {.layout = &layout, .slices = p->slices, .slices_count = count};

    kern_attend_begin(p->attend, &step);
    return kern_attend_sets(p->attend);
}

static void share(plan *p, uint32_t s, uint32_t with, uint32_t tokens)
{
    memcpy(p->tables[s], p->tables[with], tokens / BLOCK * sizeof(pd_block));
}

static void a_split_is_read_once_for_who_has_it(void **state)
{
    plan p = {0};

    (void)state;
    plan_open(&p);
    assert_int_equal(sets_of(&p, SEQUENCES), 0); /* strangers */
    share(&p, 7, 2, 240);
    assert_int_equal(sets_of(&p, SEQUENCES), 0); /* not a whole split */
    share(&p, 7, 2, 256);
    assert_int_equal(sets_of(&p, SEQUENCES), 1);
    share(&p, 7, 2, 1024);
    assert_int_equal(sets_of(&p, SEQUENCES), 4);
    share(&p, 12, 2, 512); /* three have two splits, two of them two more */
    assert_int_equal(sets_of(&p, SEQUENCES), 4);
    p.slices[2].position = 512; /* a token sees two whole, and is in the third */
    assert_int_equal(sets_of(&p, SEQUENCES), 2);
    p.slices[2].position = 511;
    assert_int_equal(sets_of(&p, SEQUENCES), 2);
    for (uint32_t s = 1; s < 16; s++)
        share(&p, s, 0, 256);
    p.slices[2].position = 1100;
    assert_int_equal(sets_of(&p, 16),
                     1 + 3); /* one call's worth, and what three of them have more */
    share(&p, 16, 0, 256);
    assert_int_equal(sets_of(&p, 17), 2 + 3);
    plan_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_split_is_read_once_for_who_has_it),
        cmocka_unit_test(a_row_is_the_same_alone_and_among_sharers),
        cmocka_unit_test(a_slice_of_several_tokens_shares_too),
    };
    choice_filter();
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

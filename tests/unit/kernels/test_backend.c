/* What stands behind the table of backends: the host's own, and plugins that work or say why not.
 */

#include "kernels/model/engine.h"
#include "kernels/model/host.h"
#include "kernels/plugins.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <dlfcn.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define TOKENS 90
#define BLOCKS 32

static pd_model_file *file;
static pd_kv_layout layout;
static uint32_t tokens[TOKENS];
static pd_block blocks[BLOCKS];
static char folder[64]; /* of this run, with one below for each plugin */

static int set_up(void **state)
{
    uint64_t seed = 5;

    (void)state;
    pd_log_init("test", PD_LOG_INFO);
    file = tiny_open();
    layout = tiny_layout(file, BLOCKS);
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)(pd_random_next(&seed) % TINY_VOCAB);
    for (uint32_t i = 0; i < BLOCKS; i++)
        blocks[i] = i * 11 % BLOCKS;
    snprintf(folder, sizeof folder, "/tmp/kvferry-plugins-XXXXXX");
    return mkdtemp(folder) != NULL ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    pd_model_file_close(file);
    rmdir(folder);
    return pd_mem_live() == 0 ? 0 : -1;
}

/* --- the host --- */

typedef struct rig {
    kern_loaded *model;
    void *pool;
} rig;

static rig rig_make(uint32_t slices_max, uint32_t logits_rows_max, bool seals)
{
    kern_backend_options options = {.threads = 2,
                                    .context_max = 128,
                                    .rows_max = TOKENS,
                                    .slices_max = slices_max,
                                    .logits_rows_max = logits_rows_max};
    rig r = {.pool = pd_calloc(layout.pool_bytes, 1)};

    assert_non_null(r.pool);
    assert_int_equal(kern_backend_host.create(file, &options, &r.model), PD_OK);
    assert_int_equal(kern_backend_host.bind(r.model, &layout, r.pool, seals), PD_OK);
    return r;
}

static rig rig_make_sampling(uint32_t slices_max, uint32_t sampled_rows_max)
{
    kern_backend_options options = {.threads = 2,
                                    .context_max = 128,
                                    .rows_max = TOKENS,
                                    .slices_max = slices_max,
                                    .sampled_rows_max = sampled_rows_max};
    rig r = rig_make(slices_max, 0, true);

    kern_backend_host.destroy(r.model);
    assert_int_equal(kern_backend_host.create(file, &options, &r.model), PD_OK);
    assert_int_equal(kern_backend_host.bind(r.model, &layout, r.pool, true), PD_OK);
    return r;
}

static void rig_end(rig *r)
{
    kern_backend_host.destroy(r->model);
    pd_free(r->pool);
}

static pd_status run(const rig *r, kern_job_slice *slices, uint32_t count)
{
    kern_backend_step step = {.slices = slices, .slices_count = count};

    return kern_backend_host.step(r->model, &step);
}

static pd_seal_item item_of(uint32_t group, uint32_t index, uint32_t head_from, uint32_t head_to)
{
    return (pd_seal_item){.block = blocks[index],
                          .head_from = head_from,
                          .head_to = head_to,
                          .place = {.request = 9,
                                    .group = group,
                                    .block_index = index,
                                    .valid_tokens = layout.block_tokens}};
}

static void a_token_is_sampled_whether_or_not_its_logits_are_asked_for(void **state)
{
    static float logits[TOKENS * TINY_VOCAB];
    static uint64_t scratch[TINY_VOCAB];
    rig r = rig_make(1, TOKENS, false);

    (void)state;
    for (uint32_t seed = 0; seed < 20; seed++) {
        kern_sampling sampling = {.temperature = (float)(seed % 3), .top_p = 0.9f, .seed = seed};
        kern_job_slice with = {
            .slice = {.tokens = tokens, .count = TOKENS, .blocks = blocks, .logits = logits},
            .want_token = true,
            .sampling = sampling};
        kern_job_slice without = with;
        without.slice.logits = NULL;
        without.slice.logits_from = TOKENS;
        assert_int_equal(run(&r, &with, 1), PD_OK);
        assert_int_equal(run(&r, &without, 1), PD_OK);
        assert_int_equal(with.token_out, kern_sample(&sampling, logits + (TOKENS - 1) * TINY_VOCAB,
                                                     TINY_VOCAB, TOKENS, scratch));
        assert_int_equal(without.token_out, with.token_out);
        assert_null(without.slice.logits); /* the caller's slice is as it was */
    }
    rig_end(&r);
}

/* Of a text's last tokens, taken along as drafts: each row before one draws what the text alone,
 * cut off there, would draw; and so do others' in the same step. */
static void drafts_are_sampled_as_if_their_rows_came_one_by_one(void **state)
{
    enum { BASE = 21, MOST = 7 };
    rig r = rig_make(2, 0, false), wide = rig_make_sampling(2, 2 + MOST);

    (void)state;
    for (uint32_t drafts = 0; drafts <= MOST; drafts++) {
        kern_sampling sampling = {
            .temperature = (float)(drafts % 3), .top_p = 0.9f, .seed = drafts, .choice = 1};
        uint32_t out[MOST], count = BASE + 1 + drafts, alone[MOST + 1];
        kern_job_slice text = {
            .slice = {.tokens = tokens, .count = BASE, .blocks = blocks, .logits_from = BASE}};
        kern_job_slice both[2] = {text, text};
        both[1].slice.blocks = blocks + 8;
        assert_int_equal(run(&r, &text, 1), PD_OK);
        assert_int_equal(run(&wide, both, 2), PD_OK);
        for (uint32_t i = BASE; i < count; i++) {
            kern_job_slice one = {.slice = {.tokens = tokens + i,
                                            .count = 1,
                                            .position = i,
                                            .blocks = blocks,
                                            .logits_from = 1},
                                  .want_token = true,
                                  .sampling = sampling};
            assert_int_equal(run(&r, &one, 1), PD_OK);
            alone[i - BASE] = one.token_out;
        }
        kern_job_slice slices[2] = {{.slice = {.tokens = tokens + BASE,
                                               .count = 1,
                                               .position = BASE,
                                               .blocks = blocks,
                                               .logits_from = 1},
                                     .want_token = true,
                                     .sampling = sampling},
                                    {.slice = {.tokens = tokens + BASE,
                                               .count = 1 + drafts,
                                               .position = BASE,
                                               .blocks = blocks + 8,
                                               .logits_from = 1 + drafts},
                                     .want_token = true,
                                     .drafts = drafts,
                                     .sampling = sampling,
                                     .drafts_out = out}};
        assert_int_equal(run(&wide, slices, 2), PD_OK);
        assert_int_equal(slices[0].token_out, alone[0]);
        assert_memory_equal(out, alone, drafts * sizeof *out);
        assert_int_equal(slices[1].token_out, alone[drafts]);
    }
    rig_end(&r);
    rig_end(&wide);
}

/* What was guessed wrongly is written again, and its hashes with it: in the middle of a tile, over
 * the end of a block, and where the next step goes less far. */
static void drafts_that_were_wrong_leave_no_trace_in_seals(void **state)
{
    rig r = rig_make_sampling(1, 16), plain = rig_make(1, 0, true);
    static const uint32_t lengths[] = {3, 9, 1, 16, 2, 7, 12, 5};
    uint32_t at = 0, out[16], wrong[16];

    (void)state;
    for (uint32_t step = 0; at + 16 < TOKENS; step++) {
        uint32_t count = lengths[step % 8], kept = 1 + step % 3 % count;
        memcpy(wrong, tokens + at, count * sizeof *wrong);
        for (uint32_t i = kept; i < count; i++)
            wrong[i] = (wrong[i] + 1) % TINY_VOCAB;
        kern_job_slice slice = {.slice = {.tokens = wrong,
                                          .count = count,
                                          .position = at,
                                          .blocks = blocks,
                                          .logits_from = count},
                                .want_token = true,
                                .drafts = count - 1,
                                .drafts_out = out};
        assert_int_equal(run(&r, &slice, 1), PD_OK);
        at += kept;
    }
    kern_job_slice whole = {
        .slice = {.tokens = tokens, .count = at, .blocks = blocks, .logits_from = at}};
    assert_int_equal(run(&plain, &whole, 1), PD_OK);
    for (uint32_t group = 0; group < layout.groups; group++)
        for (uint32_t index = 0; index * layout.block_tokens < at; index++) {
            pd_seal_item item = item_of(group, index, 0, layout.kv_heads);
            uint32_t left = at - index * layout.block_tokens;
            uint64_t seal, expected;
            if (left < layout.block_tokens)
                item.place.valid_tokens = left;
            assert_int_equal(kern_backend_host.seal(r.model, &item, 1, &seal), PD_OK);
            assert_int_equal(kern_backend_host.seal(plain.model, &item, 1, &expected), PD_OK);
            assert_true(seal == expected);
            assert_true(seal == pd_seal_compute(&layout, r.pool, item.block, &item.place, 0,
                                                layout.kv_heads));
        }
    rig_end(&r);
    rig_end(&plain);
}

static void what_a_step_was_not_made_for_is_refused(void **state)
{
    static float logits[3 * TINY_VOCAB];
    rig r = rig_make(2, 2, false);
    kern_job_slice slices[3];

    (void)state;
    for (uint32_t i = 0; i < 3; i++)
        slices[i] = (kern_job_slice){
            .slice = {.tokens = tokens, .count = 3, .blocks = blocks + 4 * i, .logits_from = 3},
            .want_token = true};
    assert_int_equal(run(&r, slices, 3), PD_E_TOO_LARGE);
    assert_int_equal(run(&r, slices, 2), PD_OK);
    slices[0].slice.logits = logits;
    slices[0].slice.logits_from = 0;
    assert_int_equal(run(&r, slices, 1), PD_E_TOO_LARGE);
    slices[0].slice.logits_from = 1;
    assert_int_equal(run(&r, slices, 2), PD_OK);
    uint32_t out[2];
    slices[0].drafts = 1;
    slices[0].drafts_out = out;
    assert_int_equal(run(&r, slices, 1), PD_OK);
    assert_int_equal(run(&r, slices, 2), PD_E_TOO_LARGE); /* three rows are sampled */
    rig_end(&r);
}

/* One model computes, its pool's bytes go to another's, which learns what matches. */
static void seals_of_many_are_made_and_checked_at_once(void **state)
{
    enum { WHOLE = TOKENS / 16 };
    rig from = rig_make(1, 0, true), to = rig_make(1, 0, true);
    kern_job_slice slice = {
        .slice = {.tokens = tokens, .count = TOKENS, .blocks = blocks, .logits_from = TOKENS}};
    pd_seal_item items[64];
    uint64_t seals[64], again[64];
    uint32_t count = 0, bad = UINT32_MAX;

    (void)state;
    assert_int_equal(run(&from, &slice, 1), PD_OK);
    memcpy(to.pool, from.pool, layout.pool_bytes);
    for (uint32_t group = 0; group < layout.groups; group++)
        for (uint32_t index = 0; index < WHOLE && count + 2 <= 64; index++) {
            items[count++] = item_of(group, index, 0, 1);
            items[count++] = item_of(group, index, 1, layout.kv_heads);
        }
    assert_int_equal(kern_backend_host.seal(from.model, items, count, seals), PD_OK);
    for (uint32_t i = 0; i < count; i++)
        assert_true(seals[i] == pd_seal_compute(&layout, from.pool, items[i].block, &items[i].place,
                                                items[i].head_from, items[i].head_to));
    assert_int_equal(kern_backend_host.check(to.model, items, count, seals, &bad), PD_OK);
    assert_int_equal(kern_backend_host.seal(to.model, items, count, again), PD_OK);
    assert_memory_equal(seals, again, count * sizeof *seals);
    /* the first that does not match is named */
    uint64_t right[2] = {seals[count / 2], seals[count / 2 + 1]};
    seals[count / 2]++;
    seals[count / 2 + 1]++;
    assert_int_equal(kern_backend_host.check(to.model, items, count, seals, &bad), PD_E_MISMATCH);
    assert_int_equal(bad, count / 2);
    assert_int_equal(kern_backend_host.check(to.model, items + bad, 2, right, &bad), PD_OK);
    rig_end(&from);
    rig_end(&to);
}

static void creation_survives_every_failed_allocation(void **state)
{
    kern_backend_options options = {
        .threads = 1, .context_max = 64, .rows_max = 8, .slices_max = 2};
    kern_loaded *model = NULL;
    void *pool = pd_calloc(layout.pool_bytes, 1);

    (void)state;
    for (long n = 0; model == NULL; n++) {
        pd_mem_fail_at(n);
        pd_status status = kern_backend_host.create(file, &options, &model);
        pd_mem_fail_at(-1);
        assert_int_equal(status, model == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 200);
    }
    uint64_t bytes = kern_backend_host.bytes(model);
    for (long n = 0;; n++) {
        pd_mem_fail_at(n);
        pd_status status = kern_backend_host.bind(model, &layout, pool, true);
        pd_mem_fail_at(-1);
        if (status == PD_OK)
            break;
        assert_int_equal(status, PD_E_NOMEM);
        assert_true(n < 10);
    }
    assert_true(kern_backend_host.bytes(model) > bytes); /* the hashes count */
    assert_null(kern_backend_host.broken(model));
    kern_backend_host.destroy(model);
    kern_backend_host.destroy(NULL);
    pd_free(pool);
}

/* --- plugins --- */

/* What is logged meanwhile. */
typedef struct captured {
    int saved;
    FILE *file;
    char text[2048];
} captured;

static void capture_begin(captured *c)
{
    fflush(stderr);
    c->saved = dup(2);
    c->file = tmpfile();
    assert_non_null(c->file);
    assert_true(dup2(fileno(c->file), 2) == 2);
}

static void capture_end(captured *c)
{
    fflush(stderr);
    assert_true(dup2(c->saved, 2) == 2);
    close(c->saved);
    rewind(c->file);
    size_t len = fread(c->text, 1, sizeof c->text - 1, c->file);
    c->text[len] = '\0';
    fclose(c->file);
}

static void plugin_path(char *out, size_t size, const char *name)
{
    const char *built = getenv("TEST_PLUGINS");
    char program[512];

    if (built != NULL) {
        snprintf(out, size, "%s/kv_cuda_%s.so", built, name);
        return;
    }
    ssize_t len = readlink("/proc/self/exe", program, sizeof program - 1);
    assert_true(len > 0);
    program[len] = '\0';
    *strrchr(program, '/') = '\0';
    snprintf(out, size, "%s/plugins/kv_cuda_%s.so", program, name);
}

/* A folder of its own in which this plugin is kv_cuda.so; it is where they are looked for. */
static void plugin_install(const char *name, char *own, size_t size, char *link, size_t link_size)
{
    char from[1024];

    plugin_path(from, sizeof from, name);
    snprintf(own, size, "%s/%s", folder, name);
    snprintf(link, link_size, "%s/kv_cuda.so", own);
    assert_int_equal(mkdir(own, 0700), 0);
    assert_int_equal(symlink(from, link), 0);
    assert_int_equal(setenv("KVFERRY_PLUGINS", own, 1), 0);
}

static void expect_refused(const char *plugin, const char *device, const char *why)
{
    char own[128], link[160];
    captured c;
    kern_choice choice;

    plugin_install(plugin, own, sizeof own, link, sizeof link);
    capture_begin(&c);
    pd_status status = kern_backend_choose(device, &choice);
    capture_end(&c);
    unlink(link);
    rmdir(own);
    unsetenv("KVFERRY_PLUGINS");
    assert_int_equal(status, PD_E_UNSUPPORTED);
    if (strstr(c.text, why) == NULL)
        fail_msg("not said: %s, but: %s", why, c.text);
    assert_ptr_equal(strchr(c.text, '\n'), c.text + strlen(c.text) - 1); /* one line */
}

static void a_plugin_that_cannot_be_had_says_why_in_one_line(void **state)
{
    char other[64];

    (void)state;
    snprintf(other, sizeof other, "was built for another kvferry: ABI %d", KERN_BACKEND_ABI + 1);
    expect_refused("old", "cuda", other);
    snprintf(other, sizeof other, "was built for another kvferry: ABI %d with", KERN_BACKEND_ABI);
    expect_refused("small", "cuda", other);
    expect_refused("nameless", "cuda", "has no symbol kern_backend_plugin");
    expect_refused("unresolved", "cuda", "undefined symbol: kern_nobody_has_this");
    expect_refused("refused", "cuda:1", "device=cuda:1 reason=\"device 1: CUDA driver version is");
    expect_refused("missing", "cuda", "no kv_cuda.so in KVFERRY_PLUGINS=");
    expect_refused("works", "cuda-emu", "no kv_cuda_emu.so in KVFERRY_PLUGINS=");
}

/* Neither by an empty nor by a relative entry. */
static void nothing_is_loaded_from_the_current_folder(void **state)
{
    char own[128], link[160], before[512];
    kern_choice choice;

    (void)state;
    assert_non_null(getcwd(before, sizeof before));
    plugin_install("works", own, sizeof own, link, sizeof link);
    assert_int_equal(chdir(own), 0);
    const char *const lists[] = {".", "::", "./", ".:..:", NULL};
    for (size_t i = 0; lists[i] != NULL; i++) {
        setenv("KVFERRY_PLUGINS", lists[i], 1);
        assert_int_equal(kern_backend_choose("cuda", &choice), PD_E_UNSUPPORTED);
    }
    unsetenv("KVFERRY_PLUGINS"); /* then it may well be found elsewhere on this machine */
    pd_status status = kern_backend_choose("cuda", &choice);
    assert_true(status == PD_OK || status == PD_E_UNSUPPORTED);
    assert_null(dlopen(link, RTLD_NOW | RTLD_NOLOAD));
    assert_int_equal(chdir(before), 0);
    unlink(link);
    rmdir(own);
}

static void what_is_no_device_is_refused(void **state)
{
    static const char *const texts[] = {"gpu",     "",        "cuda:",      "cuda:x",
                                        "cuda:1x", "cuda:-1", "cuda:99999", "cpu:0"};
    kern_choice choice;

    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        assert_int_equal(kern_backend_choose(texts[i], &choice), PD_E_INVALID);
}

static void the_host_is_taken_where_there_is_no_gpu(void **state)
{
    char own[128], link[160];
    kern_choice choice;

    (void)state;
    plugin_install("refused", own, sizeof own, link, sizeof link);
    assert_int_equal(kern_backend_choose("auto", &choice), PD_OK);
    assert_ptr_equal(choice.backend, &kern_backend_host);
    assert_null(choice.variant);
    unlink(link);
    rmdir(own);
    unsetenv("KVFERRY_PLUGINS");
    assert_int_equal(kern_backend_choose("cpu-ref", &choice), PD_OK);
    assert_string_equal(choice.variant, "cpu-ref");
    assert_int_equal(kern_backend_choose("cpu", &choice), PD_OK);
    assert_null(choice.variant);
}

static uint32_t token_by(const char *device, const char *backend)
{
    kern_engine_options options = {
        .device = device, .threads = 2, .context_max = 128, .rows_max = TOKENS, .slices_max = 1};
    kern_job_slice slice = {
        .slice = {.tokens = tokens, .count = TOKENS, .blocks = blocks, .logits_from = TOKENS},
        .want_token = true};
    kern_job job = {.slices = &slice, .slices_count = 1}, *done = NULL;
    kern_engine *engine = NULL;
    void *pool = NULL, *host = NULL;
    uint32_t pieces = 9;
    uint64_t seal, bytes_seal;
    pd_seal_item item = item_of(0, 0, 0, layout.kv_heads);

    assert_int_equal(kern_engine_create(file, &options, &engine), PD_OK);
    assert_non_null(strstr(kern_engine_backend(engine), backend));
    assert_int_equal(kern_engine_pool_alloc(engine, layout.pool_bytes, &pool, &pieces), PD_OK);
    assert_int_equal(pieces, pool == NULL ? 0 : 1);
    if (pool == NULL)
        pool = host = pd_calloc(layout.pool_bytes, 1);
    assert_int_equal(kern_engine_bind(engine, &layout, pool, true), PD_OK);
    assert_int_equal(kern_engine_submit(engine, &job), PD_OK);
    while (kern_engine_poll(engine, &done) == PD_E_AGAIN) {
        struct pollfd ready = {.fd = kern_engine_fd(engine), .events = POLLIN};
        assert_int_equal(poll(&ready, 1, 20000), 1);
    }
    assert_int_equal(job.status, PD_OK);
    kern_engine_stop(engine);
    /* seals may still be asked for */
    pd_sealer sealer = kern_engine_sealer(engine);
    assert_int_equal(sealer.seal(sealer.ctx, &item, 1, &seal), PD_OK);
    bytes_seal =
        pd_seal_compute(&layout, pool, item.block, &item.place, item.head_from, item.head_to);
    assert_true(seal == bytes_seal);
    kern_engine_destroy(engine);
    pd_free(host);
    return slice.token_out;
}

/* Last: a plugin that works stays loaded. */
static void a_plugin_that_works_does_all_that_the_host_does(void **state)
{
    char own[128], link[160];
    captured c;
    kern_choice choice;

    (void)state;
    uint32_t expected = token_by("cpu", "cpu");
    plugin_install("works", own, sizeof own, link, sizeof link);
    capture_begin(&c);
    uint32_t token = token_by("cuda:1", "cuda the host in disguise");
    capture_end(&c);
    assert_int_equal(token, expected);
    assert_non_null(strstr(c.text, "svc=test msg=\"attached\"")); /* its log is ours */
    assert_int_equal(kern_backend_choose("auto", &choice), PD_OK);
    assert_string_equal(choice.backend->name, "cuda");
    assert_int_equal(choice.device, 0);
    assert_int_equal(kern_backend_choose("cuda:2", &choice), PD_E_UNSUPPORTED);
    unlink(link);
    rmdir(own);
    unsetenv("KVFERRY_PLUGINS");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_token_is_sampled_whether_or_not_its_logits_are_asked_for),
        cmocka_unit_test(drafts_are_sampled_as_if_their_rows_came_one_by_one),
        cmocka_unit_test(drafts_that_were_wrong_leave_no_trace_in_seals),
        cmocka_unit_test(what_a_step_was_not_made_for_is_refused),
        cmocka_unit_test(seals_of_many_are_made_and_checked_at_once),
        cmocka_unit_test(creation_survives_every_failed_allocation),
        cmocka_unit_test(a_plugin_that_cannot_be_had_says_why_in_one_line),
        cmocka_unit_test(nothing_is_loaded_from_the_current_folder),
        cmocka_unit_test(what_is_no_device_is_refused),
        cmocka_unit_test(the_host_is_taken_where_there_is_no_gpu),
        cmocka_unit_test(a_plugin_that_works_does_all_that_the_host_does),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

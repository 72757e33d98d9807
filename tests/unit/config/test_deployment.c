/* The deployment: defaults, every fault with its place, counts of workers, --set. */

#include "common/base/hash.h"
#include "common/config/deployment.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MODEL "model: {path: models/m.gguf}\n"

static pd_status parse_sets(const char *text, const char *const *sets, size_t sets_count,
                            pd_deployment *d, pd_buf *errors)
{
    pd_buf_init(errors, 1u << 20);
    return pd_deployment_parse("f.yaml", text, strlen(text), sets, sets_count, d, errors);
}

static pd_deployment good(const char *text)
{
    pd_deployment d;
    pd_buf errors;

    if (parse_sets(text, NULL, 0, &d, &errors) != PD_OK)
        fail_msg("%s", pd_buf_text(&errors));
    assert_int_equal(errors.len, 0);
    pd_buf_fini(&errors);
    return d;
}

/* Exactly these faults, and the struct is not touched. */
static void bad_sets(const char *text, const char *const *sets, size_t sets_count,
                     const char *expected)
{
    pd_deployment d, before;
    pd_buf errors;

    memset(&d, 0x5a, sizeof d);
    before = d;
    assert_int_equal(parse_sets(text, sets, sets_count, &d, &errors), PD_E_INVALID);
    assert_string_equal(pd_buf_text(&errors), expected);
    assert_memory_equal(&d, &before, sizeof d);
    pd_buf_fini(&errors);
}

static void bad(const char *text, const char *expected)
{
    bad_sets(text, NULL, 0, expected);
}

static void a_model_is_all_that_is_needed(void **state)
{
    (void)state;
    pd_deployment d = good(MODEL);

    assert_string_equal(d.cluster, "local");
    assert_string_equal(d.state_dir, ".kvferry/local");
    assert_int_equal(d.log_level, PD_LOG_INFO);
    assert_int_equal(d.pin_threads, PD_PIN_NEVER);
    assert_string_equal(d.model.name, "m");
    assert_int_equal(d.model.context, 0);
    assert_int_equal(d.workers, 2);
    assert_int_equal(d.prefill.workers, 1);
    assert_int_equal(d.decode.workers, 1);
    assert_string_equal(d.router.listen.host, "127.0.0.1");
    assert_int_equal(d.router.listen.port, 8080);
    assert_string_equal(d.router.control, "ipc://.kvferry/local/control.sock");
    assert_int_equal(d.router.policy, PD_POLICY_KV_AWARE);
    assert_int_equal(d.router.slo.ttft_ns, 200000000);
    assert_int_equal(d.router.limits.body_bytes, 8 << 20);
    assert_true(d.router.deadlines.total_ns == 600000000000ull);
    assert_string_equal(d.decode.device, "cpu");
    assert_int_equal(d.decode.max_batch, 64);
    assert_int_equal(d.prefill.chunk_tokens, 512);
    assert_int_equal(d.kv.block_tokens, 16);
    assert_true(d.kv.memory_bytes == 1ull << 30);
    assert_true(d.kv.prefix_cache);
    assert_string_equal(d.transfer.backend, "ucx");
    assert_string_equal(d.transfer.device, "auto");
    assert_true(d.transfer.seals); /* blocks are checked unless somebody says otherwise */
    assert_int_equal(d.heartbeat.interval_ns, 200000000);
    pd_deployment_fini(&d);
    bad("", "f.yaml:1:1: model.path: is required: the model's GGUF file\n");
    bad("model:\n", "f.yaml:1:7: model.path: is required: the model's GGUF file\n");
    bad("- a\n", "f.yaml:1:1: the file must be a map of keys, not a list\n");
}

static void ratio_and_counts_agree(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint32_t prefill, decode;
    } fine[] = {
        {MODEL "workers: 3\nratio: \"2:1\"\n", 2, 1},
        {MODEL "workers: 9\nratio: 1:2\n", 3, 6},
        {MODEL "ratio: 3:4\n", 3, 4},
        {MODEL "workers: 4\n", 2, 2},
        {MODEL "prefill: {workers: 3}\n", 3, 1},
        {MODEL "workers: 5\ndecode: {workers: 3}\n", 2, 3},
        {MODEL "ratio: 4:2\nprefill: {workers: 2}\ndecode: {workers: 1}\n", 2, 1},
    };

    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) {
        pd_deployment d = good(fine[i].text);
        assert_int_equal(d.prefill.workers, fine[i].prefill);
        assert_int_equal(d.decode.workers, fine[i].decode);
        assert_int_equal(d.workers, fine[i].prefill + fine[i].decode);
        pd_deployment_fini(&d);
    }
    bad(MODEL "workers: 4\nratio: 2:1\n",
        "f.yaml:2:10: workers: 4 workers do not divide by the ratio 2:1; 3 or 6 would\n");
    bad(MODEL "workers: 2\nratio: 2:1\n",
        "f.yaml:2:10: workers: 2 workers do not divide by the ratio 2:1; 3 would\n");
    bad(MODEL "workers: 3\n",
        "f.yaml:2:10: workers: 3 workers do not divide by the ratio 1:1; 2 or 4 would\n");
    bad(MODEL "workers: 5\nprefill: {workers: 3}\ndecode: {workers: 1}\n",
        "f.yaml:2:10: workers: 5, but prefill.workers and decode.workers make 4\n");
    bad(MODEL "ratio: 2:1\nprefill: {workers: 3}\ndecode: {workers: 1}\n",
        "f.yaml:2:8: ratio: 2:1, but there are 3 prefill and 1 decode workers\n");
    bad(MODEL "workers: 2\nprefill: {workers: 2}\n",
        "f.yaml:2:10: workers: 2 leave no decode worker beside 2\n");
}

static void faults_come_all_at_once_in_order(void **state)
{
    (void)state;
    bad("cluster: Demo\n" MODEL "router:\n  listen: 8080\n  polcy: random\nkv: {memory: 2GB}\n"
        "transfer: {backend: pigeon}\nheartbeat: {interval: 5s}\n",
        "f.yaml:1:10: cluster: must be 1 to 63 of a-z, 0-9 and '-' ('-' neither first nor last), "
        "not 'Demo'\n"
        "f.yaml:4:11: router.listen: must be HOST:PORT such as 127.0.0.1:8080, not '8080'\n"
        "f.yaml:5:3: router.polcy: unknown key, did you mean 'router.policy'?\n"
        "f.yaml:6:14: kv.memory: '2GB': units are KiB, MiB, GiB, TiB (powers of 1024); write 2GiB\n"
        "f.yaml:7:21: transfer.backend: must be one of ucx, nccl, not 'pigeon'\n"
        "f.yaml:8:23: heartbeat.lost_after: must be at least two intervals (10s)\n");
}

static void formats_of_kv_are_the_ones_that_every_worker_reads(void **state)
{
    static const char *const fine[] = {"f16", "int8", "fp8_e4m3"};
    char text[200];

    (void)state;
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) {
        snprintf(text, sizeof text, MODEL "kv: {dtype: %s}\n", fine[i]);
        pd_deployment d = good(text);
        assert_string_equal(d.kv.dtype, fine[i]);
        pd_deployment_fini(&d);
    }
    bad(MODEL "kv: {dtype: int4}\n",
        "f.yaml:2:13: kv.dtype: unknown value 'int4', did you mean 'int8'? (one of f16, int8, "
        "fp8_e4m3)\n");
    bad(MODEL "kv:\n  dtype: int8\ndecode: {device: cuda:1}\n",
        "f.yaml:3:10: kv.dtype: int8 is computed by CPUs alone so far, and decode.device is "
        "cuda:1; f16 would do\n");
    bad(MODEL "prefill: {device: cuda-emu}\nkv: {dtype: fp8_e4m3}\n",
        "f.yaml:3:13: kv.dtype: fp8_e4m3 is computed by CPUs alone so far, and prefill.device is "
        "cuda-emu; f16 would do\n");
}

static void threads_are_given_or_shared_out(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint32_t cpus, prefill, decode;
    } cases[] = {
        {MODEL, 2, 1, 1}, /* a laptop: one each */
        {MODEL, 1, 1, 1},
        {MODEL, 8, 4, 4},
        {MODEL, 9, 4, 4},
        {MODEL "prefill: {threads: auto}\ndecode: {threads: auto}\n", 6, 3, 3},
        {MODEL "ratio: 2:1\n", 8, 2, 2},
        {MODEL "ratio: 2:1\n", 2, 1, 1},
        {MODEL "prefill: {tensor_parallel: 3}\n", 16, 4, 4}, /* each rank of a worker */
        {MODEL "prefill: {threads: 1}\n", 8, 1, 7},          /* what the others leave */
        {MODEL "ratio: 2:3\nprefill: {threads: 2}\n", 16, 2, 4},
        {MODEL "decode: {tensor_parallel: 2, threads: 3}\n", 8, 2, 3},
        {MODEL "decode: {threads: 8}\n", 8, 1, 8},
        {MODEL "decode: {threads: 20}\n", 8, 1, 20},
        {MODEL "prefill: {threads: 5}\ndecode: {threads: 6}\n", 2, 5, 6},
        {MODEL, 1u << 20, 1024, 1024},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        pd_deployment d = good(cases[i].text);
        assert_int_equal(pd_deployment_threads(&d, &d.prefill, cases[i].cpus), cases[i].prefill);
        assert_int_equal(pd_deployment_threads(&d, &d.decode, cases[i].cpus), cases[i].decode);
        pd_deployment_fini(&d);
    }
    bad(MODEL "prefill:\n  threads: 2000\ndecode: {threads: all}\n",
        "f.yaml:3:12: prefill.threads: must be 1 to 1024, not 2000 (or auto)\n"
        "f.yaml:4:19: decode.threads: must be a whole number, not 'all' (or auto)\n");
}

static void threads_are_pinned_where_it_says_so(void **state)
{
    (void)state;
    static const char *const names[] = {"never", "auto", "always"};

    for (int i = 0; i < 3; i++) {
        char text[64];
        snprintf(text, sizeof text, MODEL "pin_threads: %s\n", names[i]);
        pd_deployment d = good(text);
        assert_int_equal(d.pin_threads, PD_PIN_NEVER + i);
        pd_deployment_fini(&d);
    }
    assert_int_equal(PD_PIN_AUTO, 1);
    assert_int_equal(PD_PIN_ALWAYS, 2);
    bad(MODEL "pin_threads: yes\ndecode: {pin_threads: auto}\n",
        "f.yaml:2:14: pin_threads: must be one of never, auto, always, not 'yes'\n"
        "f.yaml:3:10: decode.pin_threads: unknown key; it is called 'pin_threads' here\n");
}

static void wrong_shapes_are_named(void **state)
{
    (void)state;
    bad(MODEL "prefill: 3\n", "f.yaml:2:10: prefill: must be a map of keys, not a value\n");
    bad(MODEL "workers: [3]\n", "f.yaml:2:10: workers: must be one value, not a list\n");
    bad(MODEL "cluster: {}\n", "f.yaml:2:10: cluster: must be one value, not a map\n");
    bad(MODEL "router: {replicas: 2}\n",
        "f.yaml:2:20: router.replicas: 2 routers; one is supported for now\n");
    bad(MODEL "router: {control: 'tcp://h:5', tokens: 'tcp://h:5'}\n",
        "f.yaml:2:19: router.control: three different endpoints are needed, 'tcp://h:5' comes "
        "twice\n");
    bad(MODEL "zone: NO\n", "f.yaml:2:1: zone: unknown key; known here: cluster, state_dir, "
                            "log_level, pin_threads, model, "
                            "workers, ratio, router, prefill, decode, kv, transfer, heartbeat\n");
    bad(MODEL "chunk_tokens: 16\n",
        "f.yaml:2:1: chunk_tokens: unknown key at this level; there is 'prefill.chunk_tokens', "
        "'decode.chunk_tokens'\n");
    bad(MODEL "prefill: {replicas: 2}\n",
        "f.yaml:2:11: prefill.replicas: unknown key; it is called 'prefill.workers' here\n");
}

static void a_list_of_models_holds_one_for_now(void **state)
{
    (void)state;
    pd_deployment d = good("models:\n  - {name: a, path: p.gguf, aliases: [b, c], ratio: 2:1,\n"
                           "     prefill: {chunk_tokens: 64}, kv: {memory: 64MiB}}\n");

    assert_string_equal(d.model.name, "a");
    assert_string_equal(d.model.path, "p.gguf");
    assert_int_equal(d.model.aliases_count, 2);
    assert_string_equal(d.model.aliases[1], "c");
    assert_int_equal(d.prefill.workers, 2);
    assert_int_equal(d.prefill.chunk_tokens, 64);
    assert_int_equal(d.kv.memory_bytes, 64 << 20);
    pd_deployment_fini(&d);
    bad("models:\n  - {path: a}\n  - {path: b, context: 1_0}\n",
        "f.yaml:3:5: models: 2 models; one cluster serves one model for now\n"
        "f.yaml:3:24: model.context: '1_0': only plain decimal numbers are read; write 10 (or "
        "auto)\n");
    bad("kv: {memory: 1GiB}\nmodels:\n  - {path: a, kv: {memory: 2GiB}}\n",
        "f.yaml:3:15: models: 'kv' stands here and at the top level (line 1)\n");
    bad("models: []\n" MODEL,
        "f.yaml:1:9: models: must be a list of at least one model, not an empty one\n");
    bad(MODEL "models: [{path: a}]\n",
        "f.yaml:2:1: models: stands beside 'model' (line 1): keep one of them\n");
}

static void set_overrides_the_file(void **state)
{
    (void)state;
    static const char *const sets[] = {
        "router.listen=[::1]:0",  "router.slo.ttft=1s",
        "kv.memory=64MiB",        "cluster=no",
        "model.name=a=b",         "model.aliases=x",
        "prefill.workers=3",      "transfer.transport=tcp",
        "transfer.transport=shm",
    };
    pd_deployment d;
    pd_buf errors;

    assert_int_equal(parse_sets(MODEL "workers: 2\nratio: 1:1\nkv: {memory: 1GiB}\n", sets,
                                sizeof sets / sizeof sets[0], &d, &errors),
                     PD_OK);
    assert_string_equal(d.router.listen.text, "[::1]:0");
    assert_true(d.router.listen.ipv6);
    assert_int_equal(d.router.slo.ttft_ns, 1000000000);
    assert_int_equal(d.kv.memory_bytes, 64 << 20);
    assert_string_equal(d.state_dir, ".kvferry/no");
    assert_string_equal(d.model.name, "a=b");
    assert_int_equal(d.prefill.workers, 3); /* replaces the file's other way to count */
    assert_int_equal(d.decode.workers, 1);
    assert_string_equal(d.transfer.transport, "shm"); /* the last one counts */
    pd_buf_fini(&errors);
    pd_deployment_fini(&d);
}

static void faults_of_set_name_its_number(void **state)
{
    (void)state;
    static const char *const sets[] = {
        "kv.memory=2GB",  "nonsense",       "=3", "prefil.workers=2", "kv.dtype.x=1",
        "router.listen=", "kv..memory=1GiB"};
    bad_sets(MODEL "kv: {dtype: f16}\n", sets, sizeof sets / sizeof sets[0],
             "--set 1: kv.memory: '2GB': units are KiB, MiB, GiB, TiB (powers of 1024); write "
             "2GiB\n"
             "--set 2: 'nonsense' must be KEY=VALUE, such as router.listen=127.0.0.1:8080\n"
             "--set 3: '=3' must be KEY=VALUE, such as router.listen=127.0.0.1:8080\n"
             "--set 4: prefil: unknown key, did you mean 'prefill'?\n"
             "--set 5: kv.dtype.x=1: 'dtype' is a value in the file (line 2)\n"
             "--set 6: router.listen: must be HOST:PORT such as 127.0.0.1:8080, not ''\n"
             "--set 7: kv.: unknown key; known here: block_tokens, dtype, memory, group_layers, "
             "prefix_cache\n");
}

static void long_state_dirs_fall_back_to_tcp(void **state)
{
    (void)state;
    char text[512];

    snprintf(text, sizeof text, MODEL "state_dir: /%0120d\n", 0);
    pd_deployment d = good(text);
    assert_string_equal(d.router.control, "tcp://127.0.0.1:0");
    pd_deployment_fini(&d);
    d = good(MODEL "router: {bus: tcp}\n");
    assert_string_equal(d.router.events, "tcp://127.0.0.1:0");
    pd_deployment_fini(&d);
}

static void speculation_is_checked_as_a_whole(void **state)
{
    pd_deployment d;

    (void)state;
    d = good(MODEL "decode: { speculative: { method: lookahead, window: 3, draft_tokens: 4 } }\n");
    assert_int_equal(d.speculative.method, PD_SPEC_LOOKAHEAD);
    assert_int_equal(d.speculative.window, 3);
    assert_true(d.speculative.adaptive);
    assert_null(d.speculative.draft_model);
    pd_deployment_fini(&d);
    bad(MODEL "decode:\n  speculative:\n    method: ngram\n",
        "f.yaml:4:13: decode.speculative.method: must be one of off, prompt_lookup, draft_model, "
        "lookahead, not 'ngram'\n");
    bad(MODEL "decode:\n  speculative:\n    method: draft_model\n",
        "f.yaml:4:13: decode.speculative.method: draft_model needs decode.speculative.draft_model: "
        "a GGUF file with the model's vocabulary\n");
    bad(MODEL "decode:\n  speculative:\n    draft_model: a.gguf\n    num_speculative_tokens: 3\n",
        "f.yaml:4:18: decode.speculative.draft_model: is for method: draft_model, and the method "
        "is off\n"
        "f.yaml:5:5: decode.speculative.num_speculative_tokens: unknown key; it is called "
        "'decode.speculative.draft_tokens' here\n");
    bad(MODEL "decode:\n  speculative: { ngram_min: 6 }\n",
        "f.yaml:3:29: decode.speculative.ngram_min: must not be above ngram_max (5), and is 6\n");
    bad(MODEL "decode:\n  speculative:\n    method: lookahead\n    window: 8\n",
        "f.yaml:5:13: decode.speculative.window: must be below draft_tokens (8), which it is a "
        "part of, and is 8\n");
}

static void a_dump_reads_back_the_same(void **state)
{
    (void)state;
    pd_deployment d = good("model: {path: 'a \"b\"\\c.gguf', aliases: ['#', 'y: z']}\nworkers: 6\n"
                           "ratio: 2:1\nrouter: {policy: random, slo: {tpot: 90s}}\n"
                           "kv: {memory: 1536MiB, prefix_cache: false}\n");
    pd_buf first, second;

    pd_buf_init(&first, 65536);
    pd_buf_init(&second, 65536);
    pd_deployment_dump(&d, &first);
    pd_deployment_fini(&d);
    d = good(pd_buf_text(&first));
    assert_string_equal(d.model.path, "a \"b\"\\c.gguf");
    assert_int_equal(d.prefill.workers, 4);
    assert_int_equal(d.router.policy, PD_POLICY_RANDOM);
    assert_false(d.kv.prefix_cache);
    pd_deployment_dump(&d, &second);
    assert_string_equal(pd_buf_text(&first), pd_buf_text(&second));
    pd_deployment_fini(&d);
    pd_buf_fini(&first);
    pd_buf_fini(&second);
}

static void services_have_names(void **state)
{
    (void)state;
    pd_deployment d = good(MODEL "ratio: 2:1\n");

    assert_true(pd_deployment_has_service(&d, "prefill-1"));
    assert_true(pd_deployment_has_service(&d, "decode-0"));
    assert_false(pd_deployment_has_service(&d, "prefill-2"));
    assert_false(pd_deployment_has_service(&d, "decode-1"));
    assert_false(pd_deployment_has_service(&d, "decode-"));
    assert_false(pd_deployment_has_service(&d, "decode-00"));
    assert_false(pd_deployment_has_service(&d, "router"));
    pd_deployment_fini(&d);
}

/* Every file of tests/cases/yaml; expected: parts of lines that must be told, or NULL: fine. */
static void case_file(const char *name, const char *const *expected, size_t lines)
{
    char path[1024];
    pd_deployment d;
    pd_buf errors;
    size_t told = 0;

    snprintf(path, sizeof path, "%s/%s", getenv("YAML_CASES"), name);
    pd_buf_init(&errors, 65536);
    pd_status status = pd_deployment_load(path, NULL, 0, &d, &errors);
    assert_int_equal(status, expected == NULL ? PD_OK : PD_E_INVALID);
    if (status == PD_OK)
        pd_deployment_fini(&d);
    for (size_t i = 0; i < lines; i++) {
        if (strstr(pd_buf_text(&errors), expected[i]) == NULL)
            fail_msg("%s told:\n%swithout %s", name, pd_buf_text(&errors), expected[i]);
    }
    for (size_t i = 0; i < errors.len; i++)
        told += errors.bytes[i] == '\n';
    assert_int_equal(told, lines); /* all faults, and nothing else */
    pd_buf_fini(&errors);
}

#define CASE(name, ...)                                                                            \
    case_file(name, (const char *const[]){__VA_ARGS__},                                            \
              sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

static void known_bad_files_are_refused(void **state)
{
    (void)state;
    case_file("base_ok.yaml", NULL, 0);
    CASE("dup_top.yaml", ":7:1: the key 'decode' comes twice: lines 3 and 7");
    CASE("dup_nested.yaml", ":6:3: the key 'listen' comes twice: lines 4 and 6");
    CASE("dup_quoted.yaml", ":5:3: the key 'listen' comes twice: lines 4 and 5");
    CASE("dup_merge.yaml", ":5:3: the merge key '<<' is not supported");
    CASE("typo_key.yaml", ":3:1: prefil: unknown key, did you mean 'prefill'?");
    CASE("typo_nested.yaml", ":4:3: prefill.wrokers: unknown key, did you mean 'prefill.workers'?");
    CASE("wrong_level.yaml", ":5:3: router.decode: unknown key at this level; there is 'decode'");
    CASE("wrong_values.yaml", ":4:11: router.listen: the port",
         ":5:11: router.policy: ", ":7:12: prefill.workers: must be 1",
         ":8:17: prefill.chunk_tokens: must be 16", ":10:12: decode.workers: '1.5'",
         ":12:17: kv.block_tokens: must be a multiple of 16");
    CASE("scalars_bad.yaml", ":2:10: cluster: has no value", ":4:8: model.path: has no value",
         ":5:12: model.context: '0123'", ":7:11: router.listen: the port '08080'",
         ":9:12: prefill.workers: '0o2'", ":10:17: prefill.chunk_tokens: '09'",
         ":12:12: decode.workers: '1_0'", ":13:14: decode.max_batch: '1e3'",
         ":15:17: kv.prefix_cache: must be true or false");
    CASE("two_models.yaml", ":6:5: models: 2 models;", ":8:15: prefill.wrokers: unknown key");
}

static void strings_stay_as_written(void **state)
{
    (void)state;
    static const char *const names[] = {"on", "1e3", "52:54:00:44:49:56", "0123", "1:30", "true"};
    char path[1024];
    pd_deployment d;
    pd_buf errors;

    snprintf(path, sizeof path, "%s/scalars.yaml", getenv("YAML_CASES"));
    pd_buf_init(&errors, 65536);
    assert_int_equal(pd_deployment_load(path, NULL, 0, &d, &errors), PD_OK);
    assert_string_equal(d.cluster, "no");
    assert_string_equal(d.model.name, "1.10");
    assert_string_equal(d.model.path, "NO");
    assert_int_equal(d.model.aliases_count, 6);
    for (int i = 0; i < 6; i++)
        assert_string_equal(d.model.aliases[i], names[i]);
    assert_string_equal(d.router.listen.text, "22:22");
    pd_deployment_fini(&d);
    pd_buf_clear(&errors);
    assert_int_equal(pd_deployment_load("/nowhere/x.yaml", NULL, 0, &d, &errors), PD_E_IO);
    assert_string_equal(pd_buf_text(&errors),
                        "/nowhere/x.yaml: cannot be opened: No such file or directory\n");
    pd_buf_clear(&errors);
    assert_int_equal(pd_deployment_load("/", NULL, 0, &d, &errors), PD_E_IO);
    pd_buf_fini(&errors);
}

static const char seed_text[] =
    "cluster: demo\nmodel: &m {name: a, path: 'b.gguf', context: 512, aliases: [x, y]}\n"
    "workers: 3\nratio: \"2:1\"\nrouter:\n  listen: \"[::1]:80\"\n  policy: random\n"
    "  slo: {ttft: 200ms, tpot: 100ms}\n  limits: {body_bytes: 1MiB, queue: 7}\n"
    "prefill: &p {device: cpu-ref, threads: 2}\ndecode: *p\nkv: {memory: 64MiB}\n"
    "transfer: {seals: false}\nheartbeat: {interval: 100ms}\n";

/* Bytes changed, dropped, doubled and moved: a struct or faults, never a crash or a leak; and every
 * line of the faults is one line with a place. */
static void mutations_never_break_it(void **state)
{
    (void)state;
    static const char spice[] = ":{}[]&*!|>'\"%@`#-?,\n\t 09.~<\x80\xff";
    size_t base_len = sizeof seed_text - 1;
    uint64_t seed = 20260101;
    long live = pd_mem_live();
    uint32_t fine = 0, refused = 0;

    for (int round = 0; round < 4000; round++) {
        char text[2048];
        size_t len = base_len;
        memcpy(text, seed_text, len);
        for (uint64_t n = pd_random_next(&seed) % 3 + 1; n > 0; n--) {
            uint64_t r = pd_random_next(&seed);
            size_t at = (r >> 8) % len, span = (r >> 40) % 24;
            span = span < len - at ? span : len - at;
            if (r % 4 == 0)
                text[at] = spice[(r >> 32) % (sizeof spice - 1)];
            else if (r % 4 == 1)
                text[at] = (char)(r >> 32);
            else if (r % 4 == 2 && len - span > 64) {
                memmove(text + at, text + at + span, len - at - span);
                len -= span;
            } else if (len + span < sizeof text) {
                memmove(text + at + span, text + at, len - at);
                len += span;
            }
        }
        pd_deployment d;
        pd_buf errors;
        pd_buf_init(&errors, 1u << 20);
        pd_status status = pd_deployment_parse("f.yaml", text, len, NULL, 0, &d, &errors);
        if (status == PD_OK) {
            fine++;
            pd_deployment_fini(&d);
        } else {
            refused++;
            assert_int_equal(status, PD_E_INVALID);
            assert_true(errors.len > 0 && errors.bytes[errors.len - 1] == '\n');
            for (const char *line = errors.bytes; line[0] != '\0'; line = strchr(line, '\n') + 1)
                assert_int_equal(strncmp(line, "f.yaml:", 7), 0);
        }
        pd_buf_fini(&errors);
    }
    assert_true(fine > 20 && refused > 1000);
    assert_int_equal(pd_mem_live(), live);
}

static void every_failed_allocation_is_told(void **state)
{
    (void)state;
    long live = pd_mem_live();
    pd_status status = PD_E_NOMEM;

    for (long n = 0; status == PD_E_NOMEM; n++) {
        pd_deployment d;
        pd_buf errors;
        pd_buf_init(&errors, 65536);
        pd_mem_fail_at(n);
        status =
            pd_deployment_parse("f.yaml", seed_text, sizeof seed_text - 1, NULL, 0, &d, &errors);
        pd_mem_fail_at(-1);
        if (status == PD_OK)
            pd_deployment_fini(&d);
        else
            assert_int_equal(status, PD_E_NOMEM);
        pd_buf_fini(&errors);
        assert_int_equal(pd_mem_live(), live);
        assert_true(n < 1000);
    }
    assert_int_equal(status, PD_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_is_all_that_is_needed),
        cmocka_unit_test(ratio_and_counts_agree),
        cmocka_unit_test(faults_come_all_at_once_in_order),
        cmocka_unit_test(formats_of_kv_are_the_ones_that_every_worker_reads),
        cmocka_unit_test(threads_are_given_or_shared_out),
        cmocka_unit_test(threads_are_pinned_where_it_says_so),
        cmocka_unit_test(wrong_shapes_are_named),
        cmocka_unit_test(a_list_of_models_holds_one_for_now),
        cmocka_unit_test(set_overrides_the_file),
        cmocka_unit_test(faults_of_set_name_its_number),
        cmocka_unit_test(long_state_dirs_fall_back_to_tcp),
        cmocka_unit_test(speculation_is_checked_as_a_whole),
        cmocka_unit_test(a_dump_reads_back_the_same),
        cmocka_unit_test(services_have_names),
        cmocka_unit_test(known_bad_files_are_refused),
        cmocka_unit_test(strings_stay_as_written),
        cmocka_unit_test(mutations_never_break_it),
        cmocka_unit_test(every_failed_allocation_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

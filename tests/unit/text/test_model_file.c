/* Model files: a sound one opens fast and whole; a broken one is refused with one clear line. */

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/model_file/model_file.h"
#include "common/text/tokenizer.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

static char log_path[] = "/tmp/kvferry-test-log-XXXXXX";
static int log_fd = -1, saved_stderr = -1;

static void start_log(void)
{
    if (log_fd < 0) {
        log_fd = mkstemp(log_path);
        assert_true(log_fd >= 0);
        unlink(log_path);
    }
    fflush(stderr);
    saved_stderr = dup(STDERR_FILENO);
    assert_true(saved_stderr >= 0);
    assert_int_equal(ftruncate(log_fd, 0), 0);
    lseek(log_fd, 0, SEEK_SET);
    dup2(log_fd, STDERR_FILENO);
}

/* What was logged since start_log; lines_out how many lines. */
static const char *end_log(size_t *lines_out)
{
    static char text[16384];

    dup2(saved_stderr, STDERR_FILENO);
    close(saved_stderr);
    ssize_t n = pread(log_fd, text, sizeof text - 1, 0);
    assert_true(n >= 0);
    text[n] = '\0';
    *lines_out = 0;
    for (ssize_t i = 0; i < n; i++)
        *lines_out += text[i] == '\n';
    return text;
}

static char *bad_file(const char *name)
{
    const char *folder = getenv("KVFERRY_GGUF_DIR");
    return pd_asprintf("%s/%s", folder != NULL ? folder : ".", name);
}

static pd_status open_quietly(const char *path, bool container, const char **log_out,
                              size_t *lines_out)
{
    pd_model_file *file = NULL;

    start_log();
    pd_status status =
        container ? pd_model_file_open_container(path, &file) : pd_model_file_open(path, &file);
    *log_out = end_log(lines_out);
    pd_model_file_close(file);
    return status;
}

/* What the line has to name: the key or tensor, where there is one. */
static const struct {
    const char *file, *names;
} named[] = {
    {"a13_ntensors_2p61.gguf", "tensor_count=2305843009213693952"},
    {"a13_nkv_2p60.gguf", "key_count="},
    {"a13_ndims_5.gguf", "tensor=token_embd.weight"},
    {"a13_ndims_ffffffff.gguf", "tensor=token_embd.weight"},
    {"a13_dim_product_zero.gguf", "tensor=token_embd.weight"},
    {"a13_dim_product_small.gguf", "tensor=token_embd.weight"},
    {"a13_dim_bytes_wrap.gguf", "tensor=token_embd.weight"},
    {"a13_dim_negative.gguf", "tensor=token_embd.weight"},
    {"a14_align_0.gguf", "key=general.alignment"},
    {"a14_align_1GiB.gguf", "key=general.alignment"},
    {"a14_trunc_empty.gguf", "size=0 needed_at_least=24"},
    {"a14_trunc_in_magic.gguf", "size=3 needed_at_least=24"},
    {"a14_trunc_in_counts.gguf", "size=15 needed_at_least=24"},
    {"a14_trunc_last_byte.gguf", "needed="},
    {"a14_trunc_half_data.gguf", "needed="},
    {"a14_trunc_before_padding.gguf", "needed="},
    {"a14_trunc_in_tensor_info.gguf", "needed_at_least="},
    {"a14_offset_past_end.gguf", "tensor=token_embd.weight"},
    {"a14_offset_unaligned.gguf", "tensor=token_embd.weight"},
    {"a15_scores_u8.gguf", "key=tokenizer.ggml.scores"},
    {"a15_token_type_u8.gguf", "key=tokenizer.ggml.token_type"},
    {"a15_scores_short.gguf", "key=tokenizer.ggml.scores"},
    {"a15_token_type_is_scalar.gguf", "key=tokenizer.ggml.token_type"},
    {"a15_eos_out_of_range.gguf", "key=tokenizer.ggml.eos_token_id"},
    {"a15_bos_out_of_range.gguf", "key=tokenizer.ggml.bos_token_id"},
    {"a15_add_bos_without_bos.gguf", "key=tokenizer.ggml.add_bos_token"},
    {"a15_merge_without_space.gguf", "key=tokenizer.ggml.merges"},
    {"a15_tokens_empty.gguf", "key=tokenizer.ggml.tokens"},
    {"a15_token_not_utf8.gguf", "key=tokenizer.ggml.tokens"},
    {"base_ok.gguf", "no whole model"},
    {"full_no_heads.gguf", "key=llama.attention.head_count"},
    {"full_heads_3.gguf", "key=llama.attention.head_count"},
    {"full_heads_0.gguf", "key=llama.attention.head_count"},
    {"full_kv_heads_3.gguf", "key=llama.attention.head_count_kv"},
    {"full_rope_odd.gguf", "key=llama.rope.dimension_count"},
    {"full_layers_2.gguf", "tensor=blk.1.attn_norm.weight"},
    {"full_layers_max.gguf", "key=llama.block_count"},
    {"full_no_rms.gguf", "key=llama.attention.layer_norm_rms_epsilon"},
    {"full_vocab_9.gguf", "key=llama.vocab_size"},
    {"full_q_shape.gguf", "tensor=blk.0.attn_q.weight"},
    {"full_no_down.gguf", "tensor=blk.0.ffn_down.weight"},
    {"full_norm_f16.gguf", "tensor=blk.0.attn_norm.weight"},
    {"full_format_99.gguf", "format=99"},
    {"full_bias.gguf", "tensor=blk.0.attn_q.bias"},
    {"full_columns_q8.gguf", "tensor=blk.0.attn_q.weight"},
    {"full_experts.gguf", "key=llama.expert_count"},
    {"full_rope_scaled.gguf", "key=llama.rope.scaling.type"},
    {"full_key_twice.gguf", "key=tokenizer.ggml.model"},
    {"full_tensor_twice.gguf", "tensor=output_norm.weight"},
    {"full_architecture.gguf", "value=mamba"},
    {"full_version_1.gguf", "version=1"},
    {"full_magic.gguf", "not a GGUF file"},
};

/* The tokenizer copes with these: the first stands, with a warning. */
static bool loads(const char *name)
{
    return strcmp(name, "full_ok.gguf") == 0 || strcmp(name, "a15_tokens_duplicate.gguf") == 0 ||
           strcmp(name, "a15_merge_unknown_piece.gguf") == 0;
}

static void every_bad_file_is_refused_with_one_line(void **state)
{
    (void)state;
    char *path = bad_file("manifest.tsv");
    FILE *manifest = fopen(path, "r");
    char row[512];
    size_t count = 0, named_count = 0;

    assert_non_null(manifest);
    pd_free(path);
    while (fgets(row, sizeof row, manifest) != NULL) {
        const char *name = strtok(row, "\t"), *log;
        size_t lines;
        path = bad_file(name);
        uint64_t start = pd_clock_now_ns();
        pd_status status = open_quietly(path, false, &log, &lines);
        assert_true(pd_clock_now_ns() - start < PD_NS_PER_S);
        count++;
        if (loads(name)) {
            assert_int_equal(status, PD_OK);
            assert_int_equal(lines, 0);
            pd_free(path);
            continue;
        }
        if (status == PD_OK || lines != 1 || strstr(log, path) == NULL)
            print_error("# %s: %d, %zu lines: %s\n", name, status, lines, log);
        assert_true(status == PD_E_INVALID || status == PD_E_UNSUPPORTED);
        assert_int_equal(lines, 1);
        assert_non_null(strstr(log, path));
        for (size_t i = 0; i < sizeof named / sizeof named[0]; i++) {
            if (strcmp(named[i].file, name) != 0)
                continue;
            if (strstr(log, named[i].names) == NULL)
                print_error("# %s: no '%s' in: %s\n", name, named[i].names, log);
            assert_non_null(strstr(log, named[i].names));
            named_count++;
        }
        pd_free(path);
    }
    fclose(manifest);
    assert_true(count >= 65);
    assert_int_equal(named_count, sizeof named / sizeof named[0]);
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
    assert_true(SANITIZED || usage.ru_maxrss < 64 * 1024);
}

static void a_container_without_a_model_is_taken_as_one(void **state)
{
    (void)state;
    char *path = bad_file("base_ok.gguf");
    pd_model_file *file = NULL;

    assert_int_equal(pd_model_file_open_container(path, &file), PD_OK);
    const pd_tensor *tensor = pd_model_file_tensor(file, "token_embd.weight");
    assert_non_null(tensor);
    assert_int_equal(tensor->dims[0], 8);
    assert_int_equal(tensor->dims[1], 8);
    assert_int_equal(tensor->bytes, 256);
    assert_int_equal(((const unsigned char *)tensor->data)[255], 255);
    assert_null(pd_model_file_tensor(file, "output.weight"));
    assert_string_equal(pd_model_file_name(file), "base_ok");
    pd_model_file_close(file);
    pd_free(path);
}

static void broken_tables_that_load_make_a_tokenizer_with_a_warning(void **state)
{
    (void)state;
    static const char *const names[] = {"a15_tokens_duplicate.gguf", "a15_merge_unknown_piece.gguf",
                                        "full_ok.gguf"};

    for (size_t i = 0; i < 3; i++) {
        char *path = bad_file(names[i]);
        pd_model_file *file = NULL;
        pd_tokenizer *tokenizer = NULL;
        size_t lines;
        assert_int_equal(pd_model_file_open(path, &file), PD_OK);
        start_log();
        pd_status status = pd_tokenizer_create(pd_model_file_text(file), &tokenizer);
        const char *log = end_log(&lines);
        assert_int_equal(status, PD_OK);
        assert_int_equal(lines, i < 2);
        assert_true(i == 2 || strstr(log, "level=warn") != NULL);
        pd_tokenizer_destroy(tokenizer);
        pd_model_file_close(file);
        pd_free(path);
    }
}

static void what_is_no_file_is_refused(void **state)
{
    (void)state;
    const char *log;
    size_t lines;
    static const char *const paths[] = {"/nonexistent/model.gguf", "/tmp", "/dev/null"};

    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        assert_int_equal(open_quietly(paths[i], false, &log, &lines), PD_E_IO);
        assert_int_equal(lines, 1);
        assert_non_null(strstr(log, paths[i]));
    }
}

static void opening_survives_every_failed_allocation(void **state)
{
    (void)state;
    char *path = bad_file("full_ok.gguf");
    pd_model_file *file = NULL;
    long live = pd_mem_live();

    for (long n = 0; file == NULL; n++) {
        size_t lines;
        start_log();
        pd_mem_fail_at(n);
        pd_status status = pd_model_file_open(path, &file);
        pd_mem_fail_at(-1);
        end_log(&lines);
        assert_int_equal(status, file == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 200);
    }
    pd_model_file_close(file);
    assert_int_equal(pd_mem_live(), live);
    pd_free(path);
}

/* Any byte may be anything: nothing but an error or a model may come of it. */
static void flipped_bytes_never_crash(void **state)
{
    (void)state;
    char *path = bad_file("full_ok.gguf"), *copy = bad_file("flipped.gguf");
    unsigned char bytes[8192];
    FILE *file = fopen(path, "rb");
    uint64_t seed = 20260101;

    assert_non_null(file);
    size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    assert_true(size > 1000 && size < sizeof bytes);
    int fd = open(copy, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    for (int round = 0; round < 3000; round++) {
        static const unsigned char values[] = {0, 1, 0x7f, 0x80, 0xff};
        unsigned char changed[sizeof bytes];
        size_t lines;
        const char *log;
        memcpy(changed, bytes, size);
        int flips = 1 + (int)(pd_random_next(&seed) % 3);
        for (int i = 0; i < flips; i++)
            changed[pd_random_next(&seed) % size] = values[pd_random_next(&seed) % 5];
        assert_int_equal(pwrite(fd, changed, size, 0), (ssize_t)size);
        pd_status status = open_quietly(copy, false, &log, &lines);
        if ((status == PD_OK) != (lines == 0))
            print_error("# round %d: %d, %zu lines: %s\n", round, status, lines, log);
        assert_true(status == PD_OK ? lines == 0 : lines == 1);
    }
    close(fd);
    unlink(copy);
    pd_free(copy);
    pd_free(path);
}

static const char *need_model(void)
{
    const char *path = getenv("KVFERRY_MODEL");
    if (path == NULL || access(path, R_OK) != 0)
        skip();
    return path;
}

static void the_real_model_opens_in_milliseconds(void **state)
{
    (void)state;
    const char *path = need_model();
    pd_model_file *file = NULL, *again = NULL;

    uint64_t start = pd_clock_now_ns();
    assert_int_equal(pd_model_file_open(path, &file), PD_OK);
    uint64_t took = pd_clock_now_ns() - start;
    print_message("# opened in %.1f ms\n", (double)took / 1e6);
    assert_true(took < PD_NS_PER_S);
    const pd_model_shape *shape = pd_model_file_shape(file);
    assert_string_equal(shape->architecture, "llama");
    assert_int_equal(shape->layers, 30);
    assert_int_equal(shape->hidden, 576);
    assert_int_equal(shape->heads, 9);
    assert_int_equal(shape->kv_heads, 3);
    assert_int_equal(shape->head_dim, 64);
    assert_int_equal(shape->ffn, 1536);
    assert_int_equal(shape->vocab, 49152);
    assert_int_equal(shape->context, 8192);
    assert_int_equal(shape->rope_dims, 64);
    assert_true(shape->rope_base == 100000.0);
    assert_true(shape->rms_eps == 1e-5f);
    assert_true(shape->tied_embeddings);
    const pd_tensor *tensor = pd_model_file_tensor(file, "blk.29.attn_k.weight");
    assert_non_null(tensor);
    assert_int_equal(tensor->dtype, PD_Q4_1);
    assert_int_equal(tensor->bytes, 576 / 32 * 20 * 192);
    const pd_text_tables *text = pd_model_file_text(file);
    assert_string_equal(text->model, "gpt2");
    assert_string_equal(text->pre, "smollm");
    assert_int_equal(text->tokens_count, 49152);
    assert_string_equal(text->tokens[2], "<|im_end|>");
    assert_int_equal(text->types[2], 3);
    assert_int_equal(text->merges_count, 48900);
    assert_int_equal(text->bos_id, 1);
    assert_int_equal(text->eos_id, 2);
    assert_int_equal(text->eot_id, -1);
    assert_false(text->add_bos);
    assert_int_equal(pd_model_file_open(path, &again), PD_OK);
    pd_hash128 a = pd_model_file_fingerprint(file), b = pd_model_file_fingerprint(again);
    assert_true(a.lo == b.lo && a.hi == b.hi);
    pd_model_file_close(again);
    pd_model_file_close(file);
}

/* The model cut at places all over it; sparse copies would hide nothing, so the mapping's own
 * bytes are written up to each cut, the largest first. */
static void the_real_model_cut_anywhere_is_refused(void **state)
{
    (void)state;
    const char *path = need_model();
    char *copy = bad_file("cut.gguf");
    struct stat info;
    uint64_t seed = pd_random_id();

    assert_int_equal(stat(path, &info), 0);
    print_message("# seed %llu\n", (unsigned long long)seed);
    int from = open(path, O_RDONLY), to = open(copy, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(from >= 0 && to >= 0);
    off_t cut = info.st_size - 1;
    for (off_t done = 0; done < cut;) {
        ssize_t n = copy_file_range(from, NULL, to, NULL, (size_t)(cut - done), 0);
        assert_true(n > 0);
        done += n;
    }
    for (int i = 0; i < 20 && cut > 0; i++) {
        const char *log;
        size_t lines;
        char size[64];
        assert_int_equal(ftruncate(to, cut), 0);
        assert_int_equal(open_quietly(copy, false, &log, &lines), PD_E_INVALID);
        snprintf(size, sizeof size, "size=%lld needed", (long long)cut);
        if (strstr(log, size) == NULL)
            print_error("# cut at %lld: %s\n", (long long)cut, log);
        assert_non_null(strstr(log, size));
        assert_int_equal(lines, 1);
        /* half of the cuts in the data, half in the header (1.8 MB) */
        off_t below = i == 9 && cut > 1700000 ? 1700000 : cut;
        cut = below - 1 - (off_t)(pd_random_next(&seed) % (uint64_t)(below / 8 + 1));
    }
    close(from);
    close(to);
    unlink(copy);
    pd_free(copy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bad_file_is_refused_with_one_line),
        cmocka_unit_test(a_container_without_a_model_is_taken_as_one),
        cmocka_unit_test(broken_tables_that_load_make_a_tokenizer_with_a_warning),
        cmocka_unit_test(what_is_no_file_is_refused),
        cmocka_unit_test(opening_survives_every_failed_allocation),
        cmocka_unit_test(flipped_bytes_never_crash),
        cmocka_unit_test(the_real_model_opens_in_milliseconds),
        cmocka_unit_test(the_real_model_cut_anywhere_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The tokenizer and the detokenizer against a reference library's ids, and under bad input. */

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/text/detokenizer.h"
#include "common/text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { IDS_MAX = 1 << 22, TEXT_MAX = 1 << 26 };

static pd_model_file *model;
static pd_tokenizer *tokenizer;

static char *path_of(const char *name)
{
    const char *root = getenv("KVFERRY_TESTS");
    return pd_asprintf("%s/%s", root != NULL ? root : "tests", name);
}

static void read_file(const char *name, pd_buf *buf)
{
    char *path = path_of(name);
    FILE *file = fopen(path, "rb");
    char piece[65536];
    size_t n;

    assert_non_null(file);
    pd_buf_init(buf, TEXT_MAX);
    while ((n = fread(piece, 1, sizeof piece, file)) > 0)
        pd_buf_append(buf, piece, n);
    fclose(file);
    pd_free(path);
    assert_int_equal(pd_buf_status(buf), PD_OK);
}

static int open_model(void **state)
{
    (void)state;
    const char *path = getenv("KVFERRY_MODEL");
    if (path == NULL || pd_model_file_open(path, &model) != PD_OK)
        return 0; /* the tests that need it skip */
    return pd_tokenizer_create(pd_model_file_text(model), &tokenizer) == PD_OK ? 0 : -1;
}

static int close_model(void **state)
{
    (void)state;
    pd_tokenizer_destroy(tokenizer);
    pd_model_file_close(model);
    return 0;
}

static void need_model(void)
{
    if (tokenizer == NULL)
        skip();
}

static void ids_equal_the_reference_on_every_string(void **state)
{
    (void)state;
    pd_buf golden;
    pd_json *root = NULL;
    pd_json_error error;

    need_model();
    read_file("golden/tokenizer.json", &golden);
    assert_int_equal(pd_json_parse(pd_buf_text(&golden), golden.len, &root, &error), PD_OK);
    const pd_json *strings = pd_json_get(root, "strings");
    assert_true(pd_json_count(strings) >= 150);
    for (size_t i = 0; i < pd_json_count(strings); i++) {
        const pd_json *entry = pd_json_at(strings, i), *want = pd_json_get(entry, "ids");
        size_t len, decoded_len;
        const char *text = pd_json_string(pd_json_get(entry, "text"), &len);
        const char *decoded = pd_json_string(pd_json_get(entry, "decoded"), &decoded_len);
        pd_token_ids ids = {0};
        assert_int_equal(pd_tokenizer_encode(tokenizer, text, len, true, IDS_MAX, &ids), PD_OK);
        if (ids.count != pd_json_count(want))
            print_error("string %zu: %s\n", i, text);
        assert_int_equal(ids.count, pd_json_count(want));
        for (size_t k = 0; k < ids.count; k++)
            assert_int_equal(ids.ids[k], pd_json_integer(pd_json_at(want, k)));

        pd_detokenizer d;
        pd_buf out;
        pd_detokenizer_init(&d, tokenizer, true);
        pd_buf_init(&out, TEXT_MAX);
        for (size_t k = 0; k < ids.count; k++)
            pd_detokenizer_push(&d, ids.ids[k], &out);
        pd_detokenizer_finish(&d, &out);
        assert_int_equal(out.len, decoded_len);
        assert_memory_equal(pd_buf_text(&out), decoded, decoded_len);
        pd_buf_fini(&out);
        pd_token_ids_fini(&ids);
    }
    pd_json_free(root);
    pd_buf_fini(&golden);
}

static size_t from_hex(const char *hex, char *out)
{
    size_t n = 0;
    for (; hex[2 * n] != '\0'; n++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * n, "%2x", &byte), 1);
        out[n] = (char)byte;
    }
    return n;
}

/* Every prefix of the stream is valid UTF-8 too: nothing is sent early. */
static void pieces_become_text_without_half_characters(void **state)
{
    (void)state;
    pd_buf cases;
    pd_json_error error;
    size_t lines = 0;

    read_file("cases/tok_pieces.jsonl", &cases);
    for (char *line = strtok(cases.bytes, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        pd_json *root = NULL;
        size_t want_len;
        pd_detokenizer d;
        pd_buf out;
        assert_int_equal(pd_json_parse(line, strlen(line), &root, &error), PD_OK);
        const char *want = pd_json_string(pd_json_get(root, "text"), &want_len);
        const pd_json *pieces = pd_json_get(root, "pieces_hex");
        pd_detokenizer_init(&d, NULL, false);
        pd_buf_init(&out, 4096);
        for (size_t i = 0; i < pd_json_count(pieces); i++) {
            char bytes[256];
            size_t len = from_hex(pd_json_string(pd_json_at(pieces, i), NULL), bytes);
            pd_detokenizer_push_bytes(&d, bytes, len, &out);
            assert_true(out.len <= want_len);
            assert_memory_equal(pd_buf_text(&out), want, out.len);
        }
        pd_detokenizer_finish(&d, &out);
        assert_string_equal(pd_buf_text(&out), want);
        pd_detokenizer_finish(&d, &out); /* once */
        assert_int_equal(out.len, want_len);
        pd_buf_fini(&out);
        pd_json_free(root);
        lines++;
    }
    assert_int_equal(lines, 12);
    pd_buf_fini(&cases);
}

static void both_sides_of_a_nul_count(void **state)
{
    (void)state;
    static const char text[] = "first part \0 second part";
    pd_token_ids whole = {0}, half = {0};
    pd_detokenizer d;
    pd_buf out;

    need_model();
    assert_int_equal(pd_tokenizer_encode(tokenizer, text, sizeof text - 1, true, IDS_MAX, &whole),
                     PD_OK);
    assert_int_equal(pd_tokenizer_encode(tokenizer, text, 11, true, IDS_MAX, &half), PD_OK);
    assert_true(whole.count >= half.count + 3);
    pd_detokenizer_init(&d, tokenizer, false);
    pd_buf_init(&out, 4096);
    for (size_t i = 0; i < whole.count; i++)
        pd_detokenizer_push(&d, whole.ids[i], &out);
    assert_int_equal(out.len, sizeof text - 1);
    assert_memory_equal(out.bytes, text, sizeof text - 1);
    pd_buf_fini(&out);
    pd_token_ids_fini(&whole);
    pd_token_ids_fini(&half);
}

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * PD_NS_PER_S + (uint64_t)now.tv_nsec;
}

/* The machine may be busy: processor time, and the best of five. */
static uint64_t encode_ns(const char *text, size_t len)
{
    uint64_t best = UINT64_MAX;

    for (int i = 0; i < 5; i++) {
        pd_token_ids ids = {0};
        uint64_t start = cpu_ns();
        assert_int_equal(pd_tokenizer_encode(tokenizer, text, len, true, IDS_MAX, &ids), PD_OK);
        uint64_t took = cpu_ns() - start;
        assert_true(ids.count > 0);
        pd_token_ids_fini(&ids);
        best = took < best ? took : best;
    }
    return best;
}

/* A quadratic merge shows as a ratio of 64 for 8 times the text. */
static void long_runs_take_time_in_proportion(void **state)
{
    (void)state;
    static const char *const units[] = {
        "a",          "_",     " ",           "\xe4\xb8\xad\xe6\x96\x87", "qzxkvj", "\n",
        "{\"a\":[1,", "<|im_", "\xe2\x80\x83"};
    enum { LONG = 100000 };
    char *text = pd_malloc(LONG);

    need_model();
    for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
        size_t unit = strlen(units[u]), whole = LONG / unit * unit;
        for (size_t at = 0; at < whole; at += unit)
            memcpy(text + at, units[u], unit);
        uint64_t eighth = encode_ns(text, whole / 8 / unit * unit), all = encode_ns(text, whole);
        print_message("# unit %zu: 100,000 bytes: %.1f ms, an eighth: %.1f ms\n", u,
                      (double)all / 1e6, (double)eighth / 1e6);
        assert_true(all < PD_NS_PER_S);
        assert_true(all < 32 * eighth + 2 * PD_NS_PER_MS);
    }
    pd_free(text);
}

static void what_cannot_fit_is_refused_before_the_work(void **state)
{
    (void)state;
    enum { HUGE_BYTES = 10 << 20 };
    char *text = pd_malloc(HUGE_BYTES);
    pd_token_ids ids = {0};

    need_model();
    memset(text, 'a', HUGE_BYTES);
    assert_int_equal(pd_tokenizer_encode(tokenizer, "hi", 2, true, 4096, &ids), PD_OK);
    size_t count = ids.count;
    uint64_t start = pd_clock_now_ns();
    assert_int_equal(pd_tokenizer_encode(tokenizer, text, HUGE_BYTES, true, 4096, &ids),
                     PD_E_TOO_LARGE);
    assert_true(pd_clock_now_ns() - start < PD_NS_PER_S / 10);
    assert_int_equal(ids.count, count); /* as before */
    assert_int_equal(pd_tokenizer_encode(tokenizer, "a b c d", 7, true, count + 3, &ids),
                     PD_E_TOO_LARGE);
    assert_int_equal(ids.count, count);
    assert_int_equal(pd_tokenizer_encode(tokenizer, "a b c", 5, true, count + 3, &ids), PD_OK);
    assert_int_equal(ids.count, count + 3);
    pd_token_ids_fini(&ids);
    pd_free(text);
}

static void text_that_is_no_utf8_is_refused(void **state)
{
    (void)state;
    pd_token_ids ids = {0};

    need_model();
    assert_int_equal(pd_tokenizer_encode(tokenizer, "a\xff", 2, true, 100, &ids), PD_E_INVALID);
    assert_int_equal(pd_tokenizer_encode(tokenizer, "\xe2\x82", 2, true, 100, &ids), PD_E_INVALID);
    assert_int_equal(ids.count, 0);
    pd_token_ids_fini(&ids);
}

static void control_tokens_are_characters_unless_asked_for(void **state)
{
    (void)state;
    static const char text[] = "a<|im_end|>b";
    pd_token_ids with = {0}, without = {0}, ranged = {0};
    uint32_t end = 0;
    size_t len;

    need_model();
    assert_int_equal(pd_tokenizer_find(tokenizer, "<|im_end|>", 10, &end), PD_OK);
    assert_int_equal(pd_tokenizer_find(tokenizer, "<|im_", 5, &end), PD_E_NOT_FOUND);
    assert_int_equal(pd_tokenizer_encode(tokenizer, text, 12, true, 100, &with), PD_OK);
    assert_int_equal(with.count, 3);
    assert_int_equal(with.ids[1], end);
    assert_int_equal(pd_tokenizer_encode(tokenizer, text, 12, false, 100, &without), PD_OK);
    assert_true(without.count > 3);
    for (size_t i = 0; i < without.count; i++)
        assert_false(pd_tokenizer_is_control(tokenizer, without.ids[i]));
    /* one byte of it in a plain range is enough */
    for (size_t at = 0; at < 12; at++) {
        pd_text_range range = {at, at + 1};
        bool touches = at >= 1 && at < 11;
        ranged.count = 0;
        assert_int_equal(pd_tokenizer_encode_ranges(tokenizer, text, 12, &range, 1, 100, &ranged),
                         PD_OK);
        assert_int_equal(ranged.count, touches ? without.count : with.count);
    }
    pd_tokenizer_bytes(tokenizer, end, false, &len);
    assert_int_equal(len, 0);
    assert_memory_equal(pd_tokenizer_bytes(tokenizer, end, true, &len), "<|im_end|>", 10);
    assert_int_equal(len, 10);
    assert_true(pd_tokenizer_is_end(tokenizer, end));
    assert_int_equal(pd_tokenizer_added_bos(tokenizer), -1);
    pd_token_ids_fini(&with);
    pd_token_ids_fini(&without);
    pd_token_ids_fini(&ranged);
}

/* A small vocabulary of our own: the letters, two merges, and what a broken file may hold. */
static const char *small_tokens[] = {"a", "b", "ab", "abab", "<x>", "<x><y>", "ab", "1", "<u>"};
static const uint32_t small_lens[] = {1, 1, 2, 4, 3, 6, 2, 1, 3};
static const int32_t small_types[] = {1, 1, 1, 1, 3, 3, 1, 1, 4};
static const char *small_merges[] = {"a b", "b b", "ab ab", "a b"};
static const uint32_t small_merge_lens[] = {3, 3, 5, 3};

static pd_text_tables small_tables(void)
{
    return (pd_text_tables){.model = "gpt2",
                            .pre = "gpt-2",
                            .tokens_count = 9,
                            .tokens = small_tokens,
                            .tokens_len = small_lens,
                            .types = small_types,
                            .merges_count = 4,
                            .merges = small_merges,
                            .merges_len = small_merge_lens,
                            .bos_id = 4,
                            .eos_id = 5,
                            .eot_id = -1,
                            .unk_id = -1,
                            .pad_id = -1,
                            .add_bos = true};
}

static void repeated_tokens_and_unknown_merges_leave_the_first(void **state)
{
    (void)state;
    pd_text_tables tables = small_tables();
    pd_tokenizer *small = NULL;
    pd_token_ids ids = {0};
    static const char text[] = "ababbab<x><y><x><u>";
    static const uint32_t want[] = {3, 1, 2, 5, 4, 8};

    assert_int_equal(pd_tokenizer_create(&tables, &small), PD_OK);
    assert_int_equal(pd_tokenizer_encode(small, text, sizeof text - 1, true, 100, &ids), PD_OK);
    assert_int_equal(ids.count, 6);
    assert_memory_equal(ids.ids, want, sizeof want);
    assert_int_equal(pd_tokenizer_added_bos(small), 4);
    pd_token_ids_fini(&ids);
    pd_tokenizer_destroy(small);
}

static void what_is_not_here_is_named_and_refused(void **state)
{
    (void)state;
    pd_text_tables tables = small_tables();
    pd_tokenizer *small = NULL;

    tables.pre = "of another kind";
    assert_int_equal(pd_tokenizer_create(&tables, &small), PD_E_UNSUPPORTED);
    tables = small_tables();
    tables.model = "llama";
    assert_int_equal(pd_tokenizer_create(&tables, &small), PD_E_UNSUPPORTED);
    assert_null(small);
}

static void create_and_encode_survive_every_failed_allocation(void **state)
{
    (void)state;
    pd_text_tables tables = small_tables();
    pd_tokenizer *small = NULL;
    pd_token_ids ids = {0};
    long live = pd_mem_live();

    for (long n = 0; small == NULL; n++) {
        pd_mem_fail_at(n);
        pd_status status = pd_tokenizer_create(&tables, &small);
        pd_mem_fail_at(-1);
        assert_int_equal(status, small == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 200);
    }
    pd_status status = PD_E_NOMEM;
    for (long n = 0; status != PD_OK; n++) {
        pd_mem_fail_at(n);
        status = pd_tokenizer_encode(small, "abab<x>ab", 9, true, 100, &ids);
        pd_mem_fail_at(-1);
        assert_true(status == PD_OK || (status == PD_E_NOMEM && ids.count == 0));
        assert_true(n < 200);
    }
    assert_int_equal(ids.count, 3);
    pd_token_ids_fini(&ids);
    pd_tokenizer_destroy(small);
    assert_int_equal(pd_mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_equal_the_reference_on_every_string),
        cmocka_unit_test(pieces_become_text_without_half_characters),
        cmocka_unit_test(both_sides_of_a_nul_count),
        cmocka_unit_test(long_runs_take_time_in_proportion),
        cmocka_unit_test(what_cannot_fit_is_refused_before_the_work),
        cmocka_unit_test(text_that_is_no_utf8_is_refused),
        cmocka_unit_test(control_tokens_are_characters_unless_asked_for),
        cmocka_unit_test(repeated_tokens_and_unknown_merges_leave_the_first),
        cmocka_unit_test(what_is_not_here_is_named_and_refused),
        cmocka_unit_test(create_and_encode_survive_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}

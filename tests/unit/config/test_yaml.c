/* The tree and its places; limits; what is refused. */

#include "common/base/buf.h"
#include "common/config/yaml.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void note(void *ctx, uint32_t line, uint32_t column, const char *message)
{
    pd_buf_printf(ctx, "%u:%u: %s\n", line, column, message);
}

/* Parses, hands out what was told (owned by the caller's buffer). */
static pd_status parse(const char *text, size_t len, pd_arena **arena_out, pd_yaml_node **root_out,
                       pd_buf *told)
{
    assert_int_equal(pd_arena_create(16u << 20, arena_out), PD_OK);
    pd_buf_init(told, 1u << 20);
    return pd_yaml_parse(text, len, *arena_out, note, told, root_out);
}

static void refused(const char *text, const char *expected)
{
    pd_arena *arena;
    pd_yaml_node *root;
    pd_buf told;

    assert_int_equal(parse(text, strlen(text), &arena, &root, &told), PD_E_INVALID);
    if (strstr(pd_buf_text(&told), expected) == NULL)
        fail_msg("told: %s expected: %s", pd_buf_text(&told), expected);
    pd_buf_fini(&told);
    pd_arena_destroy(arena);
}

static void keeps_text_and_place(void **state)
{
    (void)state;
    static const char text[] = "a: no\n"
                               "b:\n"
                               "  - 0123\n"
                               "  - \"~\"\n"
                               "  - ~\n"
                               "'c d': {e: 22:22}\n";
    pd_arena *arena;
    pd_yaml_node *root;
    pd_buf told;

    assert_int_equal(parse(text, strlen(text), &arena, &root, &told), PD_OK);
    const pd_yaml_node *a = pd_yaml_get(root, "a"), *b = pd_yaml_get(root, "b");
    const pd_yaml_node *e = pd_yaml_get(pd_yaml_get(root, "c d"), "e");
    assert_string_equal(a->text, "no");
    assert_int_equal(a->line, 1);
    assert_int_equal(a->column, 4);
    assert_int_equal(b->count, 3);
    assert_string_equal(b->first->text, "0123");
    assert_int_equal(b->first->next->kind, PD_YAML_SCALAR);
    assert_string_equal(b->first->next->text, "~");
    assert_int_equal(b->last->kind, PD_YAML_NULL);
    assert_string_equal(e->text, "22:22");
    assert_int_equal(e->key_line, 6);
    assert_int_equal(e->key_column, 9);
    assert_null(pd_yaml_get(root, "f"));
    pd_buf_fini(&told);
    pd_arena_destroy(arena);
}

static void repeated_keys_name_both_lines(void **state)
{
    (void)state;
    refused("a: 1\nb: 2\n\"a\": 3\n", "3:1: the key 'a' comes twice: lines 1 and 3");
    refused("x:\n  a: 1\n  a: 2\n", "3:3: the key 'a' comes twice: lines 2 and 3");
    refused("x: {a: 1, a: 2}\ny: {b: 1, b: 2}\n", "'b' comes twice"); /* goes on after the first */
}

static void an_alias_is_a_copy(void **state)
{
    (void)state;
    static const char text[] = "a: &x {k: 1, l: [2, 3]}\nb: *x\nc: &x 7\nd: *x\n";
    pd_arena *arena;
    pd_yaml_node *root;
    pd_buf told;

    assert_int_equal(parse(text, strlen(text), &arena, &root, &told), PD_OK);
    const pd_yaml_node *l = pd_yaml_get(pd_yaml_get(root, "b"), "l");
    assert_int_equal(l->count, 2);
    assert_string_equal(l->last->text, "3");
    assert_string_equal(pd_yaml_get(root, "d")->text, "7"); /* the latest anchor of a name */
    pd_buf_fini(&told);
    pd_arena_destroy(arena);
    refused("a: *x\n", "no anchor '&x' before it");
    refused("a: &x [*x]\n", "inside its own anchor");
    refused("a: &x {b: *x}\n", "inside its own anchor");
}

static void what_is_not_needed_is_refused(void **state)
{
    (void)state;
    refused("a: &p {b: 1}\nc:\n  <<: *p\n", "3:3: the merge key '<<' is not supported");
    refused("a: 1\n---\nb: 2\n", "2:1: a second document");
    refused("a: !!int 3\n", "1:4: the tag");
    refused("? [a, b]\n: 1\n", "a key must be a plain word");
    refused("a: \"x\\0y\"\n", "a NUL character in a value");
    refused("\"a\\0b\": 1\n", "a NUL character in a key");
    refused("a: [1, 2\n", "not valid YAML");
    refused("a: 1\n\tb: 2\n", "2:1: not valid YAML");
    refused("a: \xff\xfe\n", "not readable as YAML text");
}

/* Each level doubles: ten levels of ten would be 10^10 nodes. */
static void a_bomb_stays_small(void **state)
{
    (void)state;
    pd_buf bomb;

    pd_buf_init(&bomb, 65536);
    pd_buf_puts(&bomb, "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for (int i = 1; i < 10; i++) {
        pd_buf_printf(&bomb, "a%d: &a%d [", i, i);
        for (int j = 0; j < 10; j++)
            pd_buf_printf(&bomb, "%s*a%d", j == 0 ? "" : ", ", i - 1);
        pd_buf_puts(&bomb, "]\n");
    }
    refused(pd_buf_text(&bomb), "more than 8192 values");
    pd_buf_fini(&bomb);
}

static void depth_count_and_size_have_limits(void **state)
{
    (void)state;
    static char text[PD_YAML_BYTES_MAX + 16];
    pd_arena *arena;
    pd_yaml_node *root;
    pd_buf told;

    memset(text, '[', 100000);
    text[100000] = '\0';
    refused(text, "nested deeper than 16");
    memset(text, '\0', sizeof text);
    for (int i = 0; i < 1025; i++)
        memcpy(text + (size_t)i * 4, "- a\n", 4);
    refused(text, "more than 1024 items");
    memset(text, '#', PD_YAML_BYTES_MAX + 1);
    assert_int_equal(parse(text, PD_YAML_BYTES_MAX + 1, &arena, &root, &told), PD_E_INVALID);
    assert_non_null(strstr(pd_buf_text(&told), "at most 1048576"));
    pd_buf_fini(&told);
    pd_arena_destroy(arena);
}

static void shown_text_has_no_control_characters(void **state)
{
    (void)state;
    char out[72];

    pd_yaml_show("a\nb\x1b", out);
    assert_string_equal(out, "a?b?");
    pd_yaml_show("0123456789012345678901234567890123456789012345678901234567\xc3\xa9\xc3\xa9", out);
    assert_string_equal(out,
                        "0123456789012345678901234567890123456789012345678901234567\xc3\xa9...");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_text_and_place),
        cmocka_unit_test(repeated_keys_name_both_lines),
        cmocka_unit_test(an_alias_is_a_copy),
        cmocka_unit_test(what_is_not_needed_is_refused),
        cmocka_unit_test(a_bomb_stays_small),
        cmocka_unit_test(depth_count_and_size_have_limits),
        cmocka_unit_test(shown_text_has_no_control_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* OpenAI bodies: tests/cases/api_validation.tsv, and what is refused by name. */

#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "router/api.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const api_limits LIMITS = {.model = "M", .vocab = 1000, .context_max = 100, .stops_max = 16};

static int parse(api_endpoint endpoint, const char *body, size_t len, char *param, size_t size)
{
    api_request *request = NULL;
    api_error error = {0};
    pd_status status = api_parse(endpoint, body, len, &LIMITS, &request, &error);
    snprintf(param, size, "%s", error.param);
    if (status == PD_OK) {
        api_request_destroy(request);
        return 200;
    }
    assert_null(request);
    assert_true(error.message[0] != '\0');
    pd_buf text;
    pd_json *root = NULL;
    pd_json_error cause;
    pd_buf_init(&text, 1 << 16);
    api_error_write(&error, &text); /* whatever came in, the answer is JSON of OpenAI's shape */
    assert_int_equal(pd_json_parse(pd_buf_text(&text), text.len, &root, &cause), PD_OK);
    const pd_json *inner = pd_json_get(root, "error");
    assert_int_equal(pd_json_count(inner), 4);
    size_t type_len;
    assert_string_equal(pd_json_string(pd_json_get(inner, "type"), &type_len),
                        "invalid_request_error");
    pd_json_free(root);
    pd_buf_fini(&text);
    return error.http_status;
}

static void replace(char *body, size_t size, const char *from, const char *to)
{
    char *at = strstr(body, from);
    if (at == NULL)
        return;
    size_t tail = strlen(at + strlen(from));
    assert_true((size_t)(at - body) + strlen(to) + tail < size);
    memmove(at + strlen(to), at + strlen(from), tail + 1);
    memcpy(at, to, strlen(to));
}

static void every_line_of_the_validation_table_holds(void **state)
{
    (void)state;
    const char *root = getenv("KVFERRY_TESTS");
    char *path = pd_asprintf("%s/cases/api_validation.tsv", root != NULL ? root : "tests");
    FILE *file = fopen(path, "r");
    char line[4096], body[4096], param[64];
    int lines = 0;

    pd_free(path);
    assert_non_null(file);
    while (fgets(line, sizeof line, file) != NULL) {
        if (line[0] == '#')
            continue;
        line[strcspn(line, "\n")] = '\0';
        char *fields[4] = {line, "", "", ""};
        for (int i = 1; i < 4; i++) {
            char *tab = strchr(fields[i - 1], '\t');
            assert_non_null(tab);
            *tab = '\0';
            fields[i] = tab + 1;
        }
        snprintf(body, sizeof body, "%s", fields[3]);
        replace(body, sizeof body, "[V]", "[1000]");
        api_endpoint endpoint = strstr(fields[2], "chat") != NULL ? API_CHAT : API_COMPLETIONS;
        int status = parse(endpoint, body, strlen(body), param, sizeof param);
        if (status != (int)strtol(fields[0], NULL, 10) ||
            (fields[1][0] != '-' && status != 200 && strcmp(param, fields[1]) != 0))
            fail_msg("%s: %d, param '%s', expected %s, '%s'", body, status, param, fields[0],
                     fields[1]);
        lines++;
    }
    fclose(file);
    assert_true(lines >= 35);
}

static void half_an_emoji_is_refused_and_whole_ones_are_equal(void **state)
{
    (void)state;
    const char *root = getenv("KVFERRY_TESTS");
    char *path = pd_asprintf("%s/cases/tok_surrogates.tsv", root != NULL ? root : "tests");
    FILE *file = fopen(path, "r");
    char line[4096], param[64];
    int lines = 0;
    pd_free(path);
    assert_non_null(file);
    while (fgets(line, sizeof line, file) != NULL) {
        if (line[0] == '#')
            continue;
        line[strcspn(line, "\n")] = '\0';
        char *body = strchr(line, '\t') + 1;
        int status = parse(API_COMPLETIONS, body, strlen(body), param, sizeof param);
        if (status != strtol(line, NULL, 10))
            fail_msg("%s: %d", body, status);
        lines++;
    }
    fclose(file);
    assert_true(lines >= 9);
}

static void names(api_endpoint endpoint, const char *extra, int expected, const char *param)
{
    char body[1024], got[64];
    snprintf(body, sizeof body, "{\"model\":\"M\",%s%s%s}",
             endpoint == API_CHAT ? "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"
                                  : "\"prompt\":\"a\"",
             extra[0] == '\0' ? "" : ",", extra);
    int status = parse(endpoint, body, strlen(body), got, sizeof got);
    if (status != expected || (param != NULL && strcmp(param, got) != 0))
        fail_msg("%s: %d, param '%s'", body, status, got);
}

static void what_would_change_the_answer_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const REFUSED[][2] = {
        {"\"tools\":[{\"type\":\"function\"}]", "tools"},
        {"\"response_format\":{\"type\":\"json_object\"}", "response_format"},
        {"\"response_format\":\"json\"", "response_format"},
        {"\"logit_bias\":{\"5\":1}", "logit_bias"},
        {"\"presence_penalty\":0.5", "presence_penalty"},
        {"\"frequency_penalty\":\"high\"", "frequency_penalty"},
        {"\"repetition_penalty\":1.1", "repetition_penalty"},
        {"\"min_p\":0.1", "min_p"},
        {"\"logprobs\":true", "logprobs"},
        {"\"logprobs\":true,\"top_logprobs\":2", "logprobs"},
        {"\"tool_choice\":\"required\"", "tool_choice"},
        {"\"modalities\":[\"audio\"]", "modalities"},
        {"\"stop\":[5]", "stop"},
        {"\"seed\":1.5", "seed"},
        {"\"stream\":1", "stream"},
        {"\"top_k\":-2", "top_k"},
        {"\"priority\":\"high\"", "priority"},
        {"\"priority\":2147483648", "priority"},
        {"\"stream_options\":{\"include_usage\":true}", "stream_options"},
        {"\"stream\":true,\"stream_options\":{\"include_usage\":\"yes\"}",
         "stream_options.include_usage"},
        {"\"max_completion_tokens\":0", "max_completion_tokens"},
    };
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++)
        names(API_CHAT, REFUSED[i][0], 400, REFUSED[i][1]);
    names(API_COMPLETIONS, "\"max_completion_tokens\":0", 400, "max_completion_tokens");
    names(API_COMPLETIONS, "\"echo\":true", 400, "echo");
    names(API_COMPLETIONS, "\"suffix\":\"x\"", 400, "suffix");
    names(API_COMPLETIONS, "\"best_of\":3", 400, "best_of");
    names(API_COMPLETIONS, "\"logprobs\":1", 400, "logprobs");
}

static void what_changes_nothing_is_ignored(void **state)
{
    (void)state;
    static const char *const TAKEN[] = {
        "",
        "\"user\":\"u\",\"metadata\":{\"a\":\"b\"},\"store\":true,\"service_tier\":\"auto\"",
        "\"presence_penalty\":0,\"frequency_penalty\":0.0,\"repetition_penalty\":1.0,\"min_p\":0",
        "\"logit_bias\":{},\"tools\":[],\"logprobs\":false,\"top_logprobs\":0,\"n\":1",
        "\"response_format\":{\"type\":\"text\"}",
        "\"modalities\":[\"text\"],\"tool_choice\":\"auto\"",
        "\"stream\":true,\"stream_options\":null",
        "\"stream\":true,\"stream_options\":{}",
        "\"temperature\":null,\"top_p\":null,\"seed\":null,\"stop\":null,\"max_tokens\":null",
        "\"nobody_knows_this\":[1,2,3],\"seed\":-5,\"stop\":[]",
        "\"documents\":[],\"logits_processors\":null,\"truncate_prompt_tokens\":null",
    };
    for (size_t i = 0; i < sizeof TAKEN / sizeof TAKEN[0]; i++)
        names(API_CHAT, TAKEN[i], 200, NULL);
}

static void parts_and_the_developer_role_become_what_templates_know(void **state)
{
    (void)state;
    static const char BODY[] =
        "{\"model\":\"M\",\"messages\":[{\"role\":\"developer\",\"content\":\"be\\u0000brief\"},"
        "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
        "{\"type\":\"text\",\"text\":\"b\"}]}]}";
    api_request *request;
    api_error error;
    pd_buf text;
    assert_int_equal(api_parse(API_CHAT, BODY, sizeof BODY - 1, &LIMITS, &request, &error), PD_OK);
    pd_buf_init(&text, 4096);
    pd_json_dump(request->messages, &text);
    assert_string_equal(pd_buf_text(&text), "[{\"role\":\"system\",\"content\":\"be\\u0000brief\"},"
                                            "{\"role\":\"user\",\"content\":\"a\\nb\"}]");
    pd_buf_fini(&text);
    api_request_destroy(request);
}

static void what_else_a_message_holds_stays(void **state)
{
    (void)state;
    static const char BODY[] =
        "{\"model\":\"M\",\"messages\":[{\"name\":\"b\\\"o\",\"role\":\"user\",\"content\":["
        "{\"type\":\"text\",\"text\":\"a\"}]},{"
        "\"role\":\"assistant\",\"content\":"
        "\"x\","
        "\"tool_calls\":[],\"refusal\":null},{"
        "\"role\":\"tool\",\"tool_call_id\":"
        "\"t1\","
        "\"content\":\"y\"}]}";
    api_request *request;
    api_error error;
    pd_buf text;
    assert_int_equal(api_parse(API_CHAT, BODY, sizeof BODY - 1, &LIMITS, &request, &error), PD_OK);
    pd_buf_init(&text, 4096);
    pd_json_dump(request->messages, &text);
    assert_string_equal(pd_buf_text(&text), "[{\"role\":\"user\",\"content\":\"a\",\"name\":"
                                            "\"b\\\"o\"},"
                                            "{\"role\":\"assistant\",\"content\":\"x\","
                                            "\"tool_calls\":[],"
                                            "\"refusal\":null},{\"role\":\"tool\","
                                            "\"content\":\"y\","
                                            "\"tool_call_id\":\"t1\"}]");
    pd_buf_fini(&text);
    api_request_destroy(request);
}

/* The parameter named is written to the log: a key that is no name could be anything. */
static void a_field_is_blamed_by_its_name_or_not_at_all(void **state)
{
    (void)state;
    char param[64];
    static const char NAME[] = "{\"model\":\"M\",\"temperature\":1e999,\"prompt\":\"a\"}";
    static const char TEXT[] = "{\"model\":\"M\",\"my secret prompt\":1e999,\"prompt\":\"a\"}";
    assert_int_equal(parse(API_COMPLETIONS, NAME, sizeof NAME - 1, param, sizeof param), 400);
    assert_string_equal(param, "temperature");
    assert_int_equal(parse(API_COMPLETIONS, TEXT, sizeof TEXT - 1, param, sizeof param), 400);
    assert_string_equal(param, "");
}

static void counting_goes_beyond_the_context_but_not_without_end(void **state)
{
    (void)state;
    char param[64];
    pd_buf body;
    pd_buf_init(&body, 1 << 16);
    for (uint32_t more = 0; more < 2; more++) {
        pd_buf_clear(&body);
        pd_buf_puts(&body, "{\"tokens\":[0");
        for (uint32_t i = 1; i < LIMITS.context_max * 4 + more; i++)
            pd_buf_printf(&body, ",%u", i % 10);
        pd_buf_puts(&body, "]}");
        assert_int_equal(parse(API_DETOKENIZE, pd_buf_text(&body), body.len, param, sizeof param),
                         more > 0 ? 400 : 200);
        assert_string_equal(param, more > 0 ? "tokens" : "");
    }
    pd_buf_fini(&body);
    const api_limits huge = {.context_max = 1u << 20};
    assert_true(api_count_max(&huge) > huge.context_max);
}

static void a_model_name_is_compared_to_its_end(void **state)
{
    (void)state;
    char param[64];
    static const char NUL[] = "{\"model\":\"M\\u0000x\",\"prompt\":\"a\"}";
    assert_int_equal(parse(API_COMPLETIONS, NUL, sizeof NUL - 1, param, sizeof param), 404);
    assert_string_equal(param, "model");
}

static void bombs_are_refused_fast(void **state)
{
    (void)state;
    static const size_t DEPTHS[] = {65, 1000, 10000, 1000000};
    char param[64];
    for (size_t d = 0; d < 4; d++) {
        for (int shape = 0; shape < 3; shape++) {
            size_t n = DEPTHS[d];
            size_t size = n * 8 + 200;
            char *body = malloc(size);
            assert_non_null(body);
            size_t len = (size_t)snprintf(body, size, "{\"model\":\"M\",\"prompt\":\"a\",\"x\":");
            const char *opens = shape == 1 ? "{\"a\":" : "[";
            for (size_t i = 0; i < n; i++) {
                memcpy(body + len, opens, strlen(opens));
                len += strlen(opens);
            }
            body[len++] = '0';
            for (size_t i = 0; i < n && shape != 2; i++)
                body[len++] = shape == 1 ? '}' : ']';
            body[len++] = '}';
            uint64_t begin_ns = pd_clock_now_ns();
            assert_int_equal(parse(API_COMPLETIONS, body, len, param, sizeof param), 400);
            assert_true(pd_clock_now_ns() - begin_ns < 500 * PD_NS_PER_MS);
            free(body);
        }
    }
}

static void every_failed_allocation_is_survived(void **state)
{
    (void)state;
    static const char BODY[] = "{\"model\":\"M\",\"prompt\":[[1,2],[3]],\"stop\":[\"a\",\"b\"]}";
    api_request *request = NULL;
    long live = pd_mem_live();
    for (long n = 0; request == NULL; n++) {
        api_error error;
        pd_mem_fail_at(n);
        pd_status status =
            api_parse(API_COMPLETIONS, BODY, sizeof BODY - 1, &LIMITS, &request, &error);
        pd_mem_fail_at(-1);
        if (request == NULL)
            assert_int_not_equal(status, PD_OK);
        assert_true(n < 1000);
    }
    api_request_destroy(request);
    assert_int_equal(pd_mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_line_of_the_validation_table_holds),
        cmocka_unit_test(half_an_emoji_is_refused_and_whole_ones_are_equal),
        cmocka_unit_test(what_would_change_the_answer_is_refused_by_name),
        cmocka_unit_test(what_changes_nothing_is_ignored),
        cmocka_unit_test(parts_and_the_developer_role_become_what_templates_know),
        cmocka_unit_test(what_else_a_message_holds_stays),
        cmocka_unit_test(a_field_is_blamed_by_its_name_or_not_at_all),
        cmocka_unit_test(counting_goes_beyond_the_context_but_not_without_end),
        cmocka_unit_test(a_model_name_is_compared_to_its_end),
        cmocka_unit_test(bombs_are_refused_fast),
        cmocka_unit_test(every_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

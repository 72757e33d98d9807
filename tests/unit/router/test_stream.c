/* Stop strings and text over random token borders. Needs the model's tokenizer: skips without. */

#include "common/base/mem.h"
#include "common/text/tokenizer.h"
#include "router/stream.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static pd_model_file *model;
static pd_tokenizer *tokenizer;

static int open_model(void **state)
{
    (void)state;
    const char *path = getenv("KVFERRY_MODEL");
    if (path == NULL || pd_model_file_open(path, &model) != PD_OK)
        return 0;
    return pd_tokenizer_create(pd_model_file_text(model), &tokenizer) == PD_OK ? 0 : -1;
}

static int close_model(void **state)
{
    (void)state;
    pd_tokenizer_destroy(tokenizer);
    pd_model_file_close(model);
    return 0;
}

static const char TEXT[] =
    "One, two, three. Zw\xc3\xb6lf Boxk\xc3\xa4mpfer \xf0\x9f\x99\x82 jagen; "
    "aaaaab aaaaaab, thirty-one. The end of it all";

/* The text cut at random places, each piece tokenized alone: many different token borders. Pieces
 * are whole characters, since text that goes in is UTF-8; tokens need not be. */
static void split(uint64_t *random, pd_token_ids *ids)
{
    size_t len = sizeof TEXT - 1;
    for (size_t at = 0; at < len;) {
        size_t piece = 1 + pd_random_next(random) % 9;
        if (at + piece > len)
            piece = len - at;
        while (at + piece < len && ((unsigned char)TEXT[at + piece] & 0xc0) == 0x80)
            piece++;
        assert_int_equal(pd_tokenizer_encode(tokenizer, TEXT + at, piece, false, 1 << 20, ids),
                         PD_OK);
        at += piece;
    }
}

static void check(uint64_t *random, const api_text *stops, uint32_t count)
{
    pd_token_ids ids = {0};
    pd_buf shown;
    stream_text text;
    size_t expected = sizeof TEXT - 1;
    const char *whole = TEXT;
    for (uint32_t i = 0; i < count; i++) {
        const char *hit = memmem(TEXT, sizeof TEXT - 1, stops[i].bytes, stops[i].len);
        if (hit != NULL && (size_t)(hit - TEXT) < expected)
            expected = (size_t)(hit - TEXT);
    }
    split(random, &ids);
    pd_buf_init(&shown, 1 << 16);
    stream_text_init(&text, tokenizer, stops, count, false);
    for (size_t i = 0; i < ids.count && !text.stopped; i++) {
        assert_int_equal(stream_text_push(&text, ids.ids[i], &shown), PD_OK);
        assert_true(shown.len <= expected); /* no part of a stop string was ever shown */
        assert_memory_equal(pd_buf_text(&shown), whole, shown.len);
    }
    assert_int_equal(text.stopped, expected < sizeof TEXT - 1);
    assert_int_equal(stream_text_finish(&text, &shown), PD_OK);
    assert_int_equal(shown.len, expected);
    assert_memory_equal(pd_buf_text(&shown), whole, expected);
    stream_text_fini(&text);
    pd_buf_fini(&shown);
    pd_token_ids_fini(&ids);
}

static void a_stop_string_never_shows_wherever_token_borders_lie(void **state)
{
    (void)state;
    if (tokenizer == NULL)
        skip();
    uint64_t random = 11;
    for (int round = 0; round < 3000; round++) {
        size_t len = 1 + pd_random_next(&random) % 12;
        size_t at = pd_random_next(&random) % (sizeof TEXT - 1 - len);
        /* A piece of the text, of which a beginning may stand earlier; now and then one absent. */
        char copy[16];
        memcpy(copy, TEXT + at, len);
        if (round % 7 == 0)
            copy[len - 1] = '#';
        const api_text stop = {copy, len};
        check(&random, &stop, 1);
    }
}

static void without_stops_the_text_is_whole(void **state)
{
    (void)state;
    if (tokenizer == NULL)
        skip();
    uint64_t random = 12;
    for (int round = 0; round < 200; round++)
        check(&random, NULL, 0);
    const api_text never[] = {{"aaaaaaab", 8}, {"\n\n", 2}};
    for (int round = 0; round < 200; round++)
        check(&random, never, 2);
}

static void what_was_held_back_comes_at_the_end(void **state)
{
    (void)state;
    if (tokenizer == NULL)
        skip();
    pd_token_ids ids = {0};
    pd_buf shown;
    stream_text text;
    const api_text stop = {"all folks", 9};
    pd_buf_init(&shown, 4096);
    stream_text_init(&text, tokenizer, &stop, 1, false);
    assert_int_equal(pd_tokenizer_encode(tokenizer, "that is all", 11, false, 100, &ids), PD_OK);
    for (size_t i = 0; i < ids.count; i++)
        assert_int_equal(stream_text_push(&text, ids.ids[i], &shown), PD_OK);
    assert_string_equal(pd_buf_text(&shown), "that is ");
    assert_int_equal(stream_text_finish(&text, &shown), PD_OK);
    assert_string_equal(pd_buf_text(&shown), "that is all");
    stream_text_fini(&text);
    pd_buf_fini(&shown);
    pd_token_ids_fini(&ids);
}

static void chunks_are_json_of_openais_shape(void **state)
{
    (void)state;
    pd_buf out;
    const stream_head head = {API_CHAT, "chatcmpl-1", "m", 5, true};
    stream_part part = {.text = {"", 0}, .first = true};
    const stream_usage usage = {3, 4, 2};
    pd_buf_init(&out, 1 << 16);
    stream_write_chunk(&head, &part, &out);
    part = (stream_part){.text = {"a\"b\n", 4}};
    stream_write_chunk(&head, &part, &out);
    part = (stream_part){.text = {"", 0}, .finish = "stop"};
    stream_write_chunk(&head, &part, &out);
    stream_write_usage(&head, &usage, &out);
    stream_write_done(&out);
#define HEAD                                                                                       \
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":5,"             \
    "\"model\":\"m\",\"choices\":["
    assert_string_equal(
        pd_buf_text(&out),
        HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
             "\"finish_reason\":null}],\"usage\":null}\n\n" HEAD
             "{\"index\":0,\"delta\":{\"content\":\"a\\\"b\\n\"},\"logprobs\":null,"
             "\"finish_reason\":null}],\"usage\":null}\n\n" HEAD
             "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
             "\"usage\":null}\n\n" HEAD
             "],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7,"
             "\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\ndata: [DONE]\n\n");
    pd_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_string_never_shows_wherever_token_borders_lie),
        cmocka_unit_test(without_stops_the_text_is_whole),
        cmocka_unit_test(what_was_held_back_comes_at_the_end),
        cmocka_unit_test(chunks_are_json_of_openais_shape),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}

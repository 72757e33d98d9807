#include "router/stream.h"

#include <inttypes.h>
#include <string.h>

/* A held beginning is shorter than a stop string; beside it the text of one token. */
enum { HELD_MAX = 1 << 20 };

void stream_text_init(stream_text *text, const pd_tokenizer *tokenizer, const api_text *stops,
                      uint32_t stops_count, bool special)
{
    *text = (stream_text){.stops = stops, .stops_count = stops_count};
    pd_detokenizer_init(&text->detokenizer, tokenizer, special);
    pd_buf_init(&text->held, HELD_MAX);
}

void stream_text_fini(stream_text *text)
{
    pd_buf_fini(&text->held);
}

/* Where the first complete stop string begins; len when there is none. */
static size_t find_stop(const stream_text *text, const char *bytes, size_t len)
{
    size_t first = len;
    for (uint32_t i = 0; i < text->stops_count; i++) {
        const char *hit = memmem(bytes, len, text->stops[i].bytes, text->stops[i].len);
        if (hit != NULL && (size_t)(hit - bytes) < first)
            first = (size_t)(hit - bytes);
    }
    return first;
}

/* Bytes that cannot be part of a stop string any more, whatever follows. */
static size_t safe_len(const stream_text *text, const char *bytes, size_t len)
{
    size_t safe = len;
    for (uint32_t i = 0; i < text->stops_count; i++) {
        const api_text *stop = &text->stops[i];
        size_t tail = stop->len - 1 < len ? stop->len - 1 : len;
        for (; tail > 0; tail--) { /* the longest end that begins the stop string */
            if (memcmp(bytes + len - tail, stop->bytes, tail) == 0)
                break;
        }
        if (len - tail < safe)
            safe = len - tail;
    }
    return safe;
}

static pd_status show(stream_text *text, bool all, pd_buf *shown)
{
    const char *bytes = pd_buf_text(&text->held);
    size_t len = text->held.len;
    pd_status status = pd_buf_status(&text->held);
    if (status != PD_OK)
        return status;
    size_t stop = find_stop(text, bytes, len);
    if (stop < len) {
        pd_buf_append(shown, bytes, stop);
        pd_buf_clear(&text->held);
        text->stopped = true;
        return pd_buf_status(shown);
    }
    size_t safe = all ? len : safe_len(text, bytes, len);
    pd_buf_append(shown, bytes, safe);
    pd_buf_consume(&text->held, safe);
    return pd_buf_status(shown);
}

pd_status stream_text_push(stream_text *text, uint32_t token, pd_buf *shown)
{
    if (text->stopped)
        return PD_OK;
    if (text->stops_count == 0) { /* nothing to wait for */
        pd_detokenizer_push(&text->detokenizer, token, shown);
        return pd_buf_status(shown);
    }
    pd_detokenizer_push(&text->detokenizer, token, &text->held);
    return show(text, false, shown);
}

pd_status stream_text_finish(stream_text *text, pd_buf *shown)
{
    if (text->stopped)
        return PD_OK;
    pd_detokenizer_finish(&text->detokenizer, &text->held);
    return show(text, true, shown);
}

/* ---- bodies ---- */

static void write_head(const stream_head *head, bool chunk, pd_buf *out)
{
    const char *object = head->endpoint == API_COMPLETIONS ? "text_completion"
                         : chunk                           ? "chat.completion.chunk"
                                                           : "chat.completion";
    pd_buf_puts(out, "{\"id\":");
    pd_json_write_string(out, head->id, strlen(head->id));
    pd_buf_printf(out, ",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":", object,
                  head->created);
    pd_json_write_string(out, head->model, strlen(head->model));
}

static void write_ids(const char *key, const uint32_t *ids, uint32_t count, pd_buf *out)
{
    pd_buf_printf(out, ",\"%s\":[", key);
    for (uint32_t i = 0; i < count; i++)
        pd_buf_printf(out, "%s%u", i > 0 ? "," : "", ids[i]);
    pd_buf_puts(out, "]");
}

static void write_usage(const stream_usage *usage, pd_buf *out)
{
    pd_buf_printf(out,
                  ",\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u,"
                  "\"prompt_tokens_details\":{\"cached_tokens\":%u}}",
                  usage->prompt_tokens, usage->completion_tokens,
                  usage->prompt_tokens + usage->completion_tokens, usage->cached_tokens);
}

/* vLLM's places: a chat's prompt ids stand beside the choices, a completion's in each choice. */
static void write_prompt_ids(const stream_head *head, const stream_part *part, bool in_choice,
                             pd_buf *out)
{
    if (part->prompt_token_ids != NULL && (head->endpoint != API_CHAT) == in_choice)
        write_ids("prompt_token_ids", part->prompt_token_ids, part->prompt_token_ids_count, out);
}

static void write_choice_tail(const stream_head *head, const stream_part *part, pd_buf *out)
{
    pd_buf_puts(out, ",\"logprobs\":null,\"finish_reason\":");
    if (part->finish == NULL)
        pd_buf_puts(out, "null");
    else
        pd_buf_printf(out, "\"%s\"", part->finish);
    if (part->token_ids != NULL)
        write_ids("token_ids", part->token_ids, part->token_ids_count, out);
    write_prompt_ids(head, part, true, out);
    pd_buf_puts(out, "}");
}

static void write_delta(const stream_part *part, pd_buf *out)
{
    pd_buf_puts(out, ",\"delta\":{");
    if (part->first)
        pd_buf_puts(out, "\"role\":\"assistant\",\"content\":\"\"");
    else if (part->text.len > 0 || part->finish == NULL) {
        pd_buf_puts(out, "\"content\":");
        pd_json_write_string(out, part->text.bytes, part->text.len);
    }
    pd_buf_puts(out, "}");
}

void stream_write_chunk(const stream_head *head, const stream_part *part, pd_buf *out)
{
    pd_buf_puts(out, "data: ");
    write_head(head, true, out);
    pd_buf_printf(out, ",\"choices\":[{\"index\":%u", part->index);
    if (head->endpoint == API_CHAT) {
        write_delta(part, out);
    } else {
        pd_buf_puts(out, ",\"text\":");
        pd_json_write_string(out, part->text.bytes, part->text.len);
    }
    write_choice_tail(head, part, out);
    pd_buf_puts(out, "]");
    write_prompt_ids(head, part, false, out);
    pd_buf_puts(out, head->include_usage ? ",\"usage\":null}\n\n" : "}\n\n");
}

void stream_write_usage(const stream_head *head, const stream_usage *usage, pd_buf *out)
{
    pd_buf_puts(out, "data: ");
    write_head(head, true, out);
    pd_buf_puts(out, ",\"choices\":[]");
    write_usage(usage, out);
    pd_buf_puts(out, "}\n\n");
}

void stream_write_error(const api_error *error, pd_buf *out)
{
    pd_buf_puts(out, "data: ");
    api_error_write(error, out);
    pd_buf_puts(out, "\n\n");
}

void stream_write_done(pd_buf *out)
{
    pd_buf_puts(out, "data: [DONE]\n\n");
}

void stream_write_keepalive(pd_buf *out)
{
    pd_buf_puts(out, ": waiting\n\n");
}

void stream_write_answer(const stream_head *head, const stream_part *parts, uint32_t parts_count,
                         const stream_usage *usage, pd_buf *out)
{
    write_head(head, false, out);
    pd_buf_puts(out, ",\"choices\":[");
    for (uint32_t i = 0; i < parts_count; i++) {
        const stream_part *part = &parts[i];
        pd_buf_printf(out, "%s{\"index\":%u", i > 0 ? "," : "", part->index);
        if (head->endpoint == API_CHAT) {
            pd_buf_puts(out, ",\"message\":{\"role\":\"assistant\",\"content\":");
            pd_json_write_string(out, part->text.bytes, part->text.len);
            pd_buf_puts(out, ",\"refusal\":null}");
        } else {
            pd_buf_puts(out, ",\"text\":");
            pd_json_write_string(out, part->text.bytes, part->text.len);
        }
        write_choice_tail(head, part, out);
    }
    pd_buf_puts(out, "]");
    if (parts_count > 0)
        write_prompt_ids(head, &parts[0], false, out);
    write_usage(usage, out);
    pd_buf_puts(out, "}");
}

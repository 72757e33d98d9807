/* tests/unit/text/text_tool.c - our text code at a pipe, for comparison with reference libraries:
 *
 *   text_tool encode MODEL [PRE]   a JSON string a line in, a JSON array of ids a line out; PRE
 *                                  overrides the file's pre-tokenizer
 *   text_tool render               {"template":S,"bos":S,"eos":S,"messages":[...],"tools":[...],
 *                                  "extra":{...},"add_generation_prompt":B} a line in;
 *                                  {"text":S}, {"raised":S} or {"unsupported":S} a line out */

#include "common/base/buf.h"
#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/text/template.h"
#include "common/text/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IDS_MAX = 1 << 24, TEXT_MAX = 1 << 26 };

static void encode_line(const pd_tokenizer *tokenizer, const char *text, size_t len)
{
    pd_token_ids ids = {0};

    pd_status status = pd_tokenizer_encode(tokenizer, text, len, true, IDS_MAX, &ids);
    if (status != PD_OK) {
        printf("\"%s\"\n", pd_status_name(status));
    } else {
        putchar('[');
        for (size_t i = 0; i < ids.count; i++)
            printf("%s%u", i == 0 ? "" : ",", ids.ids[i]);
        printf("]\n");
    }
    pd_token_ids_fini(&ids);
}

static const char *text_of(const pd_json *line, const char *key, size_t *len_out)
{
    const pd_json *value = pd_json_get(line, key);
    const char *text = value != NULL ? pd_json_string(value, len_out) : NULL;

    if (text == NULL)
        *len_out = 0;
    return text != NULL ? text : "";
}

static void render_line(const pd_json *line)
{
    size_t source_len, len;
    const char *source = text_of(line, "template", &source_len);
    pd_template *template_ = NULL;
    pd_template_error error = {0};
    pd_template_spans spans = {0};
    pd_buf text, out;
    const pd_json *generate = pd_json_get(line, "add_generation_prompt");

    pd_buf_init(&text, TEXT_MAX);
    pd_buf_init(&out, TEXT_MAX);
    pd_status status = pd_template_compile(source, source_len, text_of(line, "bos", &len),
                                           text_of(line, "eos", &len), &template_, &error);
    if (status == PD_OK)
        status =
            pd_template_render(template_, pd_json_get(line, "messages"), pd_json_get(line, "tools"),
                               pd_json_get(line, "extra"),
                               generate != NULL && pd_json_bool(generate), &text, &spans, &error);
    pd_buf_printf(&out, "{\"%s\":",
                  status == PD_OK              ? "text"
                  : status == PD_E_UNSUPPORTED ? "unsupported"
                                               : "raised");
    if (status == PD_OK)
        pd_json_write_string(&out, pd_buf_text(&text), text.len);
    else
        pd_json_write_string(&out, error.message, strlen(error.message));
    printf("%s}\n", pd_buf_text(&out));
    pd_template_spans_fini(&spans);
    pd_template_destroy(template_);
    pd_buf_fini(&text);
    pd_buf_fini(&out);
}

int main(int argc, char **argv)
{
    pd_model_file *file = NULL;
    pd_tokenizer *tokenizer = NULL;
    char *line = NULL;
    size_t size = 0;
    ssize_t len;
    pd_text_tables tables;
    int result = 2;

    if (argc >= 3 && strcmp(argv[1], "encode") == 0) {
        if (pd_model_file_open(argv[2], &file) != PD_OK)
            goto out;
        tables = *pd_model_file_text(file);
        if (argc > 3)
            tables.pre = argv[3];
        if (pd_tokenizer_create(&tables, &tokenizer) != PD_OK)
            goto out;
    } else if (argc != 2 || strcmp(argv[1], "render") != 0) {
        fprintf(stderr, "usage: text_tool encode MODEL [PRE] | text_tool render\n");
        goto out;
    }
    while ((len = getline(&line, &size, stdin)) > 0) {
        pd_json *json = NULL;
        pd_json_error error;
        if (pd_json_parse(line, (size_t)len, &json, &error) != PD_OK) {
            fprintf(stderr, "text_tool: line is no JSON: %s\n", error.message);
            goto out;
        }
        if (tokenizer != NULL) {
            size_t text_len = 0;
            const char *text = pd_json_string(json, &text_len);
            encode_line(tokenizer, text != NULL ? text : "", text_len);
        } else {
            render_line(json);
        }
        fflush(stdout);
        pd_json_free(json);
    }
    result = 0;
out:
    free(line);
    pd_tokenizer_destroy(tokenizer);
    pd_model_file_close(file);
    return result;
}

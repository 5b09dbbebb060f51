/* Any bytes are a body of POST /v1/chat/completions or a 4xx, in every chat format; no message
 * writes a special token: those in the prompt are the format's. */
#include "tests/fuzz/fuzz_request.h"

static void check_prompt(const struct prompt *prompt) {
    size_t marked = 0, found = 0, last = 0;
    for (size_t i = 0; i < prompt->mark_count; i++) {
        check(prompt->marks[i].position >= last);
        check(prompt->marks[i].position <= prompt->text_length);
        last = prompt->marks[i].position;
        marked += tokenizer_is_special(context.tokenizer, prompt->marks[i].token);
    }
    for (size_t i = 0; i < prompt->tokens.count; i++) {
        found += tokenizer_is_special(context.tokenizer, prompt->tokens.ids[i]);
    }
    check(marked == found);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const formats[] = {NULL, "chatml", "llama3", "mistral", "zephyr", "plain"};
    struct choices choices = choices_of(data, size);
    struct text_buffer body = {0};
    struct completion_request request;
    struct api_error error = {0};
    make_context();
    make_body(data, size, "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]",
              &body);
    context.chat_format = formats[choose(&choices, sizeof formats / sizeof *formats)];
    int result = chat_request_parse(&context, body.data, body.length, NULL, &request, &error);
    if (result == 0) {
        check_request(&request);
        result = completion_request_tokenize(&context, &request, NULL, &error);
        if (result == 0) check_prompt(&request.prompts[0]);
        if (result == 0) check_answer(&request, data, size);
        completion_request_free(&request);
    }
    if (result != 0) check_refusal(&error);
    text_free(&body);
    return 0;
}

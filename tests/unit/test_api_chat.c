/* POST /v1/chat/completions on the wire: what is accepted and refused, and the shapes of answers.
 * The bundled model has no chat template, so its format is the plain one. */
#include "test_api.h"

#include <math.h>

#define HEAD "{\"model\":\"fathom-tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"

static void chat_request(const char *body, struct completion_request *request) {
    struct api_error error = {0};
    int result = chat_request_parse(&test_context, body, strlen(body), NULL, request, &error);
    if (result == 0) result = completion_request_tokenize(&test_context, request, NULL, &error);
    if (result != 0) print_error("%s: %s\n", body, error.message);
    assert_int_equal(result, 0);
}

/* ---- Requests -------------------------------------------------------------------------------- */

static void test_defaults(void **state) {
    (void)state;
    struct completion_request request;
    chat_request(HEAD "}", &request);
    assert_true(request.is_chat);
    assert_int_equal(request.prompt_count, 1);
    size_t length = request.prompts[0].tokens.count;
    assert_in_range(length, 2, 20);
    assert_int_equal(request.prompts[0].max_tokens, TEST_CONTEXT - length); /* all that is left */
    assert_false(request.has_max_tokens || request.stream);
    assert_int_equal(request.top_logprobs, -1);
    assert_int_equal(request.stop_token_count, 0);
    completion_request_free(&request);
}

static void test_every_field_arrives(void **state) {
    (void)state;
    struct completion_request request;
    chat_request(HEAD ",\"max_completion_tokens\":9,\"min_tokens\":3,\"n\":2,\"priority\":-7,"
                      "\"temperature\":0.5,\"top_p\":0.25,\"top_k\":40,\"min_p\":0.125,"
                      "\"presence_penalty\":-2,\"frequency_penalty\":2,\"seed\":5,"
                      "\"stop\":[\"a\",\"b\"],\"stop_token_ids\":[4095],\"ignore_eos\":true,"
                      "\"logprobs\":true,\"top_logprobs\":20,\"logit_bias\":{\"7\":-100},"
                      "\"stream\":true,\"stream_options\":{\"include_usage\":true},"
                      "\"return_depth\":true,\"service_tier\":\"auto\",\"quality\":\"fast\"}",
                 &request);
    assert_int_equal(request.max_tokens, 9);
    assert_int_equal(request.min_tokens, 3);
    assert_int_equal(request.choices_per_prompt, 2);
    assert_int_equal(request.priority, -7);
    assert_float_equal(request.sampling.temperature, 0.5, 0);
    assert_int_equal(request.sampling.top_k, 40);
    assert_int_equal(request.sampling.bias_count, 1);
    assert_int_equal(request.stop_count, 2);
    assert_int_equal(request.stop_token_count, 1);
    assert_int_equal(request.top_logprobs, 20);
    assert_int_equal(request.tier, 3);
    assert_true(request.has_seed && request.ignore_eos && request.return_depth);
    assert_true(request.stream && request.include_usage && request.service_tier);
    assert_false(request.echo);
    completion_request_free(&request);
}

static void test_accepted(void **state) {
    (void)state;
    static const char *const extras[] = {
        "\"max_tokens\":3,\"max_completion_tokens\":3",
        "\"max_tokens\":1",
        "\"min_tokens\":30",
        "\"logprobs\":false",
        "\"logprobs\":true",
        "\"logprobs\":true,\"top_logprobs\":0",
        "\"logprobs\":true,\"top_logprobs\":20",
        "\"tools\":[]",
        "\"tool_choice\":\"none\"",
        "\"function_call\":\"none\"",
        "\"modalities\":[\"text\"]",
        "\"response_format\":{\"type\":\"text\"}",
        "\"parallel_tool_calls\":null",
        "\"chat_template_kwargs\":{}",
        "\"add_special_tokens\":false",
        "\"echo\":true",
        "\"suffix\":\"x\"",
        "\"prompt\":5",
        "\"best_of\":7",
        "\"user\":\"me\",\"store\":true,\"metadata\":{}",
        "\"n\":128",
    };
    for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
        char body[512];
        struct completion_request request;
        snprintf(body, sizeof body, HEAD ",%s}", extras[i]);
        chat_request(body, &request);
        assert_false(request.echo);
        completion_request_free(&request);
    }
}

/* `body` is what follows "model" and a message; or, if it starts with '[', the messages. */
static const struct {
    const char *body, *param;
} refusals[] = {
    {"\"messages\":null", "messages"},
    {"\"messages\":\"Hi\"", "messages"},
    {"\"messages\":{}", "messages"},
    {"[]", "messages"},
    {"[null]", "messages[0]"},
    {"[\"Hi\"]", "messages[0]"},
    {"[{\"role\":\"user\",\"content\":\"a\"},[]]", "messages[1]"},
    {"[{}]", "messages[0].role"},
    {"[{\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":null,\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":3,\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":\"\",\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":\"user\\u0000\",\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":\"User\",\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":\"tool\",\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":\"function\",\"content\":\"a\"}]", "messages[0].role"},
    {"[{\"role\":\"user\"}]", "messages[0].content"},
    {"[{\"role\":\"user\",\"content\":null}]", "messages[0].content"},
    {"[{\"role\":\"user\",\"content\":3}]", "messages[0].content"},
    {"[{\"role\":\"user\",\"content\":{}}]", "messages[0].content"},
    {"[{\"role\":\"user\",\"content\":[]}]", "messages[0].content"},
    {"[{\"role\":\"user\",\"content\":[\"a\"]}]", "messages[0].content[0]"},
    {"[{\"role\":\"user\",\"content\":[null]}]", "messages[0].content[0]"},
    {"[{\"role\":\"user\",\"content\":[{\"text\":\"a\"}]}]", "messages[0].content[0].type"},
    {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
     "{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}]",
     "messages[0].content[1].type"},
    {"[{\"role\":\"user\",\"content\":[{\"type\":\"input_audio\"}]}]",
     "messages[0].content[0].type"},
    {"[{\"role\":\"user\",\"content\":[{\"type\":7}]}]", "messages[0].content[0].type"},
    {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "messages[0].content[0].text"},
    {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":1}]}]",
     "messages[0].content[0].text"},
    {"[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{}]}]", "messages[0].tool_calls"},
    {"[{\"role\":\"assistant\",\"content\":\"a\",\"function_call\":{}}]",
     "messages[0].function_call"},
    {"[{\"role\":\"assistant\",\"content\":\"a\",\"audio\":{\"id\":\"x\"}}]", "messages[0].audio"},
    {"[{\"role\":\"assistant\",\"content\":\"a\",\"refusal\":\"no\"}]", "messages[0].refusal"},

    {"\"max_tokens\":0", "max_tokens"},
    {"\"max_completion_tokens\":0", "max_completion_tokens"},
    {"\"max_completion_tokens\":-1", "max_completion_tokens"},
    {"\"max_tokens\":3,\"max_completion_tokens\":4", "max_completion_tokens"},
    {"\"max_tokens\":3,\"min_tokens\":4", "min_tokens"},
    {"\"logprobs\":1", "logprobs"},
    {"\"logprobs\":\"true\"", "logprobs"},
    {"\"top_logprobs\":1", "top_logprobs"},
    {"\"logprobs\":false,\"top_logprobs\":1", "top_logprobs"},
    {"\"top_logprobs\":0", "top_logprobs"},
    {"\"logprobs\":true,\"top_logprobs\":21", "top_logprobs"},
    {"\"logprobs\":true,\"top_logprobs\":-1", "top_logprobs"},
    {"\"logprobs\":true,\"top_logprobs\":true", "top_logprobs"},
    {"\"logprobs\":true,\"top_logprobs\":1.5", "top_logprobs"},
    {"\"n\":0", "n"},
    {"\"n\":129", "n"},
    {"\"temperature\":3", "temperature"},
    {"\"stop\":\"\"", "stop"},
    {"\"stream_options\":{}", "stream_options"},
    {"\"add_generation_prompt\":1", "add_generation_prompt"},
    {"\"continue_final_message\":\"yes\"", "continue_final_message"},
    {"\"continue_final_message\":true,\"add_generation_prompt\":true", "continue_final_message"},

    {"\"tools\":[{}]", "tools"},
    {"\"tool_choice\":\"auto\"", "tool_choice"},
    {"\"tool_choice\":{\"type\":\"function\"}", "tool_choice"},
    {"\"parallel_tool_calls\":true", "parallel_tool_calls"},
    {"\"parallel_tool_calls\":false", "parallel_tool_calls"},
    {"\"functions\":[{}]", "functions"},
    {"\"function_call\":\"auto\"", "function_call"},
    {"\"response_format\":{\"type\":\"json_object\"}", "response_format"},
    {"\"audio\":{}", "audio"},
    {"\"modalities\":[\"text\",\"audio\"]", "modalities"},
    {"\"modalities\":[]", "modalities"},
    {"\"prediction\":{}", "prediction"},
    {"\"web_search_options\":{}", "web_search_options"},
    {"\"reasoning_effort\":\"low\"", "reasoning_effort"},
    {"\"verbosity\":\"low\"", "verbosity"},
    {"\"chat_template\":\"{{ x }}\"", "chat_template"},
    {"\"chat_template_kwargs\":{\"a\":1}", "chat_template_kwargs"},
    {"\"add_special_tokens\":true", "add_special_tokens"},
    {"\"guided_json\":{}", "guided_json"},
};

static void refuse(const char *body, const char *param, const char *says) {
    struct completion_request request;
    struct api_error error = {0};
    struct text_buffer out = {0};
    int result = chat_request_parse(&test_context, body, strlen(body), NULL, &request, &error);
    if (result == 0) {
        result = completion_request_tokenize(&test_context, &request, NULL, &error);
        completion_request_free(&request);
    }
    if (result == 0) fail_msg("accepted: %s", body);
    if (strcmp(error.param, param) != 0) print_error("%s: %s\n", body, error.message);
    assert_int_equal(error.status, 400);
    assert_string_equal(error.param, param);
    assert_non_null(strstr(error.message, param));
    assert_non_null(strstr(error.message, says));
    api_error_write(&error, &out);
    json_decref(test_json(&out));
}

static void test_refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        char body[512];
        snprintf(body, sizeof body,
                 *refusals[i].body == '[' ? "{\"model\":\"fathom-tiny\",\"messages\":%s}"
                                          : HEAD ",%s}",
                 refusals[i].body);
        refuse(body, refusals[i].param, "");
    }
    refuse("{\"model\":\"fathom-tiny\",\"prompt\":\"Hi\"}", "messages", "missing");
}

static void test_null_is_absent(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        char body[256];
        struct completion_request request;
        if (*refusals[i].body == '[' || strcmp(refusals[i].param, "messages") == 0) continue;
        snprintf(body, sizeof body, HEAD ",\"%s\":null}", refusals[i].param);
        chat_request(body, &request);
        assert_int_equal(request.top_logprobs, -1);
        assert_false(request.has_max_tokens || request.stream);
        completion_request_free(&request);
    }
}

static void test_messages_have_a_limit(void **state) {
    (void)state;
    for (size_t count = 1024; count <= 1025; count++) {
        struct text_buffer body = {0};
        struct completion_request request;
        struct api_error error;
        text_append_string(&body, "{\"model\":\"fathom-tiny\",\"messages\":[");
        for (size_t i = 0; i < count; i++) {
            text_append_format(&body, "%s{\"role\":\"user\",\"content\":\"\"}", i > 0 ? "," : "");
        }
        text_append(&body, "]}", 3);
        int result =
            chat_request_parse(&test_context, body.data, strlen(body.data), NULL, &request, &error);
        assert_int_equal(result == 0, count == 1024);
        if (result == 0) completion_request_free(&request);
        if (result != 0) assert_non_null(strstr(error.message, "1024"));
        text_free(&body);
    }
}

static void test_lengths(void **state) {
    (void)state;
    char body[1024], text[300];
    memset(text, '9', sizeof text);
    text[sizeof text - 1] = '\0';
    snprintf(body, sizeof body,
             "{\"model\":\"fathom-tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]}",
             text);
    refuse(body, "messages", "64");
    refuse(HEAD ",\"max_tokens\":64}", "max_tokens", "in messages and 64");
}

/* A message's end-of-text token is text; a completion's is the token. */
static void test_special_tokens_are_text(void **state) {
    (void)state;
    struct completion_request request;
    size_t length = strlen("User: <|endoftext|>\nAssistant:"), used = 0;
    char text[64];
    chat_request("{\"model\":\"fathom-tiny\",\"messages\":"
                 "[{\"role\":\"user\",\"content\":\"<|endoftext|>\"}]}",
                 &request);
    const struct token_list *tokens = &request.prompts[0].tokens;
    for (size_t i = 0; i < tokens->count; i++) {
        size_t size;
        const char *bytes = tokenizer_bytes(test_context.tokenizer, tokens->ids[i], &size);
        assert_false(tokenizer_is_special(test_context.tokenizer, tokens->ids[i]));
        assert_true(used + size <= length);
        memcpy(text + used, bytes, size);
        used += size;
    }
    assert_int_equal(used, length);
    assert_memory_equal(text, "User: <|endoftext|>\nAssistant:", length);
    completion_request_free(&request);
}

/* ---- Answers --------------------------------------------------------------------------------- */

struct run {
    struct completion_request request;
    struct completion *completion;
};

static void run_begin(struct run *run, const char *fields) {
    char body[512];
    struct api_error error;
    snprintf(body, sizeof body, HEAD "%s}", fields);
    chat_request(body, &run->request);
    assert_int_equal(completion_create(&test_context, &run->request, "abc", 1700000001, 7,
                                       &run->completion, &error),
                     0);
}

static void run_end(struct run *run) {
    completion_destroy(run->completion);
    completion_request_free(&run->request);
}

static int32_t token_of(const char *text) {
    int32_t token = tokenizer_find(test_context.tokenizer, text);
    assert_true(token >= 0);
    return token;
}

static unsigned push_token(struct run *run, size_t choice, int32_t token) {
    struct engine_event event = {.kind = EVENT_TOKEN,
                                 .token = token,
                                 .is_stop = token == tokenizer_eos(test_context.tokenizer),
                                 .logprob = -0.25f,
                                 .depth = 24,
                                 .top_count = 2,
                                 .top = {{token_of("a"), -0.125f}, {token, -INFINITY}}};
    return completion_push(run->completion, choice, &event);
}

static void push_finished(struct run *run, size_t choice) {
    struct engine_event event = {
        .kind = EVENT_FINISHED,
        .finish = FINISH_LENGTH,
        .usage = {.cached_tokens = 1,
                  .attn_run = 1 << 20,
                  .attn_total = 1 << 20,
                  .mlp_run = 1 << 20,
                  .mlp_total = 1 << 20},
    };
    completion_push(run->completion, choice, &event);
}

static json_t *answer(struct run *run) {
    struct text_buffer out = {0};
    assert_true(completion_is_done(run->completion));
    completion_write_response(run->completion, &out);
    run_end(run);
    return test_json(&out);
}

/* A stream's events as a list. */
static json_t *events_of(struct text_buffer *stream) {
    json_t *events = json_array();
    for (size_t at = 0; at < stream->length;) {
        char *end = memmem(stream->data + at, stream->length - at, "\n\n", 2);
        assert_non_null(end);
        assert_memory_equal(stream->data + at, "data: ", 6);
        size_t length = (size_t)(end - stream->data) - at;
        json_t *event = json_loadb(stream->data + at + 6, length - 6,
                                   JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(event);
        json_array_append_new(events, event);
        at += length + 2;
    }
    text_free(stream);
    return events;
}

static json_t *choice_of(const json_t *json, size_t index) {
    return json_array_get(json_object_get(json, "choices"), index);
}

static bool is_null(const json_t *object, const char *name) {
    return json_is_null(json_object_get(object, name));
}

static void test_response(void **state) {
    (void)state;
    struct run run;
    run_begin(&run, ",\"n\":2,\"max_tokens\":2,\"quality\":\"fast\",\"service_tier\":\"flex\"");
    size_t prompt = run.request.prompts[0].tokens.count;
    for (size_t i = 0; i < 2; i++) {
        push_token(&run, i, token_of(" the"));
        push_token(&run, i, i == 0 ? token_of("a") : tokenizer_eos(test_context.tokenizer));
        push_finished(&run, i);
    }
    json_t *json = answer(&run);
    assert_string_equal(test_string(json, "id"), "chatcmpl-abc");
    assert_string_equal(test_string(json, "object"), "chat.completion");
    assert_string_equal(test_string(json, "model"), "fathom-tiny");
    assert_string_equal(test_string(json, "quality"), "fast");
    assert_string_equal(test_string(json, "service_tier"), "default");
    for (size_t i = 0; i < 2; i++) {
        json_t *choice = choice_of(json, i), *message = json_object_get(choice, "message");
        assert_int_equal(json_integer_value(json_object_get(choice, "index")), i);
        assert_string_equal(test_string(message, "role"), "assistant");
        assert_string_equal(test_string(message, "content"), i == 0 ? " thea" : " the");
        assert_true(is_null(message, "refusal") && is_null(choice, "logprobs"));
        assert_string_equal(test_string(choice, "finish_reason"), i == 0 ? "length" : "stop");
        assert_null(json_object_get(choice, "text"));
        assert_null(json_object_get(choice, "delta"));
    }
    json_t *usage = json_object_get(json, "usage");
    assert_int_equal(json_integer_value(json_object_get(usage, "prompt_tokens")), prompt);
    assert_int_equal(json_integer_value(json_object_get(usage, "completion_tokens")), 4);
    assert_non_null(json_object_get(usage, "depth"));
    json_decref(json);
}

static void check_token(const json_t *entry, const char *token, const char *bytes, double logprob) {
    json_t *list = json_object_get(entry, "bytes");
    assert_string_equal(test_string(entry, "token"), token);
    assert_float_equal(json_number_value(json_object_get(entry, "logprob")), logprob, 1e-9);
    assert_int_equal(json_array_size(list), strlen(bytes));
    for (size_t i = 0; bytes[i]; i++) {
        assert_int_equal(json_integer_value(json_array_get(list, i)), (unsigned char)bytes[i]);
    }
}

/* Only tokens of the content are listed: their bytes add up to it. */
static void test_logprobs(void **state) {
    (void)state;
    int32_t half = -1; /* a token that is no whole character */
    for (int32_t i = 0; half < 0; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(test_context.tokenizer, i, &length);
        if (length == 1 && (unsigned char)bytes[0] == 0xE2) half = i;
    }
    for (int top = 0; top <= 2; top++) {
        struct run run;
        char fields[128];
        snprintf(fields, sizeof fields,
                 ",\"logprobs\":true,\"top_logprobs\":%d,\"return_depth\":true", top);
        run_begin(&run, fields);
        struct engine_request told;
        completion_fill(run.completion, 0, 1, &told);
        assert_int_equal(told.top_logprobs, top);
        assert_false(told.prompt_logprobs);
        push_token(&run, 0, token_of(" the"));
        push_token(&run, 0, half);
        push_token(&run, 0, tokenizer_eos(test_context.tokenizer));
        push_finished(&run, 0);
        json_t *json = answer(&run), *choice = choice_of(json, 0);
        json_t *logprobs = json_object_get(choice, "logprobs");
        json_t *content = json_object_get(logprobs, "content");
        assert_true(is_null(logprobs, "refusal"));
        assert_int_equal(json_array_size(content), 2);
        check_token(json_array_get(content, 0), " the", " the", -0.25);
        check_token(json_array_get(content, 1), "\\xe2", "\xE2", -0.25);
        json_t *best = json_object_get(json_array_get(content, 1), "top_logprobs");
        assert_int_equal(json_array_size(best), top);
        if (top > 0) check_token(json_array_get(best, 0), "a", "a", -0.125);
        if (top > 1) check_token(json_array_get(best, 1), "\\xe2", "\xE2", -9999);
        assert_int_equal(json_array_size(json_object_get(choice, "depth")), 3);
        json_decref(json);
    }
}

static void test_stream(void **state) {
    (void)state;
    struct run run;
    struct text_buffer stream = {0};
    run_begin(&run, ",\"n\":2,\"max_tokens\":2,\"stream\":true,\"logprobs\":true,"
                    "\"stream_options\":{\"include_usage\":true}");
    for (size_t i = 0; i < 2; i++) {
        push_token(&run, i, token_of("a"));
        assert_true(completion_write_chunk(run.completion, i, &stream));
        push_token(&run, i, token_of("b"));
        push_finished(&run, i);
        assert_true(completion_write_chunk(run.completion, i, &stream));
        assert_false(completion_write_chunk(run.completion, i, &stream));
    }
    completion_write_usage_chunk(run.completion, &stream);
    run_end(&run);
    json_t *events = events_of(&stream);
    assert_int_equal(json_array_size(events), 7);
    for (size_t i = 0; i < 6; i++) {
        json_t *event = json_array_get(events, i), *choice = choice_of(event, 0);
        json_t *delta = json_object_get(choice, "delta");
        static const char *const content[] = {"", "a", "b"};
        assert_string_equal(test_string(event, "id"), "chatcmpl-abc");
        assert_string_equal(test_string(event, "object"), "chat.completion.chunk");
        assert_true(is_null(event, "usage"));
        assert_int_equal(json_integer_value(json_object_get(choice, "index")), i / 3);
        assert_string_equal(test_string(delta, "content"), content[i % 3]);
        assert_int_equal(is_null(choice, "logprobs"), i % 3 == 0);
        assert_int_equal(is_null(choice, "finish_reason"), i % 3 != 2);
        if (i % 3 == 0) assert_string_equal(test_string(delta, "role"), "assistant");
        if (i % 3 != 0) assert_null(json_object_get(delta, "role"));
    }
    json_t *last = json_array_get(events, 6);
    assert_string_equal(test_string(last, "object"), "chat.completion.chunk");
    assert_int_equal(json_array_size(json_object_get(last, "choices")), 0);
    json_t *usage = json_object_get(last, "usage");
    assert_int_equal(json_integer_value(json_object_get(usage, "completion_tokens")), 4);
    json_decref(events);
}

/* An answer without text has a beginning and an end all the same. */
static void test_an_empty_stream(void **state) {
    (void)state;
    struct run run;
    struct text_buffer stream = {0};
    run_begin(&run, ",\"stream\":true");
    assert_false(completion_write_chunk(run.completion, 0, &stream));
    assert_int_equal(push_token(&run, 0, tokenizer_eos(test_context.tokenizer)), PUSH_READY);
    assert_true(completion_write_chunk(run.completion, 0, &stream));
    assert_false(completion_write_chunk(run.completion, 0, &stream));
    run_end(&run);
    json_t *events = events_of(&stream);
    assert_int_equal(json_array_size(events), 2);
    json_t *first = choice_of(json_array_get(events, 0), 0);
    json_t *second = choice_of(json_array_get(events, 1), 0);
    assert_string_equal(test_string(json_object_get(first, "delta"), "role"), "assistant");
    assert_string_equal(test_string(json_object_get(second, "delta"), "content"), "");
    assert_string_equal(test_string(second, "finish_reason"), "stop");
    json_decref(events);
}

/* ---- The deltas add up ----------------------------------------------------------------------- */

static void push_all(struct run *run, const int32_t *tokens, size_t count, uint64_t *random,
                     struct text_buffer *stream) {
    for (size_t i = 0; i < count; i++) {
        push_token(run, 0, tokens[i]);
        if (stream && test_random(random) % 2) completion_write_chunk(run->completion, 0, stream);
    }
    push_finished(run, 0);
    if (stream) completion_write_chunk(run->completion, 0, stream);
}

/* Appends each delta's content and logprobs; checks the first one's role. */
static void add_up(const json_t *events, struct text_buffer *text, json_t *logprobs) {
    for (size_t i = 0; i < json_array_size(events); i++) {
        json_t *choice = choice_of(json_array_get(events, i), 0);
        json_t *delta = json_object_get(choice, "delta"), *content;
        assert_int_equal(json_object_get(delta, "role") != NULL, i == 0);
        assert_int_equal(is_null(choice, "finish_reason"), i + 1 < json_array_size(events));
        content = json_object_get(delta, "content");
        text_append(text, json_string_value(content), json_string_length(content));
        json_array_extend(logprobs,
                          json_object_get(json_object_get(choice, "logprobs"), "content"));
    }
}

static void test_deltas_add_up(void **state) {
    (void)state;
    uint64_t random = 99;
    size_t stopped = 0;
    for (int round = 0; round < 1000; round++) {
        int32_t tokens[20];
        size_t count = 1 + test_random(&random) % 20;
        struct run streamed, whole;
        struct text_buffer stream = {0}, text = {0};
        char fields[128];
        for (size_t i = 0; i < count; i++) {
            tokens[i] = (int32_t)(test_random(&random) % (round % 2 ? TEST_VOCAB : 300));
        }
        snprintf(fields, sizeof fields,
                 ",\"max_tokens\":%zu,\"logprobs\":true,\"top_logprobs\":1,\"stop\":[\"e\",\" a\"]",
                 count);
        run_begin(&whole, fields);
        strcat(fields, ",\"stream\":true");
        run_begin(&streamed, fields);
        push_all(&streamed, tokens, count, &random, &stream);
        run_end(&streamed);
        json_t *events = events_of(&stream), *logprobs = json_array();
        add_up(events, &text, logprobs);
        push_all(&whole, tokens, count, &random, NULL);
        json_t *json = answer(&whole), *choice = choice_of(json, 0);
        json_t *content = json_object_get(json_object_get(choice, "message"), "content");
        assert_int_equal(json_string_length(content), text.length);
        if (text.length > 0) {
            assert_memory_equal(json_string_value(content), text.data, text.length);
        }
        assert_true(
            json_equal(json_object_get(json_object_get(choice, "logprobs"), "content"), logprobs));
        stopped += strcmp(test_string(choice, "finish_reason"), "stop") == 0;
        json_decref(json), json_decref(events), json_decref(logprobs);
        text_free(&text);
    }
    assert_in_range(stopped, 100, 900); /* else the trials prove little */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),       cmocka_unit_test(test_every_field_arrives),
        cmocka_unit_test(test_accepted),       cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_null_is_absent), cmocka_unit_test(test_messages_have_a_limit),
        cmocka_unit_test(test_lengths),        cmocka_unit_test(test_special_tokens_are_text),
        cmocka_unit_test(test_response),       cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_stream),         cmocka_unit_test(test_an_empty_stream),
        cmocka_unit_test(test_deltas_add_up),
    };
    return cmocka_run_group_tests(tests, test_api_setup, test_api_teardown);
}

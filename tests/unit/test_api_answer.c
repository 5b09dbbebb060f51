/* The shapes of answers: what SDKs and evaluation harnesses read out of them. Everything written is
 * read back as JSON. */
#include "test_api.h"

#include <math.h>

struct run {
    struct completion_request request;
    struct completion *completion;
};

static void run_begin(struct run *run, const char *body) {
    struct api_error error;
    test_request(body, &run->request);
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
    if (token < 0) print_error("no token '%s'\n", text);
    assert_true(token >= 0);
    return token;
}

static void push_token(struct run *run, size_t choice, int32_t token, float logprob) {
    struct engine_event event = {
        .kind = EVENT_TOKEN, .token = token, .logprob = logprob, .depth = 24};
    completion_push(run->completion, choice, &event);
}

static void push_finished(struct run *run, size_t choice, enum finish_reason finish) {
    struct engine_event event = {
        .kind = EVENT_FINISHED,
        .finish = finish,
        .usage = {.prompt_tokens = 99,
                  .cached_tokens = 1,
                  .completion_tokens = 99,
                  .attn_run = 30,
                  .attn_total = 40,
                  .mlp_run = 10,
                  .mlp_total = 40},
    };
    completion_push(run->completion, choice, &event);
}

/* The answer as JSON; run ends. */
static json_t *answer(struct run *run) {
    struct text_buffer out = {0};
    assert_true(completion_is_done(run->completion));
    completion_write_response(run->completion, &out);
    run_end(run);
    return test_json(&out);
}

static json_t *choice_of(const json_t *json, size_t index) {
    return json_array_get(json_object_get(json, "choices"), index);
}

static double real_at(const json_t *array, size_t index) {
    return json_number_value(json_array_get(array, index));
}

static const char *string_at(const json_t *array, size_t index) {
    return json_string_value(json_array_get(array, index));
}

static json_int_t integer_of(const json_t *object, const char *name) {
    assert_true(json_is_integer(json_object_get(object, name)));
    return json_integer_value(json_object_get(object, name));
}

static void test_response(void **state) {
    (void)state;
    struct run run;
    run_begin(&run,
              "{\"model\":\"fathom-tiny:fast\",\"prompt\":[[1,2],[3]],\"n\":2,\"max_tokens\":2}");
    assert_int_equal(completion_choice_count(run.completion), 4);
    for (size_t i = 0; i < 4; i++) {
        assert_false(completion_is_done(run.completion));
        push_token(&run, i, token_of(" the"), -1);
        push_token(&run, i, token_of(i % 2 ? "a" : "\n"), -1);
        push_finished(&run, i, FINISH_LENGTH);
    }
    json_t *json = answer(&run);
    assert_string_equal(test_string(json, "id"), "cmpl-abc");
    assert_string_equal(test_string(json, "object"), "text_completion");
    assert_string_equal(test_string(json, "model"), "fathom-tiny");
    assert_string_equal(test_string(json, "quality"), "fast");
    assert_string_equal(test_string(json, "system_fingerprint"),
                        "fathom-" FATHOM_VERSION "-f32-fast");
    assert_int_equal(integer_of(json, "created"), 1700000001);
    assert_null(json_object_get(json, "service_tier"));
    for (size_t i = 0; i < 4; i++) {
        json_t *choice = choice_of(json, i);
        assert_int_equal(integer_of(choice, "index"), i);
        assert_string_equal(test_string(choice, "text"), i % 2 ? " thea" : " the\n");
        assert_string_equal(test_string(choice, "finish_reason"), "length");
        assert_true(json_is_null(json_object_get(choice, "logprobs")));
        assert_null(json_object_get(choice, "depth"));
    }
    json_t *usage = json_object_get(json, "usage"), *depth = json_object_get(usage, "depth");
    assert_int_equal(integer_of(usage, "prompt_tokens"), 3); /* each prompt once */
    assert_int_equal(integer_of(usage, "completion_tokens"), 8);
    assert_int_equal(integer_of(usage, "total_tokens"), 11);
    assert_int_equal(integer_of(json_object_get(usage, "prompt_tokens_details"), "cached_tokens"),
                     2);
    assert_int_equal(integer_of(depth, "sublayers_run"), 160);
    assert_int_equal(integer_of(depth, "sublayers_total"), 320);
    assert_float_equal(json_number_value(json_object_get(depth, "attn_skip")), 0.25, 1e-9);
    assert_float_equal(json_number_value(json_object_get(depth, "mlp_skip")), 0.75, 1e-9);
    json_decref(json);
}

static void test_logprobs(void **state) {
    (void)state;
    int32_t half = -1; /* a token that is no whole character */
    for (int32_t i = 0; half < 0; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(test_context.tokenizer, i, &length);
        if (length == 1 && (unsigned char)bytes[0] == 0xE2) half = i;
    }
    struct run run;
    run_begin(&run, "{\"model\":\"fathom-tiny\",\"prompt\":[1],\"max_tokens\":4,\"logprobs\":2,"
                    "\"return_depth\":true}");
    struct engine_event event = {
        .kind = EVENT_TOKEN,
        .token = token_of(" the"),
        .logprob = -3.25f,
        .depth = 20,
        .top_count = 3,
        .top = {{token_of("a"), -0.1f}, {half, -INFINITY}, {token_of("b"), -9}}};
    completion_push(run.completion, 0, &event);
    event = (struct engine_event){.kind = EVENT_TOKEN,
                                  .token = token_of("a"),
                                  .logprob = -0.123456789f,
                                  .depth = 24,
                                  .top_count = 2,
                                  .top = {{token_of("a"), -0.123456789f}, {token_of("b"), -9}}};
    completion_push(run.completion, 0, &event);
    push_token(&run, 0, half, -INFINITY);
    event = (struct engine_event){.kind = EVENT_TOKEN,
                                  .token = tokenizer_eos(test_context.tokenizer),
                                  .is_stop = true,
                                  .logprob = -0.5f,
                                  .depth = 3};
    completion_push(run.completion, 0, &event);
    push_finished(&run, 0, FINISH_STOP);
    json_t *json = answer(&run), *choice = choice_of(json, 0);
    assert_string_equal(test_string(choice, "text"), " thea\xEF\xBF\xBD");
    assert_string_equal(test_string(choice, "finish_reason"), "stop");
    json_t *logprobs = json_object_get(choice, "logprobs"),
           *tokens = json_object_get(logprobs, "tokens");
    json_t *values = json_object_get(logprobs, "token_logprobs"), *top;
    json_t *offsets = json_object_get(logprobs, "text_offset");
    assert_int_equal(json_array_size(tokens), 4);
    assert_string_equal(string_at(tokens, 0), " the");
    assert_string_equal(string_at(tokens, 2), "bytes:\\xe2");
    assert_string_equal(string_at(tokens, 3), "<|endoftext|>");
    assert_true((float)real_at(values, 1) == -0.123456789f); /* all of the float's digits */
    assert_true(real_at(values, 2) == -9999.0);
    static const int expected[] = {0, 4, 5, 6};
    for (size_t i = 0; i < 4; i++) assert_int_equal(real_at(offsets, i), expected[i]);
    top = json_array_get(json_object_get(logprobs, "top_logprobs"), 0);
    assert_int_equal(json_object_size(top), 3); /* the two asked for, and the token itself */
    assert_true((float)json_number_value(json_object_get(top, "a")) == -0.1f);
    assert_true(json_number_value(json_object_get(top, "bytes:\\xe2")) == -9999.0);
    assert_true(json_number_value(json_object_get(top, " the")) == -3.25);
    top = json_array_get(json_object_get(logprobs, "top_logprobs"), 1);
    assert_int_equal(json_object_size(top), 2); /* the token is one of the two */
    json_t *depth = json_object_get(choice, "depth");
    assert_int_equal(json_array_size(depth), 4);
    assert_int_equal(real_at(depth, 0), 20);
    assert_int_equal(real_at(depth, 3), 3);
    json_decref(json);
}

static void push_prompt(struct run *run, size_t choice) {
    const struct token_list *tokens = &run->request.prompts[choice].tokens;
    for (size_t i = 0; i < tokens->count; i++) {
        struct engine_event event = {.kind = EVENT_PROMPT,
                                     .token = tokens->ids[i],
                                     .logprob = i == 0 ? NAN : -(float)i,
                                     .depth = 24,
                                     .top_count = i == 0 ? 0 : 1,
                                     .top = {{tokens->ids[i], -(float)i}}};
        assert_int_equal(completion_push(run->completion, choice, &event), 0);
    }
}

/* echo, logprobs, max_tokens 0: what scores a text. The arrays are those of the prompt's tokens. */
static void test_scoring(void **state) {
    (void)state;
    struct run run;
    const char *text = "Once upon a time there was \xE2\x82\xAC and <|endoftext|> in a text.";
    char body[256];
    snprintf(body, sizeof body,
             "{\"model\":\"fathom-tiny\",\"prompt\":[\"%s\",\"\"],\"max_tokens\":0,\"logprobs\":1,"
             "\"echo\":true}",
             text);
    run_begin(&run, body);
    size_t count = run.request.prompts[0].tokens.count;
    for (size_t i = 0; i < 2; i++) {
        push_prompt(&run, i);
        push_finished(&run, i, FINISH_LENGTH);
    }
    json_t *json = answer(&run), *choice = choice_of(json, 0);
    json_t *logprobs = json_object_get(choice, "logprobs");
    json_t *values = json_object_get(logprobs, "token_logprobs");
    json_t *top = json_object_get(logprobs, "top_logprobs");
    assert_string_equal(test_string(choice, "text"), text);
    assert_string_equal(test_string(choice, "finish_reason"), "length");
    assert_int_equal(json_array_size(values), count);
    assert_int_equal(json_array_size(top), count);
    assert_int_equal(json_array_size(json_object_get(logprobs, "tokens")), count);
    assert_int_equal(json_array_size(json_object_get(logprobs, "text_offset")), count);
    assert_true(json_is_null(json_array_get(values, 0)) && json_is_null(json_array_get(top, 0)));
    assert_float_equal(real_at(values, 1), -1, 0);
    assert_int_equal(json_object_size(json_array_get(top, 1)), 1);
    choice =
        choice_of(json, 1); /* the empty text: the token that we put there is told, not shown */
    assert_string_equal(test_string(choice, "text"), "");
    assert_string_equal(
        string_at(json_object_get(json_object_get(choice, "logprobs"), "tokens"), 0),
        "<|endoftext|>");
    assert_int_equal(integer_of(json_object_get(json, "usage"), "completion_tokens"), 0);
    assert_int_equal(integer_of(json_object_get(json, "usage"), "prompt_tokens"), count + 1);
    json_decref(json);
}

static void test_echo(void **state) {
    (void)state;
    struct run run;
    /* Ids: the special token is not shown, and a stop string in the prompt stops nothing. */
    char body[256];
    snprintf(body, sizeof body,
             "{\"model\":\"fathom-tiny\",\"prompt\":[[%d,%d,%d]],\"echo\":true,\"max_tokens\":1,"
             "\"stop\":\" the\"}",
             tokenizer_eos(test_context.tokenizer), token_of(" the"), token_of("a"));
    run_begin(&run, body);
    push_token(&run, 0, token_of("b"), 0);
    push_finished(&run, 0, FINISH_LENGTH);
    json_t *json = answer(&run);
    assert_string_equal(test_string(choice_of(json, 0), "text"), " theab");
    json_decref(json);

    run_begin(&run, "{\"model\":\"fathom-tiny\",\"prompt\":\"a<|endoftext|>b\",\"echo\":true,"
                    "\"max_tokens\":1,\"logprobs\":0}");
    push_prompt(&run, 0);
    push_token(&run, 0, token_of("c"), -2);
    push_finished(&run, 0, FINISH_LENGTH);
    json = answer(&run);
    json_t *logprobs = json_object_get(choice_of(json, 0), "logprobs");
    assert_string_equal(test_string(choice_of(json, 0), "text"), "a<|endoftext|>bc");
    assert_int_equal(json_array_size(json_object_get(logprobs, "tokens")), 4);
    assert_int_equal(real_at(json_object_get(logprobs, "text_offset"), 3), 15);
    assert_int_equal(json_object_size(json_array_get(json_object_get(logprobs, "top_logprobs"), 3)),
                     1);
    json_decref(json);
}

/* The first "data: ..." of the buffer as JSON; the rest stays. */
static json_t *take_event(struct text_buffer *stream) {
    char *end = memmem(stream->data, stream->length, "\n\n", 2);
    assert_non_null(end);
    assert_memory_equal(stream->data, "data: ", 6);
    assert_null(memchr(stream->data, '\r', stream->length));
    size_t length = (size_t)(end - stream->data);
    assert_null(memchr(stream->data, '\n', length));
    json_t *json = json_loadb(stream->data + 6, length - 6, 0, NULL);
    assert_non_null(json);
    stream->length -= length + 2;
    memmove(stream->data, end + 2, stream->length);
    return json;
}

static void test_stream(void **state) {
    (void)state;
    struct run run;
    struct text_buffer stream = {0};
    run_begin(&run, "{\"model\":\"fathom-tiny\",\"prompt\":\"Hi\",\"echo\":true,\"max_tokens\":2,"
                    "\"stream\":true,\"stream_options\":{\"include_usage\":true},"
                    "\"service_tier\":\"auto\"}");
    push_token(&run, 0, token_of("a"), 0);
    assert_true(completion_write_chunk(run.completion, 0, &stream));
    push_token(&run, 0, token_of("b"), 0);
    push_finished(&run, 0, FINISH_LENGTH);
    assert_true(completion_write_chunk(run.completion, 0, &stream));
    assert_false(completion_write_chunk(run.completion, 0, &stream));
    completion_write_usage_chunk(run.completion, &stream);
    stream_write_done(&stream);
    run_end(&run);

    json_t *first = take_event(&stream), *second = take_event(&stream), *last = take_event(&stream);
    assert_string_equal(test_string(choice_of(first, 0), "text"), "Hia");
    assert_true(json_is_null(json_object_get(choice_of(first, 0), "finish_reason")));
    assert_true(json_is_null(json_object_get(choice_of(first, 0), "logprobs")));
    assert_true(json_is_null(json_object_get(first, "usage")));
    assert_string_equal(test_string(first, "service_tier"), "default");
    assert_string_equal(test_string(choice_of(second, 0), "text"), "b");
    assert_string_equal(test_string(choice_of(second, 0), "finish_reason"), "length");
    assert_string_equal(test_string(second, "id"), test_string(first, "id"));
    assert_int_equal(integer_of(second, "created"), integer_of(first, "created"));
    assert_true(json_is_array(json_object_get(last, "choices")));
    assert_int_equal(json_array_size(json_object_get(last, "choices")), 0);
    assert_int_equal(integer_of(json_object_get(last, "usage"), "completion_tokens"), 2);
    assert_int_equal(stream.length, strlen("data: [DONE]\n\n"));
    assert_memory_equal(stream.data, "data: [DONE]\n\n", stream.length);
    json_decref(first), json_decref(second), json_decref(last);
    text_free(&stream);
}

static void test_usage_in_every_chunk(void **state) {
    (void)state;
    struct run run;
    struct text_buffer stream = {0};
    run_begin(&run, "{\"model\":\"fathom-tiny\",\"prompt\":[1,2,3],\"stream\":true,"
                    "\"stream_options\":{\"continuous_usage_stats\":true}}");
    push_token(&run, 0, token_of("a"), 0);
    completion_write_chunk(run.completion, 0, &stream);
    json_t *chunk = take_event(&stream), *usage = json_object_get(chunk, "usage");
    assert_int_equal(integer_of(usage, "prompt_tokens"), 3);
    assert_int_equal(integer_of(usage, "completion_tokens"), 1);
    assert_int_equal(integer_of(usage, "total_tokens"), 4);
    json_decref(chunk);
    text_free(&stream);
    run_end(&run);
}

/* Tokens of a stop string are counted, but not listed: their text is not there. */
static void test_a_stop_string_leaves_no_trace(void **state) {
    (void)state;
    struct run run;
    run_begin(&run, "{\"model\":\"fathom-tiny\",\"prompt\":[1],\"stop\":\"bc\",\"logprobs\":0}");
    const char *const texts[] = {"a", "b", "c", "d"};
    for (size_t i = 0; i < 4; i++) push_token(&run, 0, token_of(texts[i]), -1);
    push_finished(&run, 0, FINISH_CANCELLED);
    json_t *json = answer(&run), *choice = choice_of(json, 0);
    assert_string_equal(test_string(choice, "text"), "a");
    assert_string_equal(test_string(choice, "finish_reason"), "stop");
    assert_int_equal(
        json_array_size(json_object_get(json_object_get(choice, "logprobs"), "tokens")), 1);
    assert_int_equal(integer_of(json_object_get(json, "usage"), "completion_tokens"), 3);
    json_decref(json);

    /* A token that begins before the match is the text's, whole as tokens are. */
    run_begin(&run, "{\"model\":\"fathom-tiny\",\"prompt\":[1],\"stop\":\"he\",\"logprobs\":0}");
    push_token(&run, 0, token_of(" the"), -1);
    push_finished(&run, 0, FINISH_CANCELLED);
    json = answer(&run);
    choice = choice_of(json, 0);
    assert_string_equal(test_string(choice, "text"), " t");
    json_t *tokens = json_object_get(json_object_get(choice, "logprobs"), "tokens");
    assert_int_equal(json_array_size(tokens), 1);
    assert_string_equal(string_at(tokens, 0), " the");
    json_decref(json);
}

static void test_errors(void **state) {
    (void)state;
    static const struct {
        int code, status;
        const char *name, *type;
    } cases[] = {
        {FATHOM_FULL, 429, "server_overloaded", "rate_limit_error"},
        {FATHOM_TOO_LARGE, 400, "kv_budget_exceeded", "invalid_request_error"},
        {FATHOM_NO_MEMORY, 503, NULL, "service_unavailable_error"},
        {FATHOM_INVALID, 400, NULL, "invalid_request_error"},
        {FATHOM_UNSUPPORTED, 400, NULL, "invalid_request_error"},
        {FATHOM_NOT_FOUND, 404, NULL, "invalid_request_error"},
        {FATHOM_IO, 500, NULL, "server_error"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct error cause;
        struct api_error error;
        struct text_buffer out = {0};
        error_set(&cause, cases[i].code, "why \"%s\"", "\xff\xe2\x82");
        assert_int_not_equal(api_error_from_engine(&error, &cause), 0);
        assert_int_equal(error.status, cases[i].status);
        assert_int_equal(error.retry_after_s > 0, cases[i].status == 429 || cases[i].status == 503);
        assert_int_equal(error.never_retry, cases[i].status == 500);
        api_error_write(&error, &out);
        json_t *json = test_json(&out), *object = json_object_get(json, "error");
        assert_string_equal(test_string(object, "message"), "why \"\xEF\xBF\xBD\xEF\xBF\xBD\"");
        assert_string_equal(test_string(object, "type"), cases[i].type);
        assert_true(json_is_null(json_object_get(object, "param")));
        if (cases[i].name) {
            assert_string_equal(test_string(object, "code"), cases[i].name);
        } else {
            assert_true(json_is_null(json_object_get(object, "code")));
        }
        json_decref(json);
        stream_write_error(&error, &out);
        json_decref(take_event(&out));
        text_free(&out);
    }
}

static void test_models(void **state) {
    (void)state;
    struct text_buffer out = {0};
    struct api_error error;
    models_write(&test_context, &out);
    json_t *list = test_json(&out), *model = json_array_get(json_object_get(list, "data"), 0);
    assert_string_equal(test_string(list, "object"), "list");
    assert_string_equal(test_string(model, "id"), "fathom-tiny");
    assert_string_equal(test_string(model, "object"), "model");
    assert_string_equal(test_string(model, "owned_by"), "fathom");
    assert_int_equal(integer_of(model, "created"), 1700000000);
    json_t *ours = json_object_get(model, "fathom"), *tiers = json_object_get(ours, "tiers");
    assert_string_equal(test_string(ours, "residual"), "nag");
    assert_int_equal(integer_of(ours, "context_length"), TEST_CONTEXT);
    assert_int_equal(integer_of(ours, "kv_bytes_per_token"), 3072);
    assert_true(json_is_null(json_object_get(ours, "chat_format")));
    assert_string_equal(test_string(ours, "default_quality"), "full");
    assert_int_equal(json_array_size(tiers), 4);
    assert_string_equal(test_string(json_array_get(tiers, 2), "name"), "balanced");
    json_t *measured = json_object_get(json_array_get(tiers, 2), "measured");
    assert_float_equal(json_number_value(json_object_get(measured, "perplexity")), 12.75, 1e-9);
    assert_float_equal(json_number_value(json_object_get(measured, "attn_skip")), 0.25, 1e-9);
    assert_float_equal(json_number_value(json_object_get(measured, "mlp_skip")), 0.125, 1e-9);
    assert_true(json_is_null(json_object_get(json_array_get(tiers, 1), "measured")));

    const char *const names[] = {"fathom-tiny", "fathom-tiny:fast"};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(model_write(&test_context, names[i], &out, &error), 0);
        json_t *one = test_json(&out);
        assert_true(json_equal(one, model));
        json_decref(one);
    }
    json_decref(list);
    const char *const others[] = {"", "gpt-4", "fathom-tiny:", "fathom-tiny:bogus"};
    for (size_t i = 0; i < 4; i++) {
        assert_int_not_equal(model_write(&test_context, others[i], &out, &error), 0);
        assert_int_equal(error.status, 404);
        assert_string_equal(error.code, "model_not_found");
        assert_int_equal(out.length, 0);
    }
}

typedef int endpoint(const struct api_context *context, const char *body, size_t length,
                     struct text_buffer *out, struct api_error *error);

static int tokenize(const struct api_context *context, const char *body, size_t length,
                    struct text_buffer *out, struct api_error *error) {
    return tokenize_answer(context, body, length, NULL, out, error);
}

static json_t *ask(endpoint *call, const char *body) {
    struct text_buffer out = {0};
    struct api_error error = {0};
    if (call(&test_context, body, strlen(body), &out, &error) != 0)
        print_error("%s\n", error.message);
    return test_json(&out);
}

static void test_tokenize_and_back(void **state) {
    (void)state;
    const char *text = "Once upon a time, \xF0\x9F\x98\x80<|endoftext|>";
    char body[256];
    snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"return_token_strs\":true}", text);
    json_t *json = ask(tokenize, body), *tokens = json_object_get(json, "tokens");
    size_t count = json_array_size(tokens);
    assert_true(count > 5);
    assert_int_equal(integer_of(json, "count"), count);
    assert_int_equal(integer_of(json, "max_model_len"), TEST_CONTEXT);
    assert_int_equal(json_array_size(json_object_get(json, "token_strs")), count);
    assert_string_equal(string_at(json_object_get(json, "token_strs"), count - 1), "<|endoftext|>");
    json_t *back = json_pack("{s:s, s:O}", "model", "fathom-tiny:fast", "tokens", tokens);
    char *ids = json_dumps(back, 0);
    json_t *answer_json = ask(detokenize_answer, ids);
    assert_string_equal(test_string(answer_json, "prompt"), text);
    json_decref(answer_json), json_decref(back), json_decref(json);
    free(ids);

    json = ask(tokenize, "{\"model\":\"fathom-tiny\",\"prompt\":\"\"}");
    assert_int_equal(integer_of(json, "count"), 0);
    assert_true(json_is_null(json_object_get(json, "token_strs")));
    json_decref(json);
    json = ask(detokenize_answer, "{\"tokens\":[]}");
    assert_string_equal(test_string(json, "prompt"), "");
    json_decref(json);
}

/* Given up: the error is for nobody. */
static void test_tokenize_is_given_up(void **state) {
    (void)state;
    atomic_bool stop = true;
    struct text_buffer out = {0};
    struct api_error error = {0};
    const char *body = "{\"prompt\":\"Once upon a time\"}";
    int result = tokenize_answer(&test_context, body, strlen(body), &stop, &out, &error);
    assert_int_not_equal(result, 0);
    assert_int_equal(error.status, 503);
    assert_int_equal(out.length, 0);
    atomic_store(&stop, false);
    result = tokenize_answer(&test_context, body, strlen(body), &stop, &out, &error);
    assert_int_equal(result, 0);
    text_free(&out);
}

static void test_tokenize_refuses(void **state) {
    (void)state;
    static const struct {
        endpoint *call;
        const char *body;
        int status;
        const char *param;
    } cases[] = {
        {tokenize, "{}", 400, "prompt"},
        {tokenize, "[", 400, ""},
        {tokenize, "{\"prompt\":3}", 400, "prompt"},
        {tokenize, "{\"prompt\":[\"a\"]}", 400, "prompt"},
        {tokenize, "{\"prompt\":\"a\",\"add_special_tokens\":1}", 400, "add_special_tokens"},
        {tokenize, "{\"prompt\":\"a\",\"return_token_strs\":\"x\"}", 400,
         "return_token_strs"},
        {tokenize, "{\"prompt\":\"a\",\"model\":\"b\"}", 404, "model"},
        {tokenize, "{\"prompt\":\"a\",\"model\":3}", 400, "model"},
        {detokenize_answer, "{}", 400, "tokens"},
        {detokenize_answer, "{\"tokens\":\"a\"}", 400, "tokens"},
        {detokenize_answer, "{\"tokens\":[1,\"a\"]}", 400, "tokens[1]"},
        {detokenize_answer, "{\"tokens\":[-1]}", 400, "tokens[0]"},
        {detokenize_answer, "{\"tokens\":[4096]}", 400, "tokens[0]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct text_buffer out = {0};
        struct api_error error = {0};
        const char *body = cases[i].body;
        assert_int_not_equal(cases[i].call(&test_context, body, strlen(body), &out, &error), 0);
        assert_int_equal(error.status, cases[i].status);
        assert_string_equal(error.param, cases[i].param);
        assert_int_equal(out.length, 0);
    }
}

static void test_version(void **state) {
    (void)state;
    struct text_buffer out = {0};
    version_write(&(struct version_info){.version = "1", .build = "b", .backend = "cpu"}, &out);
    json_t *json = test_json(&out);
    assert_string_equal(test_string(json, "version"), "1");
    assert_string_equal(test_string(json, "backend"), "cpu");
    assert_true(json_is_null(json_object_get(json, "isa")));
    json_decref(json);
}

/* Whatever bytes go in, a JSON string of valid UTF-8 comes out, and valid text comes out as it
 * was. */
static void test_json_strings(void **state) {
    (void)state;
    struct text_buffer out = {0};
    const char all[] = "\x01\x02\x1f \"\\/\b\f\n\r\t\x7f\xC3\xA9\xE2\x80\xA8\xF0\x9F\x98\x80";
    text_append_json(&out, all, sizeof all); /* with the NUL at its end */
    json_t *string = json_loadb(out.data, out.length, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    assert_int_equal(json_string_length(string), sizeof all);
    assert_memory_equal(json_string_value(string), all, sizeof all);
    json_decref(string);
    uint64_t random = 1;
    for (int round = 0; round < 20000; round++) {
        char bytes[12];
        for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)(test_random(&random) >> 8);
        out.length = 0;
        text_append_json(&out, bytes, test_random(&random) % (sizeof bytes + 1));
        string = json_loadb(out.data, out.length, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        assert_non_null(string);
        json_decref(string);
    }
    text_free(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_response),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_scoring),
        cmocka_unit_test(test_echo),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_usage_in_every_chunk),
        cmocka_unit_test(test_a_stop_string_leaves_no_trace),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_tokenize_and_back),
        cmocka_unit_test(test_tokenize_refuses),
        cmocka_unit_test(test_tokenize_is_given_up),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_json_strings),
    };
    return cmocka_run_group_tests(tests, test_api_setup, test_api_teardown);
}

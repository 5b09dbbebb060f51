/* What POST /v1/completions accepts, what it makes of it, and what the engine is then told. */
#include "test_api.h"

#define HEAD "{\"model\":\"fathom-tiny\",\"prompt\":\"Once upon a time\""

static void test_defaults(void **state) {
    (void)state;
    struct completion_request request;
    test_request(HEAD "}", &request);
    assert_int_equal(request.prompt_count, 1);
    assert_int_equal(request.prompts[0].text_length, strlen("Once upon a time"));
    assert_true(request.prompts[0].tokens.count > 1);
    assert_int_equal(request.prompts[0].hidden, 0);
    assert_int_equal(request.prompts[0].max_tokens, MAX_TOKENS_DEFAULT);
    assert_int_equal(request.choices_per_prompt, 1);
    assert_int_equal(request.tier, 0);
    assert_int_equal(request.top_logprobs, -1);
    assert_float_equal(request.sampling.temperature, 1, 0);
    assert_float_equal(request.sampling.top_p, 1, 0);
    assert_float_equal(request.sampling.repetition_penalty, 1, 0);
    assert_float_equal(request.sampling.min_p, 0, 0);
    assert_int_equal(request.sampling.top_k, 0);
    assert_false(request.has_max_tokens || request.has_seed || request.ignore_eos || request.echo);
    assert_false(request.stream || request.return_depth || request.service_tier);
    completion_request_free(&request);
}

static void test_every_field_arrives(void **state) {
    (void)state;
    struct completion_request request;
    test_request(HEAD
                 ",\"max_tokens\":9,\"min_tokens\":3,\"n\":2,\"best_of\":2,\"priority\":-7,"
                 "\"temperature\":0.5,\"top_p\":0.25,\"top_k\":40,\"min_p\":0.125,"
                 "\"presence_penalty\":-2,\"frequency_penalty\":2,\"repetition_penalty\":1.5,"
                 "\"seed\":-9223372036854775808,\"stop\":[\"a\\u0000b\",\"\\n\"],"
                 "\"stop_token_ids\":[4095,0],\"ignore_eos\":true,\"logprobs\":20,\"echo\":true,"
                 "\"logit_bias\":{\"7\":-100,\"4095\":2.5},\"stream\":true,"
                 "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true},"
                 "\"return_depth\":true,\"service_tier\":\"auto\",\"quality\":\"fast\"}",
                 &request);
    assert_int_equal(request.max_tokens, 9);
    assert_int_equal(request.min_tokens, 3);
    assert_int_equal(request.choices_per_prompt, 2);
    assert_int_equal(request.priority, -7);
    assert_float_equal(request.sampling.temperature, 0.5, 0);
    assert_float_equal(request.sampling.top_p, 0.25, 0);
    assert_int_equal(request.sampling.top_k, 40);
    assert_float_equal(request.sampling.min_p, 0.125, 0);
    assert_float_equal(request.sampling.presence_penalty, -2, 0);
    assert_float_equal(request.sampling.frequency_penalty, 2, 0);
    assert_float_equal(request.sampling.repetition_penalty, 1.5, 0);
    assert_true(request.has_seed);
    assert_true(request.sampling.seed == (uint64_t)1 << 63);
    assert_int_equal(request.stop_count, 2);
    assert_int_equal(request.stops[0].length, 3);
    assert_memory_equal(request.stops[0].bytes, "a\0b", 3);
    assert_int_equal(request.stop_token_count, 2);
    assert_int_equal(request.stop_tokens[0], 4095);
    assert_int_equal(request.sampling.bias_count, 2);
    for (size_t i = 0; i < 2; i++) {
        bool is_first = request.bias[i].token == 7;
        assert_true(is_first || request.bias[i].token == 4095);
        assert_float_equal(request.bias[i].bias, (is_first ? -100 : 2.5), 0);
    }
    assert_int_equal(request.top_logprobs, 20);
    assert_int_equal(request.tier, 3);
    assert_true(request.ignore_eos && request.echo && request.return_depth && request.service_tier);
    assert_true(request.stream && request.include_usage && request.continuous_usage);
    completion_request_free(&request);
}

/* Bodies that clients really send, and the edges of every range. */
static void test_accepted(void **state) {
    (void)state;
    static const char *const extras[] = {
        "\"max_tokens\":3.0",
        "\"max_tokens\":1e1",
        "\"max_tokens\":1",
        "\"n\":2.0",
        "\"seed\":5.0",
        "\"max_tokens\":0,\"echo\":true",
        "\"max_tokens\":4,\"max_completion_tokens\":4",
        "\"temperature\":0",
        "\"temperature\":2",
        "\"temperature\":-0.0",
        "\"top_p\":1",
        "\"top_p\":1e-300",
        "\"min_p\":0",
        "\"min_p\":1",
        "\"top_k\":0",
        "\"top_k\":2147483647",
        "\"repetition_penalty\":2",
        "\"repetition_penalty\":1e-300",
        "\"seed\":9223372036854775807",
        "\"logprobs\":0",
        "\"logprobs\":20",
        "\"stop\":[]",
        "\"stop\":\"x\"",
        "\"stop_token_ids\":[]",
        "\"logit_bias\":{}",
        "\"priority\":2147483647",
        "\"priority\":-2147483648",
        "\"unknown_field\":{\"deep\":[1,2]}",
        "\"huge\":123456789012345678901234567890",
        "\"user\":\"me\"",
        "\"user\":{\"any\":1}",
        "\"metadata\":{\"a\":\"b\"}",
        "\"store\":true",
        "\"service_tier\":\"flex\"",
        "\"suffix\":\"\"",
        "\"tools\":[]",
        "\"functions\":[]",
        "\"response_format\":{\"type\":\"text\"}",
        "\"include_stop_str_in_output\":false",
        "\"skip_special_tokens\":true",
        "\"use_beam_search\":false",
        "\"length_penalty\":1.0",
        "\"stream\":true,\"stream_options\":{}",
        "\"stream\":true,\"stream_options\":{\"include_usage\":null,\"include_obfuscation\":false}",
        "\"stream\":false",
        "\"n\":128",
        "\"quality\":\"auto\"",
        "\"user\":\"\\ud83d\\ude00\"",
        "\"user\":\"a\\u0000b\"",
    };
    for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
        char body[512];
        struct completion_request request;
        snprintf(body, sizeof body, HEAD ",%s}", extras[i]);
        test_request(body, &request);
        assert_true(request.sampling.top_p > 0 && request.sampling.repetition_penalty > 0);
        completion_request_free(&request);
    }
}

static void test_who_decides_the_tier(void **state) {
    (void)state;
    static const struct {
        const char *model, *header, *body, *tier;
    } cases[] = {
        {"fathom-tiny", NULL, "null", "high"},
        {"fathom-tiny:fast", NULL, "null", "fast"},
        {"fathom-tiny:fast", "balanced", "null", "balanced"},
        {"fathom-tiny:fast", "balanced", "\"full\"", "full"},
        {"fathom-tiny", NULL, "\"full\"", "full"},
        {"fathom-tiny", "full", "null", "full"},
        {"fathom-tiny:fast", "", "null", "fast"},
        {"fathom-tiny:fast", "auto", "null", "high"},
        {"fathom-tiny:fast", "full", "\"auto\"", "high"},
        {"fathom-tiny:auto", NULL, "null", "high"},
        {"fathom-tiny", "nonsense", "\"full\"", "full"},
    };
    struct api_context context = test_context;
    context.default_tier = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[256];
        struct completion_request request;
        struct api_error error;
        snprintf(body, sizeof body, "{\"model\":\"%s\",\"prompt\":\"a\",\"quality\":%s}",
                 cases[i].model, cases[i].body);
        assert_int_equal(completion_request_parse(&context, body, strlen(body), cases[i].header,
                                                  &request, &error),
                         0);
        assert_string_equal(test_model.tiers[request.tier].name, cases[i].tier);
        completion_request_free(&request);
    }
    context.served_name = "org/model:v2"; /* a ':' of its own is no tier */
    const char *body = "{\"model\":\"org/model:v2:fast\",\"prompt\":\"a\"}";
    struct completion_request request;
    struct api_error error;
    assert_int_equal(completion_request_parse(&context, body, strlen(body), NULL, &request, &error),
                     0);
    assert_string_equal(test_model.tiers[request.tier].name, "fast");
    completion_request_free(&request);
}

static void test_shapes_of_a_prompt(void **state) {
    (void)state;
    struct completion_request request;
    test_request("{\"model\":\"fathom-tiny\",\"prompt\":[\"a\",\"\",\"b\\u0000c\"]}", &request);
    assert_int_equal(request.prompt_count, 3);
    assert_int_equal(request.prompts[1].tokens.count, 1); /* something to predict from */
    assert_int_equal(request.prompts[1].tokens.ids[0], tokenizer_bos(test_context.tokenizer));
    assert_int_equal(request.prompts[1].hidden, 1);
    assert_int_equal(request.prompts[2].text_length, 3);
    completion_request_free(&request);

    test_request("{\"model\":\"fathom-tiny\",\"prompt\":[5,6.0,4095]}", &request);
    assert_int_equal(request.prompt_count, 1);
    assert_null(request.prompts[0].text);
    assert_int_equal(request.prompts[0].tokens.count, 3);
    assert_int_equal(request.prompts[0].tokens.ids[1], 6);
    assert_int_equal(request.prompts[0].tokens.ids[2], 4095);
    completion_request_free(&request);

    test_request("{\"model\":\"fathom-tiny\",\"prompt\":[[5],[6,7]]}", &request);
    assert_int_equal(request.prompt_count, 2);
    assert_int_equal(request.prompts[1].tokens.count, 2);
    completion_request_free(&request);

    test_request("{\"model\":\"fathom-tiny\",\"prompt\":\"<|endoftext|>\"}", &request);
    assert_int_equal(request.prompts[0].tokens.count, 1);
    assert_int_equal(request.prompts[0].tokens.ids[0], tokenizer_eos(test_context.tokenizer));
    assert_int_equal(request.prompts[0].hidden, 0);
    completion_request_free(&request);
}

static void test_silence_about_length_gives_way(void **state) {
    (void)state;
    struct text_buffer body = {0};
    struct completion_request request;
    text_append_string(&body, "{\"model\":\"fathom-tiny\",\"prompt\":[[1],[2");
    for (int i = 1; i < TEST_CONTEXT - 3; i++) text_append_string(&body, ",2");
    text_append(&body, "]]}", 4);
    test_request(body.data, &request);
    assert_int_equal(request.prompts[0].max_tokens, MAX_TOKENS_DEFAULT);
    assert_int_equal(request.prompts[1].max_tokens, 3);
    completion_request_free(&request);
    text_free(&body);
}

/* max_tokens 0 scores a text that fills the context to the brim. */
static void test_scoring_takes_the_whole_context(void **state) {
    (void)state;
    struct text_buffer body = {0};
    struct completion_request request;
    text_append_string(&body,
                       "{\"model\":\"fathom-tiny\",\"echo\":true,\"max_tokens\":0,\"prompt\":[2");
    for (int i = 1; i < TEST_CONTEXT; i++) text_append_string(&body, ",2");
    text_append(&body, "]}", 3);
    test_request(body.data, &request);
    assert_int_equal(request.prompts[0].tokens.count, TEST_CONTEXT);
    assert_int_equal(request.prompts[0].max_tokens, 0);
    completion_request_free(&request);
    text_free(&body);
}

static void fill(const char *body, uint64_t random_seed, size_t choice,
                 struct engine_request *filled) {
    struct completion_request request;
    struct completion *completion;
    struct api_error error;
    test_request(body, &request);
    assert_int_equal(
        completion_create(&test_context, &request, "1", 5, random_seed, &completion, &error), 0);
    completion_fill(completion, choice, 77, filled);
    if (filled->prompt_length > 0) assert_non_null(filled->prompt);
    completion_destroy(completion);
    completion_request_free(&request);
}

static void test_what_the_engine_is_told(void **state) {
    (void)state;
    struct engine_request told;
    fill("{\"model\":\"fathom-tiny\",\"prompt\":[[5],[6,7]],\"n\":3,\"max_tokens\":4,\"min_"
         "tokens\":2,"
         "\"seed\":11,\"logprobs\":2,\"echo\":true,\"quality\":\"balanced\",\"priority\":3,"
         "\"ignore_eos\":true,\"stop_token_ids\":[9]}",
         99, 3, &told);
    assert_int_equal(told.id, 77);
    assert_int_equal(told.prompt_length, 2);
    assert_int_equal(told.max_tokens, 4);
    assert_int_equal(told.min_tokens, 2);
    assert_int_equal(told.tier, 2);
    assert_int_equal(told.priority, 3);
    assert_int_equal(told.top_logprobs, 2);
    assert_int_equal(told.stop_token_count, 1);
    assert_true(told.prompt_logprobs && told.ignore_eos);
    assert_int_equal(told.sampling.seed, 11); /* choice 0 of the second prompt */

    fill(HEAD ",\"logprobs\":1}", 99, 0, &told);
    assert_false(told.prompt_logprobs);
    assert_int_equal(told.sampling.seed, 99);
    fill(HEAD ",\"echo\":true}", 99, 0, &told);
    assert_false(told.prompt_logprobs);
    assert_int_equal(told.top_logprobs, -1);
}

/* Each choice draws on its own, in the same way every time. */
static void test_seeds_of_choices(void **state) {
    (void)state;
    enum { COUNT = 128 };
    static uint64_t seeds[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        struct engine_request told, again;
        fill(HEAD ",\"n\":128,\"seed\":0}", i, i, &told);
        fill(HEAD ",\"n\":128,\"seed\":0}", i + 1, i, &again);
        assert_true(told.sampling.seed == again.sampling.seed);
        seeds[i] = told.sampling.seed;
        for (size_t j = 0; j < i; j++) assert_true(seeds[i] != seeds[j]);
    }
    assert_true(seeds[0] == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_every_field_arrives),
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_who_decides_the_tier),
        cmocka_unit_test(test_shapes_of_a_prompt),
        cmocka_unit_test(test_silence_about_length_gives_way),
        cmocka_unit_test(test_scoring_takes_the_whole_context),
        cmocka_unit_test(test_what_the_engine_is_told),
        cmocka_unit_test(test_seeds_of_choices),
    };
    return cmocka_run_group_tests(tests, test_api_setup, test_api_teardown);
}

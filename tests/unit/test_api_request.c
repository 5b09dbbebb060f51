/* What POST /v1/completions refuses, and that each refusal names its field. */
#include "test_api.h"

/* `body` is what follows "model" and "prompt", unless it starts with '{' or '!' (the whole
 * body). */
struct refusal {
    const char *body;
    int status;
    const char *param; /* "": none */
};

static const struct refusal refusals[] = {
    /* The body itself */
    {"!", 400, ""},
    {"! ", 400, ""},
    {"!nonsense", 400, ""},
    {"![]", 400, ""},
    {"!\"text\"", 400, ""},
    {"!3", 400, ""},
    {"!null", 400, ""},
    {"!{\"model\":\"fathom-tiny\",\"prompt\":\"a\"} x", 400, ""},
    {"!{\"model\":\"fathom-tiny\",\"prompt\":\"a\",}", 400, ""},
    {"!{\"model\":\"fathom-tiny\",\"prompt\":\"a\"", 400, "prompt"},
    {"\"temperature\":NaN", 400, "temperature"},
    {"\"temperature\":Infinity", 400, "temperature"},
    {"\"temperature\":-Infinity", 400, "temperature"},
    {"\"temperature\":1e999", 400, "temperature"},
    {"\"temperature\":.5", 400, "temperature"},
    {"\"max_tokens\":012", 400, "max_tokens"},
    {"\"user\":\"\\ud800\"", 400, "user"},
    {"\"user\":\"\\udc00\\ud800\"", 400, "user"},
    {"\"user\":\"\xff\"", 400, "user"},
    {"\"user\":\"\xc0\x80\"", 400, "user"},
    {"\"user\":\"\xed\xa0\x80\"", 400, "user"},
    {"\"user\":\"\xf4\x90\x80\x80\"", 400, "user"},
    {"\"user\":\"line\nbreak\"", 400, "user"},
    {"\"n\":1,\"n\":2", 400, "n"},
    {"\"logit_bias\":{\"5\":1,\"5\":2}", 400, "logit_bias"},
    {"\"metadata\":{\"a\":[{\"b\":1,\"b\":2}]}", 400, "metadata"},
    {"\"metadata\":{\"user\":nil}", 400, "metadata"},
    {"\"metadata\":{\"a\":\"]}\\\"\",\"b\":[[1,2],{}]},\"seed\":nil", 400, "seed"},
    {"\"metadata\":{},nil", 400, ""},
    {"\"a b\":nil", 400, ""},
    {"![\"seed\",nil]", 400, ""},
    {"\"a\\u0000b\":1", 400, ""},

    /* model, quality */
    {"{\"prompt\":\"a\"}", 400, "model"},
    {"{\"model\":null,\"prompt\":\"a\"}", 400, "model"},
    {"{\"model\":3,\"prompt\":\"a\"}", 400, "model"},
    {"{\"model\":[\"fathom-tiny\"],\"prompt\":\"a\"}", 400, "model"},
    {"{\"model\":\"\",\"prompt\":\"a\"}", 404, "model"},
    {"{\"model\":\"gpt-4\",\"prompt\":\"a\"}", 404, "model"},
    {"{\"model\":\"Fathom-Tiny\",\"prompt\":\"a\"}", 404, "model"},
    {"{\"model\":\"fathom-tiny2\",\"prompt\":\"a\"}", 404, "model"},
    {"{\"model\":\"fathom-tiny\\u0000\",\"prompt\":\"a\"}", 404, "model"},
    {"{\"model\":\"gpt-4:fast\",\"prompt\":\"a\"}", 404, "model"},
    {"{\"model\":\"fathom-tiny:\",\"prompt\":\"a\"}", 400, "model"},
    {"{\"model\":\"fathom-tiny:bogus\",\"prompt\":\"a\"}", 400, "model"},
    {"{\"model\":\"fathom-tiny:fast:fast\",\"prompt\":\"a\"}", 404, "model"},
    {"{\"model\":\"fathom-tiny:bogus\",\"quality\":\"full\",\"prompt\":\"a\"}", 400, "model"},
    {"\"quality\":\"bogus\"", 400, "quality"},
    {"\"quality\":\"\"", 400, "quality"},
    {"\"quality\":\"Fast\"", 400, "quality"},
    {"\"quality\":\"fast\\u0000\"", 400, "quality"},
    {"\"quality\":3", 400, "quality"},
    {"\"quality\":true", 400, "quality"},
    {"\"quality\":[\"fast\"]", 400, "quality"},

    /* prompt */
    {"{\"model\":\"fathom-tiny\"}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":null}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":3}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":true}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":{}}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[]}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[null]}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[true]}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[{}]}", 400, "prompt"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[[]]}", 400, "prompt[0]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[[1],[]]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[\"a\",1]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[\"a\",null]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[\"a\",[1]]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[[1],\"a\"]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[[1],2]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[1,\"a\"]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[1,[2]]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[1,2,null]}", 400, "prompt[2]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[1,true]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[-1]}", 400, "prompt[0]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[4096]}", 400, "prompt[0]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[1,2.5]}", 400, "prompt[1]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[1e300]}", 400, "prompt[0]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[18446744073709551616]}", 400, "prompt[0]"},
    {"{\"model\":\"fathom-tiny\",\"prompt\":[4294967297]}", 400, "prompt[0]"},

    /* Lengths */
    {"\"max_tokens\":-1", 400, "max_tokens"},
    {"\"max_tokens\":0", 400, "max_tokens"},
    {"\"max_tokens\":0,\"echo\":false", 400, "max_tokens"},
    {"\"max_tokens\":2.5", 400, "max_tokens"},
    {"\"max_tokens\":\"16\"", 400, "max_tokens"},
    {"\"max_tokens\":true", 400, "max_tokens"},
    {"\"max_tokens\":[16]", 400, "max_tokens"},
    {"\"max_tokens\":{}", 400, "max_tokens"},
    {"\"max_tokens\":1e10", 400, "max_tokens"},
    {"\"max_tokens\":1e300", 400, "max_tokens"},
    {"\"max_tokens\":99999999999999999999999999", 400, "max_tokens"},
    {"\"max_tokens\":-99999999999999999999999999", 400, "max_tokens"},
    {"\"max_completion_tokens\":-1", 400, "max_completion_tokens"},
    {"\"max_completion_tokens\":0", 400, "max_completion_tokens"},
    {"\"max_completion_tokens\":\"1\"", 400, "max_completion_tokens"},
    {"\"max_tokens\":3,\"max_completion_tokens\":4", 400, "max_completion_tokens"},
    {"\"min_tokens\":-1", 400, "min_tokens"},
    {"\"min_tokens\":17", 400, "min_tokens"},
    {"\"min_tokens\":5,\"max_tokens\":4", 400, "min_tokens"},
    {"\"min_tokens\":\"5\"", 400, "min_tokens"},
    {"\"min_tokens\":0.5", 400, "min_tokens"},
    {"\"ignore_eos\":1", 400, "ignore_eos"},
    {"\"ignore_eos\":\"true\"", 400, "ignore_eos"},
    {"\"ignore_eos\":[]", 400, "ignore_eos"},

    /* Counts */
    {"\"n\":0", 400, "n"},
    {"\"n\":-1", 400, "n"},
    {"\"n\":129", 400, "n"},
    {"\"n\":1.5", 400, "n"},
    {"\"n\":\"1\"", 400, "n"},
    {"\"n\":true", 400, "n"},
    {"\"n\":4294967297", 400, "n"},
    {"\"best_of\":2", 400, "best_of"},
    {"\"best_of\":0", 400, "best_of"},
    {"\"best_of\":1,\"n\":2", 400, "best_of"},
    {"\"best_of\":\"1\"", 400, "best_of"},
    {"\"priority\":\"high\"", 400, "priority"},
    {"\"priority\":0.5", 400, "priority"},
    {"\"priority\":2147483648", 400, "priority"},
    {"\"priority\":-2147483649", 400, "priority"},

    /* Sampling */
    {"\"temperature\":-0.1", 400, "temperature"},
    {"\"temperature\":2.1", 400, "temperature"},
    {"\"temperature\":1e308", 400, "temperature"},
    {"\"temperature\":\"1\"", 400, "temperature"},
    {"\"temperature\":true", 400, "temperature"},
    {"\"temperature\":{}", 400, "temperature"},
    {"\"temperature\":[1]", 400, "temperature"},
    {"\"temperature\":18446744073709551616", 400, "temperature"},
    {"\"top_p\":0", 400, "top_p"},
    {"\"top_p\":-0.0", 400, "top_p"},
    {"\"top_p\":-1", 400, "top_p"},
    {"\"top_p\":1.01", 400, "top_p"},
    {"\"top_p\":\"0.5\"", 400, "top_p"},
    {"\"top_p\":false", 400, "top_p"},
    {"\"top_k\":-1", 400, "top_k"},
    {"\"top_k\":1.5", 400, "top_k"},
    {"\"top_k\":\"5\"", 400, "top_k"},
    {"\"top_k\":2147483648", 400, "top_k"},
    {"\"min_p\":-0.01", 400, "min_p"},
    {"\"min_p\":1.01", 400, "min_p"},
    {"\"min_p\":\"0\"", 400, "min_p"},
    {"\"presence_penalty\":-2.01", 400, "presence_penalty"},
    {"\"presence_penalty\":2.01", 400, "presence_penalty"},
    {"\"presence_penalty\":\"0\"", 400, "presence_penalty"},
    {"\"frequency_penalty\":-2.01", 400, "frequency_penalty"},
    {"\"frequency_penalty\":2.01", 400, "frequency_penalty"},
    {"\"frequency_penalty\":[]", 400, "frequency_penalty"},
    {"\"repetition_penalty\":0", 400, "repetition_penalty"},
    {"\"repetition_penalty\":-1", 400, "repetition_penalty"},
    {"\"repetition_penalty\":2.01", 400, "repetition_penalty"},
    {"\"repetition_penalty\":\"1\"", 400, "repetition_penalty"},
    {"\"seed\":1.5", 400, "seed"},
    {"\"seed\":\"1\"", 400, "seed"},
    {"\"seed\":true", 400, "seed"},
    {"\"seed\":9223372036854775808", 400, "seed"},
    {"\"seed\":1e19", 400, "seed"},
    {"\"seed\":[1]", 400, "seed"},

    /* logit_bias */
    {"\"logit_bias\":[]", 400, "logit_bias"},
    {"\"logit_bias\":5", 400, "logit_bias"},
    {"\"logit_bias\":\"5\"", 400, "logit_bias"},
    {"\"logit_bias\":{\"\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"a\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"-1\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"+1\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"05\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\" 5\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"5 \":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"5.0\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"4096\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"99999999999999999999999999\":1}", 400, "logit_bias"},
    {"\"logit_bias\":{\"5\":100.5}", 400, "logit_bias"},
    {"\"logit_bias\":{\"5\":-100.5}", 400, "logit_bias"},
    {"\"logit_bias\":{\"5\":\"1\"}", 400, "logit_bias"},
    {"\"logit_bias\":{\"5\":null}", 400, "logit_bias"},
    {"\"logit_bias\":{\"5\":true}", 400, "logit_bias"},

    /* stop, stop_token_ids */
    {"\"stop\":\"\"", 400, "stop"},
    {"\"stop\":3", 400, "stop"},
    {"\"stop\":true", 400, "stop"},
    {"\"stop\":{}", 400, "stop"},
    {"\"stop\":[\"\"]", 400, "stop[0]"},
    {"\"stop\":[\"a\",\"\"]", 400, "stop[1]"},
    {"\"stop\":[\"a\",3]", 400, "stop[1]"},
    {"\"stop\":[\"a\",null]", 400, "stop[1]"},
    {"\"stop\":[[\"a\"]]", 400, "stop[0]"},
    {"\"stop\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", 400, "stop"},
    {"\"stop_token_ids\":5", 400, "stop_token_ids"},
    {"\"stop_token_ids\":\"5\"", 400, "stop_token_ids"},
    {"\"stop_token_ids\":[\"5\"]", 400, "stop_token_ids[0]"},
    {"\"stop_token_ids\":[5,-1]", 400, "stop_token_ids[1]"},
    {"\"stop_token_ids\":[4096]", 400, "stop_token_ids[0]"},
    {"\"stop_token_ids\":[1.5]", 400, "stop_token_ids[0]"},
    {"\"stop_token_ids\":[null]", 400, "stop_token_ids[0]"},

    /* What comes back */
    {"\"logprobs\":-1", 400, "logprobs"},
    {"\"logprobs\":21", 400, "logprobs"},
    {"\"logprobs\":true", 400, "logprobs"},
    {"\"logprobs\":\"1\"", 400, "logprobs"},
    {"\"logprobs\":1.5", 400, "logprobs"},
    {"\"echo\":1", 400, "echo"},
    {"\"echo\":\"yes\"", 400, "echo"},
    {"\"return_depth\":1", 400, "return_depth"},
    {"\"return_depth\":\"true\"", 400, "return_depth"},
    {"\"cache_salt\":7", 400, "cache_salt"},
    {"\"cache_salt\":\"\"", 400, "cache_salt"},
    {"\"cache_salt\":\"a\\u0000b\"", 400, "cache_salt"},
    {"\"stream\":1", 400, "stream"},
    {"\"stream\":\"true\"", 400, "stream"},
    {"\"stream\":[]", 400, "stream"},
    {"\"stream_options\":{}", 400, "stream_options"},
    {"\"stream_options\":{\"include_usage\":true}", 400, "stream_options"},
    {"\"stream\":false,\"stream_options\":{\"include_usage\":true}", 400, "stream_options"},
    {"\"stream\":true,\"stream_options\":true", 400, "stream_options"},
    {"\"stream\":true,\"stream_options\":[]", 400, "stream_options"},
    {"\"stream\":true,\"stream_options\":{\"include_usage\":1}", 400,
     "stream_options.include_usage"},
    {"\"stream\":true,\"stream_options\":{\"continuous_usage_stats\":\"no\"}", 400,
     "stream_options.continuous_usage_stats"},

    /* Known, and not supported */
    {"\"suffix\":\"x\"", 400, "suffix"},
    {"\"suffix\":3", 400, "suffix"},
    {"\"tools\":[{}]", 400, "tools"},
    {"\"tool_choice\":\"auto\"", 400, "tool_choice"},
    {"\"tool_choice\":\"none\\u0000\"", 400, "tool_choice"},
    {"\"functions\":[{}]", 400, "functions"},
    {"\"function_call\":\"auto\"", 400, "function_call"},
    {"\"response_format\":{\"type\":\"json_object\"}", 400, "response_format"},
    {"\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}", 400, "response_format"},
    {"\"response_format\":{}", 400, "response_format"},
    {"\"response_format\":\"text\"", 400, "response_format"},
    {"\"response_format\":{\"type\":3}", 400, "response_format"},
    {"\"response_format\":{\"type\":\"text\\u0000\"}", 400, "response_format"},
    {"\"audio\":{}", 400, "audio"},
    {"\"modalities\":[\"audio\"]", 400, "modalities"},
    {"\"prediction\":{}", 400, "prediction"},
    {"\"guided_json\":{}", 400, "guided_json"},
    {"\"guided_regex\":\"a*\"", 400, "guided_regex"},
    {"\"guided_choice\":[\"a\"]", 400, "guided_choice"},
    {"\"guided_grammar\":\"x\"", 400, "guided_grammar"},
    {"\"structured_outputs\":{}", 400, "structured_outputs"},
    {"\"prompt_logprobs\":1", 400, "prompt_logprobs"},
    {"\"truncate_prompt_tokens\":5", 400, "truncate_prompt_tokens"},
    {"\"allowed_token_ids\":[1]", 400, "allowed_token_ids"},
    {"\"bad_words\":[\"x\"]", 400, "bad_words"},
    {"\"include_stop_str_in_output\":true", 400, "include_stop_str_in_output"},
    {"\"skip_special_tokens\":false", 400, "skip_special_tokens"},
    {"\"use_beam_search\":true", 400, "use_beam_search"},
    {"\"length_penalty\":0.5", 400, "length_penalty"},
};

static char *whole_body(const char *body) {
    static char whole[4096];
    if (*body == '!') {
        snprintf(whole, sizeof whole, "%s", body + 1);
    } else if (*body == '{') {
        snprintf(whole, sizeof whole, "%s", body);
    } else {
        snprintf(whole, sizeof whole,
                 "{\"model\":\"fathom-tiny\",\"prompt\":\"Once upon a time\",%s}", body);
    }
    return whole;
}

static void check_error(const struct api_error *error, const char *body, int status,
                        const char *param) {
    if (error->status != status || strcmp(error->param, param) != 0) {
        print_error("%s: %d '%s': %s\n", body, error->status, error->param, error->message);
    }
    assert_int_equal(error->status, status);
    assert_string_equal(error->param, param);
    assert_non_null(strstr(error->message, param)); /* a person reads the message, not param */
    assert_true(strlen(error->message) > 10);
    assert_string_equal(error->type, "invalid_request_error");
}

static void test_refusals(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct completion_request request;
        struct api_error error = {0};
        const char *body = whole_body(refusals[i].body);
        if (completion_request_parse(&test_context, body, strlen(body), NULL, &request, &error) ==
            0) {
            fail_msg("accepted: %s", body);
        }
        check_error(&error, body, refusals[i].status, refusals[i].param);
    }
}

/* Any field may be null: it is then absent, never a type error. */
static void test_null_is_absent(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        char name[64], body[256];
        if (refusals[i].body[0] != '"' || refusals[i].param[0] == '\0') continue;
        snprintf(name, sizeof name, "%s", refusals[i].param);
        name[strcspn(name, ".[")] = '\0';
        snprintf(body, sizeof body, "{\"model\":\"fathom-tiny\",\"prompt\":\"a\",\"%s\":null}",
                 name);
        struct completion_request request;
        test_request(body, &request);
        assert_int_equal(request.max_tokens, MAX_TOKENS_DEFAULT);
        assert_int_equal(request.top_logprobs, -1);
        assert_int_equal(request.choices_per_prompt, 1);
        assert_float_equal(request.sampling.temperature, 1, 0);
        assert_float_equal(request.sampling.top_p, 1, 0);
        assert_float_equal(request.sampling.repetition_penalty, 1, 0);
        assert_false(request.has_seed || request.has_max_tokens || request.stream || request.echo);
        assert_int_equal(request.stop_count + request.stop_token_count, 0);
        completion_request_free(&request);
    }
}

static void refuse(const char *body, const char *header, const char *param, const char *says) {
    struct completion_request request;
    struct api_error error = {0};
    int result =
        completion_request_parse(&test_context, body, strlen(body), header, &request, &error);
    if (result == 0) {
        result = completion_request_tokenize(&test_context, &request, NULL, &error);
        completion_request_free(&request);
    }
    assert_int_not_equal(result, 0);
    check_error(&error, body, 400, param);
    if (!strstr(error.message, says)) print_error("%s\n", error.message);
    assert_non_null(strstr(error.message, says));
}

static void test_unknown_tiers_are_answered_with_the_known(void **state) {
    (void)state;
    const char *names = "full, high, balanced, fast, auto";
    refuse("{\"model\":\"fathom-tiny\",\"prompt\":\"a\",\"quality\":\"best\"}", NULL, "quality",
           names);
    refuse("{\"model\":\"fathom-tiny\",\"prompt\":\"a\"}", "best", "X-Quality", names);
    refuse("{\"model\":\"fathom-tiny:best\",\"prompt\":\"a\"}", NULL, "model", names);
}

/* Builds {"model":...,"FIELD":BEFORE ITEM,ITEM,... AFTER} with `count` items. */
static char *repeat(const char *before, const char *item, size_t count, const char *after) {
    struct text_buffer body = {0};
    text_append_string(&body, before);
    for (size_t i = 0; i < count; i++) {
        if (i > 0) text_append_string(&body, ",");
        text_append_string(&body, item);
    }
    text_append(&body, after, strlen(after) + 1);
    assert_false(body.failed);
    return body.data;
}

static void test_counts_have_limits(void **state) {
    (void)state;
    static const struct {
        const char *before, *item, *after;
        size_t limit;
        const char *param, *says;
    } cases[] = {
        {"{\"model\":\"fathom-tiny\",\"prompt\":[", "\"a\"", "]}", PROMPTS_MAX, "prompt", "256"},
        {"{\"model\":\"fathom-tiny\",\"prompt\":[", "[1]", "]}", PROMPTS_MAX, "prompt", "256"},
        {"{\"model\":\"fathom-tiny\",\"prompt\":\"a\",\"stop\":[", "\"x\"", "]}", STOPS_MAX, "stop",
         "16"},
        {"{\"model\":\"fathom-tiny\",\"prompt\":\"a\",\"stop_token_ids\":[", "7", "]}",
         STOP_TOKENS_MAX, "stop_token_ids", "64"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct completion_request request;
        char *body = repeat(cases[i].before, cases[i].item, cases[i].limit, cases[i].after);
        test_request(body, &request);
        completion_request_free(&request);
        free(body);
        body = repeat(cases[i].before, cases[i].item, cases[i].limit + 1, cases[i].after);
        refuse(body, NULL, cases[i].param, cases[i].says);
        free(body);
    }
}

static void test_logit_bias_has_a_limit(void **state) {
    (void)state;
    for (size_t count = LOGIT_BIAS_MAX; count <= LOGIT_BIAS_MAX + 1; count++) {
        struct text_buffer body = {0};
        text_append_string(&body,
                           "{\"model\":\"fathom-tiny\",\"prompt\":\"a\",\"logit_bias\":{\"0\":1");
        for (size_t i = 1; i < count; i++) text_append_format(&body, ",\"%zu\":-100", i);
        text_append(&body, "}}", 3);
        if (count == LOGIT_BIAS_MAX) {
            struct completion_request request;
            test_request(body.data, &request);
            assert_int_equal(request.sampling.bias_count, LOGIT_BIAS_MAX);
            completion_request_free(&request);
        } else {
            refuse(body.data, NULL, "logit_bias", "1024");
        }
        text_free(&body);
    }
}

static void test_stop_strings_have_a_length(void **state) {
    (void)state;
    char stop[STOP_BYTES_MAX + 2], body[STOP_BYTES_MAX + 100];
    struct completion_request request;
    memset(stop, 'x', sizeof stop);
    stop[STOP_BYTES_MAX] = '\0';
    const char *format = "{\"model\":\"fathom-tiny\",\"prompt\":\"a\",\"stop\":[\"%s\"]}";
    snprintf(body, sizeof body, format, stop);
    test_request(body, &request);
    assert_int_equal(request.stops[0].length, STOP_BYTES_MAX);
    completion_request_free(&request);
    stop[STOP_BYTES_MAX] = 'x', stop[STOP_BYTES_MAX + 1] = '\0';
    snprintf(body, sizeof body, format, stop);
    refuse(body, NULL, "stop[0]", "1024");
}

static void test_nesting_is_bounded(void **state) {
    (void)state;
    for (int depth = JSON_DEPTH_MAX - 1; depth <= JSON_DEPTH_MAX; depth++) {
        struct text_buffer body = {0};
        /* A bracket in a string is no bracket, and an escaped quote no end of the string. */
        text_append_string(&body, "{\"model\":\"fathom-tiny\",\"prompt\":\"[[[\\\"[[[\",\"user\":");
        for (int i = 0; i < depth; i++) text_append_string(&body, "[");
        for (int i = 0; i < depth; i++) text_append_string(&body, "]");
        text_append(&body, "}", 2);
        if (depth < JSON_DEPTH_MAX) {
            struct completion_request request;
            test_request(body.data, &request);
            completion_request_free(&request);
        } else {
            refuse(body.data, NULL, "", "64");
        }
        text_free(&body);
    }
    char *bomb =
        repeat("{\"model\":\"fathom-tiny\",\"prompt\":\"a\",\"user\":[", "[]", 70000, "]}");
    refuse(bomb, NULL, "", "arrays and objects");
    free(bomb);
}

static void test_lengths_are_checked_with_the_numbers(void **state) {
    (void)state;
    char *ids = repeat("{\"model\":\"fathom-tiny\",\"prompt\":[", "9", TEST_CONTEXT, "]}");
    refuse(ids, NULL, "prompt", "holds 64 tokens");
    refuse(ids, NULL, "prompt", "asks for 65");
    free(ids);
    ids = repeat("{\"model\":\"fathom-tiny\",\"prompt\":[", "9", 60, "],\"max_tokens\":5}");
    refuse(ids, NULL, "max_tokens", "asks for 65: 60 in prompt and 5");
    free(ids);
    ids = repeat("{\"model\":\"fathom-tiny\",\"prompt\":[[1],[", "9", 65,
                 "]],\"max_tokens\":0,\"echo\":true}");
    refuse(ids, NULL, "prompt[1]", "65 in prompt[1]");
    free(ids);
    refuse("{\"model\":\"fathom-tiny\",\"prompt\":[1],\"max_tokens\":2147483647}", NULL,
           "max_tokens", "2147483648");

    struct completion_request request;
    struct api_error error = {0};
    const char *body = "{\"model\":\"fathom-tiny\",\"prompt\":[1,2,3],\"max_tokens\":30}";
    struct api_context small = test_context;
    small.max_sequence = 32;
    assert_int_equal(completion_request_parse(&small, body, strlen(body), NULL, &request, &error),
                     0);
    assert_int_not_equal(completion_request_tokenize(&small, &request, NULL, &error), 0);
    assert_int_equal(error.status, 400);
    assert_string_equal(error.code, "kv_budget_exceeded");
    assert_non_null(strstr(error.message, "32"));
    completion_request_free(&request);
}

static void test_choices_are_bounded_by_the_queue(void **state) {
    (void)state;
    char *body = repeat("{\"model\":\"fathom-tiny\",\"prompt\":[", "\"a\"", 9, "],\"n\":128}");
    refuse(body, NULL, "n", "1152");
    free(body);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_null_is_absent),
        cmocka_unit_test(test_unknown_tiers_are_answered_with_the_known),
        cmocka_unit_test(test_counts_have_limits),
        cmocka_unit_test(test_logit_bias_has_a_limit),
        cmocka_unit_test(test_stop_strings_have_a_length),
        cmocka_unit_test(test_nesting_is_bounded),
        cmocka_unit_test(test_lengths_are_checked_with_the_numbers),
        cmocka_unit_test(test_choices_are_bounded_by_the_queue),
    };
    return cmocka_run_group_tests(tests, test_api_setup, test_api_teardown);
}

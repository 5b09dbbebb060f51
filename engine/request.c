#include "engine/request.h"

#include <inttypes.h>
#include <stdlib.h>

static int check_lengths(const struct engine_request *request, const struct request_limits *limits,
                         struct error *error);
static int check_tokens(const char *field, const int32_t *tokens, size_t count, size_t vocab,
                        struct error *error);
static int check_sampling(const struct sampling *sampling, size_t vocab, struct error *error);

int request_check(const struct engine_request *request, const struct request_limits *limits,
                  struct error *error) {
    size_t vocab = limits->vocab;
    int result = check_lengths(request, limits, error);
    if (result != 0) return result;
    result = check_tokens("prompt", request->prompt, request->prompt_length, vocab, error);
    if (result != 0) return result;
    if (request->stop_token_count > STOP_TOKENS_MAX) {
        return error_set(error, FATHOM_INVALID, "stop_token_count is %zu; the limit is %d",
                         request->stop_token_count, STOP_TOKENS_MAX);
    }
    result = check_tokens("stop_tokens", request->stop_tokens, request->stop_token_count, vocab,
                          error);
    if (result != 0) return result;
    if (request->tier < 0 || (size_t)request->tier >= limits->tiers) {
        return error_set(error, FATHOM_INVALID, "tier is %" PRId32 "; the model has %zu, from 0",
                         request->tier, limits->tiers);
    }
    if (request->top_logprobs < -1 || request->top_logprobs > TOP_LOGPROBS_MAX) {
        return error_set(error, FATHOM_INVALID, "top_logprobs is %" PRId32 "; it must be -1..%d",
                         request->top_logprobs, TOP_LOGPROBS_MAX);
    }
    if (request->prompt_logprobs && request->top_logprobs < 0) {
        return error_set(error, FATHOM_INVALID, "prompt_logprobs needs top_logprobs of at least 0");
    }
    if (request->cache_salt_length > 0 && !request->cache_salt) {
        return error_set(error, FATHOM_INVALID, "cache_salt is NULL; its length is %zu",
                         request->cache_salt_length);
    }
    return check_sampling(&request->sampling, vocab, error);
}

static int check_lengths(const struct engine_request *request, const struct request_limits *limits,
                         struct error *error) {
    size_t prompt = request->prompt_length, generated = request->max_tokens;
    if (prompt == 0 || prompt > limits->context) {
        return error_set(error, FATHOM_INVALID, "the prompt has %zu tokens; it must have 1 to %zu",
                         prompt, limits->context);
    }
    if (generated > limits->context - prompt) {
        return error_set(error, FATHOM_INVALID,
                         "max_tokens is %zu; after a prompt of %zu the context of %zu leaves %zu",
                         generated, prompt, limits->context, limits->context - prompt);
    }
    if (request->min_tokens > generated) {
        return error_set(error, FATHOM_INVALID, "min_tokens is %zu; max_tokens is only %zu",
                         request->min_tokens, generated);
    }
    if (prompt + generated > limits->kv_tokens) {
        return error_set(error, FATHOM_TOO_LARGE,
                         "max_tokens is %zu; with a prompt of %zu it can never fit the KV budget "
                         "of %zu tokens", generated, prompt, limits->kv_tokens);
    }
    return 0;
}

static int check_tokens(const char *field, const int32_t *tokens, size_t count, size_t vocab,
                        struct error *error) {
    if (count > 0 && !tokens) {
        return error_set(error, FATHOM_INVALID, "%s is NULL; its count is %zu", field, count);
    }
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (size_t)tokens[i] >= vocab) {
            return error_set(error, FATHOM_INVALID, "%s[%zu] is %" PRId32 "; tokens are 0..%zu",
                             field, i, tokens[i], vocab - 1);
        }
    }
    return 0;
}

static int check_bias(const struct sampling *sampling, size_t vocab, struct error *error) {
    if (sampling->bias_count > LOGIT_BIAS_MAX) {
        return error_set(error, FATHOM_INVALID, "bias_count is %zu; the limit is %d",
                         sampling->bias_count, LOGIT_BIAS_MAX);
    }
    if (sampling->bias_count > 0 && !sampling->bias) {
        return error_set(error, FATHOM_INVALID, "bias is NULL; its count is %zu",
                         sampling->bias_count);
    }
    for (size_t i = 0; i < sampling->bias_count; i++) {
        int32_t token = sampling->bias[i].token;
        float bias = sampling->bias[i].bias;
        if (token < 0 || (size_t)token >= vocab) {
            return error_set(error, FATHOM_INVALID,
                             "bias[%zu].token is %" PRId32 "; tokens are 0..%zu", i, token,
                             vocab - 1);
        }
        if (!(bias >= -100 && bias <= 100)) { /* this way round, NaN is refused too */
            return error_set(error, FATHOM_INVALID, "bias[%zu].bias is %g; it must be -100..100", i,
                             (double)bias);
        }
    }
    return 0;
}

static int check_sampling(const struct sampling *sampling, size_t vocab, struct error *error) {
    const struct {
        const char *field;
        float value, low, high;
        bool low_excluded;
    } ranges[] = {
        {"temperature", sampling->temperature, 0, 2, false},
        {"top_p", sampling->top_p, 0, 1, true},
        {"min_p", sampling->min_p, 0, 1, false},
        {"presence_penalty", sampling->presence_penalty, -2, 2, false},
        {"frequency_penalty", sampling->frequency_penalty, -2, 2, false},
        {"repetition_penalty", sampling->repetition_penalty, 0, 2, true},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        float value = ranges[i].value, low = ranges[i].low, high = ranges[i].high;
        bool excluded = ranges[i].low_excluded;
        if (value >= low && value <= high && !(excluded && value == low)) continue; /* NaN fails */
        return error_set(error, FATHOM_INVALID, "%s is %g; it must be %s%g..%g", ranges[i].field,
                         (double)value, excluded ? "above " : "", (double)low, (double)high);
    }
    if (sampling->top_k < 0) {
        return error_set(error, FATHOM_INVALID, "top_k is %" PRId32 "; it must be 0 (off) or more",
                         sampling->top_k);
    }
    return check_bias(sampling, vocab, error);
}

/* A POST /v1/completions or /v1/chat/completions body -> struct completion_request. One function
 * per group of fields, in the order of the table in which the API is documented. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "api/chat.h"
#include "api/prompt.h"
#include "api/served_model.h"
#include "api/stop.h"
#include "api/unsupported.h"

static int read_model_and_tier(const struct api_context *context, const json_t *body,
                               const char *quality_header, struct completion_request *request,
                               struct api_error *error);
static int read_lengths(const json_t *body, struct completion_request *request,
                        struct api_error *error);
static int read_counts(const struct api_context *context, const json_t *body,
                       struct completion_request *request, struct api_error *error);
static int read_sampling(const json_t *body, struct completion_request *request,
                         struct api_error *error);
static int read_logit_bias(const json_t *body, size_t vocab, struct completion_request *request,
                           struct api_error *error);
static int read_stops(const json_t *body, struct completion_request *request,
                      struct api_error *error);
static int read_stop_tokens(const json_t *body, size_t vocab, struct completion_request *request,
                            struct api_error *error);
static int read_output(const json_t *body, struct completion_request *request,
                       struct api_error *error);
static int read_logprobs(const json_t *body, struct completion_request *request,
                         struct api_error *error);
static int read_chat_logprobs(const json_t *body, struct completion_request *request,
                              struct api_error *error);
static int read_stream(const json_t *body, struct completion_request *request,
                       struct api_error *error);

static int read_body(const struct api_context *context, const json_t *body,
                     const char *quality_header, struct completion_request *request,
                     struct api_error *error) {
    size_t vocab = context->model->vocab;
    bool is_chat = request->is_chat;
    int result = unsupported_refuse(body, is_chat, error);
    if (!result) {
        result = read_model_and_tier(context, body, quality_header, request, error);
    }
    if (!result) result = (is_chat ? read_chat_logprobs : read_logprobs)(body, request, error);
    if (!result) result = read_output(body, request, error);
    if (!result) result = read_lengths(body, request, error);
    if (!result) result = (is_chat ? messages_read : prompts_read)(context, body, request, error);
    if (!result) result = read_counts(context, body, request, error);
    if (!result) result = read_sampling(body, request, error);
    if (!result) result = read_logit_bias(body, vocab, request, error);
    if (!result) result = read_stops(body, request, error);
    if (!result) result = read_stop_tokens(body, vocab, request, error);
    if (!result) result = read_stream(body, request, error);
    return result;
}

static int parse(const struct api_context *context, const char *body, size_t length,
                 const char *quality_header, struct completion_request *request,
                 struct api_error *error) {
    json_t *object;
    int result = body_parse(body, length, &object, error);
    if (result != 0) return result;
    result = read_body(context, object, quality_header, request, error);
    json_decref(object);
    if (result != 0) completion_request_free(request);
    return result;
}

static const struct completion_request defaults = {
    .choices_per_prompt = 1,
    .max_tokens = MAX_TOKENS_DEFAULT,
    .top_logprobs = -1,
    .sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
};

int completion_request_parse(const struct api_context *context, const char *body, size_t length,
                             const char *quality_header, struct completion_request *request,
                             struct api_error *error) {
    *request = defaults;
    return parse(context, body, length, quality_header, request, error);
}

/* Of a chat, the default length is the rest of the context: more than any context has. */
int chat_request_parse(const struct api_context *context, const char *body, size_t length,
                       const char *quality_header, struct completion_request *request,
                       struct api_error *error) {
    *request = defaults;
    request->is_chat = true;
    request->max_tokens = INT32_MAX;
    return parse(context, body, length, quality_header, request, error);
}

void completion_request_free(struct completion_request *request) {
    for (size_t i = 0; i < request->prompt_count; i++) prompt_free(&request->prompts[i]);
    for (size_t i = 0; i < request->stop_count; i++) stop_string_free(&request->stops[i]);
    free(request->prompts);
    free(request->bias);
    free(request->cache_salt);
    *request = (struct completion_request){0};
}

/* The most specific voice wins: body, header, model suffix, default. */
static int read_model_and_tier(const struct api_context *context, const json_t *body,
                               const char *quality_header, struct completion_request *request,
                               struct api_error *error) {
    const json_t *model = field_get(body, "model"), *quality = field_get(body, "quality");
    if (!json_is_string(model)) {
        return field_refuse("model", model, error, "a string, '%s'", context->served_name);
    }
    request->tier = context->default_tier;
    int result = served_model_find(context, json_string_value(model), json_string_length(model),
                                   &request->tier, error);
    if (result != 0) return result;
    const char *suffix = json_string_value(model) + strlen(context->served_name);
    request->tier_is_auto = *suffix ? strcmp(suffix, ":auto") == 0 : context->default_is_auto;
    const char *name = quality ? json_string_value(quality) : quality_header;
    const char *param = quality ? "quality" : "X-Quality";
    if (quality && !name) {
        return field_refuse(param, quality, error, "the name of a tier, or \"auto\"");
    }
    if (!name || (!quality && !*name)) return 0;
    int found = tier_find(context, name, quality ? json_string_length(quality) : strlen(name));
    if (found < 0) return tier_refuse(context, param, name, error);
    request->tier = (size_t)found;
    request->tier_is_auto = strcmp(name, "auto") == 0;
    return 0;
}

/* Some clients send both names of max_tokens, meaning one thing. */
static int read_max_tokens(const json_t *body, struct completion_request *request,
                           struct api_error *error) {
    static const char *const names[] = {"max_tokens", "max_completion_tokens"};
    for (size_t i = 0; i < 2; i++) {
        int64_t value = -1;
        int64_t least = request->is_chat ? 1 : 0;
        int result = field_read_integer(body, names[i], least, INT32_MAX, &value, error);
        if (result != 0) return result;
        if (value < 0) continue;
        if (request->has_max_tokens && (size_t)value != request->max_tokens) {
            return api_error_set(error, 400, NULL, names[i],
                                 "max_completion_tokens and max_tokens differ; give one of them");
        }
        if (value == 0 && !request->echo) {
            return api_error_set(error, 400, NULL, names[i],
                                 "%s may be 0 only with echo: else there is nothing to answer",
                                 names[i]);
        }
        request->has_max_tokens = true;
        request->max_tokens = (size_t)value;
    }
    return 0;
}

static int read_lengths(const json_t *body, struct completion_request *request,
                        struct api_error *error) {
    int64_t min_tokens = 0;
    int result = read_max_tokens(body, request, error);
    if (!result) result = field_read_integer(body, "min_tokens", 0, INT32_MAX, &min_tokens, error);
    if (!result) result = field_read_bool(body, "ignore_eos", &request->ignore_eos, error);
    if (result != 0) return result;
    request->min_tokens = (size_t)min_tokens;
    if (request->min_tokens > request->max_tokens) {
        return api_error_set(error, 400, NULL, "min_tokens",
                             "min_tokens is %zu, more than max_tokens, which is %zu",
                             request->min_tokens, request->max_tokens);
    }
    return 0;
}

static int read_counts(const struct api_context *context, const json_t *body,
                       struct completion_request *request, struct api_error *error) {
    int64_t n = 1, priority = 0;
    int result = field_read_integer(body, "n", 1, CHOICES_MAX, &n, error);
    int64_t best_of = n;
    if (!result && !request->is_chat) {
        result = field_read_integer(body, "best_of", 1, CHOICES_MAX, &best_of, error);
    }
    if (!result) {
        result = field_read_integer(body, "priority", INT32_MIN, INT32_MAX, &priority, error);
    }
    if (result != 0) return result;
    if (best_of != n) {
        return api_error_set(error, 400, "unsupported_parameter", "best_of",
                             "best_of must equal n, which is %d: choices are not ranked here",
                             (int)n);
    }
    size_t choices = request->prompt_count * (size_t)n;
    if (context->max_choices > 0 && choices > context->max_choices) {
        return api_error_set(error, 400, NULL, n > 1 ? "n" : "prompt",
                             "prompt x n makes %zu choices; one request may have %zu", choices,
                             context->max_choices);
    }
    request->choices_per_prompt = (size_t)n;
    request->priority = (int32_t)priority;
    return 0;
}

static const struct {
    const char *name;
    double low, high;
    bool open_low;
    size_t offset; /* of a float in struct sampling */
} sampling_fields[] = {
    {"temperature", 0, 2, false, offsetof(struct sampling, temperature)},
    {"top_p", 0, 1, true, offsetof(struct sampling, top_p)},
    {"min_p", 0, 1, false, offsetof(struct sampling, min_p)},
    {"presence_penalty", -2, 2, false, offsetof(struct sampling, presence_penalty)},
    {"frequency_penalty", -2, 2, false, offsetof(struct sampling, frequency_penalty)},
    {"repetition_penalty", 0, 2, true, offsetof(struct sampling, repetition_penalty)},
};

static int read_sampling(const json_t *body, struct completion_request *request,
                         struct api_error *error) {
    struct sampling *sampling = &request->sampling;
    for (size_t i = 0; i < sizeof sampling_fields / sizeof *sampling_fields; i++) {
        double value = NAN;
        bool open_low = sampling_fields[i].open_low;
        int result = field_read_number(body, sampling_fields[i].name, sampling_fields[i].low,
                                       sampling_fields[i].high, open_low, &value, error);
        if (result != 0) return result;
        if (isnan(value)) continue;
        /* What is above 0 as a double must not become 0 as a float. */
        float *field = (float *)((char *)sampling + sampling_fields[i].offset);
        *field = open_low ? fmaxf((float)value, FLT_MIN) : (float)value;
    }
    int64_t top_k = 0, seed = 0;
    int result = field_read_integer(body, "top_k", 0, INT32_MAX, &top_k, error);
    if (!result) result = field_read_integer(body, "seed", INT64_MIN, INT64_MAX, &seed, error);
    if (result != 0) return result;
    sampling->top_k = (int32_t)top_k;
    request->has_seed = field_get(body, "seed") != NULL;
    sampling->seed = (uint64_t)seed;
    return 0;
}

/* Keys are ids as JSON writes integers, so that one token cannot be given twice in two
 * spellings. */
static bool parse_token_key(const char *key, size_t vocab, int32_t *token) {
    size_t value = 0;
    if (*key == '\0' || (key[0] == '0' && key[1] != '\0')) return false;
    for (; *key; key++) {
        if (*key < '0' || *key > '9') return false;
        value = value * 10 + (size_t)(*key - '0');
        if (value >= vocab) return false;
    }
    *token = (int32_t)value;
    return true;
}

static int read_logit_bias(const json_t *body, size_t vocab, struct completion_request *request,
                           struct api_error *error) {
    static const char name[] = "logit_bias";
    const json_t *object = field_get(body, name);
    const char *key;
    json_t *value;
    if (!object) return 0;
    if (!json_is_object(object)) return field_refuse(name, object, error, "an object of token ids");
    size_t count = json_object_size(object);
    if (count > LOGIT_BIAS_MAX) {
        return api_error_set(error, 400, NULL, name, "logit_bias has %zu entries; the limit is %d",
                             count, LOGIT_BIAS_MAX);
    }
    request->bias = calloc(count + 1, sizeof *request->bias);
    if (!request->bias) return refuse_no_memory(error);
    request->sampling.bias = request->bias;
    json_object_foreach((json_t *)object, key, value) {
        struct logit_bias *entry = &request->bias[request->sampling.bias_count++];
        double bias = json_number_value(value);
        if (!parse_token_key(key, vocab, &entry->token)) {
            return api_error_set(
                error, 400, NULL, name,
                "logit_bias has the key '%.32s'; a key must be a token id from 0 to %zu", key,
                vocab - 1);
        }
        if (!json_is_number(value) || !(bias >= -100 && bias <= 100)) {
            return field_refuse(name, value, error, "a number from -100 to 100 for token %s", key);
        }
        entry->bias = (float)bias;
    }
    return 0;
}

static int read_stop(const json_t *value, const char *name, struct completion_request *request,
                     struct api_error *error) {
    size_t length = json_string_length(value);
    if (!json_is_string(value) || length == 0 || length > STOP_BYTES_MAX) {
        if (!json_is_string(value)) return field_refuse(name, value, error, "a string");
        return api_error_set(error, 400, NULL, name, "%s has %zu bytes; a stop string has 1 to %d",
                             name, length, STOP_BYTES_MAX);
    }
    if (!stop_string_set(&request->stops[request->stop_count], json_string_value(value), length)) {
        return refuse_no_memory(error);
    }
    request->stop_count++;
    return 0;
}

static int read_stops(const json_t *body, struct completion_request *request,
                      struct api_error *error) {
    const json_t *stop = field_get(body, "stop");
    if (!stop) return 0;
    if (json_is_string(stop)) return read_stop(stop, "stop", request, error);
    if (!json_is_array(stop)) {
        return field_refuse("stop", stop, error, "a string or an array of strings");
    }
    if (json_array_size(stop) > STOPS_MAX) {
        return api_error_set(error, 400, NULL, "stop", "stop has %zu strings; the limit is %d",
                             json_array_size(stop), STOPS_MAX);
    }
    for (size_t i = 0; i < json_array_size(stop); i++) {
        char name[64];
        int result =
            read_stop(json_array_get(stop, i), field_element("stop", i, name), request, error);
        if (result != 0) return result;
    }
    return 0;
}

static int read_stop_tokens(const json_t *body, size_t vocab, struct completion_request *request,
                            struct api_error *error) {
    static const char name[] = "stop_token_ids";
    const json_t *array = field_get(body, name);
    struct token_list list = {0};
    if (!array) return 0;
    if (!json_is_array(array)) return field_refuse(name, array, error, "an array of token ids");
    size_t room = STOP_TOKENS_MAX - request->stop_token_count; /* a chat's format took its own */
    if (json_array_size(array) > room) {
        return api_error_set(error, 400, NULL, name, "stop_token_ids has %zu ids; the limit is %zu",
                             json_array_size(array), room);
    }
    int result = value_to_tokens(array, name, vocab, &list, error);
    if (result != 0) return result;
    memcpy(request->stop_tokens + request->stop_token_count, list.ids,
           list.count * sizeof *list.ids);
    request->stop_token_count += list.count;
    free(list.ids);
    return 0;
}

/* Requests share what was computed of equal prompts only within one salt. */
static int read_cache_salt(const json_t *body, struct completion_request *request,
                           struct api_error *error) {
    const json_t *salt = field_get(body, "cache_salt");
    if (!salt) return 0;
    if (!json_is_string(salt)) return field_refuse("cache_salt", salt, error, "a string");
    if (json_string_length(salt) != strlen(json_string_value(salt))) {
        return api_error_set(error, 400, NULL, "cache_salt", "cache_salt has a NUL character");
    }
    if (json_string_length(salt) == 0 || json_string_length(salt) > CACHE_SALT_MAX) {
        return api_error_set(error, 400, NULL, "cache_salt",
                             "cache_salt has %zu bytes; it must have 1 to %d",
                             json_string_length(salt), CACHE_SALT_MAX);
    }
    request->cache_salt = strdup(json_string_value(salt));
    return request->cache_salt ? 0 : refuse_no_memory(error);
}

static int read_output(const json_t *body, struct completion_request *request,
                       struct api_error *error) {
    request->service_tier = field_get(body, "service_tier") != NULL;
    int result = field_read_bool(body, "return_depth", &request->return_depth, error);
    return result ? result : read_cache_salt(body, request, error);
}

static int read_logprobs(const json_t *body, struct completion_request *request,
                         struct api_error *error) {
    int64_t logprobs = -1;
    int result = field_read_integer(body, "logprobs", 0, TOP_LOGPROBS_MAX, &logprobs, error);
    request->top_logprobs = (int32_t)logprobs;
    return result ? result : field_read_bool(body, "echo", &request->echo, error);
}

static int read_chat_logprobs(const json_t *body, struct completion_request *request,
                              struct api_error *error) {
    bool logprobs = false;
    int64_t top = 0;
    int result = field_read_bool(body, "logprobs", &logprobs, error);
    if (!result) {
        result = field_read_integer(body, "top_logprobs", 0, TOP_LOGPROBS_MAX, &top, error);
    }
    if (!result && !logprobs && field_get(body, "top_logprobs")) {
        return api_error_set(error, 400, NULL, "top_logprobs",
                             "top_logprobs may be given only with logprobs: true");
    }
    request->top_logprobs = logprobs ? (int32_t)top : -1;
    return result;
}

static int read_stream(const json_t *body, struct completion_request *request,
                       struct api_error *error) {
    const json_t *options = field_get(body, "stream_options");
    int result = field_read_bool(body, "stream", &request->stream, error);
    if (result != 0 || !options) return result;
    if (!json_is_object(options)) {
        return field_refuse("stream_options", options, error, "an object");
    }
    if (!request->stream) {
        return api_error_set(error, 400, NULL, "stream_options",
                             "stream_options may be given only with stream: true");
    }
    static const char *const names[] = {"include_usage", "continuous_usage_stats"};
    bool *const out[] = {&request->include_usage, &request->continuous_usage};
    for (size_t i = 0; i < 2; i++) {
        const json_t *value = field_get(options, names[i]);
        char param[64];
        if (value && !json_is_boolean(value)) {
            snprintf(param, sizeof param, "stream_options.%s", names[i]);
            return field_refuse(param, value, error, "true or false");
        }
        *out[i] = json_is_true(value);
    }
    return 0;
}

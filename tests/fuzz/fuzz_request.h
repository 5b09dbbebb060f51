/* What the targets of api/ share: a context, and a request played through to its answer.
 *
 * A body that does not begin with '{' is a list of members: model and prompt are put before it, so
 * that the other fields get their turn. Needs FATHOM_SOURCE for the bundled tokenizer. */
#ifndef FATHOM_FUZZ_REQUEST_H
#define FATHOM_FUZZ_REQUEST_H

#include <jansson.h>
#include <math.h>

#include "api/api.h"
#include "tests/fuzz/fuzz.h"

static struct model_info model = {
    .residual = "nag",
    .weights = "f32",
    .device = "cpu",
    .vocab = 4096,
    .context = 128,
    .blocks = 12,
    .sublayers = 24,
    .kv_block_tokens = 16,
    .tier_count = 2,
    .tiers = {{.name = "full"}, {.name = "fast"}},
};

static struct api_context context = {
    .model = &model, .served_name = "m", .max_sequence = 96, .max_choices = 512};

static inline void make_context(void) {
    if (context.tokenizer) return;
    struct tokenizer *tokenizer; /* lives as long as the process */
    check(tokenizer_load(FATHOM_SOURCE "/models/fathom-tiny", &tokenizer, NULL) == 0);
    model.bos = tokenizer_bos(tokenizer);
    model.eos[0] = tokenizer_eos(tokenizer);
    model.eos_count = model.eos[0] >= 0;
    context.tokenizer = tokenizer;
}

static inline void make_body(const uint8_t *data, size_t size, const char *start,
                             struct text_buffer *body) {
    if (size == 0 || data[0] != '{') text_append_string(body, start);
    text_append(body, (const char *)data, size);
    check(!body->failed);
}

/* What we write is valid JSON, in valid UTF-8. NULL only for a key with NUL (a token in
 * "top_logprobs"), which is valid, and which jansson cannot read. */
static inline json_t *parse_json(const char *bytes, size_t length) {
    json_error_t reason;
    json_t *json = json_loadb(bytes, length, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &reason);
    check(json || json_error_code(&reason) == json_error_null_byte_in_key);
    return json;
}

/* A client's mistake is a 4xx that says so, in JSON. */
static inline void check_refusal(const struct api_error *error) {
    struct text_buffer out = {0};
    check(error->status >= 400 && error->status < 500 && error->message[0] != '\0' && error->type);
    api_error_write(error, &out);
    check(!out.failed);
    json_decref(parse_json(out.data, out.length));
    text_free(&out);
}

/* ---- What is accepted ------------------------------------------------------------------------ */

static inline void check_request(const struct completion_request *request) {
    const struct sampling *sampling = &request->sampling;
    check(request->prompt_count - 1 < PROMPTS_MAX && request->choices_per_prompt - 1 < CHOICES_MAX);
    check(request->prompt_count * request->choices_per_prompt <= context.max_choices);
    check(request->tier < model.tier_count && request->stop_count <= STOPS_MAX);
    check(sampling->temperature >= 0 && sampling->temperature <= 2);
    check(sampling->top_p > 0 && sampling->top_p <= 1);
    check(sampling->min_p >= 0 && sampling->min_p <= 1);
    check(fabsf(sampling->presence_penalty) <= 2 && fabsf(sampling->frequency_penalty) <= 2);
    check(sampling->repetition_penalty > 0 && sampling->repetition_penalty <= 2);
    check(sampling->top_k >= 0 && sampling->bias_count <= LOGIT_BIAS_MAX);
    check(request->top_logprobs >= -1 && request->top_logprobs <= TOP_LOGPROBS_MAX);
    check(request->stop_token_count <= STOP_TOKENS_MAX);
    check(!request->cache_salt || strlen(request->cache_salt) <= CACHE_SALT_MAX);
    check(request->stream || (!request->include_usage && !request->continuous_usage));
    for (size_t i = 0; i < request->stop_count; i++) {
        check(request->stops[i].length - 1 < STOP_BYTES_MAX);
    }
    for (size_t i = 0; i < request->stop_token_count; i++) {
        check(request->stop_tokens[i] >= 0 && (size_t)request->stop_tokens[i] < model.vocab);
    }
    for (size_t i = 0; i < sampling->bias_count; i++) {
        check(sampling->bias[i].token >= 0 && (size_t)sampling->bias[i].token < model.vocab);
        check(fabsf(sampling->bias[i].bias) <= 100);
    }
}

static inline void check_engine_request(const struct engine_request *told) {
    check(told->prompt_length > 0);
    check(told->prompt_length + told->max_tokens <= context.max_sequence);
    check(told->min_tokens <= told->max_tokens);
    check(!told->prompt_logprobs || told->top_logprobs >= 0);
    for (size_t i = 0; i < told->prompt_length; i++) {
        check(told->prompt[i] >= 0 && (size_t)told->prompt[i] < model.vocab);
    }
}

/* ---- The answer ------------------------------------------------------------------------------ */

/* What a client has of choice 0: from the chunks of a stream put together, or from the whole. */
struct received {
    struct text_buffer text;
    json_t *lists; /* "tokens", ... of the logprobs, and "depth": arrays, put together */
    char finish[16];
    bool unreadable; /* some of it */
};

static inline void receive_lists(struct received *received, const json_t *object) {
    const char *name;
    json_t *list;
    json_object_foreach((json_t *)object, name, list) {
        if (!json_is_array(list)) continue;
        json_t *so_far = json_object_get(received->lists, name);
        if (!so_far) {
            so_far = json_array();
            json_object_set_new(received->lists, name, so_far);
        }
        check(json_array_extend(so_far, list) == 0);
    }
}

static inline void receive(struct received *received, const json_t *answer) {
    const json_t *choice = json_array_get(json_object_get(answer, "choices"), 0);
    received->unreadable |= answer == NULL;
    if (!choice || json_integer_value(json_object_get(choice, "index")) != 0) return;
    const json_t *part = json_object_get(choice, "delta");
    if (!part) part = json_object_get(choice, "message");
    const json_t *text = json_object_get(part ? part : choice, part ? "content" : "text");
    const json_t *finish = json_object_get(choice, "finish_reason");
    check(json_is_string(text) && received->finish[0] == '\0'); /* it comes with the last text */
    text_append(&received->text, json_string_value(text), json_string_length(text));
    if (json_is_string(finish)) {
        snprintf(received->finish, sizeof received->finish, "%s", json_string_value(finish));
    }
    receive_lists(received, json_object_get(choice, "logprobs"));
    json_t *depth = json_object_get(choice, "depth");
    json_t *only_depth = depth ? json_pack("{s:O}", "depth", depth) : NULL;
    receive_lists(received, only_depth);
    json_decref(only_depth);
}

/* Events of a stream. */
static inline void receive_events(struct received *received, struct text_buffer *out) {
    check(!out->failed);
    for (size_t at = 0; at < out->length;) {
        char *end = memmem(out->data + at, out->length - at, "\n\n", 2);
        check(end && memcmp(out->data + at, "data: ", 6) == 0);
        size_t stop = (size_t)(end - out->data);
        json_t *json = parse_json(out->data + at + 6, stop - at - 6);
        receive(received, json);
        json_decref(json);
        at = stop + 2;
    }
    out->length = 0;
}

static inline void check_received(const struct received *received,
                                  const struct completion_request *request) {
    if (received->unreadable) return;
    check(!strcmp(received->finish, "stop") || !strcmp(received->finish, "length"));
    for (size_t i = 0; i < request->stop_count && !request->echo && !request->min_tokens; i++) {
        const struct stop_string *stop = &request->stops[i];
        check(received->text.length == 0 ||
              !memmem(received->text.data, received->text.length, stop->bytes, stop->length));
    }
    static const char *const parallel[] = {"tokens", "token_logprobs", "top_logprobs",
                                           "text_offset"};
    size_t count = json_array_size(json_object_get(received->lists, "tokens"));
    for (size_t i = 0; i < 4; i++) {
        check(json_array_size(json_object_get(received->lists, parallel[i])) == count);
    }
}

/* Plays the engine for one choice: its tokens are the bytes of the input. */
static inline void play(struct completion *completion, size_t choice, const uint8_t *data,
                        size_t size, struct received *received, struct choices choices) {
    struct engine_request told;
    struct text_buffer out = {0};
    bool is_cancelled = false;
    completion_fill(completion, choice, 1, &told);
    check_engine_request(&told);
    size_t prompt_events = told.prompt_logprobs ? told.prompt_length : 0;
    struct engine_event last = {.kind = EVENT_FINISHED, .finish = FINISH_LENGTH};
    for (size_t i = 0; i < prompt_events + told.max_tokens; i++) {
        bool is_prompt = i < prompt_events, is_scored = told.top_logprobs >= 0 && (i || !is_prompt);
        struct engine_event event = {.kind = is_prompt ? EVENT_PROMPT : EVENT_TOKEN,
                                     .token = is_prompt ? told.prompt[i] : data[i % size],
                                     .logprob = is_scored ? -1 : NAN,
                                     .depth = (uint16_t)(i % 25),
                                     .attn_depth = (uint16_t)(i % 25 / 2),
                                     .top_count = is_scored ? (uint16_t)told.top_logprobs : 0};
        for (int32_t top = 0; top < event.top_count; top++) {
            event.top[top] = (struct token_logprob){top * 7, top < 3 ? -(float)top : -INFINITY};
        }
        event.is_stop = !is_prompt && event.token == model.eos[0] && !told.ignore_eos;
        unsigned flags = completion_push(completion, choice, &event);
        check(!(flags & (PUSH_FAILED | PUSH_DONE)) && !(is_cancelled && flags));
        is_cancelled |= (flags & PUSH_CANCEL) != 0;
        last.usage.attn_run += event.attn_depth, last.usage.attn_total += model.blocks;
        last.usage.mlp_run += (uint64_t)event.depth - event.attn_depth;
        last.usage.mlp_total += model.blocks;
        if (received && choose(&choices, 3) == 0 &&
            completion_write_chunk(completion, choice, &out)) {
            receive_events(received, &out);
        }
        if (event.is_stop) break;
    }
    check(completion_push(completion, choice, &last) & PUSH_DONE);
    if (received && completion_write_chunk(completion, choice, &out)) {
        receive_events(received, &out);
    }
    text_free(&out);
}

static inline void answer(const struct completion_request *request, const uint8_t *data,
                          size_t size, struct received *received) {
    struct completion *completion;
    struct api_error error;
    struct text_buffer out = {0};
    check(completion_create(&context, request, "id", 0, 1, &completion, &error) == 0);
    received->lists = json_object();
    for (size_t i = 0; i < completion_choice_count(completion); i++) {
        play(completion, i, data, size, request->stream && i == 0 ? received : NULL,
             choices_of(data, size));
    }
    check(completion_is_done(completion));
    if (!request->stream) {
        completion_write_response(completion, &out);
        check(!out.failed);
        json_t *json = parse_json(out.data, out.length);
        receive(received, json);
        json_decref(json);
    }
    check_received(received, request);
    completion_destroy(completion);
    text_free(&out);
}

static inline void free_received(struct received *received) {
    text_free(&received->text);
    json_decref(received->lists);
}

/* The same tokens make the same answer, streamed or whole. */
static inline void check_answer(struct completion_request *request, const uint8_t *data,
                                size_t size) {
    struct received streamed = {0}, whole = {0};
    bool include_usage = request->include_usage, continuous = request->continuous_usage;
    request->stream = true;
    answer(request, data, size, &streamed);
    request->stream = request->include_usage = request->continuous_usage = false;
    answer(request, data, size, &whole);
    request->include_usage = include_usage, request->continuous_usage = continuous;
    check(streamed.unreadable == whole.unreadable);
    if (!whole.unreadable) {
        check(streamed.text.length == whole.text.length);
        check(whole.text.length == 0 ||
              memcmp(streamed.text.data, whole.text.data, whole.text.length) == 0);
        check(strcmp(streamed.finish, whole.finish) == 0);
        check(json_equal(streamed.lists, whole.lists));
    }
    free_received(&streamed);
    free_received(&whole);
}

#endif

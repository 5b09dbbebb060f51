/* Any bytes are a completion request or an error; what is accepted keeps its limits, and the answer
 * made for it is valid JSON. The model is named, so that the other fields get their turn; the first
 * byte chooses the endpoint and the chat format. Needs FATHOM_SOURCE for the bundled tokenizer. */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "api/api.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct model_info model = {
    .residual = "nag",
    .weights = "f32",
    .device = "cpu",
    .vocab = 4096,
    .context = 128,
    .tier_count = 2,
    .tiers = {{.name = "full"}, {.name = "fast"}},
};

static struct api_context context = {
    .model = &model, .served_name = "m", .max_sequence = 96, .max_choices = 512};

static void check(bool holds) {
    if (!holds) abort();
}

static void check_json(struct text_buffer *out) {
    json_t *json = json_loadb(out->data, out->length, JSON_ALLOW_NUL, NULL);
    check(!out->failed && json);
    json_decref(json);
    out->length = 0;
}

/* Events of a stream, one or two. */
static void check_events(struct text_buffer *out) {
    for (size_t at = 0; at < out->length;) {
        char *end = memmem(out->data + at, out->length - at, "\n\n", 2);
        check(end && memcmp(out->data + at, "data: ", 6) == 0);
        size_t stop = (size_t)(end - out->data);
        json_t *json = json_loadb(out->data + at + 6, stop - at - 6, JSON_ALLOW_NUL, NULL);
        check(json != NULL);
        json_decref(json);
        at = stop + 2;
    }
    check(!out->failed);
    out->length = 0;
}

static void check_error(const struct api_error *error) {
    struct text_buffer out = {0};
    check(error->status >= 400 && error->status < 500 && error->message[0] != '\0' && error->type);
    api_error_write(error, &out);
    check_json(&out);
    text_free(&out);
}

static void check_request(const struct completion_request *request) {
    const struct sampling *sampling = &request->sampling;
    check(request->prompt_count - 1 < PROMPTS_MAX && request->choices_per_prompt - 1 < CHOICES_MAX);
    check(request->prompt_count * request->choices_per_prompt <= context.max_choices);
    check(request->tier < model.tier_count && request->stop_count <= STOPS_MAX);
    check(sampling->temperature >= 0 && sampling->temperature <= 2);
    check(sampling->top_p > 0 && sampling->top_p <= 1 && sampling->min_p >= 0 &&
          sampling->min_p <= 1);
    check(fabsf(sampling->presence_penalty) <= 2 && fabsf(sampling->frequency_penalty) <= 2);
    check(sampling->repetition_penalty > 0 && sampling->repetition_penalty <= 2);
    check(sampling->top_k >= 0 && sampling->bias_count <= LOGIT_BIAS_MAX);
    check(request->top_logprobs >= -1 && request->top_logprobs <= TOP_LOGPROBS_MAX);
    check(request->stop_token_count <= STOP_TOKENS_MAX);
    for (size_t i = 0; i < request->stop_count; i++) {
        check(request->stops[i].length - 1 < STOP_BYTES_MAX);
    }
}

static void check_engine_request(const struct engine_request *told) {
    check(told->prompt_length > 0 &&
          told->prompt_length + told->max_tokens <= context.max_sequence);
    check(told->min_tokens <= told->max_tokens &&
          (told->max_tokens > 0 || told->prompt_length > 0));
    check(!told->prompt_logprobs || told->top_logprobs >= 0);
    for (size_t i = 0; i < told->prompt_length; i++) {
        check(told->prompt[i] >= 0 && (size_t)told->prompt[i] < model.vocab);
    }
}

/* Plays the engine for the first choice: its tokens are the bytes of the input. */
static void run(const struct completion_request *request, const uint8_t *data, size_t size) {
    struct completion *completion;
    struct api_error error;
    struct engine_request told;
    struct text_buffer out = {0};
    check(completion_create(&context, request, "id", 0, 1, &completion, &error) == 0);
    completion_fill(completion, 0, 1, &told);
    check_engine_request(&told);
    for (size_t i = 0; i < told.max_tokens; i++) {
        struct engine_event event = {.kind = EVENT_TOKEN, .token = data[i % size], .logprob = -1};
        unsigned flags = completion_push(completion, 0, &event);
        check(!(flags & PUSH_FAILED));
        if (request->stream && completion_write_chunk(completion, 0, &out)) check_events(&out);
    }
    for (size_t i = 0; i < completion_choice_count(completion); i++) {
        struct engine_event event = {.kind = EVENT_FINISHED, .finish = FINISH_LENGTH};
        completion_push(completion, i, &event);
    }
    completion_write_response(completion, &out);
    check_json(&out);
    completion_destroy(completion);
    text_free(&out);
}

/* No message writes a special token: those in the prompt are the format's. */
static void check_chat(const struct prompt *prompt) {
    size_t marked = 0, found = 0, last = 0;
    for (size_t i = 0; i < prompt->mark_count; i++) {
        check(prompt->marks[i].position >= last &&
              prompt->marks[i].position <= prompt->text_length);
        last = prompt->marks[i].position;
        marked += tokenizer_is_special(context.tokenizer, prompt->marks[i].token);
    }
    for (size_t i = 0; i < prompt->tokens.count; i++) {
        found += tokenizer_is_special(context.tokenizer, prompt->tokens.ids[i]);
    }
    check(marked == found);
}

static void fuzz_completion(bool is_chat, const char *body, size_t length, const uint8_t *data,
                            size_t size) {
    struct completion_request request;
    struct api_error error = {0};
    int result = (is_chat ? chat_request_parse : completion_request_parse)(&context, body, length,
                                                                           NULL, &request, &error);
    if (result == 0) {
        check_request(&request);
        result = completion_request_tokenize(&context, &request, &error);
        if (result == 0 && is_chat) check_chat(&request.prompts[0]);
        if (result == 0) run(&request, data, size);
        completion_request_free(&request);
    }
    if (result != 0) check_error(&error);
}

static void fuzz_tokenize(bool back, const char *body, size_t length) {
    struct api_error error = {0};
    struct text_buffer out = {0};
    int result = back ? detokenize_answer(&context, body, length, &out, &error)
                      : tokenize_answer(&context, body, length, &out, &error);
    if (result != 0) {
        check_error(&error);
    } else {
        check_json(&out);
    }
    text_free(&out);
}

static const char *const formats[] = {NULL, "chatml", "llama3", "mistral", "zephyr", "plain"};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct tokenizer *tokenizer;
    if (!context.tokenizer) {
        check(tokenizer_load(FATHOM_SOURCE "/models/fathom-tiny", &tokenizer, NULL) == 0);
        model.bos = tokenizer_bos(tokenizer);
        model.eos = tokenizer_eos(tokenizer);
        context.tokenizer = tokenizer; /* lives as long as the process */
    }
    if (size < 2) return 0;
    struct text_buffer body = {0};
    const char *rest = (const char *)data + 1;
    if (data[0] % 4 < 2) { /* half of the inputs: the fields that follow model and prompt */
        text_append_string(&body, "{\"model\":\"m\",\"prompt\":\"a\",\"tokens\":[1],\"messages\":"
                                  "[{\"role\":\"user\",\"content\":\"a\"}],");
    }
    text_append(&body, rest, size - 1);
    switch (data[0] / 4 % 4) {
    case 0:
        fuzz_tokenize(false, body.data, body.length);
        break;
    case 1:
        fuzz_tokenize(true, body.data, body.length);
        break;
    case 2:
        fuzz_completion(false, body.data, body.length, data, size);
        break;
    default:
        context.chat_format = formats[data[0] / 16 % (sizeof formats / sizeof *formats)];
        fuzz_completion(true, body.data, body.length, data, size);
        break;
    }
    text_free(&body);
    return 0;
}

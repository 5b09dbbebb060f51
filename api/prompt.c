#include "api/prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int read_one(const struct api_context *context, const json_t *value, const char *name,
                    struct prompt *prompt, struct api_error *error) {
    if (!json_is_string(value)) {
        if (json_array_size(value) == 0) {
            return api_error_set(error, 400, NULL, name, "%s is empty: give at least one token id",
                                 name);
        }
        return value_to_tokens(value, name, context->model->vocab, &prompt->tokens, error);
    }
    prompt->text_length = json_string_length(value);
    prompt->text = malloc(prompt->text_length + 1);
    if (!prompt->text) return refuse_no_memory(error);
    memcpy(prompt->text, json_string_value(value), prompt->text_length + 1);
    return 0;
}

/* Every prompt of a list is of the first one's kind. */
static int read_list(const struct api_context *context, const json_t *list,
                     struct completion_request *request, struct api_error *error) {
    const json_t *first = json_array_get(list, 0);
    for (size_t i = 0; i < request->prompt_count; i++) {
        char name[64];
        const json_t *value = json_array_get(list, i);
        field_element("prompt", i, name);
        if (json_typeof(value) != json_typeof(first)) {
            return field_refuse(name, value, error, "of the same kind as prompt[0], %s",
                                json_is_string(first) ? "a string" : "an array of token ids");
        }
        int result = read_one(context, value, name, &request->prompts[i], error);
        if (result != 0) return result;
    }
    return 0;
}

int prompts_read(const struct api_context *context, const json_t *body,
                 struct completion_request *request, struct api_error *error) {
    const json_t *value = field_get(body, "prompt"), *first = json_array_get(value, 0);
    bool is_list = json_is_string(first) || json_is_array(first);
    if (!is_list && !json_is_string(value) && !json_is_number(first)) {
        const char *expected =
            "a string, an array of strings, an array of token ids, or an array of "
            "arrays of token ids; \"\" starts a new document";
        if (!json_is_array(value)) return field_refuse("prompt", value, error, "%s", expected);
        return api_error_set(error, 400, NULL, "prompt", "prompt must be %s; this array %s",
                             expected, first ? "holds something else" : "is empty");
    }
    size_t count = is_list ? json_array_size(value) : 1;
    if (count > PROMPTS_MAX) {
        return api_error_set(error, 400, NULL, "prompt",
                             "prompt holds %zu prompts; the limit is %d", count, PROMPTS_MAX);
    }
    request->prompts = calloc(count, sizeof *request->prompts);
    if (!request->prompts) return refuse_no_memory(error);
    request->prompt_count = count;
    if (is_list) return read_list(context, value, request, error);
    return read_one(context, value, "prompt", &request->prompts[0], error);
}

/* The stretches between the marks, and the marks' tokens. */
static int encode(const struct tokenizer *tokenizer, struct prompt *prompt, bool parse_special,
                  const char *param, const atomic_bool *stop, struct api_error *error) {
    size_t at = 0;
    for (size_t i = 0; i <= prompt->mark_count; i++) {
        bool is_last = i == prompt->mark_count;
        size_t end = is_last ? prompt->text_length : prompt->marks[i].position;
        struct error cause = {0};
        int result = tokenizer_encode_until(tokenizer, prompt->text + at, end - at, parse_special,
                                            stop, &prompt->tokens, &cause);
        if (result == FATHOM_CANCELLED) return refuse_abandoned(error);
        if (result == FATHOM_NO_MEMORY) return refuse_no_memory(error);
        if (result != 0) {
            return api_error_set(error, 400, NULL, param, "%s: %s", param, cause.message);
        }
        if (!is_last && prompt->marks[i].token >= 0) {
            result = token_list_push(&prompt->tokens, prompt->marks[i].token, &cause);
            if (result != 0) return refuse_no_memory(error);
        }
        at = end;
    }
    return 0;
}

/* Text -> ids as the model wants to see them: the bos token first if the tokenizer adds one, and
 * never nothing (an empty text becomes the token that starts a document). Special tokens written in
 * the text are recognised. */
static int tokenize(const struct api_context *context, struct prompt *prompt, const char *param,
                    const atomic_bool *stop, struct api_error *error) {
    bool is_empty = prompt->text_length == 0;
    int32_t start = model_start_token(context->model, context->tokenizer, is_empty);
    if (is_empty && start < 0) {
        return api_error_set(error, 400, NULL, param,
                             "%s is empty, and this model has no token that starts a document",
                             param);
    }
    if (start >= 0) {
        if (token_list_push(&prompt->tokens, start, NULL) != 0) return refuse_no_memory(error);
        prompt->hidden = 1;
    }
    return encode(context->tokenizer, prompt, true, param, stop, error);
}

/* A chat's format has brought its bos, and its special tokens are its marks: what its messages
 * write is never one. */
static int tokenize_chat(const struct api_context *context, struct prompt *prompt,
                         const atomic_bool *stop, struct api_error *error) {
    int result = encode(context->tokenizer, prompt, false, "messages", stop, error);
    if (result != 0 || prompt->tokens.count > 0) return result;
    return api_error_set(error, 400, NULL, "messages", "messages make an empty prompt");
}

static size_t length_limit(const struct api_context *context) {
    size_t most = context->model->context;
    return context->max_sequence < most ? context->max_sequence : most;
}

/* Refuses by its bytes alone a text that cannot fit, whatever its tokens are. */
static int check_bytes(const struct api_context *context, const struct prompt *prompt,
                       const char *name, struct api_error *error) {
    size_t limit = length_limit(context), longest = tokenizer_longest(context->tokenizer);
    size_t least = prompt->text_length / longest;
    if (least <= limit) return 0;
    bool over_context = least > context->model->context;
    return api_error_set(
        error, 400, over_context ? "context_length_exceeded" : "kv_budget_exceeded", name,
        "the %s holds %zu tokens, and the %zu bytes of %s make at least %zu; shorten it",
        over_context ? "model's context" : "server's KV budget",
        over_context ? context->model->context : limit, prompt->text_length, name, least);
}

/* What a completion may at most take: the default length, if the client named none, gives way. */
static int check_length(const struct api_context *context, const struct completion_request *request,
                        struct prompt *prompt, const char *name, struct api_error *error) {
    size_t count = prompt->tokens.count, most = context->model->context;
    size_t limit = length_limit(context);
    size_t room = count < limit ? limit - count : 0;
    size_t wanted = request->max_tokens;
    if (!request->has_max_tokens && wanted > room) wanted = room > 0 ? room : 1;
    if (count <= limit && wanted <= room) {
        prompt->max_tokens = wanted;
        return 0;
    }
    /* Both counts are far below SIZE_MAX: one is held in memory, the other is at most INT32_MAX. */
    bool over_context = count + wanted > most;
    return api_error_set(
        error, 400, over_context ? "context_length_exceeded" : "kv_budget_exceeded",
        room > 0 ? "max_tokens" : name,
        "the %s holds %zu tokens, and this request asks for %zu: %zu in %s and %zu "
        "(max_tokens) to complete it; shorten one of them",
        over_context ? "model's context" : "server's KV budget", over_context ? most : limit,
        count + wanted, count, name, wanted);
}

int completion_request_tokenize(const struct api_context *context,
                                struct completion_request *request, const atomic_bool *stop,
                                struct api_error *error) {
    for (size_t i = 0; i < request->prompt_count; i++) {
        struct prompt *prompt = &request->prompts[i];
        char name[64] = "prompt";
        if (request->prompt_count > 1) field_element("prompt", i, name);
        if (request->is_chat) snprintf(name, sizeof name, "messages");
        int result = check_bytes(context, prompt, name, error);
        if (result != 0) return result;
        if (request->is_chat) {
            result = tokenize_chat(context, prompt, stop, error);
        } else if (prompt->text) {
            result = tokenize(context, prompt, name, stop, error);
        }
        if (!result) result = check_length(context, request, prompt, name, error);
        if (result != 0) return result;
    }
    return 0;
}

void prompt_free(struct prompt *prompt) {
    free(prompt->text);
    free(prompt->marks);
    free(prompt->tokens.ids);
    *prompt = (struct prompt){0};
}

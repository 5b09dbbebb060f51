/* POST /tokenize and /detokenize, in the shape of vLLM's. */
#include <stdlib.h>

#include "api/fields.h"
#include "api/served_model.h"

/* Parses the body and checks `model`, which these two endpoints do not insist on. */
static int read_body(const struct api_context *context, const char *body, size_t length,
                     json_t **object, struct api_error *error) {
    size_t tier;
    int result = body_parse(body, length, object, error);
    if (result != 0) return result;
    const json_t *model = field_get(*object, "model");
    if (model && !json_is_string(model)) {
        result = field_refuse("model", model, error, "a string");
    } else if (model) {
        result = served_model_find(context, json_string_value(model), json_string_length(model),
                                   &tier, error);
    }
    if (result != 0) json_decref(*object);
    return result;
}

static int encode(const struct api_context *context, const json_t *prompt, bool add_special,
                  const atomic_bool *stop, struct token_list *tokens, struct api_error *error) {
    const struct tokenizer *tokenizer = context->tokenizer;
    struct error cause = {0};
    int32_t start = add_special ? model_start_token(context->model, tokenizer, false) : -1;
    int result = start >= 0 ? token_list_push(tokens, start, &cause) : 0;
    if (result == 0) {
        result = tokenizer_encode_until(tokenizer, json_string_value(prompt),
                                        json_string_length(prompt), true, stop, tokens, &cause);
    }
    if (result == FATHOM_CANCELLED) return refuse_abandoned(error);
    if (result == FATHOM_NO_MEMORY) return refuse_no_memory(error);
    if (result != 0) return api_error_set(error, 400, NULL, "prompt", "prompt: %s", cause.message);
    return 0;
}

static void write_tokens(const struct api_context *context, const struct token_list *tokens,
                         bool with_strings, struct text_buffer *out) {
    text_append_format(out, "{\"count\":%zu,\"max_model_len\":%zu,\"tokens\":[", tokens->count,
                       context->model->context);
    for (size_t i = 0; i < tokens->count; i++) {
        if (i > 0) text_append(out, ",", 1);
        text_append_number(out, (uint64_t)tokens->ids[i]);
    }
    text_append_string(out, "],\"token_strs\":");
    if (!with_strings) {
        text_append_string(out, "null}");
        return;
    }
    text_append_string(out, "[");
    for (size_t i = 0; i < tokens->count; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(context->tokenizer, tokens->ids[i], &length);
        if (i > 0) text_append_string(out, ",");
        text_append_json(out, bytes, length);
    }
    text_append_string(out, "]}");
}

static int tokenize_object(const struct api_context *context, const json_t *object,
                           const atomic_bool *stop, struct text_buffer *out,
                           struct api_error *error) {
    const json_t *prompt = field_get(object, "prompt");
    struct token_list tokens = {0};
    bool add_special = true, with_strings = false;
    if (!json_is_string(prompt)) return field_refuse("prompt", prompt, error, "a string");
    int result = field_read_bool(object, "add_special_tokens", &add_special, error);
    if (!result) result = field_read_bool(object, "return_token_strs", &with_strings, error);
    if (!result) result = encode(context, prompt, add_special, stop, &tokens, error);
    if (!result) write_tokens(context, &tokens, with_strings, out);
    free(tokens.ids);
    return result;
}

int tokenize_answer(const struct api_context *context, const char *body, size_t length,
                    const atomic_bool *stop, struct text_buffer *out, struct api_error *error) {
    json_t *object;
    int result = read_body(context, body, length, &object, error);
    if (result != 0) return result;
    result = tokenize_object(context, object, stop, out, error);
    json_decref(object);
    return result;
}

static int detokenize_object(const struct api_context *context, const json_t *object,
                             struct text_buffer *out, struct api_error *error) {
    const json_t *array = field_get(object, "tokens");
    struct token_list tokens;
    struct text_buffer text = {0};
    bool stripped = false;
    if (!json_is_array(array)) return field_refuse("tokens", array, error, "an array of token ids");
    int result = value_to_tokens(array, "tokens", context->model->vocab, &tokens, error);
    if (result != 0) return result;
    for (size_t i = 0; i < tokens.count; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(context->tokenizer, tokens.ids[i], &length);
        /* Of a whole text, a space that encoding put before it. */
        bool is_extra = text.length == 0 && length > 0 && bytes[0] == ' ' && !stripped &&
                        tokenizer_strips_space(context->tokenizer);
        text_append(&text, bytes + is_extra, length - is_extra);
        stripped |= length > 0 && !tokenizer_is_special(context->tokenizer, tokens.ids[i]);
    }
    text_append_string(out, "{\"prompt\":");
    text_append_json(out, text.data, text.length);
    text_append_string(out, "}");
    out->failed |= text.failed;
    text_free(&text);
    free(tokens.ids);
    return 0;
}

int detokenize_answer(const struct api_context *context, const char *body, size_t length,
                      struct text_buffer *out, struct api_error *error) {
    json_t *object;
    int result = read_body(context, body, length, &object, error);
    if (result != 0) return result;
    result = detokenize_object(context, object, out, error);
    json_decref(object);
    return result;
}

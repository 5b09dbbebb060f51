/* Any bytes are a body of POST /tokenize and of POST /detokenize, or a 4xx; what the one answers
 * the other turns back into the same text. */
#include "tests/fuzz/fuzz_request.h"

static int tokenize(const struct text_buffer *body, json_t **answer) {
    struct api_error error = {0};
    struct text_buffer out = {0};
    int result = tokenize_answer(&context, body->data, body->length, NULL, &out, &error);
    if (result != 0) {
        check_refusal(&error);
    } else {
        *answer = parse_json(out.data, out.length);
    }
    text_free(&out);
    return result;
}

static int detokenize(const struct text_buffer *body, json_t **answer) {
    struct api_error error = {0};
    struct text_buffer out = {0};
    int result = detokenize_answer(&context, body->data, body->length, &out, &error);
    if (result != 0) {
        check_refusal(&error);
    } else {
        *answer = parse_json(out.data, out.length);
    }
    text_free(&out);
    return result;
}

/* Without the special token that may be put before a text, which this tokenizer does not do. */
static void check_round_trip(const struct text_buffer *body, const json_t *answer) {
    const json_t *tokens = json_object_get(answer, "tokens");
    json_t *asked = json_loadb(body->data, body->length, JSON_ALLOW_NUL, NULL), *back;
    if (!asked)
        asked =
            json_loadb(body->data, body->length, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, NULL);
    json_t *list = json_pack("{s:O}", "tokens", tokens);
    struct text_buffer again = {0};
    char *text = json_dumps(list, JSON_COMPACT);
    check((size_t)json_integer_value(json_object_get(answer, "count")) == json_array_size(tokens));
    text_append_string(&again, text);
    check(detokenize(&again, &back) == 0);
    check(json_equal(json_object_get(back, "prompt"), json_object_get(asked, "prompt")));
    text_free(&again);
    free(text);
    json_decref(back);
    json_decref(list);
    json_decref(asked);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct text_buffer body = {0};
    json_t *answer;
    make_context();
    make_body(data, size, "{\"model\":\"m\",\"prompt\":\"a\",\"tokens\":[1]", &body);
    if (tokenize(&body, &answer) == 0) {
        check_round_trip(&body, answer);
        json_decref(answer);
    }
    if (detokenize(&body, &answer) == 0) {
        check(json_is_string(json_object_get(answer, "prompt")));
        json_decref(answer);
    }
    text_free(&body);
    return 0;
}

/* What the tests of api/ share: a context with the bundled tokenizer, and JSON read back. */
#ifndef FATHOM_TEST_API_H
#define FATHOM_TEST_API_H

#include "api/api.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TEST_VOCAB   4096
#define TEST_CONTEXT 64

static struct model_info test_model = {
    .name = "fathom-tiny",
    .residual = "nag",
    .device = "cpu \"test\"",
    .weights = "f32",
    .parameters = 6400000,
    .vocab = TEST_VOCAB,
    .context = TEST_CONTEXT,
    .sublayers = 24,
    .kv_block_tokens = 16,
    .kv_block_bytes = 16 * 3072,
    .kv_groups = 1,
    .tier_count = 4,
    .tiers = {{.name = "full", .measured = true, .perplexity = 12.5, .flops_per_token = 1e7},
              {.name = "high", .target_skip = 0.1},
              {.name = "balanced",
               .target_skip = 0.25,
               .measured = true,
               .perplexity = 12.75,
               .attn_skip = 0.25,
               .mlp_skip = 0.125,
               .flops_per_token = 8e6},
              {.name = "fast", .target_skip = 0.4}},
};

static struct api_context test_context = {
    .model = &test_model,
    .served_name = "fathom-tiny",
    .created = 1700000000,
    .max_sequence = TEST_CONTEXT,
    .max_choices = 1024,
};

static inline int test_api_setup(void **state) {
    (void)state;
    struct tokenizer *tokenizer;
    struct error error = {0};
    if (tokenizer_load(FATHOM_SOURCE "/models/fathom-tiny", &tokenizer, &error) != 0) {
        print_error("%s\n", error.message);
        return -1;
    }
    test_context.tokenizer = tokenizer;
    test_model.bos = tokenizer_bos(tokenizer);
    test_model.eos[0] = tokenizer_eos(tokenizer);
    test_model.eos_count = test_model.eos[0] >= 0;
    return 0;
}

static inline int test_api_teardown(void **state) {
    (void)state;
    tokenizer_destroy((struct tokenizer *)test_context.tokenizer);
    return 0;
}

/* The buffer's JSON, which must be valid; the buffer is emptied. */
static inline json_t *test_json(struct text_buffer *buffer) {
    json_error_t error;
    assert_false(buffer->failed);
    json_t *value =
        json_loadb(buffer->data, buffer->length, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &error);
    if (!value) print_error("%s\n%.*s\n", error.text, (int)buffer->length, buffer->data);
    assert_non_null(value);
    text_free(buffer);
    return value;
}

static inline const char *test_string(const json_t *object, const char *name) {
    return json_string_value(json_object_get(object, name));
}

/* A request that must be accepted and tokenized. */
static inline void test_request(const char *body, struct completion_request *request) {
    struct api_error error = {0};
    int result = completion_request_parse(&test_context, body, strlen(body), NULL, request, &error);
    if (result == 0) result = completion_request_tokenize(&test_context, request, NULL, &error);
    if (result != 0) print_error("%s: %s\n", body, error.message);
    assert_int_equal(result, 0);
}

/* A repeatable source of numbers. */
static inline uint32_t test_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

#endif

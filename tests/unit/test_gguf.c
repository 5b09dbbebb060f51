/* GGUF: models against the plain PyTorch of tests/reference/llama.py, and files that are not what
 * they say. */
#include "golden.h"
#include "test_device.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/gguf.h"

#define FOLDER    GOLDEN_FOLDER "gguf/"
#define TOKENIZER FATHOM_SOURCE "/tests/reference/tokenizer/"

enum { LENGTH = 40 };

/* ---- Models ---------------------------------------------------------------------------------- */

static void check_model(const char *name, const char *isa) {
    char path[512];
    struct error error = {0};
    struct safetensors expected;
    struct window_runner runner;
    struct step_result result;
    int32_t tokens[LENGTH];
    struct model_options options = {
        .device = test_device(), .isa = isa, .weights = WEIGHTS_F32, .threads = 2};
    snprintf(path, sizeof path, FOLDER "%s.gguf", name);
    struct model *model = golden_model(path, &options);
    assert_string_equal(model_get_info(model)->name, name);
    assert_string_equal(model_get_info(model)->residual, "standard");
    snprintf(path, sizeof path, FOLDER "%s.safetensors", name);
    must(safetensors_open(path, &expected, &error), &error);
    golden_copy(&expected, "tokens", tokens, sizeof tokens);
    size_t vocab = model->config.vocab, bytes = LENGTH * vocab * sizeof(float);
    float *want = malloc(bytes);
    golden_copy(&expected, "logits", want, bytes);
    must(window_runner_create(model, 0, &runner, &error), &error);
    window_runner_step(&runner, tokens, 0, LENGTH, 0, true, &result);
    for (size_t row = 0; row < LENGTH; row++) {
        double top = 0;
        for (size_t v = 0; v < vocab; v++) top = fmax(top, fabs((double)want[row * vocab + v]));
        for (size_t v = 0; v < vocab; v++) {
            double a = (double)result.logits[row * vocab + v], b = (double)want[row * vocab + v];
            if (fabs(a - b) > 1e-4 * top) {
                fail_msg("%s %s: row %zu logit %zu is %.7f, not %.7f", name, isa, row, v, a, b);
            }
        }
    }
    free(want);
    window_runner_destroy(&runner);
    safetensors_close(&expected);
    model_destroy(model);
}

static void check_models(const char *isa) {
    check_model("pieces", isa);
    check_model("bytes", isa);
}

static void models_agree_with_the_reference(void **state) {
    (void)state;
    for_each_isa(check_models);
}

/* ---- Tokenizers ------------------------------------------------------------------------------ */

static struct token_list encode(const struct tokenizer *tokenizer, const char *text) {
    struct token_list ids = {0};
    struct error error = {0};
    must(tokenizer_encode(tokenizer, text, strlen(text), false, &ids, &error), &error);
    return ids;
}

/* The files' tokenizers were made from those of tests/reference/tokenizer, without their added
 * tokens where these are no pieces. */
static void tokenizers_agree_with_their_source(void **state) {
    static const char *const names[][2] = {{"pieces", "pieces"}, {"bytes", "split"}};
    static const char *const texts[] = {
        "The depth of the river was thirteen fathoms.",
        "  two spaces, and 1234567 digits",
        "深い海の底に静かな光がある。",
        "naïve façade Ångström\n\n\ttabs",
        "it's DON'T we'll",
        "👩‍👩‍👧‍👦 ½¾",
        "",
        " ",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
    (void)state;
    struct error error = {0};
    for (size_t n = 0; n < 2; n++) {
        char path[512];
        struct gguf file;
        struct tokenizer *got, *want;
        snprintf(path, sizeof path, FOLDER "%s.gguf", names[n][0]);
        must(gguf_open(path, &file, &error), &error);
        must(gguf_load_tokenizer(&file, &got, &error), &error);
        gguf_close(&file);
        snprintf(path, sizeof path, TOKENIZER "%s", names[n][1]);
        must(tokenizer_load(path, &want, &error), &error);
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
            struct token_list a = encode(got, texts[i]), b = encode(want, texts[i]);
            if (a.count != b.count ||
                (a.count > 0 && memcmp(a.ids, b.ids, a.count * sizeof *a.ids) != 0)) {
                fail_msg("%s: \"%s\" is cut otherwise", names[n][0], texts[i]);
            }
            free(a.ids);
            free(b.ids);
        }
        assert_true(tokenizer_adds_bos(got));
        assert_int_equal(tokenizer_bos(got), n == 0 ? 1 : 0);
        assert_int_equal(tokenizer_eos(got), n == 0 ? 2 : 1);
        assert_true((tokenizer_chat_template(got) != NULL) == (n == 1));
        tokenizer_destroy(got);
        tokenizer_destroy(want);
    }
}

/* ---- Hostile files --------------------------------------------------------------------------- */

struct bytes {
    unsigned char data[2048];
    size_t size;
};

static void put(struct bytes *bytes, const void *data, size_t size) {
    assert_true(bytes->size + size <= sizeof bytes->data);
    memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
}
static void put_u32(struct bytes *bytes, uint32_t value) {
    put(bytes, &value, sizeof value);
}
static void put_u64(struct bytes *bytes, uint64_t value) {
    put(bytes, &value, sizeof value);
}
static void put_string(struct bytes *bytes, const char *text) {
    put_u64(bytes, strlen(text));
    put(bytes, text, strlen(text));
}
static struct bytes begin(uint32_t version, uint64_t tensors, uint64_t values) {
    struct bytes bytes = {.size = 0};
    put(&bytes, "GGUF", 4);
    put_u32(&bytes, version);
    put_u64(&bytes, tensors);
    put_u64(&bytes, values);
    return bytes;
}
static void put_tensor(struct bytes *bytes, const char *name, uint32_t rank,
                       const uint64_t *dimensions, uint32_t type, uint64_t offset) {
    put_string(bytes, name);
    put_u32(bytes, rank);
    for (uint32_t i = 0; i < rank; i++) put_u64(bytes, dimensions[i]);
    put_u32(bytes, type);
    put_u64(bytes, offset);
}
static void pad(struct bytes *bytes, size_t data) {
    while (bytes->size % 32) put(bytes, "", 1);
    for (size_t i = 0; i < data; i++) put(bytes, "", 1);
}

static void refused(const struct bytes *bytes, int code, const char *part) {
    struct gguf file;
    struct error error = {0};
    int result = gguf_parse(bytes->data, bytes->size, &file, &error);
    if (result == 0) fail_msg("accepted; \"%s\" was expected", part);
    if (result != code || !strstr(error.message, part)) {
        fail_msg("%d \"%s\" does not say \"%s\"", result, error.message, part);
    }
}

static void refuse_tensor(uint32_t rank, const uint64_t *dimensions, uint32_t type, uint64_t offset,
                          const char *part) {
    struct bytes bytes = begin(3, 1, 0);
    put_tensor(&bytes, "t", rank, dimensions, type, offset);
    pad(&bytes, 128);
    refused(&bytes, strstr(part, "supported") ? FATHOM_UNSUPPORTED : FATHOM_INVALID, part);
}

static void headers_are_checked(void **state) {
    (void)state;
    struct bytes bytes = begin(1, 0, 0);
    refused(&bytes, FATHOM_UNSUPPORTED, "GGUF version 1; 2 and 3");
    bytes = begin(0x03000000, 0, 0);
    refused(&bytes, FATHOM_UNSUPPORTED, "big-endian");
    bytes = begin(3, UINT64_MAX, 0);
    refused(&bytes, FATHOM_INVALID, "18446744073709551615 tensors");
    bytes = begin(3, 0, UINT64_MAX / 56 + 2); /* times the size of an entry: a small number */
    refused(&bytes, FATHOM_INVALID, "the limits are");
    bytes = begin(3, 0, 1);
    refused(&bytes, FATHOM_INVALID, "value 1 of 1: the file ends within a key");
    for (size_t size = 0; size < 24; size++) {
        bytes = begin(3, 0, 0);
        bytes.size = size;
        refused(&bytes, FATHOM_INVALID, "the file ends within");
    }
    bytes = begin(3, 0, 0);
    bytes.data[0] = 'g';
    refused(&bytes, FATHOM_INVALID, "does not begin with");
}

static void values_are_checked(void **state) {
    (void)state;
    struct bytes bytes = begin(3, 0, 1);
    put_u64(&bytes, UINT64_MAX); /* a key that long */
    refused(&bytes, FATHOM_INVALID, "a key of 18446744073709551615 bytes");
    bytes = begin(3, 0, 1);
    put_string(&bytes, "k");
    put_u32(&bytes, 13);
    refused(&bytes, FATHOM_INVALID, "k has the unknown type 13");
    bytes = begin(3, 0, 1);
    put_string(&bytes, "k");
    put_u32(&bytes, GGUF_STRING);
    put_u64(&bytes, UINT64_MAX - 7);
    refused(&bytes, FATHOM_INVALID,
            "a string of 18446744073709551608 bytes, of which the file has only 0 more");
    static const uint64_t counts[] = {UINT64_MAX, UINT64_MAX / 8 + 2, UINT64_MAX / 4 + 2, 1000};
    for (size_t i = 0; i < 4; i++) {
        bytes = begin(3, 0, 1);
        put_string(&bytes, "k");
        put_u32(&bytes, GGUF_ARRAY);
        put_u32(&bytes, i == 1 ? GGUF_STRING : GGUF_UINT32);
        put_u64(&bytes, counts[i]);
        refused(&bytes, FATHOM_INVALID, "bytes left cannot hold them");
    }
    bytes = begin(3, 0, 1);
    put_string(&bytes, "k");
    put_u32(&bytes, GGUF_ARRAY);
    put_u32(&bytes, GGUF_ARRAY);
    put_u64(&bytes, 1);
    refused(&bytes, FATHOM_UNSUPPORTED, "k is an array of type 9");
    bytes = begin(3, 0, 2);
    for (size_t i = 0; i < 2; i++) {
        put_string(&bytes, "k");
        put_u32(&bytes, GGUF_UINT8);
        put(&bytes, "", 1);
    }
    refused(&bytes, FATHOM_INVALID, "the key k is there twice");
    bytes = begin(3, 0, 1);
    put_string(&bytes, "general.alignment");
    put_u32(&bytes, GGUF_UINT32);
    put_u32(&bytes, 24);
    refused(&bytes, FATHOM_INVALID, "general.alignment is 24; a power of two");
}

static void tensors_are_checked(void **state) {
    (void)state;
    refuse_tensor(0, NULL, 0, 0, "t has 0 dimensions");
    refuse_tensor(5, (uint64_t[]){1, 1, 1, 1, 1}, 0, 0, "t has 5 dimensions");
    refuse_tensor(1, (uint64_t[]){0}, 0, 0, "impossible dimension 0");
    refuse_tensor(2, (uint64_t[]){1ull << 32, 1ull << 32}, 0, 0, "impossible dimension");
    refuse_tensor(1, (uint64_t[]){1ull << 62}, 0, 0, "t is too large");
    refuse_tensor(2, (uint64_t[]){1ull << 40, 1ull << 22}, 0, 0, "t is too large");
    refuse_tensor(1, (uint64_t[]){4}, 12, 0, "t has type 12, which is not supported");
    refuse_tensor(1, (uint64_t[]){31}, 8, 0, "rows of 31 elements; Q8_0 needs a multiple of 32");
    refuse_tensor(1, (uint64_t[]){4}, 0, 16, "is not aligned");
    refuse_tensor(1, (uint64_t[]){4}, 0, UINT64_MAX - 31, "reaches beyond the end");
    refuse_tensor(1, (uint64_t[]){33}, 0, 0, "reaches beyond the end");
    struct bytes bytes = begin(3, 2, 0);
    put_tensor(&bytes, "a", 1, (uint64_t[]){16}, 0, 0);
    put_tensor(&bytes, "b", 1, (uint64_t[]){4}, 0, 32);
    pad(&bytes, 128);
    refused(&bytes, FATHOM_INVALID, "shares bytes with another");
    bytes = begin(3, 2, 0);
    put_tensor(&bytes, "a", 1, (uint64_t[]){4}, 0, 0);
    put_tensor(&bytes, "a", 1, (uint64_t[]){4}, 0, 32);
    pad(&bytes, 128);
    refused(&bytes, FATHOM_INVALID, "tensor a is there twice");
}

/* Every file that is cut off is refused, and no changed byte does harm (sanitizers watch). */
static void no_damage_does_harm(void **state) {
    (void)state;
    char *data;
    size_t size;
    struct error error = {0};
    must(file_read(FOLDER "bytes.gguf", 1 << 20, &data, &size, &error), &error);
    struct gguf file;
    for (size_t length = 0; length < size; length += length < 4096 ? 7 : 4099) {
        char *copy = malloc(length + 1); /* of the exact size, so that reading on is seen */
        memcpy(copy, data, length);
        assert_true(gguf_parse(copy, length, &file, NULL) != 0);
        free(copy);
    }
    uint64_t random = 1;
    for (size_t i = 0; i < 400; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        size_t at = (size_t)(random >> 33) % 30000; /* metadata and the list of tensors */
        char kept = data[at];
        data[at] ^= (char)(1 + (random >> 20) % 255);
        if (gguf_parse(data, size, &file, NULL) == 0) {
            struct config config;
            struct tokenizer *tokenizer;
            if (gguf_read_config(&file, &config, NULL) == 0) {
                assert_true(config.heads % config.kv_heads == 0 && config.head_size % 2 == 0);
            }
            if (i % 20 == 0 && gguf_load_tokenizer(&file, &tokenizer, NULL) == 0) {
                tokenizer_destroy(tokenizer);
            }
            gguf_close(&file);
        }
        data[at] = kept;
    }
    free(data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_agree_with_the_reference),
        cmocka_unit_test(tokenizers_agree_with_their_source),
        cmocka_unit_test(headers_are_checked),
        cmocka_unit_test(values_are_checked),
        cmocka_unit_test(tensors_are_checked),
        cmocka_unit_test(no_damage_does_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The safetensors reader, fed from memory: what it accepts, what it refuses and how it says so. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/safetensors.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* A file in a block of exactly its size, so that a read past the end is seen by the sanitizer. */
static unsigned char *build(const char *header, const void *data, size_t data_size, size_t *size) {
    uint64_t length = strlen(header);
    unsigned char *bytes = malloc(sizeof length + length + data_size);
    assert_non_null(bytes);
    memcpy(bytes, &length, sizeof length);
    memcpy(bytes + sizeof length, header, length);
    if (data_size > 0) memcpy(bytes + sizeof length + length, data, data_size);
    *size = sizeof length + length + data_size;
    return bytes;
}

static void expect_refusal(const char *header, size_t data_size, int code, const char *part) {
    static const unsigned char zeros[256];
    size_t size;
    unsigned char *bytes = build(header, zeros, data_size, &size);
    struct safetensors file;
    struct error error = {0};
    int result = safetensors_parse(bytes, size, &file, &error);
    if (result == 0) fail_msg("accepted: %s", header);
    if (result != code || error.code != code)
        fail_msg("%s: code %d, %d", header, result, error.code);
    if (!strstr(error.message, part)) {
        fail_msg("%s: \"%s\" does not say \"%s\"", header, error.message, part);
    }
    free(bytes);
}

static void refuses_malformed_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        int code;
        const char *part;
    } cases[] = {
        {"", 0, FATHOM_INVALID, "header: not valid JSON"},
        {"{", 0, FATHOM_INVALID, "header: not valid JSON"},
        {"[]", 0, FATHOM_INVALID, "header: the JSON text is an array"},
        {"3", 0, FATHOM_INVALID, "header: not valid JSON"},
        {"{}x", 0, FATHOM_INVALID, "after '{}"},
        {"{\"a\":1}", 4, FATHOM_INVALID, "tensor 'a': the entry is 1"},
        {"{\"a\":null}", 4, FATHOM_INVALID, "tensor 'a': the entry is null"},
        {"{\"a\":[]}", 4, FATHOM_INVALID, "tensor 'a': the entry is an array"},
        {"{\"a\":{}}", 4, FATHOM_INVALID, "tensor 'a': dtype is missing"},
        {"{\"a\":{\"dtype\":1}}", 4, FATHOM_INVALID, "tensor 'a': dtype is 1"},
        {"{\"a\":{\"dtype\":\"F31\"}}", 4, FATHOM_UNSUPPORTED, "tensor 'a': dtype 'F31'"},
        {"{\"a\":{\"dtype\":\"f32\"}}", 4, FATHOM_UNSUPPORTED, "tensor 'a': dtype 'f32'"},
        {"{\"a\":{\"dtype\":\"F32\"}}", 4, FATHOM_INVALID, "tensor 'a': shape is missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":1}}", 4, FATHOM_INVALID, "tensor 'a': shape is 1"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0]}}", 4, FATHOM_INVALID,
         "tensor 'a': a size in shape is 1.0"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1]}}", 4, FATHOM_INVALID,
         "tensor 'a': a size in shape is -1"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"1\"]}}", 4, FATHOM_INVALID,
         "tensor 'a': a size in shape is \"1\""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775808]}}", 4, FATHOM_INVALID,
         "\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775808"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         FATHOM_INVALID, "tensor 'a': shape has too many elements"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
         FATHOM_INVALID, "tensor 'a': data_offsets hold 0 bytes; 4611686018427387904 elements"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
         FATHOM_INVALID, "tensor 'a': shape has 9 dimensions"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets is missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":{}}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets is an object"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[]}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets is an array"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,2,4]}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets end is 4.0"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets begin is -4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, FATHOM_INVALID,
         "tensor 'a': data_offsets end is 0; a whole number from 4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 3, FATHOM_INVALID,
         "tensor 'a': data_offsets end at 4; the file has 3 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[9223372036854775803,"
         "9223372036854775807]}}",
         4, FATHOM_INVALID, "tensor 'a': data_offsets end at 9223372036854775807"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 8, FATHOM_INVALID,
         "tensor 'a': data_offsets hold 4 bytes; 2 elements of dtype F32"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,4]}}", 8, FATHOM_INVALID,
         "tensor 'a': data_offsets hold 4 bytes; 1 elements of dtype BF16"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,8]}}", 8, FATHOM_INVALID,
         "tensor 'a': data_offsets hold 8 bytes; 1 elements"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
         12, FATHOM_INVALID, "tensor 'b': data_offsets begin at 4, inside tensor 'a'"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
         8, FATHOM_INVALID, "inside tensor"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}}",
         8, FATHOM_INVALID, "tensor 'b': data_offsets begin at 4, inside tensor 'a'"},
        {"{\"blocks.0.weight_twice\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},"
         "\"blocks.0.weight_twice\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[1,2]}}",
         2, FATHOM_INVALID, "\"blocks.0.weight_twice\""},
        {"{\"__metadata__\":\"x\"}", 0, FATHOM_INVALID, "__metadata__ is \"x\""},
        {"{\"__metadata__\":null}", 0, FATHOM_INVALID, "__metadata__ is null"},
        {"{\"__metadata__\":{\"step\":7}}", 0, FATHOM_INVALID,
         "__metadata__ 'step': the value is 7"},
        {"{\"a\\u0000b\":{}}", 0, FATHOM_INVALID, "not valid JSON"},
        {"{\"a\xff\":{}}", 0, FATHOM_INVALID, "not valid JSON"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        expect_refusal(cases[i].header, cases[i].data, cases[i].code, cases[i].part);
    }
}

static void refuses_a_header_longer_than_the_file(void **state) {
    (void)state;
    static const uint64_t lengths[] = {3,         4096,           (100u << 20) + 1,
                                       INT64_MAX, UINT64_MAX - 7, UINT64_MAX};
    for (size_t i = 0; i < COUNT(lengths); i++) {
        unsigned char *bytes = malloc(10);
        assert_non_null(bytes);
        memcpy(bytes, &lengths[i], 8);
        memcpy(bytes + 8, "{}", 2);
        struct safetensors file;
        struct error error = {0};
        assert_int_equal(safetensors_parse(bytes, 10, &file, &error), FATHOM_INVALID);
        assert_non_null(strstr(error.message, "header length"));
        free(bytes);
    }
}

static void limits_the_length_of_names(void **state) {
    (void)state;
    for (int length = 512; length <= 513; length++) {
        char header[700];
        snprintf(header, sizeof header,
                 "{\"%0*d\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", length, 7);
        if (length == 513) {
            expect_refusal(header, 1, FATHOM_INVALID, "a tensor name has 513 bytes");
            continue;
        }
        size_t size;
        unsigned char *bytes = build(header, "", 1, &size);
        struct safetensors file;
        assert_int_equal(safetensors_parse(bytes, size, &file, NULL), 0);
        assert_int_equal(strlen(file.entries[0].name), 512);
        safetensors_close(&file);
        free(bytes);
    }
}

static void limits_the_number_of_tensors(void **state) {
    (void)state;
    size_t tensors = ((size_t)1 << 20) + 1, used = 1;
    char *header = malloc(tensors * 12 + 2);
    assert_non_null(header);
    header[0] = '{';
    for (size_t i = 0; i < tensors; i++) {
        used += (size_t)sprintf(header + used, "%s\"%zx\":0", i ? "," : "", i);
    }
    memcpy(header + used, "}", 2);
    expect_refusal(header, 0, FATHOM_INVALID, "1048577 tensors");
    free(header);
}

/* Text that is small beside the tree it would become is refused before the tree is built. */
static void limits_the_values_of_a_header(void **state) {
    (void)state;
    size_t size = ((size_t)16 << 20) + 64;
    char *header = malloc(size + 1);
    assert_non_null(header);
    memset(header, ',', size);
    memcpy(header, "{\"a,\\\"[\":[0", 11);
    header[size] = '\0';
    expect_refusal(header, 0, FATHOM_INVALID, "more than 16777216");
    free(header);
}

static const char three[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                            "\"b\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[1,9]},"
                            "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                            "\"c\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[10,12]}}  ";

static void finds_tensors_by_name(void **state) {
    (void)state;
    unsigned char data[12] = {0};
    const float values[2] = {1.5f, -2.25f};
    memcpy(data + 1, values, sizeof values);
    data[11] = 0x40; /* bf16 2.0; the hole at 9 is allowed */
    size_t size;
    unsigned char *bytes = build(three, data, sizeof data, &size);
    struct safetensors file;
    struct error error = {0};
    assert_int_equal(safetensors_parse(bytes, size, &file, &error), 0);
    assert_int_equal(file.count, 3);
    assert_string_equal(file.entries[0].name, "a");
    assert_string_equal(file.entries[2].name, "c");
    assert_null(safetensors_find(&file, "d"));
    assert_null(safetensors_find(&file, "__metadata__"));

    struct tensor tensor;
    float out[2] = {0};
    assert_int_equal(safetensors_tensor(&file, safetensors_find(&file, "b"), &tensor, &error), 0);
    assert_int_equal(tensor.rank, 2);
    assert_int_equal(tensor.shape[0], 2);
    assert_int_equal(tensor.shape[1], 1);
    assert_int_equal(tensor.bytes, 8);
    assert_int_equal(tensor_to_f32(&tensor, out, &error), 0);
    assert_memory_equal(out, values, sizeof values);

    assert_int_equal(safetensors_tensor(&file, safetensors_find(&file, "c"), &tensor, &error), 0);
    assert_int_equal(tensor.rank, 1);
    assert_int_equal(tensor.shape[0], 1);
    assert_int_equal(tensor_to_f32(&tensor, out, &error), 0);
    assert_true(out[0] == 2.0f);

    assert_int_equal(safetensors_tensor(&file, safetensors_find(&file, "a"), &tensor, &error),
                     FATHOM_UNSUPPORTED);
    assert_non_null(strstr(error.message, "tensor 'a' has dtype U8"));
    safetensors_close(&file);
    free(bytes);
}

static void reads_from_every_alignment(void **state) {
    (void)state;
    const float values[3] = {0x1.234p5f, -1e-30f, 7};
    const uint16_t halves[3] = {0x3C00, 0xC000, 0x0001}; /* 1, -2, 2^-24 */
    unsigned char block[32];
    for (size_t offset = 0; offset < 8; offset++) {
        float out[3];
        struct tensor tensor = {
            .name = "t", .type = DTYPE_F32, .data = block + offset, .bytes = 12};
        memcpy(block + offset, values, sizeof values);
        assert_int_equal(tensor_to_f32(&tensor, out, NULL), 0);
        assert_memory_equal(out, values, sizeof values);
        memcpy(block + offset, halves, sizeof halves);
        tensor.type = DTYPE_F16;
        tensor.bytes = sizeof halves;
        assert_int_equal(tensor_to_f32(&tensor, out, NULL), 0);
        assert_true(out[0] == 1 && out[1] == -2 && out[2] == 0x1p-24f);
    }
}

/* IEEE 754: (-1)^sign * 2^(max(exponent, 1) - bias) * (implied one and fraction). */
static double decode(uint16_t bits, int fraction_bits, int bias) {
    int fraction = bits & ((1 << fraction_bits) - 1);
    int exponent = (bits & 0x7FFF) >> fraction_bits;
    double magnitude =
        exponent == 0 ? ldexp(fraction, 1 - bias - fraction_bits)
                      : ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
    return bits & 0x8000 ? -magnitude : magnitude;
}

static void converts_every_16_bit_value(void **state) {
    (void)state;
    static const struct {
        enum dtype type;
        int fraction_bits, bias;
    } formats[] = {{DTYPE_F16, 10, 15}, {DTYPE_BF16, 7, 127}};
    for (size_t i = 0; i < COUNT(formats); i++) {
        for (uint32_t bits = 0; bits <= UINT16_MAX; bits++) {
            uint16_t half = (uint16_t)bits;
            uint16_t exponents =
                (uint16_t)(0x7FFF >> formats[i].fraction_bits << formats[i].fraction_bits);
            struct tensor tensor = {
                .name = "t", .type = formats[i].type, .data = &half, .bytes = 2};
            float out;
            int result = tensor_to_f32(&tensor, &out, NULL);
            if ((half & exponents) == exponents) {
                assert_int_equal(result, FATHOM_INVALID);
                continue;
            }
            assert_int_equal(result, 0);
            assert_true((double)out == decode(half, formats[i].fraction_bits, formats[i].bias));
            assert_int_equal(signbit(out) != 0, half >> 15);
        }
    }
}

static void names_the_element_that_is_not_finite(void **state) {
    (void)state;
    struct error error = {0};
    float values[4] = {0, 1, NAN, INFINITY}, out[4];
    struct tensor tensor = {.name = "gate.bias", .type = DTYPE_F32, .data = values, .bytes = 16};
    assert_int_equal(tensor_to_f32(&tensor, out, &error), FATHOM_INVALID);
    assert_string_equal(error.message, "tensor 'gate.bias' has NaN at element 2 of 4");
    values[2] = -INFINITY;
    assert_int_equal(tensor_to_f32(&tensor, out, &error), FATHOM_INVALID);
    assert_string_equal(error.message, "tensor 'gate.bias' has an infinity at element 2 of 4");
}

static void accepts_empty_tensors_and_high_ranks(void **state) {
    (void)state;
    size_t size;
    unsigned char *bytes =
        build("{\"e\":{\"dtype\":\"F32\",\"shape\":[0,9223372036854775807],\"data_offsets\":[8,8]},"
              "\"f\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
              "\"g\":{\"dtype\":\"F32\",\"shape\":[1,2,1,1,1],\"data_offsets\":[0,8]}}",
              "12345678", 8, &size);
    struct safetensors file;
    struct error error = {0};
    struct tensor tensor;
    float none;
    assert_int_equal(safetensors_parse(bytes, size, &file, &error), 0);
    assert_int_equal(safetensors_tensor(&file, safetensors_find(&file, "e"), &tensor, &error), 0);
    assert_int_equal(tensor.bytes, 0);
    assert_int_equal(tensor_to_f32(&tensor, &none, &error), 0);
    assert_int_equal(safetensors_tensor(&file, safetensors_find(&file, "g"), &tensor, &error),
                     FATHOM_UNSUPPORTED);
    assert_non_null(strstr(error.message, "tensor 'g' has 5 dimensions"));
    safetensors_close(&file);
    free(bytes);
}

static void refuses_every_truncation(void **state) {
    (void)state;
    const unsigned char data[12] = {0};
    size_t size;
    unsigned char *whole = build(three, data, sizeof data, &size);
    for (size_t length = 0; length < size; length++) {
        unsigned char *part = malloc(length ? length : 1);
        assert_non_null(part);
        memcpy(part, whole, length);
        struct safetensors file;
        struct error error = {0};
        assert_int_equal(safetensors_parse(part, length, &file, &error), FATHOM_INVALID);
        assert_true(error.message[0] != '\0');
        free(part);
    }
    free(whole);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_malformed_headers),
        cmocka_unit_test(refuses_a_header_longer_than_the_file),
        cmocka_unit_test(limits_the_length_of_names),
        cmocka_unit_test(limits_the_number_of_tensors),
        cmocka_unit_test(limits_the_values_of_a_header),
        cmocka_unit_test(finds_tensors_by_name),
        cmocka_unit_test(reads_from_every_alignment),
        cmocka_unit_test(converts_every_16_bit_value),
        cmocka_unit_test(names_the_element_that_is_not_finite),
        cmocka_unit_test(accepts_empty_tensors_and_high_ranks),
        cmocka_unit_test(refuses_every_truncation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "server/flags.h"

static void sizes_are_parsed_or_refused(void **state) {
    static const struct {
        const char *text;
        size_t bytes;
    } good[] = {{"0", 0},       {"4096", 4096},         {"17B", 17},
                {"3KiB", 3072}, {"512MiB", 512u << 20}, {"2GiB", 2ull << 30}};
    static const char *const bad[] = {"",
                                      "-1",
                                      "1.5MiB",
                                      "5 MiB",
                                      "5MB",
                                      "MiB",
                                      "0x10",
                                      "5MiBs",
                                      "99999999999999999999999",
                                      "18446744073709551615KiB"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        size_t bytes = 1;
        assert_int_equal(size_parse(good[i].text, &bytes, NULL), 0);
        assert_int_equal(bytes, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        size_t bytes = 77;
        struct error error = {0};
        assert_int_equal(size_parse(bad[i], &bytes, &error), FATHOM_INVALID);
        assert_int_equal(bytes, 77);
        assert_non_null(strstr(error.message, bad[i]));
    }
}

static void messages_hold_no_control_and_no_torn_character(void **state) {
    (void)state;
    struct error error;
    error_set(&error, FATHOM_INVALID, "name 'a\x1b[31m\nb'");
    assert_string_equal(error.message, "name 'a?[31m?b'");
    char wide[1000] = "";
    for (size_t shift = 0; shift < 3; shift++) {
        memset(wide, 'x', shift);
        for (size_t i = shift; i + 3 < sizeof wide; i += 3) memcpy(wide + i, "\xE2\x82\xAC", 4);
        error_set(&error, FATHOM_INVALID, "%s", wide);
        size_t length = strlen(error.message);
        assert_true(length > 470);
        assert_int_equal((length - shift) % 3, 0);
    }
    error_set(&error, FATHOM_IO, "inner");
    assert_int_equal(error_prefix(&error, "file %d", 3), FATHOM_IO);
    assert_string_equal(error.message, "file 3: inner");
}

static void files_are_read_whole_within_a_limit(void **state) {
    (void)state;
    char *data;
    size_t size;
    struct error error = {0};
    assert_int_equal(file_read(FATHOM_SOURCE "/CMakeLists.txt", 1 << 20, &data, &size, &error), 0);
    assert_int_equal(strlen(data), size);
    free(data);
    assert_int_equal(file_read(FATHOM_SOURCE "/CMakeLists.txt", 10, &data, &size, &error),
                     FATHOM_INVALID);
    assert_non_null(strstr(error.message, "limit is 10"));
    assert_int_equal(file_read(FATHOM_SOURCE, 10, &data, &size, &error), FATHOM_INVALID);
    assert_int_equal(file_read(FATHOM_SOURCE "/no such file", 10, &data, &size, &error),
                     FATHOM_NOT_FOUND);
}

/* ---- Flags ----------------------------------------------------------------------------------- */

struct values {
    const char *text, *positional;
    size_t bytes, count;
    uint64_t seed;
    double real;
    bool on;
};

static int parse(struct values *values, struct error *error, int argc, const char *const *argv) {
    *values = (struct values){.count = 3, .real = 0.5};
    const struct flag flags[] = {
        {"text-value", 't', FLAG_TEXT, "T", "", &values->text, 0, 0},
        {"bytes", 0, FLAG_BYTES, "SIZE", "", &values->bytes, 0, 1 << 20},
        {"count", 'n', FLAG_COUNT, "N", "", &values->count, 1, 10},
        {"seed", 0, FLAG_SEED, "S", "", &values->seed, 0, 0},
        {"real", 0, FLAG_REAL, "R", "", &values->real, -1, 1},
        {"on", 0, FLAG_SWITCH, NULL, "", &values->on, 0, 0},
    };
    const struct command command = {.name = "try",
                                    .usage = "X [flags]",
                                    .summary = "",
                                    .flags = flags,
                                    .flag_count = sizeof flags / sizeof *flags,
                                    .positional_count = 1,
                                    .positionals = &values->positional};
    char *copy[16];
    copy[0] = (char *)(uintptr_t) "try";
    for (int i = 0; i < argc; i++) copy[i + 1] = (char *)(uintptr_t)argv[i];
    return flags_parse(&command, argc + 1, copy, error);
}

#define PARSE(values, error, ...)                                                                  \
    parse(values, error, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)),            \
          (const char *[]){__VA_ARGS__})

static void flags_take_every_form(void **state) {
    (void)state;
    struct values v;
    struct error error = {0};
    assert_int_equal(PARSE(&v, &error, "-t", "a", "--bytes=4KiB", "pos", "--count", "7", "--seed",
                           "-1", "--real", "-1", "--on"),
                     0);
    assert_string_equal(v.text, "a");
    assert_string_equal(v.positional, "pos");
    assert_int_equal(v.bytes, 4096);
    assert_int_equal(v.count, 7);
    assert_true(v.seed == UINT64_MAX);
    assert_true(v.real == -1);
    assert_true(v.on);
    assert_int_equal(PARSE(&v, &error, "--", "--on"), 0);
    assert_string_equal(v.positional, "--on");
    assert_false(v.on);
    assert_int_equal(v.count, 3);
}

static void flags_refuse_and_say_why(void **state) {
    static const struct {
        const char *argument, *value, *message;
    } bad[] = {
        {"--cuont", "3", "did you mean --count"},
        {"--count", "11", "between 1 and 10"},
        {"--count", "0", "between 1 and 10"},
        {"--count", "3x", "between 1 and 10"},
        {"--count", "-3", "between 1 and 10"},
        {"--count", "99999999999999999999", "between"},
        {"--real", "nan", "between -1 and 1"},
        {"--real", "1.5", "between"},
        {"--real", "", "between"},
        {"--bytes", "2MiB", "between"},
        {"--bytes", "1MB", "--bytes"},
        {"--seed", "18446744073709551616", "64-bit"},
        {"--seed", "1e3", "64-bit"},
        {"--on=maybe", "x", "switch"},
        {"x", "y", "unexpected argument 'y'"},
        {"--frobnicate", "x", "unknown flag"},
        {"x", "-n", "needs a value"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct values v;
        struct error error = {0};
        assert_int_equal(PARSE(&v, &error, bad[i].argument, bad[i].value), FATHOM_INVALID);
        if (!strstr(error.message, bad[i].message))
            fail_msg("%s: %s", bad[i].argument, error.message);
    }
    struct values v;
    struct error error = {0};
    assert_int_equal(parse(&v, &error, 0, NULL), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "missing argument"));
}

static void environment_sets_flags_and_the_command_line_wins(void **state) {
    (void)state;
    struct values v;
    struct error error = {0};
    setenv("FATHOM_TEXT_VALUE", "from-environment", 1);
    setenv("FATHOM_ON", "true", 1);
    assert_int_equal(PARSE(&v, &error, "x"), 0);
    assert_string_equal(v.text, "from-environment");
    assert_true(v.on);
    assert_int_equal(PARSE(&v, &error, "x", "-t", "mine", "--on=false"), 0);
    assert_string_equal(v.text, "mine");
    assert_false(v.on);
    setenv("FATHOM_COUNT", "many", 1);
    assert_int_equal(PARSE(&v, &error, "x"), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "FATHOM_COUNT in the environment"));
    unsetenv("FATHOM_TEXT_VALUE");
    unsetenv("FATHOM_ON");
    unsetenv("FATHOM_COUNT");
}

/* Against the definition: a character is what a decoder gives back by encoding it again. */
static size_t utf8_encode(uint32_t c, char out[4]) {
    if (c < 0x80) return out[0] = (char)c, 1;
    if (c < 0x800) return out[0] = (char)(0xC0 | c >> 6), out[1] = (char)(0x80 | (c & 63)), 2;
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 63)), out[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18), out[1] = (char)(0x80 | (c >> 12 & 63));
    out[2] = (char)(0x80 | (c >> 6 & 63)), out[3] = (char)(0x80 | (c & 63));
    return 4;
}

static void utf8_is_what_the_standard_says(void **state) {
    (void)state;
    size_t used;
    for (uint32_t c = 0; c < 0x120000; c++) { /* 17 planes, and one that is none */
        char bytes[4];
        size_t length = utf8_encode(c, bytes);
        bool is_character = c < 0x110000 && (c < 0xD800 || c > 0xDFFF);
        assert_int_equal(utf8_scan(bytes, length, &used) == UTF8_VALID, is_character);
        if (!is_character) continue;
        assert_int_equal(used, length);
        for (size_t cut = 1; cut < length; cut++) {
            assert_int_equal(utf8_scan(bytes, cut, &used), UTF8_TORN);
            assert_int_equal(used, cut);
        }
    }
    static const struct {
        const char *bytes;
        size_t used; /* of an invalid piece */
    } invalid[] = {
        {"\x80", 1},         {"\xC0\x80", 1}, {"\xC1\xBF", 1},         {"\xE0\x80\x80", 1},
        {"\xED\xA0\x80", 1}, {"\xFF", 1},     {"\xF0\x8F\xBF\xBF", 1}, {"\xF4\x90\x80\x80", 1},
        {"\xE2\x82(", 2},    {"\xC3(", 1},    {"\xF0\x9F\x98(", 3}};
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
        assert_int_equal(utf8_scan(invalid[i].bytes, strlen(invalid[i].bytes), &used),
                         UTF8_INVALID);
        assert_int_equal(used, invalid[i].used);
    }
}

static void json_is_measured_outside_of_strings(void **state) {
    (void)state;
    static const struct {
        const char *text;
        struct json_extent extent;
    } cases[] = {
        {"", {0, 0, 0, 0}},
        {"{}", {1, 1, 0, 0}},
        {"{\"a\":[1,2,{\"b\":3}]}", {3, 3, 2, 2}},
        {"[\"[,:{\\\",[\"]", {1, 1, 0, 0}},
        {"[\"\\\\\",[]]", {2, 2, 1, 0}},
        {"]]][", {1, 1, 0, 0}},
        {"\"never ends,,,\\", {0, 0, 0, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct json_extent extent = json_measure(cases[i].text, strlen(cases[i].text));
        assert_memory_equal(&extent, &cases[i].extent, sizeof extent);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_parsed_or_refused),
        cmocka_unit_test(messages_hold_no_control_and_no_torn_character),
        cmocka_unit_test(utf8_is_what_the_standard_says),
        cmocka_unit_test(json_is_measured_outside_of_strings),
        cmocka_unit_test(files_are_read_whole_within_a_limit),
        cmocka_unit_test(flags_take_every_form),
        cmocka_unit_test(flags_refuse_and_say_why),
        cmocka_unit_test(environment_sets_flags_and_the_command_line_wins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

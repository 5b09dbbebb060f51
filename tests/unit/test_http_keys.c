/* API keys: what a file may hold, and what opens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/api_keys.h"

/* Loads keys from a file of those bytes. */
static int load_bytes(struct api_keys *keys, const char *bytes, size_t length, const char *single,
                      struct error *error) {
    char path[] = "/tmp/fathom-keys-XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    assert_int_equal(write(file, bytes, length), length);
    close(file);
    int result = api_keys_load(keys, path, single, error);
    unlink(path);
    return result;
}

static int load(struct api_keys *keys, const char *text, const char *single, struct error *error) {
    return load_bytes(keys, text, strlen(text), single, error);
}

static bool accepts(const struct api_keys *keys, const char *authorization) {
    return api_keys_accept(keys, authorization, strlen(authorization));
}

static void test_accepted(void **state) {
    (void)state;
    struct api_keys keys;
    struct error error;
    assert_int_equal(load(&keys, "# comment\n\nfirst\n second\t\r\nlast", "single", &error),
                     FATHOM_INVALID);
    assert_int_equal(load(&keys, "# comment\n\nfirst\nsecond \t\r\nlast", "single", &error), 0);
    assert_int_equal(keys.count, 4);
    assert_true(accepts(&keys, "Bearer first"));
    assert_true(accepts(&keys, "bearer  second"));
    assert_true(accepts(&keys, "Bearer last"));
    assert_true(accepts(&keys, "Bearer single"));
    assert_false(accepts(&keys, "Bearer firs"));
    assert_false(accepts(&keys, "Bearer firstt"));
    assert_false(accepts(&keys, "Bearer first "));
    assert_false(accepts(&keys, "Bearer FIRST"));
    assert_false(accepts(&keys, "Bearer "));
    assert_false(accepts(&keys, "Bearer"));
    assert_false(accepts(&keys, "first"));
    assert_false(accepts(&keys, "Basic first"));
    assert_false(accepts(&keys, "Bearer # comment"));
    assert_false(accepts(&keys, ""));
    assert_false(api_keys_accept(&keys, "Bearer first\0", 13));
    api_keys_free(&keys);
}

static void test_length(void **state) {
    (void)state;
    char text[API_KEY_MAX + 2], header[API_KEY_MAX + 16];
    struct api_keys keys;
    struct error error;
    memset(text, 'k', sizeof text);
    text[API_KEY_MAX + 1] = '\0';
    assert_int_equal(load(&keys, text, NULL, &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "512"));
    text[API_KEY_MAX] = '\0';
    assert_int_equal(load(&keys, text, NULL, &error), 0);
    snprintf(header, sizeof header, "Bearer %s", text);
    assert_true(accepts(&keys, header));
    strcat(header, "k");
    assert_false(accepts(&keys, header));
    api_keys_free(&keys);
}

static void test_no_keys(void **state) {
    (void)state;
    struct api_keys keys;
    struct error error;
    assert_int_equal(load(&keys, "# nothing\n\n", NULL, &error), FATHOM_INVALID);
    assert_int_equal(load(&keys, "", "single", &error), FATHOM_INVALID);
    assert_int_equal(api_keys_load(&keys, "/nowhere/keys", NULL, &error), FATHOM_NOT_FOUND);
    assert_int_equal(api_keys_load(&keys, NULL, "", &error), FATHOM_INVALID);
    assert_non_null(strstr(error.message, "FATHOM_API_KEY"));
    assert_int_equal(load(&keys, "first\n", "", &error), FATHOM_INVALID);
    assert_int_equal(api_keys_load(&keys, NULL, NULL, &error), 0);
    assert_int_equal(keys.count, 0);
    api_keys_free(&keys);
}

/* A key is never cut short: what cannot be one is refused, with its line. */
static void test_bytes_that_are_no_key(void **state) {
    (void)state;
    struct api_keys keys;
    struct error error;
    static const struct {
        const char *bytes;
        size_t length;
    } files[] = {{"# one\nk\0y\nlast\n", 15}, {"first\n\0\n", 8}, {"first\n\0", 7},
                 {"first\nkey\0", 10},        {"\nk\ty\n", 5},    {"\nk\xc3\xa4y", 5}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        assert_int_equal(load_bytes(&keys, files[i].bytes, files[i].length, NULL, &error),
                         FATHOM_INVALID);
        assert_non_null(strstr(error.message, "line 2: "));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_length),
        cmocka_unit_test(test_no_keys),
        cmocka_unit_test(test_bytes_that_are_no_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

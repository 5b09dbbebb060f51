#include "engine/json_field.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

/* A value of two bytes of text ("[]") becomes a hundred bytes of tree. The largest document we need
 * is the header of 1 Mi tensors with about a dozen commas and brackets each. */
#define VALUES_MAX ((size_t)16 << 20)

static int check_extent(const char *text, size_t size, struct error *error);
static int refuse_syntax(const char *text, size_t size, const json_error_t *syntax,
                         struct error *error);
static void describe(const json_t *value, char *out, size_t size);

int json_object_parse(const char *text, size_t size, json_t **object, struct error *error) {
    int result = check_extent(text, size, error);
    if (result != 0) return result;
    json_error_t syntax;
    bool no_memory;
    json_t *value = json_parse(text, size, JSON_REJECT_DUPLICATES, &syntax, &no_memory);
    if (no_memory) {
        return error_set(error, FATHOM_NO_MEMORY, "no memory to parse %zu bytes of JSON", size);
    }
    if (!value) return refuse_syntax(text, size, &syntax, error);
    if (!json_is_object(value)) {
        json_decref(value);
        return error_set(error, FATHOM_INVALID, "the JSON text is an array; an object is required");
    }
    *object = value;
    return 0;
}

json_t *json_object_field(const json_t *object, const char *key) {
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

int json_read_integer(const json_t *value, const char *name, int64_t minimum, int64_t maximum,
                      int64_t *out, struct error *error) {
    int64_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < minimum || number > maximum) {
        char expected[80];
        snprintf(expected, sizeof expected, "a whole number from %lld to %lld", (long long)minimum,
                 (long long)maximum);
        return json_refuse(value, name, expected, error);
    }
    *out = number;
    return 0;
}

int json_read_number(const json_t *value, const char *name, double minimum, double maximum,
                     double *out, struct error *error) {
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= minimum && number <= maximum)) {
        char expected[80];
        snprintf(expected, sizeof expected,
                 maximum < DBL_MAX ? "a number from %g to %g" : "a number of at least %g", minimum,
                 maximum);
        return json_refuse(value, name, expected, error);
    }
    *out = number;
    return 0;
}

int json_read_choice(const json_t *value, const char *name, const char *const *words, size_t count,
                     size_t *out, struct error *error) {
    char expected[128] = "";
    for (size_t i = 0; i < count; i++) {
        if (json_is_string(value) && strcmp(json_string_value(value), words[i]) == 0) {
            *out = i;
            return 0;
        }
        size_t used = strlen(expected);
        snprintf(expected + used, sizeof expected - used, "%s\"%s\"", i ? " or " : "", words[i]);
    }
    json_refuse(value, name, expected, error);
    if (!json_is_string(value)) return FATHOM_INVALID;
    if (error) error->code = FATHOM_UNSUPPORTED;
    return FATHOM_UNSUPPORTED;
}

int json_refuse(const json_t *value, const char *name, const char *expected, struct error *error) {
    char found[64];
    describe(value, found, sizeof found);
    return error_set(error, FATHOM_INVALID, "%s is %s; %s is required", name, found, expected);
}

/* How a message shows a value: as JSON if that is short. */
static void describe(const json_t *value, char *out, size_t size) {
    if (!value || json_is_array(value) || json_is_object(value)) {
        const char *kind = !value ? "missing" : json_is_array(value) ? "an array" : "an object";
        snprintf(out, size, "%s", kind);
        return;
    }
    /* json_dumpb returns the length that it needs; where that is too much, `out` has gaps. */
    size_t length = json_dumpb(value, out, size - 1,
                               JSON_ENCODE_ANY | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(12));
    if (length < size) {
        out[length] = '\0';
    } else {
        snprintf(out, size, "a text of %zu bytes", json_string_length(value));
    }
}

static int check_extent(const char *text, size_t size, struct error *error) {
    struct json_extent extent = json_measure(text, size);
    if (extent.containers + extent.commas + extent.colons <= VALUES_MAX) return 0;
    return error_set(error, FATHOM_INVALID, "the JSON text holds more than %zu keys and values",
                     VALUES_MAX);
}

/* The parser names a position only; the text that led to it shows the key. */
static int refuse_syntax(const char *text, size_t size, const json_error_t *syntax,
                         struct error *error) {
    enum json_error_code code = json_error_code(syntax);
    char before[97];
    size_t end = syntax->position > 0 ? (size_t)syntax->position : 0;
    if (end > size) end = size;
    size_t length = end < sizeof before - 1 ? end : sizeof before - 1;
    for (size_t i = 0; i < length; i++) {
        /* The cut may tear a UTF-8 character, and bad UTF-8 may be the very fault. */
        unsigned char c = (unsigned char)text[end - length + i];
        before[i] = c > 0 && c < 0x80 ? (char)c : '?';
    }
    before[length] = '\0';
    return error_set(error, FATHOM_INVALID, "not valid JSON at line %d: %s%s, after '%s'",
                     syntax->line, syntax->text,
                     code == json_error_numeric_overflow ? " (64 bits are the limit)" : "", before);
}

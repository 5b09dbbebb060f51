#include "api/fields.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

/* As a tree, an array takes about 100 bytes and a number 40, whatever little text they were:
 * without these bounds 16 MiB of "[[],[],..." would take half a gigabyte. Both leave room for 256
 * prompts of 8192 ids. */
#define JSON_CONTAINERS_MAX ((size_t)1 << 16)
#define JSON_VALUES_MAX     ((size_t)1 << 21)
#define MEMBER_SIZE         64 /* of a name that a refusal tells: no field's is longer */

static int check_extent(const char *body, size_t length, struct api_error *error);
static int refuse_text(const char *body, size_t length, const json_error_t *syntax,
                       struct api_error *error);
static void member_at(const char *body, size_t end, char out[MEMBER_SIZE]);

int body_parse(const char *body, size_t length, json_t **object, struct api_error *error) {
    json_error_t syntax;
    int result = check_extent(body, length, error);
    if (result != 0) return result;
    bool no_memory;
    size_t flags = JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES;
    json_t *value = json_parse(body, length, flags, &syntax, &no_memory);
    if (!value && !no_memory && json_error_code(&syntax) == json_error_numeric_overflow) {
        /* An integer beyond 64 bits. As a real it is out of every field's range, and so gets
         * refused by name, or ignored where it stands in a field that is ignored. */
        flags |= JSON_DECODE_INT_AS_REAL;
        value = json_parse(body, length, flags, &syntax, &no_memory);
    }
    if (no_memory) return refuse_no_memory(error);
    if (!value) return refuse_text(body, length, &syntax, error);
    if (!json_is_object(value)) {
        json_decref(value);
        return api_error_set(error, 400, NULL, NULL, "the body must be a JSON object");
    }
    *object = value;
    return 0;
}

static int check_extent(const char *body, size_t length, struct api_error *error) {
    struct json_extent extent = json_measure(body, length);
    if (extent.depth > JSON_DEPTH_MAX) {
        return api_error_set(error, 400, NULL, NULL, "the body nests deeper than %d levels",
                             JSON_DEPTH_MAX);
    }
    if (extent.containers <= JSON_CONTAINERS_MAX && extent.commas <= JSON_VALUES_MAX) return 0;
    return api_error_set(
        error, 400, NULL, NULL,
        "the body holds more than %zu arrays and objects or %zu values; send it in parts",
        JSON_CONTAINERS_MAX, JSON_VALUES_MAX);
}

static int refuse_text(const char *body, size_t length, const json_error_t *syntax,
                       struct api_error *error) {
    char member[MEMBER_SIZE];
    size_t end = syntax->position > 0 ? (size_t)syntax->position : 0;
    member_at(body, end < length ? end : length, member);
    return api_error_set(error, 400, NULL, member,
                         "the body is not valid JSON%s%s: %s (line %d, column %d)",
                         *member ? " in " : "", member, syntax->text, syntax->line, syntax->column);
}

static bool is_plain_name(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        bool is_letter = (text[i] | 0x20) >= 'a' && (text[i] | 0x20) <= 'z';
        bool is_digit = text[i] >= '0' && text[i] <= '9';
        if (!is_letter && !is_digit && text[i] != '_') return false;
    }
    return length < MEMBER_SIZE;
}

/* The name of the body's member whose key or value ends at `end` or goes on there: the field at
 * fault when the text cannot be read any further. Empty when there is none, or it is no name that a
 * field could have. */
static void member_at(const char *body, size_t end, char out[MEMBER_SIZE]) {
    const char *name = "", *string = NULL; /* the string that began and has not ended */
    size_t name_length = 0, depth = 0;
    bool is_object = false, at_key = false;
    for (size_t i = 0; i < end; i++) {
        char c = body[i];
        if (string && c == '\\') {
            i++;
        } else if (string && c == '"') {
            if (at_key && depth == 1) name_length = (size_t)(body + i - (name = string));
            at_key = at_key && depth > 1;
            string = NULL;
        } else if (string) {
            continue;
        } else if (c == '"') {
            string = body + i + 1;
        } else if (c == '[' || c == '{') {
            if (depth++ > 0) continue;
            is_object = at_key = c == '{';
            name_length = 0;
        } else if (c == ']' || c == '}') {
            depth -= depth > 0;
        } else if (c == ',' && depth == 1 && is_object) {
            at_key = true;
            name_length = 0;
        }
    }
    if (depth == 0 || !is_plain_name(name, name_length)) name_length = 0;
    snprintf(out, MEMBER_SIZE, "%.*s", (int)name_length, name);
}

const json_t *field_get(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

int field_read_bool(const json_t *object, const char *name, bool *out, struct api_error *error) {
    const json_t *value = field_get(object, name);
    if (!value) return 0;
    if (!json_is_boolean(value)) return field_refuse(name, value, error, "true or false");
    *out = json_is_true(value);
    return 0;
}

int field_read_integer(const json_t *object, const char *name, int64_t low, int64_t high,
                       int64_t *out, struct api_error *error) {
    const json_t *value = field_get(object, name);
    int64_t number;
    if (!value) return 0;
    if (!value_to_integer(value, &number) || number < low || number > high) {
        return field_refuse(name, value, error, "an integer from %lld to %lld", (long long)low,
                            (long long)high);
    }
    *out = number;
    return 0;
}

int field_read_number(const json_t *object, const char *name, double low, double high,
                      bool open_low, double *out, struct api_error *error) {
    const json_t *value = field_get(object, name);
    if (!value) return 0;
    double number = json_number_value(value);
    bool inside = number >= low && number <= high && !(open_low && number == low);
    if (!json_is_number(value) || !inside) {
        return field_refuse(
            name, value, error,
            open_low ? "a number above %g and at most %g" : "a number from %g to %g", low, high);
    }
    *out = number;
    return 0;
}

/* How a message shows a value: numbers as they are, the rest by kind. */
static void describe(const json_t *value, char *out, size_t size) {
    if (json_is_integer(value)) {
        snprintf(out, size, "%lld", (long long)json_integer_value(value));
    } else if (json_is_real(value)) {
        snprintf(out, size, "%.12g", json_real_value(value));
    } else {
        snprintf(out, size, "%s",
                 !value                  ? "missing"
                 : json_is_string(value) ? "a string"
                 : json_is_array(value)  ? "an array"
                 : json_is_object(value) ? "an object"
                 : json_is_null(value)   ? "null"
                                         : "a boolean");
    }
}

int field_refuse(const char *name, const json_t *found, struct api_error *error,
                 const char *expected, ...) {
    char wanted[256], shown[32];
    va_list arguments;
    va_start(arguments, expected);
    vsnprintf(wanted, sizeof wanted, expected, arguments);
    va_end(arguments);
    describe(found, shown, sizeof shown);
    return api_error_set(error, 400, NULL, name, "%s must be %s, not %s", name, wanted, shown);
}

const char *field_element(const char *name, size_t index, char out[64]) {
    snprintf(out, 64, "%s[%zu]", name, index);
    return out;
}

bool value_to_integer(const json_t *value, int64_t *out) {
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
        return true;
    }
    double real = json_real_value(value); /* 0 for what is no real */
    /* Beyond 2^53 a double no longer says which integer was meant. */
    if (!json_is_real(value) || !(fabs(real) <= 0x1p53) || real != floor(real)) return false;
    *out = (int64_t)real;
    return true;
}

bool value_is_word(const json_t *value, const char *word) {
    size_t length = strlen(word);
    return json_is_string(value) && json_string_length(value) == length &&
           memcmp(json_string_value(value), word, length) == 0;
}

int value_to_tokens(const json_t *array, const char *name, size_t vocab, struct token_list *list,
                    struct api_error *error) {
    size_t count = json_array_size(array);
    int32_t *ids = calloc(count ? count : 1, sizeof *ids);
    if (!ids) return refuse_no_memory(error);
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_array_get(array, i);
        int64_t id;
        if (!value_to_integer(value, &id) || id < 0 || (uint64_t)id >= vocab) {
            char element[64];
            free(ids);
            return field_refuse(field_element(name, i, element), value, error,
                                "a token id from 0 to %zu", vocab - 1);
        }
        ids[i] = (int32_t)id;
    }
    *list = (struct token_list){.ids = ids, .count = count, .capacity = count ? count : 1};
    return 0;
}

int refuse_unsupported(const char *name, struct api_error *error) {
    return api_error_set(error, 400, "unsupported_parameter", name,
                         "%s is not supported here; leave it out", name);
}

int refuse_no_memory(struct api_error *error) {
    return api_error_set(error, 500, NULL, NULL, "no memory for this request");
}

int refuse_abandoned(struct api_error *error) {
    return api_error_set(error, 503, NULL, NULL, "nobody waits for this request any more");
}

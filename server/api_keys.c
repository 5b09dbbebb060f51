#include "server/api_keys.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define KEY_FILE_LIMIT ((size_t)1 << 20)

static int keys_add(struct api_keys *keys, const char *key, size_t length, struct error *error) {
    if (length > API_KEY_MAX) {
        return error_set(error, FATHOM_INVALID, "an API key has %zu bytes; the limit is %d", length,
                         API_KEY_MAX);
    }
    for (size_t i = 0; i < length; i++) {
        if (key[i] <= 0x20 || key[i] >= 0x7f) {
            return error_set(
                error, FATHOM_INVALID,
                "an API key has the byte 0x%02x; it may have printable ASCII without spaces",
                (unsigned char)key[i]);
        }
    }
    char **grown = realloc(keys->keys, (keys->count + 1) * sizeof *grown);
    if (grown) keys->keys = grown;
    char *copy = strndup(key, length);
    if (!grown || !copy) {
        free(copy);
        return error_set(error, FATHOM_NO_MEMORY, "no memory for API keys");
    }
    keys->keys[keys->count++] = copy;
    return 0;
}

static bool is_blank(char character) {
    return character == ' ' || character == '\t' || character == '\r';
}

static int keys_add_file(struct api_keys *keys, const char *path, struct error *error) {
    char *text;
    size_t size, count_before = keys->count, number = 0;
    int result = file_read(path, KEY_FILE_LIMIT, &text, &size, error);
    if (result != 0) return result;
    const char *end = text + size;
    for (const char *line = text, *next; line < end && result == 0; line = next) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        next = stop ? stop + 1 : end;
        if (!stop) stop = end;
        number++;
        while (stop > line && is_blank(stop[-1])) stop--;
        if (stop > line && *line != '#')
            result = keys_add(keys, line, (size_t)(stop - line), error);
    }
    explicit_bzero(text, size);
    free(text);
    if (result != 0) {
        error_prefix(error, "%s line %zu", path, number);
    } else if (keys->count == count_before) {
        result = error_set(error, FATHOM_INVALID, "%s holds no API key", path);
    }
    return result;
}

int api_keys_load(struct api_keys *keys, const char *path, const char *single,
                  struct error *error) {
    *keys = (struct api_keys){0};
    int result = 0;
    if (path) result = keys_add_file(keys, path, error);
    if (result == 0 && single && !*single) {
        result =
            error_set(error, FATHOM_INVALID, "FATHOM_API_KEY is empty; unset it to need no key");
    } else if (result == 0 && single) {
        result = keys_add(keys, single, strlen(single), error);
        if (result != 0) error_prefix(error, "FATHOM_API_KEY");
    }
    if (result != 0) api_keys_free(keys);
    return result;
}

void api_keys_free(struct api_keys *keys) {
    for (size_t i = 0; i < keys->count; i++) {
        explicit_bzero(keys->keys[i], strlen(keys->keys[i]));
        free(keys->keys[i]);
    }
    free(keys->keys);
    *keys = (struct api_keys){0};
}

/* Both padded to the same length: every comparison reads API_KEY_MAX bytes of each. */
static bool key_equals(const char *padded, size_t length, const char *key) {
    char other[API_KEY_MAX] = {0};
    size_t other_length = strlen(key);
    memcpy(other, key, other_length);
    volatile size_t difference = length ^ other_length;
    for (size_t i = 0; i < API_KEY_MAX; i++) {
        difference |= (size_t)((unsigned char)padded[i] ^ (unsigned char)other[i]);
    }
    return difference == 0;
}

bool api_keys_accept(const struct api_keys *keys, const char *authorization, size_t length) {
    static const char scheme[] = "Bearer ";
    size_t scheme_length = sizeof scheme - 1;
    if (length < scheme_length || strncasecmp(authorization, scheme, scheme_length) != 0)
        return false;
    const char *key = authorization + scheme_length;
    size_t key_length = length - scheme_length;
    while (key_length > 0 && *key == ' ') {
        key++;
        key_length--;
    }
    if (key_length == 0 || key_length > API_KEY_MAX) return false;
    char padded[API_KEY_MAX] = {0};
    memcpy(padded, key, key_length);
    bool accepted = false;
    for (size_t i = 0; i < keys->count; i++)
        accepted |= key_equals(padded, key_length, keys->keys[i]);
    explicit_bzero(padded, sizeof padded);
    return accepted;
}

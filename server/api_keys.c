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
            return error_set(error, FATHOM_INVALID,
                             "API key %zu has a character that is not printable ASCII",
                             keys->count + 1);
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

static int keys_add_file(struct api_keys *keys, const char *path, struct error *error) {
    char *text;
    size_t size, count_before = keys->count;
    int result = file_read(path, KEY_FILE_LIMIT, &text, &size, error);
    if (result != 0) return result;
    for (char *line = text, *next; *line && result == 0; line = next) {
        size_t length = strcspn(line, "\n");
        next = line + length + (line[length] == '\n');
        while (length > 0 && strchr(" \t\r", line[length - 1])) length--;
        if (length > 0 && *line != '#') result = keys_add(keys, line, length, error);
    }
    explicit_bzero(text, size);
    free(text);
    if (result != 0) {
        error_prefix(error, "%s", path);
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
    if (result == 0 && single && *single) {
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

#include "api/stop.h"

#include <stdlib.h>
#include <string.h>

/* Longest prefix of the stop string that the text ends with after `byte`, given that it ended with
 * the prefix of length `matched` (shorter than the whole) before. */
static uint16_t advance(const struct stop_string *stop, uint16_t matched, char byte) {
    while (matched > 0 && stop->bytes[matched] != byte) matched = stop->fallback[matched - 1];
    return (uint16_t)(matched + (stop->bytes[matched] == byte));
}

bool stop_string_set(struct stop_string *stop, const char *bytes, size_t length) {
    *stop = (struct stop_string){.bytes = malloc(length), .length = length};
    stop->fallback = calloc(length, sizeof *stop->fallback);
    if (!stop->bytes || !stop->fallback) {
        stop_string_free(stop);
        return false;
    }
    memcpy(stop->bytes, bytes, length);
    /* The string is matched against itself, one byte late. */
    for (size_t i = 1; i < length; i++) {
        stop->fallback[i] = advance(stop, stop->fallback[i - 1], bytes[i]);
    }
    return true;
}

void stop_string_free(struct stop_string *stop) {
    free(stop->bytes);
    free(stop->fallback);
    *stop = (struct stop_string){0};
}

size_t stop_take(struct stop_matcher *matcher, const struct stop_string *stops, size_t count,
                 char byte) {
    size_t longest = 0;
    for (size_t i = 0; i < count; i++) {
        matcher->matched[i] = advance(&stops[i], matcher->matched[i], byte);
        if (matcher->matched[i] == stops[i].length && stops[i].length > longest) {
            longest = stops[i].length;
        }
    }
    return longest;
}

size_t stop_held(const struct stop_matcher *matcher, size_t count) {
    size_t held = 0;
    for (size_t i = 0; i < count; i++) {
        if (matcher->matched[i] > held) held = matcher->matched[i];
    }
    return held;
}

/* Stop strings, matched byte by byte as the text grows (Knuth, Morris and Pratt), so that a match
 * across tokens is found with its last byte and no byte is looked at twice. Private to api/. */
#ifndef FATHOM_STOP_H
#define FATHOM_STOP_H

#include "api/api.h"

/* Copies `bytes` (1..STOP_BYTES_MAX) and builds the fallback table; false when memory ran out. */
bool stop_string_set(struct stop_string *stop, const char *bytes, size_t length);
void stop_string_free(struct stop_string *stop);

/* Per stop string, how many of its bytes the text ends with now. Zero-initialised is the start. */
struct stop_matcher {
    uint16_t matched[STOPS_MAX];
};

/* Takes the next byte of the text. Returns the length of the longest stop string that is complete
 * with it, 0 if none is. */
size_t stop_take(struct stop_matcher *matcher, const struct stop_string *stops, size_t count,
                 char byte);

/* Bytes at the end of the text that may yet turn out to be the start of a stop string. */
size_t stop_held(const struct stop_matcher *matcher, size_t count);

#endif

/* A chunked body (RFC 9112 section 7.1), unwrapped byte by byte as it arrives.
 *
 * To the letter, as http_head.h tells why: sizes are hexadecimal digits, lines end with CR LF,
 * trailers are fields with a name and without folds. Extensions and trailers are checked and
 * dropped. No sockets here: a pure function of bytes.
 */
#ifndef FATHOM_HTTP_CHUNKS_H
#define FATHOM_HTTP_CHUNKS_H

#include "base/base.h"

enum http_chunk_state {
    CHUNK_SIZE, /* before the first digit */
    CHUNK_MORE_SIZE,
    CHUNK_BLANK, /* before an extension's semicolon */
    CHUNK_EXTENSION,
    CHUNK_SIZE_END, /* CR was there */
    CHUNK_DATA,
    CHUNK_DATA_RETURN,
    CHUNK_DATA_END,
    CHUNK_TRAILER, /* before a trailer, or the empty line behind the last */
    CHUNK_TRAILER_NAME,
    CHUNK_TRAILER_VALUE,
    CHUNK_TRAILER_END,
    CHUNK_LAST_END,
    CHUNK_COMPLETE,
};

/* Zeroed is ready. */
struct http_chunks {
    enum http_chunk_state state;
    uint64_t left;   /* of the chunk under way: read so far in CHUNK_*SIZE, then still to come */
    size_t overhead; /* bytes so far that are no data */
};

/* Takes bytes up to the end of a stretch of data, of a chunk's size line or of the body: *consumed
 * of them, of which the last *data_length are data. Returns 0, or FATHOM_INVALID with a sentence.
 */
int http_chunks_feed(struct http_chunks *chunks, const char *bytes, size_t length, size_t *consumed,
                     size_t *data_length, struct error *error);

#endif

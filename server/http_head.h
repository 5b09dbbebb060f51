/* The head of a request: its request line and header fields, checked byte by byte as they arrive.
 *
 * Parsers differ in what they forgive (a bare LF, a folded line, a space before the colon), and a
 * proxy and a server that differ can be made to disagree on where a request ends. So this file
 * forgives nothing of RFC 9112 but empty lines before a request. No sockets here: a pure function
 * of bytes.
 */
#ifndef FATHOM_HTTP_HEAD_H
#define FATHOM_HTTP_HEAD_H

#include "base/base.h"

#define HTTP_FIELDS_MAX 64
#define HTTP_TARGET_MAX 8192

/* What a request may cost. A failure is answered with an HTTP status: 414 or 431 for the head, 413
 * for the body. */
struct http_limits {
    size_t head_bytes; /* request line and header fields together */
    size_t body_bytes; /* after chunked decoding */
};

enum http_method {
    HTTP_METHOD_GET,
    HTTP_METHOD_HEAD,
    HTTP_METHOD_POST,
    HTTP_METHOD_OPTIONS,
    HTTP_METHOD_OTHER,  /* PUT, DELETE, PATCH, TRACE: known, and served nowhere */
    HTTP_METHOD_UNKNOWN /* CONNECT is one: what follows it would be no request */
};

/* A part of the head's bytes, by offset because the bytes may move while more arrive. */
struct http_span {
    uint32_t offset, length;
};

/* The same part as a pointer: not NUL-terminated; valid while the head is. */
struct http_slice {
    const char *data;
    size_t length;
};

struct http_head {
    char *bytes; /* as received, from the request line to the empty line that ends the head */
    size_t length, capacity;
    size_t line_start;
    bool after_return; /* the last byte was CR: the next must be LF */
    bool complete;

    enum http_method method;
    struct http_span method_name;
    struct http_span target; /* as sent, with the query */
    struct http_span path;   /* of the target, without the query, not decoded; "*" for OPTIONS * */
    int minor_version;       /* HTTP/1.x */
    size_t field_count;
    struct http_span names[HTTP_FIELDS_MAX],
        values[HTTP_FIELDS_MAX]; /* values without outer blanks */

    /* What the fields mean, once complete. */
    bool keep_alive, chunked, has_content_length, expects_continue;
    uint64_t content_length;
};

/* A zeroed head is empty and ready. Takes bytes up to the end of the head, *consumed of them.
 * Returns 0 (look at head->complete), or the HTTP status to answer with; then `error` has the
 * sentence. */
int http_head_feed(struct http_head *head, const struct http_limits *limits, const char *data,
                   size_t length, size_t *consumed, struct error *error);
void http_head_free(struct http_head *head); /* empties it; may be used again */

/* Value of the first field of that name (any case). False, and an empty slice, without one. */
bool http_head_find(const struct http_head *head, const char *name, struct http_slice *value);

struct http_slice http_head_slice(const struct http_head *head, struct http_span span);
bool http_slice_equals(struct http_slice slice, const char *text);
bool http_slice_equals_any_case(struct http_slice slice, const char *text);

/* True for the characters of a token (RFC 9110 section 5.6.2), which names of fields and methods
 * are. */
bool http_is_token_character(unsigned char character);

#endif

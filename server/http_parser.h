/* Bytes of a connection in, requests out: head, then body, one after another, under limits.
 *
 * http_head checks the head; the body is framed by its length or by http_chunks. Feeding the same
 * bytes in any pieces gives the same requests. No sockets, no clocks: fuzzable as it is.
 */
#ifndef FATHOM_HTTP_PARSER_H
#define FATHOM_HTTP_PARSER_H

#include "server/http_chunks.h"
#include "server/http_head.h"

enum http_progress {
    HTTP_PROGRESS_MORE,    /* all bytes consumed, nothing new */
    HTTP_PROGRESS_HEAD,    /* the head is complete and checked; call again with the rest */
    HTTP_PROGRESS_MESSAGE, /* the request is complete; http_parser_next() before feeding again */
    HTTP_PROGRESS_FAILED,  /* status and error say why; the connection cannot go on */
};

struct http_parser {
    const struct http_limits *limits; /* outlive the parser */
    struct http_head head;            /* valid from PROGRESS_HEAD to http_parser_next */
    char *body;                       /* [body_length], NUL-terminated; NULL while empty */
    size_t body_length, body_capacity;
    bool discards_body; /* set after PROGRESS_HEAD: the body is framed and bounded, but not kept */
    int status;         /* of a failure */
    struct error error;

    struct http_chunks chunks; /* of a chunked body */
    bool message_complete;
    size_t body_seen; /* bytes of the body so far, kept or not */
};

void http_parser_init(struct http_parser *parser, const struct http_limits *limits);
void http_parser_free(struct http_parser *parser);

/* Consumes bytes up to the next milestone; call it with what is left, even if that is nothing,
 * until it says MORE. */
enum http_progress http_parser_feed(struct http_parser *parser, const char *data, size_t length,
                                    size_t *consumed);

/* Forgets the request and waits for the first byte of the next one. */
void http_parser_next(struct http_parser *parser);

/* Most bytes that a request within the limits can have on the wire. */
size_t http_request_bytes_max(const struct http_limits *limits);

/* True between requests: not one byte of a next one has come. */
bool http_parser_is_idle(const struct http_parser *parser);

#endif

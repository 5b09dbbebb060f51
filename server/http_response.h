/* The head of an answer, as bytes. */
#ifndef FATHOM_HTTP_RESPONSE_H
#define FATHOM_HTTP_RESPONSE_H

#include "api/api.h"

struct http_response {
    int status;
    int minor_version;        /* of the request: HTTP/1.0 knows no chunked coding */
    const char *content_type; /* NULL: there is no body */
    bool streams;             /* length unknown: chunked, or up to the end of the connection */
    size_t content_length;
    bool keep_alive;
    const char *request_id;
    const char *allow;       /* NULL, or the methods of the path, for 405 and OPTIONS */
    unsigned retry_after_s;  /* 0: none */
    bool never_retry;        /* x-should-retry: false */
    const char *cors_origin; /* NULL: none; "*" or the origin that may read the answer */
    bool is_preflight;       /* also say what a browser may send */
    const char *more_fields; /* NULL, or complete lines */
};

void http_response_write_head(const struct http_response *response, struct text_buffer *out);

#endif

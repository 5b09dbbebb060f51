#include "server/http_parser.h"

#include <stdlib.h>
#include <string.h>

#define BODY_CAPACITY_FIRST 4096
/* Bytes of chunk sizes, extensions and trailers that a body may be wrapped in. */
#define BODY_OVERHEAD_MAX(body_limit) ((body_limit) / 16 + ((size_t)64 << 10))

static enum http_progress parser_feed_head(struct http_parser *parser, const char *data,
                                           size_t length, size_t *consumed);
static enum http_progress parser_end_head(struct http_parser *parser);
static enum http_progress parser_feed_body(struct http_parser *parser, const char *data,
                                           size_t length, size_t *consumed);
static enum http_progress parser_fail(struct http_parser *parser, int status, const char *message);
static const llhttp_settings_t *framing_settings(void);

void http_parser_init(struct http_parser *parser, const struct http_limits *limits) {
    memset(parser, 0, sizeof *parser);
    parser->limits = limits;
}

void http_parser_free(struct http_parser *parser) {
    http_head_free(&parser->head);
    free(parser->body);
    http_parser_init(parser, parser->limits);
}

void http_parser_next(struct http_parser *parser) {
    http_parser_free(parser);
}

bool http_parser_is_idle(const struct http_parser *parser) {
    return parser->head.length == 0;
}

enum http_progress http_parser_feed(struct http_parser *parser, const char *data, size_t length,
                                    size_t *consumed) {
    *consumed = 0;
    if (parser->status != 0) return HTTP_PROGRESS_FAILED;
    if (!parser->head.complete) return parser_feed_head(parser, data, length, consumed);
    if (!parser->message_complete && length > 0) {
        enum http_progress progress = parser_feed_body(parser, data, length, consumed);
        if (progress != HTTP_PROGRESS_MORE) return progress;
    }
    return parser->message_complete ? HTTP_PROGRESS_MESSAGE : HTTP_PROGRESS_MORE;
}

static enum http_progress parser_fail(struct http_parser *parser, int status, const char *message) {
    parser->status = status;
    if (message) error_set(&parser->error, FATHOM_INVALID, "%s", message);
    return HTTP_PROGRESS_FAILED;
}

static enum http_progress parser_feed_head(struct http_parser *parser, const char *data,
                                           size_t length, size_t *consumed) {
    int status =
        http_head_feed(&parser->head, parser->limits, data, length, consumed, &parser->error);
    if (status != 0) return parser_fail(parser, status, NULL);
    return parser->head.complete ? parser_end_head(parser) : HTTP_PROGRESS_MORE;
}

/* Gives the checked head to llhttp, which then frames the body. */
static enum http_progress parser_end_head(struct http_parser *parser) {
    const struct http_head *head = &parser->head;
    if (head->content_length > parser->limits->body_bytes) {
        error_set(&parser->error, FATHOM_INVALID, "the body has %llu bytes; the limit is %zu",
                  (unsigned long long)head->content_length, parser->limits->body_bytes);
        return parser_fail(parser, 413, NULL);
    }
    llhttp_init(&parser->framing, HTTP_REQUEST, framing_settings());
    parser->framing.data = parser;
    llhttp_errno_t result = llhttp_execute(&parser->framing, head->bytes, head->length);
    if (result == HPE_INVALID_METHOD || parser->framing.method == HTTP_CONNECT) {
        return parser_fail(parser, 405, "there is no such request method here");
    }
    if (result != HPE_OK && !parser->message_complete) {
        return parser_fail(parser, 400, llhttp_get_error_reason(&parser->framing));
    }
    return HTTP_PROGRESS_HEAD;
}

static enum http_progress parser_feed_body(struct http_parser *parser, const char *data,
                                           size_t length, size_t *consumed) {
    size_t seen_before = parser->body_seen;
    llhttp_errno_t result = llhttp_execute(&parser->framing, data, length);
    if (parser->status != 0) return HTTP_PROGRESS_FAILED; /* by a callback */
    if (result != HPE_OK && result != HPE_PAUSED) {
        return parser_fail(parser, 400, llhttp_get_error_reason(&parser->framing));
    }
    *consumed = result == HPE_OK ? length : (size_t)(llhttp_get_error_pos(&parser->framing) - data);
    parser->body_overhead += *consumed - (parser->body_seen - seen_before);
    if (parser->body_overhead > BODY_OVERHEAD_MAX(parser->limits->body_bytes)) {
        return parser_fail(parser, 400, "the chunked body is mostly chunk sizes or extensions");
    }
    return HTTP_PROGRESS_MORE;
}

static int framing_on_headers_complete(llhttp_t *framing) {
    /* An offer to upgrade (h2c, websocket) is declined by answering in HTTP/1.1. */
    framing->upgrade = 0;
    return 0;
}

static bool body_reserve(struct http_parser *parser, size_t length) {
    size_t need = parser->body_length + length + 1; /* both are bounded by the body limit */
    if (need <= parser->body_capacity) return true;
    size_t capacity = parser->body_capacity ? parser->body_capacity : BODY_CAPACITY_FIRST;
    while (capacity < need) capacity *= 2;
    char *body = realloc(parser->body, capacity);
    if (!body) return false;
    parser->body = body;
    parser->body_capacity = capacity;
    return true;
}

static int body_refuse_length(struct http_parser *parser) {
    error_set(&parser->error, FATHOM_INVALID, "the body is longer than the limit of %zu bytes",
              parser->limits->body_bytes);
    parser->status = 413;
    return -1;
}

/* Memory follows the bytes that really came, not the length that a client announces. */
static int framing_on_body(llhttp_t *framing, const char *data, size_t length) {
    struct http_parser *parser = framing->data;
    if (length > parser->limits->body_bytes - parser->body_seen) {
        return body_refuse_length(parser);
    }
    parser->body_seen += length;
    if (parser->discards_body) return 0;
    if (!body_reserve(parser, length)) {
        parser_fail(parser, 503, "no memory for the request body");
        return -1;
    }
    memcpy(parser->body + parser->body_length, data, length);
    parser->body_length += length;
    parser->body[parser->body_length] = '\0';
    return 0;
}

/* Header fields came through http_head already: what is left to check are trailers. */
static int framing_on_field(llhttp_t *framing, const char *data, size_t length) {
    struct http_parser *parser = framing->data;
    for (size_t i = 0; i < length; i++) {
        if (http_is_token_character((unsigned char)data[i])) continue;
        parser_fail(parser, 400, "a trailer's name has a character that names cannot have");
        return -1;
    }
    return 0;
}

/* A chunk that cannot fit is refused by its size, not when its bytes have come. */
static int framing_on_chunk_header(llhttp_t *framing) {
    struct http_parser *parser = framing->data;
    if (framing->content_length <= parser->limits->body_bytes - parser->body_seen) return 0;
    return body_refuse_length(parser);
}

static int framing_on_message_complete(llhttp_t *framing) {
    struct http_parser *parser = framing->data;
    parser->message_complete = true;
    return HPE_PAUSED;
}

static const llhttp_settings_t *framing_settings(void) {
    static const llhttp_settings_t settings = {
        .on_header_field = framing_on_field,
        .on_headers_complete = framing_on_headers_complete,
        .on_body = framing_on_body,
        .on_chunk_header = framing_on_chunk_header,
        .on_message_complete = framing_on_message_complete,
    };
    return &settings;
}

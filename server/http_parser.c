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
static bool keep_body(struct http_parser *parser, const char *data, size_t length);

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

size_t http_request_bytes_max(const struct http_limits *limits) {
    return limits->head_bytes + limits->body_bytes + BODY_OVERHEAD_MAX(limits->body_bytes);
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

static enum http_progress parser_end_head(struct http_parser *parser) {
    const struct http_head *head = &parser->head;
    if (head->method == HTTP_METHOD_UNKNOWN) {
        return parser_fail(parser, 405, "there is no such request method here");
    }
    if (head->content_length > parser->limits->body_bytes) {
        error_set(&parser->error, FATHOM_INVALID, "the body has %llu bytes; the limit is %zu",
                  (unsigned long long)head->content_length, parser->limits->body_bytes);
        return parser_fail(parser, 413, NULL);
    }
    parser->message_complete = !head->chunked && head->content_length == 0;
    return HTTP_PROGRESS_HEAD;
}

static enum http_progress parser_refuse_length(struct http_parser *parser) {
    error_set(&parser->error, FATHOM_INVALID, "the body is longer than the limit of %zu bytes",
              parser->limits->body_bytes);
    return parser_fail(parser, 413, NULL);
}

static enum http_progress parser_feed_chunks(struct http_parser *parser, const char *data,
                                             size_t length, size_t *consumed) {
    struct http_chunks *chunks = &parser->chunks;
    while (*consumed < length && chunks->state != CHUNK_COMPLETE) {
        size_t taken, kept;
        if (http_chunks_feed(chunks, data + *consumed, length - *consumed, &taken, &kept,
                             &parser->error) != 0) {
            return parser_fail(parser, 400, NULL);
        }
        *consumed += taken;
        /* A chunk that cannot fit is refused by its size, not when its bytes have come. */
        if (kept == 0 && chunks->state == CHUNK_DATA &&
            chunks->left > parser->limits->body_bytes - parser->body_seen) {
            return parser_refuse_length(parser);
        }
        if (chunks->overhead > BODY_OVERHEAD_MAX(parser->limits->body_bytes)) {
            return parser_fail(parser, 400, "the chunked body is mostly chunk sizes or extensions");
        }
        if (!keep_body(parser, data + *consumed - kept, kept)) return HTTP_PROGRESS_FAILED;
    }
    parser->message_complete = chunks->state == CHUNK_COMPLETE;
    return HTTP_PROGRESS_MORE;
}

static enum http_progress parser_feed_body(struct http_parser *parser, const char *data,
                                           size_t length, size_t *consumed) {
    if (parser->head.chunked) return parser_feed_chunks(parser, data, length, consumed);
    size_t left = (size_t)parser->head.content_length - parser->body_seen;
    *consumed = length < left ? length : left;
    if (!keep_body(parser, data, *consumed)) return HTTP_PROGRESS_FAILED;
    parser->message_complete = *consumed == left;
    return HTTP_PROGRESS_MORE;
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

/* Memory follows the bytes that really came, not the length that a client announces. */
static bool keep_body(struct http_parser *parser, const char *data, size_t length) {
    parser->body_seen += length; /* within the limit: the length or the chunk's size was checked */
    if (parser->discards_body || length == 0) return true;
    if (!body_reserve(parser, length)) {
        parser_fail(parser, 503, "no memory for the request body");
        return false;
    }
    memcpy(parser->body + parser->body_length, data, length);
    parser->body_length += length;
    parser->body[parser->body_length] = '\0';
    return true;
}

/* Bytes of a connection, in pieces: no crash, limits kept, and the pieces do not matter. */
#include <stdlib.h>
#include <string.h>

#include "server/http_parser.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct http_limits limits = {.head_bytes = 4096, .body_bytes = 4096};

/* What came out: a hash over requests and the failure. */
struct outcome {
    uint64_t hash;
    size_t requests;
    int status;
};

static void outcome_add(struct outcome *outcome, const char *bytes, size_t length) {
    for (size_t i = 0; i < length; i++) {
        outcome->hash = (outcome->hash ^ (unsigned char)bytes[i]) * 1099511628211u; /* FNV-1a */
    }
    outcome->hash = (outcome->hash ^ length) * 1099511628211u;
}

static void require(bool holds) {
    if (!holds) abort();
}

static void add_message(struct outcome *outcome, struct http_parser *parser) {
    const struct http_head *head = &parser->head;
    require(head->length <= limits.head_bytes && head->field_count <= HTTP_FIELDS_MAX);
    require(parser->body_length <= limits.body_bytes && parser->body_seen <= limits.body_bytes);
    require(!(head->chunked && head->has_content_length));
    require(head->chunked || parser->body_seen == head->content_length);
    struct http_slice path = http_head_slice(head, head->path);
    outcome_add(outcome, path.data, path.length);
    for (size_t i = 0; i < head->field_count; i++) {
        struct http_slice name = http_head_slice(head, head->names[i]);
        struct http_slice value = http_head_slice(head, head->values[i]);
        require(name.length > 0 && !memchr(value.data, '\n', value.length));
        outcome_add(outcome, name.data, name.length);
        outcome_add(outcome, value.data, value.length);
    }
    if (parser->body) outcome_add(outcome, parser->body, parser->body_length);
    outcome->requests++;
}

/* Every second request's body is discarded, as a refused one's is. */
static struct outcome parse(const char *data, size_t size, size_t piece) {
    struct outcome outcome = {.hash = 14695981039346656037u};
    struct http_parser parser;
    http_parser_init(&parser, &limits);
    for (size_t at = 0; at < size && outcome.status == 0;) {
        size_t end = size - at < piece ? size : at + piece, consumed;
        /* A copy of its own size: reading past a piece is caught. */
        char *copy = malloc(end - at);
        require(copy != NULL);
        memcpy(copy, data + at, end - at);
        size_t used = 0, length = end - at;
        enum http_progress progress = HTTP_PROGRESS_HEAD;
        while (progress != HTTP_PROGRESS_MORE && progress != HTTP_PROGRESS_FAILED) {
            progress = http_parser_feed(&parser, copy + used, length - used, &consumed);
            require(consumed <= length - used);
            used += consumed;
            if (progress == HTTP_PROGRESS_HEAD) parser.discards_body = outcome.requests % 2 == 1;
            if (progress != HTTP_PROGRESS_MESSAGE) continue;
            add_message(&outcome, &parser);
            http_parser_next(&parser);
        }
        outcome.status = parser.status;
        require(outcome.status == 0 || (outcome.status >= 400 && parser.error.message[0]));
        require(outcome.status != 0 || used == length);
        free(copy);
        at = end;
    }
    http_parser_free(&parser);
    return outcome;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    const char *bytes = (const char *)data + 1;
    struct outcome whole = parse(bytes, size - 1, size);
    struct outcome pieces = parse(bytes, size - 1, 1u + data[0] % 32u);
    require(whole.status == pieces.status && whole.requests == pieces.requests);
    require(whole.hash == pieces.hash);
    return 0;
}

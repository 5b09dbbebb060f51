/* Bytes of a connection, pipelined requests and all: limits kept, the pieces in which they come do
 * not matter, and a request ends where the letter of RFC 9112 says. The last is what a proxy in
 * front must agree on: the reading below forgives nothing, so that what it cannot read is not to be
 * accepted either. */
#include <strings.h>

#include "server/http_parser.h"
#include "tests/fuzz/fuzz.h"

static const struct http_limits limits = {.head_bytes = 4096, .body_bytes = 4096};

/* ---- The letter ------------------------------------------------------------------------------ */

struct text {
    const char *at, *end;
};

static bool take(struct text *text, const char *expected) {
    size_t length = strlen(expected);
    if ((size_t)(text->end - text->at) < length || memcmp(text->at, expected, length) != 0) {
        return false;
    }
    text->at += length;
    return true;
}

/* A line without its CR LF; neither byte stands alone, nor is there another control but HTAB. */
static bool take_line(struct text *text, struct text *line) {
    line->at = text->at;
    while (text->at < text->end) {
        line->end = text->at;
        if (take(text, "\r\n")) return true;
        unsigned char byte = (unsigned char)*text->at++;
        if ((byte < 0x20 && byte != '\t') || byte == 0x7f) return false;
    }
    return false;
}

/* field-name ":" OWS field-value OWS */
static bool split_field(struct text line, struct text *name, struct text *value) {
    *name = line;
    while (line.at < line.end && http_is_token_character((unsigned char)*line.at)) line.at++;
    name->end = line.at;
    if (name->at == name->end || !take(&line, ":")) return false;
    while (line.at < line.end && strchr(" \t", *line.at)) line.at++;
    while (line.at < line.end && strchr(" \t", line.end[-1])) line.end--;
    *value = line;
    return true;
}

static bool equals(struct text text, const char *word) {
    size_t length = (size_t)(text.end - text.at);
    return length == strlen(word) && strncasecmp(text.at, word, length) == 0;
}

static bool take_digits(struct text *text, unsigned base, size_t *number) {
    const char *start = text->at;
    *number = 0;
    for (; text->at < text->end; text->at++) {
        char byte = (char)(*text->at | 0x20);
        unsigned digit = byte >= 'a' && byte <= 'f'             ? (unsigned)(byte - 'a') + 10
                         : *text->at >= '0' && *text->at <= '9' ? (unsigned)(*text->at - '0')
                                                                : 99;
        if (digit >= base) break;
        if (!size_multiply(*number, base, number) || !size_add(*number, digit, number)) {
            return false;
        }
    }
    return text->at > start;
}

struct reading {
    const char *body; /* as it came: chunks are put together in `joined` */
    size_t length;
    char joined[4096];
};

static bool join(struct reading *reading, const char *bytes, size_t length) {
    if (length > sizeof reading->joined - reading->length) return false;
    memcpy(reading->joined + reading->length, bytes, length);
    reading->length += length;
    return true;
}

/* *( BWS ";" BWS name [ BWS "=" BWS ( token / quoted-string ) ] ), of which only this much matters
 * here: it begins with a semicolon and stays on its line. */
static bool is_extension(struct text rest) {
    while (rest.at < rest.end && strchr(" \t", *rest.at)) rest.at++;
    return rest.at == rest.end || *rest.at == ';';
}

static bool read_chunks(struct text *text, struct reading *reading) {
    struct text line, name, value;
    for (size_t size = 1; size > 0;) {
        if (!take_line(text, &line) || !take_digits(&line, 16, &size) || !is_extension(line)) {
            return false;
        }
        if (size == 0) break;
        if ((size_t)(text->end - text->at) < size || !join(reading, text->at, size)) return false;
        text->at += size;
        if (!take(text, "\r\n")) return false;
    }
    for (;;) {
        if (!take_line(text, &line)) return false;
        if (line.at == line.end) return true;
        if (!split_field(line, &name, &value)) return false;
    }
}

/* One request; leaves *text behind it. */
static bool read_request(struct text *text, struct reading *reading) {
    struct text line, name, value;
    size_t length = 0;
    bool has_length = false, is_chunked = false;
    *reading = (struct reading){.body = reading->joined};
    while (take(text, "\r\n")) continue;
    if (!take_line(text, &line)) return false;
    for (;;) {
        if (!take_line(text, &line)) return false;
        if (line.at == line.end) break;
        if (!split_field(line, &name, &value)) return false;
        if (equals(name, "content-length")) {
            if (has_length || !take_digits(&value, 10, &length) || value.at != value.end) {
                return false;
            }
            has_length = true;
        } else if (equals(name, "transfer-encoding")) {
            if (is_chunked || !equals(value, "chunked")) return false;
            is_chunked = true;
        }
    }
    if (is_chunked) return !has_length && read_chunks(text, reading);
    if ((size_t)(text->end - text->at) < length) return false;
    reading->body = text->at;
    reading->length = length;
    text->at += length;
    return true;
}

/* ---- The parser ------------------------------------------------------------------------------ */

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

static void add_message(struct outcome *outcome, struct http_parser *parser) {
    const struct http_head *head = &parser->head;
    check(head->length <= limits.head_bytes && head->field_count <= HTTP_FIELDS_MAX);
    check(parser->body_length <= limits.body_bytes && parser->body_seen <= limits.body_bytes);
    check(!(head->chunked && head->has_content_length));
    check(head->chunked || parser->body_seen == head->content_length);
    struct http_slice path = http_head_slice(head, head->path);
    outcome_add(outcome, path.data, path.length);
    for (size_t i = 0; i < head->field_count; i++) {
        struct http_slice name = http_head_slice(head, head->names[i]);
        struct http_slice value = http_head_slice(head, head->values[i]);
        check(name.length > 0 && !memchr(value.data, '\n', value.length));
        outcome_add(outcome, name.data, name.length);
        outcome_add(outcome, value.data, value.length);
    }
    if (parser->body) outcome_add(outcome, parser->body, parser->body_length);
    outcome->requests++;
}

static void check_reading(const struct http_parser *parser, struct text *text, const char *end) {
    struct reading reading;
    check(read_request(text, &reading));
    check(text->at == end && reading.length == parser->body_seen);
    if (parser->discards_body) return;
    check(reading.length == parser->body_length);
    check(reading.length == 0 || memcmp(reading.body, parser->body, reading.length) == 0);
}

/* Every second request's body is discarded, as a refused one's is. In pieces of 1..most bytes. */
static struct outcome parse(const char *data, size_t size, size_t most, struct choices choices) {
    struct outcome outcome = {.hash = 14695981039346656037u};
    struct http_parser parser;
    struct text unread = {data, data + size};
    http_parser_init(&parser, &limits);
    for (size_t at = 0; at < size && outcome.status == 0;) {
        size_t length = most == SIZE_MAX ? size : 1 + choose(&choices, most), used = 0, consumed;
        if (length > size - at) length = size - at;
        char *piece = copy_exact(data + at, length);
        enum http_progress progress = HTTP_PROGRESS_HEAD;
        while (progress != HTTP_PROGRESS_MORE && progress != HTTP_PROGRESS_FAILED) {
            progress = http_parser_feed(&parser, piece + used, length - used, &consumed);
            check(consumed <= length - used);
            used += consumed;
            if (progress == HTTP_PROGRESS_HEAD) parser.discards_body = outcome.requests % 2 == 1;
            if (progress != HTTP_PROGRESS_MESSAGE) continue;
            add_message(&outcome, &parser);
            check_reading(&parser, &unread, data + at + used);
            http_parser_next(&parser);
        }
        outcome.status = parser.status;
        check(outcome.status == 0 || (outcome.status >= 400 && parser.error.message[0]));
        check(outcome.status != 0 || used == length);
        free(piece);
        at += length;
    }
    http_parser_free(&parser);
    return outcome;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *bytes = (const char *)data;
    struct choices choices = choices_of(data, size);
    struct outcome whole = parse(bytes, size, SIZE_MAX, choices);
    static const size_t most[] = {1, 8, 256};
    for (size_t i = 0; i < sizeof most / sizeof *most; i++) {
        struct outcome pieces = parse(bytes, size, most[i], choices);
        check(whole.status == pieces.status && whole.requests == pieces.requests);
        check(whole.hash == pieces.hash);
    }
    return 0;
}

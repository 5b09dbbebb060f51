#include "server/http_head.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define HEAD_CAPACITY_FIRST 512

static int head_append(struct http_head *head, char byte, struct error *error);
static int head_end_line(struct http_head *head, struct error *error);
static int head_parse_request_line(struct http_head *head, const char *line, size_t length,
                                   struct error *error);
static int head_parse_target(struct http_head *head, struct error *error);
static int head_parse_field(struct http_head *head, const char *line, size_t length,
                            struct error *error);
static int head_interpret(struct http_head *head, struct error *error);

/* Fills the sentence and returns the status, so that a caller can `return head_fail(...)`. */
#define head_fail(error, status, ...) (error_set((error), FATHOM_INVALID, __VA_ARGS__), (status))

int http_head_feed(struct http_head *head, const struct http_limits *limits, const char *data,
                   size_t length, size_t *consumed, struct error *error) {
    size_t at = 0;
    int status = 0;
    while (at < length && !head->complete && status == 0) {
        unsigned char byte = (unsigned char)data[at++];
        bool ends_line = head->after_return && byte == '\n';
        if (head->length == limits->head_bytes) {
            /* Without a first line end, the request line itself is what is too long. */
            bool in_first_line = head->line_start == 0;
            status = in_first_line ? 414 : 431;
            error_set(error, FATHOM_INVALID, "the %s is longer than the limit of %zu bytes",
                      in_first_line ? "request line" : "request head", limits->head_bytes);
        } else if (head->after_return && !ends_line) {
            status = head_fail(error, 400, "a carriage return must be followed by a line feed");
        } else if (byte == '\n' && !ends_line) {
            status =
                head_fail(error, 400, "a line must end with CR LF, not with a line feed alone");
        } else if ((byte < 0x20 && byte != '\r' && byte != '\n' && byte != '\t') || byte == 0x7f) {
            status =
                head_fail(error, 400, "the request head has the control character 0x%02x", byte);
        } else {
            status = head_append(head, (char)byte, error);
            head->after_return = byte == '\r';
            if (status == 0 && ends_line) status = head_end_line(head, error);
        }
    }
    *consumed = at;
    return status;
}

void http_head_free(struct http_head *head) {
    free(head->bytes);
    memset(head, 0, sizeof *head);
}

bool http_head_find(const struct http_head *head, const char *name, struct http_slice *value) {
    for (size_t i = 0; i < head->field_count; i++) {
        if (!http_slice_equals_any_case(http_head_slice(head, head->names[i]), name)) continue;
        *value = http_head_slice(head, head->values[i]);
        return true;
    }
    *value = (struct http_slice){"", 0};
    return false;
}

struct http_slice http_head_slice(const struct http_head *head, struct http_span span) {
    if (!head->bytes) return (struct http_slice){"", 0};
    return (struct http_slice){head->bytes + span.offset, span.length};
}

bool http_slice_equals(struct http_slice slice, const char *text) {
    return slice.length == strlen(text) && memcmp(slice.data, text, slice.length) == 0;
}

bool http_slice_equals_any_case(struct http_slice slice, const char *text) {
    return slice.length == strlen(text) && strncasecmp(slice.data, text, slice.length) == 0;
}

bool http_is_token_character(unsigned char character) {
    if (character >= '0' && character <= '9') return true;
    if ((character | 0x20) >= 'a' && (character | 0x20) <= 'z') return true;
    return character != '\0' && strchr("!#$%&'*+-.^_`|~", character) != NULL;
}

static int head_append(struct http_head *head, char byte, struct error *error) {
    if (head->length == head->capacity) {
        size_t capacity = head->capacity ? head->capacity * 2 : HEAD_CAPACITY_FIRST;
        char *bytes = realloc(head->bytes, capacity);
        if (!bytes) return head_fail(error, 503, "no memory for the request head");
        head->bytes = bytes;
        head->capacity = capacity;
    }
    head->bytes[head->length++] = byte;
    return 0;
}

/* The bytes from line_start are one line with its CR LF. */
static int head_end_line(struct http_head *head, struct error *error) {
    const char *line = head->bytes + head->line_start;
    size_t length = head->length - head->line_start - 2;
    if (length == 0 && head->line_start == 0) {
        head->length = 0; /* RFC 9112 section 2.2: empty lines before a request are ignored */
        return 0;
    }
    int status;
    if (length == 0) {
        head->complete = true;
        status = head_interpret(head, error);
    } else if (head->line_start == 0) {
        status = head_parse_request_line(head, line, length, error);
    } else {
        status = head_parse_field(head, line, length, error);
    }
    head->line_start = head->length;
    return status;
}

static struct http_span head_span(const struct http_head *head, const char *data, size_t length) {
    return (struct http_span){(uint32_t)(data - head->bytes), (uint32_t)length};
}

static bool is_digit(char character) {
    return character >= '0' && character <= '9';
}

static enum http_method find_method(struct http_slice name) {
    static const struct {
        const char *name;
        enum http_method method;
    } methods[] = {
        {"GET", HTTP_METHOD_GET},     {"HEAD", HTTP_METHOD_HEAD},
        {"POST", HTTP_METHOD_POST},   {"OPTIONS", HTTP_METHOD_OPTIONS},
        {"PUT", HTTP_METHOD_OTHER},   {"DELETE", HTTP_METHOD_OTHER},
        {"PATCH", HTTP_METHOD_OTHER}, {"TRACE", HTTP_METHOD_OTHER},
    };
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        if (http_slice_equals(name, methods[i].name)) return methods[i].method;
    }
    return HTTP_METHOD_UNKNOWN;
}

/* method SP target SP "HTTP/" digit "." digit, with single spaces. */
static int head_parse_request_line(struct http_head *head, const char *line, size_t length,
                                   struct error *error) {
    size_t method_length = 0;
    while (method_length < length && http_is_token_character((unsigned char)line[method_length])) {
        method_length++;
    }
    if (method_length == 0 || method_length == length || line[method_length] != ' ') {
        return head_fail(error, 400, "the request line does not start with a method");
    }
    head->method = find_method((struct http_slice){line, method_length});
    head->method_name = head_span(head, line, method_length);
    const char *target = line + method_length + 1, *end = line + length;
    const char *target_end = memchr(target, ' ', (size_t)(end - target));
    if (!target_end || target_end == target) {
        return head_fail(error, 400, "the request line is not METHOD TARGET HTTP/1.1");
    }
    const char *version = target_end + 1;
    if (end - version != 8 || memcmp(version, "HTTP/", 5) != 0 || !is_digit(version[5]) ||
        version[6] != '.' || !is_digit(version[7])) {
        return head_fail(error, 400, "the request line does not end with HTTP/1.1");
    }
    if (version[5] != '1' || version[7] > '1') {
        return head_fail(error, 505, "HTTP/%c.%c is not spoken here; use HTTP/1.1", version[5],
                         version[7]);
    }
    head->minor_version = version[7] - '0';
    head->target = head_span(head, target, (size_t)(target_end - target));
    return head_parse_target(head, error);
}

/* Origin form (/path?query), absolute form (http://host/path, https too) or, for OPTIONS, an
 * asterisk. */
static int head_parse_target(struct http_head *head, struct error *error) {
    struct http_slice target = http_head_slice(head, head->target);
    if (target.length > HTTP_TARGET_MAX) {
        return head_fail(error, 414, "the request target has %zu bytes; the limit is %d",
                         target.length, HTTP_TARGET_MAX);
    }
    for (size_t i = 0; i < target.length; i++) {
        unsigned char byte = (unsigned char)target.data[i];
        if (byte <= 0x20 || byte >= 0x7f || byte == '#') {
            return head_fail(error, 400, "the request target has the byte 0x%02x; encode it", byte);
        }
    }
    const char *start = target.data, *end = target.data + target.length;
    size_t scheme = 0;
    if (target.length > 7 && strncasecmp(start, "http://", 7) == 0) scheme = 7;
    if (target.length > 8 && strncasecmp(start, "https://", 8) == 0) scheme = 8;
    if (scheme > 0) {
        start = memchr(start + scheme, '/', target.length - scheme);
        if (!start) return head_fail(error, 400, "the request target has no path");
    }
    bool asterisk = head->method == HTTP_METHOD_OPTIONS && http_slice_equals(target, "*");
    if (*start != '/' && !asterisk) {
        return head_fail(error, 400, "the request target must be a path that starts with '/'");
    }
    const char *query = memchr(start, '?', (size_t)(end - start));
    head->path = head_span(head, start, (size_t)((query ? query : end) - start));
    return 0;
}

static bool is_blank(char character) {
    return character == ' ' || character == '\t';
}

static int head_parse_field(struct http_head *head, const char *line, size_t length,
                            struct error *error) {
    if (head->field_count == HTTP_FIELDS_MAX) {
        return head_fail(error, 431, "there are more than %d header fields", HTTP_FIELDS_MAX);
    }
    if (is_blank(line[0]))
        return head_fail(error, 400, "a header line must not start with a blank");
    size_t name_length = 0;
    while (name_length < length && http_is_token_character((unsigned char)line[name_length])) {
        name_length++;
    }
    if (name_length == 0 || name_length == length || line[name_length] != ':') {
        return head_fail(error, 400, "header line %zu is not 'Name: value'", head->field_count + 1);
    }
    const char *value = line + name_length + 1, *end = line + length;
    while (value < end && is_blank(*value)) value++;
    while (value < end && is_blank(end[-1])) end--;
    head->names[head->field_count] = head_span(head, line, name_length);
    head->values[head->field_count] = head_span(head, value, (size_t)(end - value));
    head->field_count++;
    return 0;
}

static int head_parse_length(struct http_head *head, struct http_slice value, struct error *error) {
    if (head->has_content_length) {
        return head_fail(error, 400, "Content-Length is given more than once");
    }
    uint64_t length = 0;
    bool valid = value.length > 0;
    for (size_t i = 0; i < value.length && valid; i++) {
        valid = is_digit(value.data[i]) && !__builtin_mul_overflow(length, 10u, &length) &&
                !__builtin_add_overflow(length, (uint64_t)(value.data[i] - '0'), &length);
    }
    if (!valid) return head_fail(error, 400, "Content-Length is not a whole number");
    head->has_content_length = true;
    head->content_length = length;
    return 0;
}

static int head_parse_coding(struct http_head *head, struct http_slice value, struct error *error) {
    if (head->chunked) return head_fail(error, 400, "Transfer-Encoding is given more than once");
    if (head->minor_version == 0) {
        return head_fail(error, 400, "Transfer-Encoding does not exist in HTTP/1.0");
    }
    /* Not 501: it is the client's mistake, or somebody's attempt to make two servers disagree. */
    if (!http_slice_equals_any_case(value, "chunked")) {
        return head_fail(error, 400, "the only transfer coding understood is 'chunked'");
    }
    head->chunked = true;
    return 0;
}

/* Connection: a comma-separated list of options; only these two concern us. */
static void head_parse_connection(struct http_head *head, struct http_slice value) {
    const char *at = value.data, *end = value.data + value.length;
    while (at < end) {
        const char *comma = memchr(at, ',', (size_t)(end - at));
        const char *next = comma ? comma + 1 : end, *stop = comma ? comma : end;
        while (at < stop && is_blank(*at)) at++;
        while (at < stop && is_blank(stop[-1])) stop--;
        struct http_slice option = {at, (size_t)(stop - at)};
        if (http_slice_equals_any_case(option, "close")) {
            head->keep_alive = false;
            return;
        }
        if (http_slice_equals_any_case(option, "keep-alive")) head->keep_alive = true;
        at = next;
    }
}

/* RFC 9112 section 3.2: nothing but what a host name, an address and a port are written with. */
static int head_check_host(struct http_slice value, struct error *error) {
    for (size_t i = 0; i < value.length; i++) {
        unsigned char byte = (unsigned char)value.data[i];
        bool is_letter = (byte | 0x20) >= 'a' && (byte | 0x20) <= 'z';
        if (is_letter || is_digit((char)byte) || strchr("-._~%!$&'()*+,;=:[]", byte)) continue;
        return head_fail(error, 400, "Host has the byte 0x%02x; it must be NAME or NAME:PORT",
                         byte);
    }
    return 0;
}

/* Fields that say where the request ends must say it once and clearly (RFC 9112 section 6.3). */
static int head_interpret(struct http_head *head, struct error *error) {
    size_t hosts = 0;
    head->keep_alive = head->minor_version == 1;
    for (size_t i = 0; i < head->field_count; i++) {
        struct http_slice name = http_head_slice(head, head->names[i]);
        struct http_slice value = http_head_slice(head, head->values[i]);
        int status = 0;
        if (http_slice_equals_any_case(name, "content-length")) {
            status = head_parse_length(head, value, error);
        } else if (http_slice_equals_any_case(name, "transfer-encoding")) {
            status = head_parse_coding(head, value, error);
        } else if (http_slice_equals_any_case(name, "connection")) {
            head_parse_connection(head, value);
        } else if (http_slice_equals_any_case(name, "host")) {
            hosts++;
            status = head_check_host(value, error);
        } else if (http_slice_equals_any_case(name, "expect")) {
            head->expects_continue = http_slice_equals_any_case(value, "100-continue");
            if (!head->expects_continue) {
                status = head_fail(error, 417, "the only expectation understood is 100-continue");
            }
        }
        if (status != 0) return status;
    }
    if (head->chunked && head->has_content_length) {
        return head_fail(error, 400, "Content-Length and Transfer-Encoding exclude each other");
    }
    if (hosts > 1) return head_fail(error, 400, "Host is given more than once");
    if (hosts == 0 && head->minor_version == 1) {
        return head_fail(error, 400, "an HTTP/1.1 request needs a Host header");
    }
    if (head->minor_version == 0) head->expects_continue = false; /* RFC 9110 section 10.1.1 */
    return 0;
}

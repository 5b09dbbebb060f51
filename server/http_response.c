#include "server/http_response.h"

#include <string.h>
#include <time.h>

static const char *status_phrase(int status) {
    static const struct {
        int status;
        const char *phrase;
    } phrases[] = {
        {200, "OK"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {411, "Length Required"},
        {413, "Content Too Large"},
        {414, "URI Too Long"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {422, "Unprocessable Content"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {503, "Service Unavailable"},
        {505, "HTTP Version Not Supported"},
    };
    for (size_t i = 0; i < sizeof phrases / sizeof *phrases; i++) {
        if (phrases[i].status == status) return phrases[i].phrase;
    }
    return "Unknown";
}

/* RFC 9110 section 5.6.7, in English whatever the locale. */
static void append_date(struct text_buffer *out) {
    static const char days[] = "SunMonTueWedThuFriSat";
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    time_t now = time(NULL);
    struct tm parts;
    gmtime_r(&now, &parts);
    text_append_format(out, "Date: %.3s, %02d %.3s %04d %02d:%02d:%02d GMT\r\n",
                       days + 3 * parts.tm_wday, parts.tm_mday, months + 3 * parts.tm_mon,
                       parts.tm_year + 1900, parts.tm_hour, parts.tm_min, parts.tm_sec);
}

static void append_body_fields(const struct http_response *response, struct text_buffer *out) {
    if (response->content_type) {
        text_append_format(out, "Content-Type: %s\r\n", response->content_type);
    }
    if (response->streams) {
        text_append_string(out, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
        if (response->minor_version > 0) {
            text_append_string(out, "Transfer-Encoding: chunked\r\n");
        }
    } else if (response->status != 204) { /* RFC 9110 section 8.6: no length with 204 */
        text_append_format(out, "Content-Length: %zu\r\n", response->content_length);
    }
}

static void append_cors_fields(const struct http_response *response, struct text_buffer *out) {
    text_append_format(out,
                       "Access-Control-Allow-Origin: %s\r\n"
                       "Access-Control-Expose-Headers: X-Request-Id, Retry-After\r\n",
                       response->cors_origin);
    if (strcmp(response->cors_origin, "*") != 0) text_append_string(out, "Vary: Origin\r\n");
    if (!response->is_preflight) return;
    text_append_string(out, "Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n"
                            "Access-Control-Allow-Headers: *, Authorization\r\n"
                            "Access-Control-Max-Age: 600\r\n");
}

void http_response_write_head(const struct http_response *response, struct text_buffer *out) {
    text_append_format(out, "HTTP/1.1 %d %s\r\n", response->status,
                       status_phrase(response->status));
    append_date(out);
    append_body_fields(response, out);
    text_append_format(out, "X-Request-Id: %s\r\n", response->request_id);
    if (!response->keep_alive) {
        text_append_string(out, "Connection: close\r\n");
    } else if (response->minor_version == 0) {
        text_append_string(out, "Connection: keep-alive\r\n");
    }
    if (response->allow) text_append_format(out, "Allow: %s\r\n", response->allow);
    if (response->status == 401) text_append_string(out, "WWW-Authenticate: Bearer\r\n");
    if (response->retry_after_s) {
        text_append_format(out, "Retry-After: %u\r\n", response->retry_after_s);
    }
    if (response->never_retry) text_append_string(out, "x-should-retry: false\r\n");
    if (response->cors_origin) append_cors_fields(response, out);
    if (response->more_fields) text_append_string(out, response->more_fields);
    text_append_string(out, "\r\n");
}

/* The head of an answer, byte for byte but for its date. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "server/http_response.h"

/* The head without its Date line, which must have its fixed length. Freed by the caller. */
static char *head_of(const struct http_response *response) {
    struct text_buffer out = {0};
    http_response_write_head(response, &out);
    text_append(&out, "", 1);
    assert_false(out.failed);
    char *date = strstr(out.data, "Date: "), *end = date ? strstr(date, "\r\n") : NULL;
    assert_non_null(end);
    assert_int_equal(end - date, strlen("Date: Sun, 06 Nov 1994 08:49:37 GMT"));
    memmove(date, end + 2, strlen(end + 2) + 1);
    return out.data;
}

static void check(const struct http_response *response, const char *expected) {
    char *head = head_of(response);
    assert_string_equal(head, expected);
    free(head);
}

static void test_plain(void **state) {
    (void)state;
    struct http_response response = {
        .status = 200,
        .minor_version = 1,
        .content_type = "application/json",
        .content_length = 12,
        .keep_alive = true,
        .request_id = "r1",
    };
    check(&response, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n"
                     "X-Request-Id: r1\r\n\r\n");
    response.minor_version = 0;
    check(&response, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n"
                     "X-Request-Id: r1\r\nConnection: keep-alive\r\n\r\n");
    response.keep_alive = false;
    check(&response, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n"
                     "X-Request-Id: r1\r\nConnection: close\r\n\r\n");
}

static void test_stream(void **state) {
    (void)state;
    struct http_response response = {
        .status = 200,
        .minor_version = 1,
        .content_type = "text/event-stream",
        .streams = true,
        .keep_alive = true,
        .request_id = "r1",
    };
    check(&response, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                     "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
                     "Transfer-Encoding: chunked\r\nX-Request-Id: r1\r\n\r\n");
    response.minor_version = 0;
    response.keep_alive = false;
    check(&response, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                     "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
                     "X-Request-Id: r1\r\nConnection: close\r\n\r\n");
}

static void test_errors(void **state) {
    (void)state;
    struct http_response response = {
        .status = 503,
        .minor_version = 1,
        .content_type = "application/json",
        .keep_alive = true,
        .request_id = "r1",
        .retry_after_s = 7,
        .never_retry = true,
        .allow = "POST",
    };
    check(&response, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
                     "Content-Length: 0\r\nX-Request-Id: r1\r\nAllow: POST\r\nRetry-After: 7\r\n"
                     "x-should-retry: false\r\n\r\n");
    static const int statuses[] = {400, 401, 403, 404, 405, 408, 411, 413, 414,
                                   415, 417, 422, 429, 431, 500, 503, 505};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        response.status = statuses[i];
        char *head = head_of(&response);
        assert_null(strstr(head, "Unknown"));
        assert_true((strstr(head, "WWW-Authenticate") != NULL) == (statuses[i] == 401));
        free(head);
    }
}

static void test_preflight(void **state) {
    (void)state;
    struct http_response response = {
        .status = 204,
        .minor_version = 1,
        .keep_alive = true,
        .request_id = "r1",
        .cors_origin = "https://a.example",
        .is_preflight = true,
    };
    char *head = head_of(&response);
    assert_non_null(strstr(head, "Access-Control-Allow-Origin: https://a.example\r\n"));
    assert_non_null(strstr(head, "Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n"));
    assert_non_null(strstr(head, "Vary: Origin\r\n"));
    assert_null(strstr(head, "Content-Length"));
    free(head);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_preflight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

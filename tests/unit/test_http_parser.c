/* Bytes to requests: what is accepted, what is refused with which status, whatever the pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http_parser.h"

static const struct http_limits limits = {.head_bytes = 1024, .body_bytes = 64};

/* What came out of a byte string, as text: "POST /a [hello] keep; GET /b [] close; 400". */
static void transcribe(const char *data, size_t length, size_t piece, char *out, size_t out_size) {
    struct http_parser parser;
    http_parser_init(&parser, &limits);
    size_t at = 0, written = 0;
    out[0] = '\0';
    bool failed = false;
    while (at < length && !failed) {
        size_t end = at + piece < length ? at + piece : length, consumed;
        enum http_progress progress = HTTP_PROGRESS_HEAD;
        while (progress != HTTP_PROGRESS_MORE && !failed) {
            progress = http_parser_feed(&parser, data + at, end - at, &consumed);
            assert_true(consumed <= end - at);
            at += consumed;
            if (progress == HTTP_PROGRESS_FAILED) {
                assert_true(parser.error.message[0] != '\0');
                written += (size_t)snprintf(out + written, out_size - written, "%d", parser.status);
                failed = true;
            }
            if (progress != HTTP_PROGRESS_MESSAGE) continue;
            struct http_slice target = http_head_slice(&parser.head, parser.head.target);
            written +=
                (size_t)snprintf(out + written, out_size - written, "%.*s [%s] %s; ",
                                 (int)target.length, target.data, parser.body ? parser.body : "",
                                 parser.head.keep_alive ? "keep" : "close");
            assert_true(written < out_size);
            http_parser_next(&parser);
        }
        if (!failed) assert_int_equal(at, end);
    }
    http_parser_free(&parser);
}

static void check_bytes(const char *data, size_t length, const char *expected) {
    char out[1024];
    for (size_t piece = 1; piece <= length; piece = piece < 40 ? piece + 1 : piece * 2) {
        transcribe(data, length, piece, out, sizeof out);
        if (strcmp(out, expected) != 0) print_error("in pieces of %zu: %s\n", piece, data);
        assert_string_equal(out, expected);
    }
    transcribe(data, length, length, out, sizeof out);
    assert_string_equal(out, expected);
}

static void check(const char *text, const char *expected) {
    check_bytes(text, strlen(text), expected);
}

#define HOST    "Host: h\r\n"
#define POST    "POST /a HTTP/1.1\r\n" HOST
#define CHUNKED POST "Transfer-Encoding: chunked\r\n\r\n"

static void test_accepted(void **state) {
    (void)state;
    check("GET / HTTP/1.1\r\n" HOST "\r\n", "/ [] keep; ");
    check("GET /?q=1 HTTP/1.1\r\nhOsT:h\r\nX:\r\n\r\n", "/?q=1 [] keep; ");
    check("\r\n\r\nGET / HTTP/1.1\r\n" HOST "\r\n", "/ [] keep; ");
    check("GET / HTTP/1.0\r\n\r\n", "/ [] close; ");
    check("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", "/ [] keep; ");
    check("GET / HTTP/1.1\r\n" HOST "Connection: x ,CLOSE\r\n\r\n", "/ [] close; ");
    check("GET http://h/p HTTP/1.1\r\n" HOST "\r\n", "http://h/p [] keep; ");
    check("OPTIONS * HTTP/1.1\r\n" HOST "\r\n", "* [] keep; ");
    check(POST "Content-Length: 5\r\n\r\nhello", "/a [hello] keep; ");
    check(POST "Content-Length: 0\r\n\r\n", "/a [] keep; ");
    check(CHUNKED "2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n", "/a [hello] keep; ");
    check(CHUNKED "5\r\nhello\r\n0\r\nA: b\r\n\r\n", "/a [hello] keep; ");
    check(CHUNKED "0\r\n\r\n", "/a [] keep; ");
    check("GET / HTTP/1.1\r\n" HOST "Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "/ [] keep; ");
    check(POST "Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nhi",
          "/a [hi] keep; ");
    check(POST "X: \x80\xff\r\n\r\n", "/a [] keep; ");
}

static void test_pipelined(void **state) {
    (void)state;
    check(POST "Content-Length: 2\r\n\r\nhi"
               "GET /b HTTP/1.1\r\n" HOST "\r\n" CHUNKED "1\r\nx\r\n0\r\n\r\n"
               "GET /c HTTP/1.1\r\n" HOST "Connection: close\r\n\r\n",
          "/a [hi] keep; /b [] keep; /a [x] keep; /c [] close; ");
    check("GET /b HTTP/1.1\r\n" HOST "\r\n\r\n\r\nGET /c HTTP/1.1\r\n" HOST "\r\n",
          "/b [] keep; /c [] keep; ");
    check("GET /b HTTP/1.1\r\n" HOST "\r\nnonsense\r\n", "/b [] keep; 400");
}

static void test_refused_lines(void **state) {
    (void)state;
    check("GET / HTTP/1.1\n" HOST "\n", "400");
    check("GET / HTTP/1.1\r" HOST "\r\n", "400");
    check("GET / HTTP/1.1\r\nHost: h\n\r\n", "400");
    check("GET / HTTP/1.1\r\nHost: h\rX: y\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST "\r\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST "A: b\r\n c\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n X: y\r\n" HOST "\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST "A : b\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST "A b: c\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST ": c\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST "noColon\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST "A: \x01\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST "A\x80: b\r\n\r\n", "400");
    check("GET  / HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET /  HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET / HTTP/1.1 \r\n" HOST "\r\n", "400");
    check(" GET / HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET /\r\n\r\n", "400");
    check("GET\r\n\r\n", "400");
    check("GET /a\tb HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET /\xc3\xa9 HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET a HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET http://h HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET * HTTP/1.1\r\n" HOST "\r\n", "400");
    check("GET / http/1.1\r\n" HOST "\r\n", "400");
    check("GET / HTTP/1.1x\r\n" HOST "\r\n", "400");
    check("G@T / HTTP/1.1\r\n" HOST "\r\n", "400");
    check("get / HTTP/1.1\r\n" HOST "\r\n", "405");
    check("FETCH / HTTP/1.1\r\n" HOST "\r\n", "405");
    check("CONNECT /x HTTP/1.1\r\n" HOST "\r\n", "405");
    check("PRI * HTTP/2.0\r\n\r\n", "505");
    check("GET / HTTP/1.2\r\n" HOST "\r\n", "505");
    check("GET / HTTP/0.9\r\n" HOST "\r\n", "505");
    check_bytes("\x16\x03\x01\x02\x00\x01", 6, "400");
    check_bytes("GET / HTTP/1.1\r\nA: \0\r\n", 22, "400");
}

static void test_refused_framing(void **state) {
    (void)state;
    check("GET / HTTP/1.1\r\n\r\n", "400");
    check("GET / HTTP/1.1\r\n" HOST HOST "\r\n", "400");
    check(POST "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "400");
    check(POST "Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", "400");
    check(POST "Content-Length: 2\r\nContent-Length: 3\r\n\r\n", "400");
    check(POST "Content-Length: 2\r\nContent-Length: 2\r\n\r\n", "400");
    check(POST "Content-Length: 2, 2\r\n\r\n", "400");
    check(POST "Content-Length: -1\r\n\r\n", "400");
    check(POST "Content-Length: +1\r\n\r\n", "400");
    check(POST "Content-Length: 0x1\r\n\r\n", "400");
    check(POST "Content-Length:\r\n\r\n", "400");
    check(POST "Content-Length: 99999999999999999999\r\n\r\n", "400");
    check(POST "Content-Length: 65\r\n\r\n", "413");
    check(POST "Transfer-Encoding: gzip\r\n\r\n", "400");
    check(POST "Transfer-Encoding: gzip, chunked\r\n\r\n", "400");
    check(POST "Transfer-Encoding: xchunked\r\n\r\n", "400");
    check(POST "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "400");
    check("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "400");
    check(POST "Expect: 200-ok\r\n\r\n", "417");
    check(CHUNKED "1\t ;e\r\nx\r\n0\r\n\r\n", "/a [x] keep; ");
    check(CHUNKED "1 \r\nx\r\n0\r\n\r\n", "400");
    check(CHUNKED "1;a\nb\r\nx\r\n0\r\n\r\n", "400");
    check(CHUNKED "1;a\rb\r\nx\r\n0\r\n\r\n", "400");
    check(CHUNKED ";a\r\nx\r\n0\r\n\r\n", "400");
    check(CHUNKED "\r\n", "400");
    check(CHUNKED "0x1\r\nx\r\n", "400");
    check(CHUNKED "0\r\nA: b\r\n c\r\n\r\n", "400");
    check(CHUNKED "0\r\n: b\r\n\r\n", "400");
    check(CHUNKED "0\r\nA\r\n\r\n", "400");
    check(CHUNKED "0\r\nA : b\r\n\r\n", "400");
    check(CHUNKED "0\r\nA: b\rc\r\n\r\n", "400");
    check(CHUNKED "0\r\nA: b\n\r\n", "400");
    check(CHUNKED "0\n\r\n", "400");
    check(CHUNKED "10000000000000000\r\n", "400");
    check(CHUNKED "ffffffffffffffff\r\n", "413");
    check(CHUNKED "20\r\n01234567890123456789012345678901\r\n21\r\n", "413");
    check(CHUNKED "g\r\n", "400");
    check(CHUNKED "2\nhi\r\n0\r\n\r\n", "400");
    check(CHUNKED "2\r\nhiX", "400");
    check(CHUNKED "2\r\nhi\nx0\r\n\r\n", "400");
    check(CHUNKED "-2\r\nhi\r\n", "400");
    check(CHUNKED "fffffffffffffffff\r\n", "400");
    check(CHUNKED "41\r\n"
                  "0123456789012345678901234567890123456789012345678901234567890123456789",
          "413");
}

static void test_limits(void **state) {
    (void)state;
    char text[200000];
    size_t length = (size_t)sprintf(text, "GET / HTTP/1.1\r\n" HOST);
    for (int i = 0; i < 63; i++) length += (size_t)sprintf(text + length, "A: b\r\n");
    sprintf(text + length, "\r\n");
    check(text, "/ [] keep; ");
    sprintf(text + length, "A: b\r\n\r\n");
    check(text, "431");

    length = (size_t)sprintf(text, "GET / HTTP/1.1\r\n" HOST "A: ");
    memset(text + length, 'x', 2000);
    check_bytes(text, length + 2000, "431");
    memset(text, 'x', 2000);
    memcpy(text, "GET /", 5);
    check_bytes(text, 2000, "414");

    /* Chunk extensions cannot make an endless body of a short one. */
    length = (size_t)sprintf(text, CHUNKED "1;");
    memset(text + length, 'e', 100000);
    char out[64];
    transcribe(text, length + 100000, 4096, out, sizeof out);
    assert_string_equal(out, "400");
}

/* A body that is not kept is framed all the same, and costs no memory. */
static void test_discarded_body(void **state) {
    (void)state;
    const char *text = POST "Content-Length: 5\r\n\r\nhello";
    struct http_parser parser;
    size_t consumed, at;
    http_parser_init(&parser, &limits);
    assert_int_equal(http_parser_feed(&parser, text, strlen(text), &at), HTTP_PROGRESS_HEAD);
    struct http_slice value;
    assert_true(http_head_find(&parser.head, "HOST", &value));
    assert_true(http_slice_equals(value, "h"));
    assert_false(http_head_find(&parser.head, "X-None", &value));
    parser.discards_body = true;
    assert_int_equal(http_parser_feed(&parser, text + at, strlen(text) - at, &consumed),
                     HTTP_PROGRESS_MESSAGE);
    assert_int_equal(at + consumed, strlen(text));
    assert_null(parser.body);
    http_parser_next(&parser);
    assert_true(http_parser_is_idle(&parser));
    http_parser_free(&parser);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepted),      cmocka_unit_test(test_pipelined),
        cmocka_unit_test(test_refused_lines), cmocka_unit_test(test_refused_framing),
        cmocka_unit_test(test_limits),        cmocka_unit_test(test_discarded_body),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

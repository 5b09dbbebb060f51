/* The load generator reads whatever a server sends: in any pieces, to one judgement, never a
 * crash. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "bench/answer.h"
#include "bench/dice.h"

#define STREAM_HEAD                                                                                \
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"                        \
    "Connection: close\r\n\r\n"
#define JSON_HEAD "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
#define TEXT_EVENT(text, finish)                                                                   \
    "data: {\"quality\":\"fast\",\"choices\":[{\"text\":\"" text "\",\"finish_reason\":" finish    \
    "}]}\n\n"
#define USAGE                                                                                      \
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,"                \
    "\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\n"
#define DONE "data: [DONE]\n\n"

/* Feeds `text` in pieces of `piece` bytes, 10 ms apart, then the connection's end. */
static void feed(struct answer *answer, const char *text, size_t length, size_t piece) {
    uint64_t now = 1000000000;
    answer_begin(answer);
    for (size_t at = 0; at < length; at += piece, now += 10000000) {
        size_t size = length - at < piece ? length - at : piece;
        char *exact = malloc(size); /* so that a sanitizer sees a byte read too far */
        memcpy(exact, text + at, size);
        bool complete = answer_feed(answer, exact, size, now);
        free(exact);
        if (complete) return;
    }
    assert_true(answer_end(answer));
}

static const struct {
    const char *name, *text;
    enum failure failure;
    size_t chunks, output_tokens;
} cases[] = {
    {"a stream to the connection's end",
     STREAM_HEAD TEXT_EVENT("a", "null") TEXT_EVENT("b", "\"length\"") USAGE DONE, FAILURE_NONE, 2,
     4},
    {"no usage: chunks are counted",
     STREAM_HEAD TEXT_EVENT("a", "null") TEXT_EVENT("b", "\"stop\"") DONE, FAILURE_NONE, 2, 2},
    {"a chunk without text counts, but as a token only in a usage",
     STREAM_HEAD TEXT_EVENT("a", "null") TEXT_EVENT("", "\"stop\"") DONE, FAILURE_NONE, 2, 1},
    {"a usage that counts nothing is none",
     STREAM_HEAD TEXT_EVENT("a", "null") TEXT_EVENT("b", "\"stop\"") "data: {\"choices\":[],"
                                                                     "\"usage\":{}}\n\n" DONE,
     FAILURE_NONE, 2, 2},
    {"CR LF, comments, fields and split data",
     STREAM_HEAD ": ping\r\n\r\nevent: x\r\nid: 1\r\ndata: {\"choices\":\r\n"
                 "data:[{\"text\":\"a\"}]}\r\n\r\ndata:[DONE]\r\n\r\n",
     FAILURE_NONE, 1, 1},
    {"CR alone", STREAM_HEAD "data: {\"choices\":[{\"text\":\"a\"}]}\r\rdata: [DONE]\r\r",
     FAILURE_NONE, 1, 1},
    {"a chat's delta",
     STREAM_HEAD "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
                 "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"
                 "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"b\"}}]}\n\n" DONE,
     FAILURE_NONE, 3, 2},
    {"finish_reason without [DONE]", STREAM_HEAD TEXT_EVENT("a", "\"stop\""), FAILURE_NONE, 1, 1},
    {"neither", STREAM_HEAD TEXT_EVENT("a", "null"), FAILURE_TRUNCATED, 1, 1},
    {"half an event", STREAM_HEAD TEXT_EVENT("a", "null") "data: {\"choi", FAILURE_TRUNCATED, 1, 1},
    {"only [DONE]", STREAM_HEAD DONE, FAILURE_CONTENT, 0, 0},
    {"what is not JSON", STREAM_HEAD "data: {oops}\n\n" DONE, FAILURE_CONTENT, 0, 0},
    {"an array", STREAM_HEAD "data: [1]\n\n" DONE, FAILURE_CONTENT, 0, 0},
    {"bytes that are not UTF-8", STREAM_HEAD "data: {\"choices\":[{\"text\":\"\xff\"}]}\n\n" DONE,
     FAILURE_CONTENT, 0, 0},
    {"an error in mid-stream",
     STREAM_HEAD TEXT_EVENT("a", "null") "data: {\"error\":{\"message\":\"no\"}}\n\n" DONE,
     FAILURE_ERROR_EVENT, 1, 0},
    {"a usage below zero",
     STREAM_HEAD TEXT_EVENT("a", "\"stop\"") "data: {\"choices\":[],\"usage\":"
                                             "{\"completion_tokens\":-1}}\n\n" DONE,
     FAILURE_CONTENT, 1, 0},
    {"a usage of 2^60",
     STREAM_HEAD TEXT_EVENT("a", "\"stop\"") "data: {\"choices\":[],\"usage\":"
                                             "{\"completion_tokens\":1152921504606846976}}\n\n",
     FAILURE_CONTENT, 1, 0},
    {"members of other types",
     STREAM_HEAD "data: {\"choices\":7,\"usage\":[],\"quality\":{},\"error\":null}\n\n" DONE,
     FAILURE_CONTENT, 0, 0},
    {"choices that are a number",
     STREAM_HEAD TEXT_EVENT("a", "null") "data: {\"choices\":5}\n\n" DONE, FAILURE_CONTENT, 1, 0},
    {"a choice that is a number", STREAM_HEAD "data: {\"choices\":[1]}\n\n" DONE, FAILURE_CONTENT,
     0, 0},
    {"a text that is a number", STREAM_HEAD "data: {\"choices\":[{\"text\":7}]}\n\n" DONE,
     FAILURE_CONTENT, 0, 0},
    {"a delta that is a text", STREAM_HEAD "data: {\"choices\":[{\"delta\":\"a\"}]}\n\n" DONE,
     FAILURE_CONTENT, 0, 0},
    {"a delta's content that is a list",
     STREAM_HEAD "data: {\"choices\":[{\"delta\":{\"content\":[]}}]}\n\n" DONE, FAILURE_CONTENT, 0,
     0},
    {"a message that is a number", JSON_HEAD "{\"choices\":[{\"message\":7}]}", FAILURE_CONTENT, 0,
     0},
    {"members that are null",
     STREAM_HEAD
     "data: {\"choices\":null}\n\n"
     "data: {\"choices\":[{\"text\":null,\"delta\":null}]}\n\n"
     "data: {\"choices\":[{\"delta\":{\"content\":null,\"reasoning\":\"a\"}}]}\n\n" DONE,
     FAILURE_NONE, 2, 1},
    {"an answer that is not streamed",
     JSON_HEAD "{\"choices\":[{\"text\":\"a\"}],\"usage\":{\"completion_tokens\":9}}", FAILURE_NONE,
     0, 9},
    {"an error with status 200", JSON_HEAD "{\"error\":\"no\"}", FAILURE_ERROR_EVENT, 0, 0},
    {"an empty body", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", FAILURE_CONTENT, 0, 0},
    {"half a body", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{\"choices\"", FAILURE_CLOSED, 0,
     0},
    {"half a chunked stream",
     "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
     "5\r\ndata:",
     FAILURE_CLOSED, 0, 0},
    {"a stream short of its length, though all was said",
     "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n" TEXT_EVENT(
         "a", "\"stop\"") DONE,
     FAILURE_CLOSED, 1, 0},
    {"a chunked stream without its last chunk, though all was said",
     "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
     "30\r\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n\r\n",
     FAILURE_CLOSED, 1, 0},
    {"half a head", "HTTP/1.1 200 OK\r\nConte", FAILURE_CLOSED, 0, 0},
    {"nothing", "", FAILURE_CLOSED, 0, 0},
    {"what is not HTTP", "SSH-2.0-OpenSSH_9.2\r\n", FAILURE_HTTP, 0, 0},
    {"a chunk size that is none", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
     FAILURE_HTTP, 0, 0},
    {"429", "HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}", FAILURE_OVERLOADED, 0, 0},
    {"503", "HTTP/1.1 503 Later\r\nContent-Length: 0\r\n\r\n", FAILURE_OVERLOADED, 0, 0},
    {"400", "HTTP/1.1 400 Bad\r\nContent-Length: 4\r\n\r\noops", FAILURE_CLIENT_ERROR, 0, 0},
    {"500 with an event stream",
     "HTTP/1.1 500 Oh\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" DONE,
     FAILURE_SERVER_ERROR, 0, 0},
    {"204", "HTTP/1.1 204 None\r\n\r\n", FAILURE_HTTP, 0, 0},
    {"302", "HTTP/1.1 302 There\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", FAILURE_HTTP, 0, 0},
    {"101", "HTTP/1.1 101 Switch\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", FAILURE_HTTP, 0, 0},
    {"100, then the answer",
     "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n"
     "{\"choices\":[{\"text\":\"a\"}]}",
     FAILURE_NONE, 0, 0},
};
enum { CASE_COUNT = sizeof cases / sizeof *cases };

static void every_answer_is_judged_in_any_pieces(void **state) {
    (void)state;
    const size_t pieces[] = {1, 2, 3, 7, 64, 4096};
    struct answer answer;
    answer_init(&answer);
    for (size_t i = 0; i < CASE_COUNT; i++) {
        for (size_t j = 0; j < sizeof pieces / sizeof *pieces; j++) {
            feed(&answer, cases[i].text, strlen(cases[i].text), pieces[j]);
            if (answer.failure != cases[i].failure)
                fail_msg("%s: judged as %s (%s)", cases[i].name, failure_name(answer.failure),
                         answer.detail);
            assert_int_equal(answer.chunks, cases[i].chunks);
            if (answer.failure == FAILURE_NONE)
                assert_int_equal(answer.output_tokens, cases[i].output_tokens);
        }
    }
    answer_free(&answer);
}

static void a_stream_is_measured(void **state) {
    (void)state;
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n";
    static const char *const events[] = {TEXT_EVENT("", "null"), TEXT_EVENT("b", "null"),
                                         TEXT_EVENT("", "\"length\""), USAGE, DONE};
    struct answer answer;
    answer_init(&answer);
    for (int round = 0; round < 2; round++) { /* the second: nothing is left of the first */
        answer_begin(&answer);
        assert_false(answer_feed(&answer, head, sizeof head - 1, 5));
        for (uint64_t i = 0; i < 5; i++) {
            char chunk[256];
            int length =
                snprintf(chunk, sizeof chunk, "%zx\r\n%s\r\n", strlen(events[i]), events[i]);
            assert_false(answer_feed(&answer, chunk, (size_t)length, 1000 + i * i * 1000000));
        }
        assert_true(answer_feed(&answer, "0\r\n\r\n", 5, 99000000));
        assert_int_equal(answer.failure, FAILURE_NONE);
        assert_true(answer.keeps_alive);
        assert_int_equal(answer.first_ns, 1000);
        assert_int_equal(answer.last_ns, 1000 + 4000000);
        assert_int_equal(answer.gap_count, 2);
        assert_true(answer.gaps[0] > 0.0009f && answer.gaps[0] < 0.0011f);
        assert_true(answer.gaps[1] > 0.0029f && answer.gaps[1] < 0.0031f);
        assert_int_equal(answer.prompt_tokens, 3);
        assert_int_equal(answer.output_tokens, 4);
        assert_int_equal(answer.cached_tokens, 2);
        assert_string_equal(answer.quality, "fast");
    }
    answer_free(&answer);
}

static void bytes_behind_the_answer_end_the_connection(void **state) {
    (void)state;
    static const char text[] = "HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n"
                               "{\"choices\":[{\"text\":\"a\"}]}";
    struct answer answer;
    answer_init(&answer);
    feed(&answer, text, sizeof text - 1, 4096);
    assert_true(answer.keeps_alive);
    feed(&answer, text, sizeof text, 4096); /* with the NUL */
    assert_int_equal(answer.failure, FAILURE_NONE);
    assert_false(answer.keeps_alive);
    answer_free(&answer);
}

/* Repeats `part` behind `head` until the answer ends; returns what it was judged as. */
static enum failure flood(const char *head, const char *part, size_t most) {
    struct answer answer;
    struct text_buffer block = {0};
    while (block.length < 65536) text_append_string(&block, part);
    answer_init(&answer);
    answer_begin(&answer);
    bool complete = answer_feed(&answer, head, strlen(head), 1);
    for (size_t fed = 0; !complete && fed < most; fed += block.length)
        complete = answer_feed(&answer, block.data, block.length, 1);
    enum failure failure = complete ? answer.failure : FAILURE_NONE;
    answer_free(&answer);
    text_free(&block);
    return failure;
}

/* What a head weighs does not depend on the pieces in which it comes. */
static void a_large_head_in_single_bytes_is_one(void **state) {
    (void)state;
    struct answer answer;
    struct text_buffer text = {0};
    text_append_string(&text, "HTTP/1.1 200 OK\r\nX: ");
    while (text.length < ANSWER_HEAD_MAX - 200) text_append_string(&text, "y");
    text_append_string(&text, "\r\nContent-Length: 26\r\n\r\n{\"choices\":[{\"text\":\"a\"}]}");
    answer_init(&answer);
    feed(&answer, text.data, text.length, 1);
    assert_int_equal(answer.failure, FAILURE_NONE);
    answer_free(&answer);
    text_free(&text);
}

static void floods_are_bounded(void **state) {
    (void)state;
    size_t most = (size_t)100 << 20;
    assert_int_equal(flood("HTTP/1.1 200 OK\r\n", "X-Fill: y\r\n", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood("HTTP/1.1 200 OK\r\nX: ", "y", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood("HTTP/1.1 200 ", "y", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood("", "HTTP/1.1 100 Continue\r\n\r\n", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood("", "HTTP/1.1 100 \r\n\r\n", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood(JSON_HEAD "{\"choices\":[", "[],", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood(STREAM_HEAD "data: ", "y", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood(STREAM_HEAD, "data: y\n", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood(JSON_HEAD, "[", most), FAILURE_TOO_LARGE);
    assert_int_equal(flood(STREAM_HEAD, "\r", (size_t)4 << 20), FAILURE_NONE);
}

/* Answers with bytes changed, lost and doubled: judged, whatever they are. */
static void damaged_answers_do_no_harm(void **state) {
    (void)state;
    struct dice dice = dice_make(1, 1);
    struct answer answer;
    char text[2048];
    answer_init(&answer);
    for (int i = 0; i < 20000; i++) {
        const char *whole = cases[dice_below(&dice, CASE_COUNT)].text;
        size_t length = strlen(whole);
        memcpy(text, whole, length);
        for (uint64_t damage = dice_below(&dice, 4); length > 1 && damage > 0; damage--) {
            size_t at = dice_below(&dice, length);
            if (dice_below(&dice, 3) == 0)
                length = at + 1;
            else
                text[at] = (char)dice_next(&dice);
        }
        feed(&answer, text, length, 1 + dice_below(&dice, 200));
        assert_true(answer.failure < FAILURE_KINDS);
        for (const char *c = answer.detail; *c; c++) assert_true(*c >= 0x20 && *c < 0x7f);
    }
    answer_free(&answer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_answer_is_judged_in_any_pieces),
        cmocka_unit_test(a_stream_is_measured),
        cmocka_unit_test(bytes_behind_the_answer_end_the_connection),
        cmocka_unit_test(a_large_head_in_single_bytes_is_one),
        cmocka_unit_test(floods_are_bounded),
        cmocka_unit_test(damaged_answers_do_no_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

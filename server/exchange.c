#include "server/exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/http_connection.h"
#include "server/http_response.h"
#include "server/server.h"

#define STATUS_CLIENT_LEFT 499 /* only in the log: nobody is there to read it */
/* To copy or encrypt so much takes the loop less than a millisecond. */
#define ANSWER_SLICE ((size_t)256 << 10)

static void exchange_log(const struct exchange *exchange) {
    struct http_slice path = http_head_slice(exchange->head, exchange->head->path);
    struct http_slice method = http_head_slice(exchange->head, exchange->head->method_name);
    struct log_request line = {
        .id = exchange->request_id,
        .method = method.data,
        .method_length = method.length,
        .path = path.data,
        .path_length = path.length,
        .status = exchange->status,
        .error = exchange->failure ? exchange->failure->message : NULL,
        .tier = exchange->tier,
        .prompt_tokens = exchange->prompt_tokens,
        .completion_tokens = exchange->completion_tokens,
        .ttft_ms = exchange->ttft_ms,
        .tpot_ms = exchange->tpot_ms,
        .total_ms = (double)(time_now_ns() - exchange->started_ns) / 1e6,
    };
    log_request(&exchange->server->log, &line);
}

/* A next request may follow if this one was read to its end. */
static bool exchange_keeps_alive(const struct exchange *exchange) {
    const struct http_parser *parser = &exchange->connection->parser;
    return !exchange->connection->is_visitor && !exchange->connection->client_is_done &&
           exchange->head->keep_alive && parser->message_complete && parser->status == 0 &&
           exchange->server->lifecycle.phase <= PHASE_READY &&
           !(exchange->streams && exchange->head->minor_version == 0);
}

static struct http_response exchange_response(const struct exchange *exchange) {
    return (struct http_response){
        .status = exchange->status,
        .minor_version = exchange->head->minor_version,
        .streams = exchange->streams,
        .keep_alive = exchange_keeps_alive(exchange),
        .request_id = exchange->request_id,
        .cors_origin = exchange->cors_origin,
        .is_preflight = exchange->is_preflight,
        .more_fields = exchange->more_fields,
    };
}

/* Writes head and body, or the body's first `length` bytes, in one piece, so that a small answer is
 * one packet. */
static void exchange_write_answer(struct exchange *exchange, const struct http_response *response,
                                  const char *body, size_t length) {
    struct text_buffer head = {0};
    http_response_write_head(response, &head);
    if (head.failed) {
        connection_break(exchange->connection, "no memory for an answer");
    } else {
        bool has_body = exchange->head->method != HTTP_METHOD_HEAD && length > 0;
        uv_buf_t pieces[2] = {{.base = head.data, .len = head.length},
                              {.base = (char *)body, .len = length}};
        connection_write(exchange->connection, pieces, has_body ? 2 : 1);
    }
    text_free(&head);
}

static void exchange_end(struct exchange *exchange) {
    bool keep_alive = exchange_keeps_alive(exchange);
    text_free(&exchange->body);
    metrics_count_response(&exchange->server->metrics, exchange->status);
    exchange_log(exchange);
    connection_end_exchange(exchange->connection, keep_alive);
}

void exchange_attach(struct exchange *exchange, void *job, void (*abandon)(void *job)) {
    exchange->job = job;
    exchange->abandon = abandon;
}

char *exchange_take_body(struct exchange *exchange, size_t *length) {
    struct http_parser *parser = &exchange->connection->parser;
    char *body = parser->body;
    *length = parser->body_length;
    parser->body = NULL;
    parser->body_length = parser->body_capacity = 0;
    return body;
}

void exchange_answer(struct exchange *exchange, int status, const char *content_type,
                     const char *body, size_t length) {
    exchange->status = status;
    struct http_response response = exchange_response(exchange);
    response.content_type = content_type;
    response.content_length = length;
    if (exchange->head->method == HTTP_METHOD_OPTIONS) response.allow = exchange->allow;
    exchange_write_answer(exchange, &response, body, length);
    exchange_end(exchange);
}

static void exchange_begin_long(struct exchange *exchange, const char *content_type,
                                struct text_buffer *body) {
    exchange->status = 200;
    struct http_response response = exchange_response(exchange);
    response.content_type = content_type;
    response.content_length = body->length;
    exchange->job = NULL;
    exchange->body = *body;
    exchange->body_written = ANSWER_SLICE;
    *body = (struct text_buffer){0};
    exchange_write_answer(exchange, &response, exchange->body.data, ANSWER_SLICE);
    connection_await_turn(exchange->connection);
}

/* Gives the pages between two places of the body back to the system, but not the one in which it
 * begins: to free them all at once, at the end, would take the loop 0.2 ms per MiB. */
static void forget_written(const struct text_buffer *body, size_t from, size_t to) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)body->data;
    uintptr_t first = (start + from + page - 1) / page * page, end = (start + to) / page * page;
    if (first < end) madvise((void *)first, end - first, MADV_DONTNEED);
}

bool exchange_has_more(const struct exchange *exchange) {
    return exchange->body_written < exchange->body.length;
}

void exchange_write_more(struct exchange *exchange) {
    size_t left = exchange->body.length - exchange->body_written;
    uv_buf_t slice = {.base = exchange->body.data + exchange->body_written,
                      .len = left < ANSWER_SLICE ? left : ANSWER_SLICE};
    connection_write(exchange->connection, &slice, 1);
    forget_written(&exchange->body, exchange->body_written - ANSWER_SLICE, exchange->body_written);
    exchange->body_written += slice.len;
    if (exchange_has_more(exchange)) {
        connection_await_turn(exchange->connection);
    } else {
        exchange_end(exchange);
    }
}

void exchange_answer_text(struct exchange *exchange, const char *content_type,
                          struct text_buffer *body) {
    if (body->failed) {
        exchange_answer_no_memory(exchange);
    } else if (body->length > ANSWER_SLICE && exchange->head->method != HTTP_METHOD_HEAD) {
        exchange_begin_long(exchange, content_type, body);
    } else {
        exchange_answer(exchange, 200, content_type, body->data, body->length);
    }
    text_free(body);
}

void exchange_answer_json(struct exchange *exchange, struct text_buffer *body) {
    exchange_answer_text(exchange, "application/json", body);
}

void exchange_answer_error(struct exchange *exchange, const struct api_error *error) {
    struct text_buffer body = {0};
    exchange->status = error->status;
    exchange->failure = error;
    api_error_write(error, &body);
    struct http_response response = exchange_response(exchange);
    response.content_type = "application/json";
    response.content_length = body.length;
    response.retry_after_s = error->retry_after_s;
    response.never_retry = error->never_retry;
    if (error->status == 405) response.allow = exchange->allow;
    if (body.failed) {
        connection_break(exchange->connection, "no memory for an error");
    } else {
        exchange_write_answer(exchange, &response, body.data, body.length);
    }
    text_free(&body);
    exchange_end(exchange);
}

void exchange_answer_no_memory(struct exchange *exchange) {
    struct api_error error;
    api_error_set(&error, 500, NULL, NULL, "there is no memory for this request");
    exchange_answer_error(exchange, &error);
}

void exchange_begin_stream(struct exchange *exchange) {
    exchange->status = 200;
    exchange->streams = true;
    exchange->sent_at_ms = uv_now(&exchange->server->loop);
    struct http_response response = exchange_response(exchange);
    response.content_type = "text/event-stream";
    exchange_write_answer(exchange, &response, NULL, 0);
}

void exchange_send(struct exchange *exchange, const char *data, size_t length) {
    struct connection *connection = exchange->connection;
    if (length == 0) return; /* an empty chunk would end the body */
    if (connection_unsent(connection) > exchange->server->settings->send_high_water) {
        connection_break(connection, "the client reads too slowly");
        return;
    }
    char size[24];
    int size_length = snprintf(size, sizeof size, "%zx\r\n", length);
    uv_buf_t pieces[3] = {{.base = size, .len = (size_t)size_length},
                          {.base = (char *)data, .len = length},
                          {.base = "\r\n", .len = 2}};
    bool chunked = exchange->head->minor_version > 0;
    connection_write(connection, chunked ? pieces : pieces + 1, chunked ? 3 : 1);
    exchange->sent_at_ms = uv_now(&exchange->server->loop);
}

void exchange_end_stream(struct exchange *exchange) {
    uv_buf_t last = {.base = "0\r\n\r\n", .len = 5};
    if (exchange->head->minor_version > 0) connection_write(exchange->connection, &last, 1);
    exchange_end(exchange);
}

void exchange_fail_stream(struct exchange *exchange, const struct api_error *error) {
    struct text_buffer out = {0};
    exchange->failure = error;
    stream_write_error(error, &out);
    stream_write_done(&out);
    if (!out.failed) exchange_send(exchange, out.data, out.length);
    text_free(&out);
    exchange_end_stream(exchange);
}

void exchange_abandon(struct exchange *exchange) {
    if (exchange->job) exchange->abandon(exchange->job);
    exchange->job = NULL;
    text_free(&exchange->body);
    exchange->status = STATUS_CLIENT_LEFT;
    metrics_count_response(&exchange->server->metrics, exchange->status);
    exchange_log(exchange);
}

void exchange_interrupt(struct exchange *exchange, const struct api_error *error) {
    if (exchange->job) exchange->abandon(exchange->job);
    exchange->job = NULL;
    if (exchange->streams) {
        exchange_fail_stream(exchange, error);
    } else if (exchange_has_more(exchange)) {
        connection_break(exchange->connection, "the server stops in the middle of an answer");
    } else {
        exchange_answer_error(exchange, error);
    }
}

void exchange_ping(struct exchange *exchange, uint64_t now_ms) {
    double silent_s = (double)(now_ms - exchange->sent_at_ms) / 1000;
    if (!exchange->streams || silent_s < exchange->server->settings->ping_interval) return;
    struct text_buffer ping = {0};
    stream_write_ping(&ping);
    if (!ping.failed) exchange_send(exchange, ping.data, ping.length);
    text_free(&ping);
}

#include "server/http_connection.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/router.h"
#include "server/server.h"

/* For a client that is silent to read its last answer before the connection is closed. */
#define LINGER_S 2.0
/* For one that goes on sending; a refused body has no more time than one that is wanted. */
#define LINGER_LONGEST_S 300.0
#define LINGER_BYTES_MAX ((uint64_t)256 << 20)
/* A body gets one second more than its timeout for every so many bytes that have come. */
#define BODY_BYTES_PER_S 16384
/* A longer body of a refused request is not worth reading to keep the connection. */
#define REFUSED_BODY_MAX ((uint64_t)1 << 20)
/* For a visitor to ask. */
#define VISITOR_S 1.0
/* Pipelined requests answered before other connections have their turn. */
#define TURN_REQUESTS_MAX 16

static const struct transport_owner *transport_owner(void);
static size_t connection_process(struct connection *connection, const char *data, size_t length);
static void connection_keep_ahead(struct connection *connection, const char *data, size_t length);
static void connection_linger(struct connection *connection, size_t length);
static void connection_hold(struct connection *connection);
static bool connection_is_behind(const struct connection *connection);
static void connection_begin_exchange(struct connection *connection);
static void connection_dispatch(struct connection *connection);
static void connection_refuse(struct connection *connection);
static void connection_answer_failure(struct connection *connection, int status,
                                      const char *message);
static void connection_finish(struct connection *connection);
static void connection_close(struct connection *connection);

/* ---- Accepting ------------------------------------------------------------------------------- */

static void connection_link(struct connection *connection) {
    struct server *server = connection->server;
    connection->next = server->connections;
    if (connection->next) connection->next->previous = connection;
    server->connections = connection;
    server->connection_count++;
}

static void connection_unlink(struct connection *connection) {
    struct server *server = connection->server;
    if (connection->next) connection->next->previous = connection->previous;
    if (connection->previous) connection->previous->next = connection->next;
    if (server->connections == connection) server->connections = connection->next;
    server->connection_count--;
    if (server->accept_owed) server_sweep_soon(server);
}

void connection_accept(struct server *server) {
    size_t limit = server->settings->max_connections;
    struct connection *connection = NULL;
    if (server->connection_count < limit + CONNECTION_VISITORS_MAX) {
        connection = calloc(1, sizeof *connection);
    }
    if (!connection) {
        server->accept_owed = true;
        return;
    }
    connection->server = server;
    connection->is_visitor = server->connection_count >= limit;
    connection->since_ms = connection->taken_at_ms = uv_now(&server->loop);
    http_parser_init(&connection->parser, &server->settings->limits);
    connection->transport.owner = transport_owner();
    connection->transport.read_buffer = server->read_buffer;
    connection_link(connection);
    if (transport_accept(&connection->transport, &server->listener, server->tls) != 0) {
        connection_close(connection);
    }
}

/* ---- Reading --------------------------------------------------------------------------------- */

static struct connection *connection_of(struct transport *transport) {
    return (struct connection *)((char *)transport - offsetof(struct connection, transport));
}

/* Some of an answer that is complete is still to be sent. */
static bool connection_owes(const struct connection *connection) {
    return exchange_has_more(&connection->exchange) ||
           (connection->state != CONNECTION_ANSWERING && connection_unsent(connection) > 0);
}

static void connection_end_input(struct connection *connection, ssize_t why) {
    if (why == UV_EPROTONOSUPPORT && connection->state == CONNECTION_READING) {
        connection_answer_failure(connection, 400, "TLS is spoken here; use https://");
    } else if (why == UV_EPROTO && connection->state == CONNECTION_READING) {
        log_message(&connection->server->log, LOG_DEBUG, "connection dropped: TLS: %s",
                    transport_failure(&connection->transport));
        connection_finish(connection); /* what TLS itself had to say to that is on its way */
    } else if (why == UV_EOF && connection_owes(connection)) {
        connection->client_is_done = true;
        if (connection->state == CONNECTION_READING) connection_finish(connection);
    } else {
        connection_close(connection);
    }
}

static void on_read(struct transport *transport, const char *data, ssize_t length) {
    struct connection *connection = connection_of(transport);
    if (length < 0) {
        connection_end_input(connection, length);
    } else if (connection->state == CONNECTION_READING) {
        size_t used = connection_process(connection, data, (size_t)length);
        connection_keep_ahead(connection, data + used, (size_t)length - used);
    } else if (connection->state == CONNECTION_ANSWERING) {
        connection_keep_ahead(connection, data, (size_t)length);
    } else if (connection->state == CONNECTION_LINGERING) {
        connection_linger(connection, (size_t)length);
    }
}

/* Moves what is left to the front once more is used than left: a byte is moved once on average. */
static void ahead_compact(struct connection *connection) {
    struct text_buffer *ahead = &connection->ahead;
    size_t left = ahead->length - connection->ahead_used;
    if (left > connection->ahead_used) return;
    if (left > 0) memmove(ahead->data, ahead->data + connection->ahead_used, left);
    ahead->length = left;
    connection->ahead_used = 0;
}

/* Behind a gap nothing is kept: there is no way to know where a request would begin. */
static void connection_keep_ahead(struct connection *connection, const char *data, size_t length) {
    struct text_buffer *ahead = &connection->ahead;
    bool is_wanted = connection->state == CONNECTION_ANSWERING || connection->is_held;
    if (!is_wanted || length == 0 || connection->ahead_is_cut) return;
    ahead_compact(connection);
    size_t room = http_request_bytes_max(connection->parser.limits) -
                  (ahead->length - connection->ahead_used);
    connection->ahead_is_cut = length > room;
    text_append(ahead, data, length < room ? length : room);
    if (ahead->failed) connection_break(connection, "no memory for pipelined requests");
}

/* Requests, one after another, until the bytes end, an answer is still to come, or it is for others
 * or for the client to go on first. Returns how many bytes were used. */
static size_t connection_process(struct connection *connection, const char *data, size_t length) {
    const char *start = data;
    bool was_idle = http_parser_is_idle(&connection->parser);
    enum http_progress progress = HTTP_PROGRESS_HEAD;
    unsigned requests = 0;
    connection->is_processing = true;
    while (connection->state == CONNECTION_READING && progress != HTTP_PROGRESS_MORE) {
        bool is_between = http_parser_is_idle(&connection->parser);
        if (is_between && (requests == TURN_REQUESTS_MAX || connection_is_behind(connection))) {
            connection_hold(connection);
            break;
        }
        size_t consumed;
        progress = http_parser_feed(&connection->parser, data, length, &consumed);
        data += consumed;
        length -= consumed;
        if (progress == HTTP_PROGRESS_HEAD) connection_begin_exchange(connection);
        if (progress == HTTP_PROGRESS_MESSAGE) {
            connection_dispatch(connection);
            requests++;
        }
        if (progress == HTTP_PROGRESS_FAILED) connection_refuse(connection);
    }
    connection->is_processing = false;
    bool is_idle = http_parser_is_idle(&connection->parser);
    if (was_idle && !is_idle && !connection->parser.head.complete) {
        connection->since_ms = uv_now(&connection->server->loop);
    }
    return (size_t)(data - start);
}

static void connection_read_on(struct connection *connection) {
    transport_read_start(&connection->transport); /* nothing happens if it was not stopped */
    if (connection->transport.end != 0) server_sweep_soon(connection->server);
}

static void connection_refuse_cut(struct connection *connection) {
    char message[160];
    snprintf(message, sizeof message,
             "more than %zu bytes of requests came before the answers to those before them; what "
             "came after was not read: wait for answers, then send it again",
             http_request_bytes_max(connection->parser.limits));
    connection_answer_failure(connection, 429, message);
}

/* Goes on with what was kept while the connection answered or was held. */
static void connection_resume(struct connection *connection) {
    struct text_buffer ahead = connection->ahead;
    size_t used = connection->ahead_used;
    connection->ahead = (struct text_buffer){0}; /* processing may end the connection */
    connection->ahead_used = 0;
    connection->is_held = false;
    if (ahead.length > used) {
        used += connection_process(connection, ahead.data + used, ahead.length - used);
    }
    if (used < ahead.length && (connection->state == CONNECTION_ANSWERING || connection->is_held)) {
        connection->ahead = ahead;
        connection->ahead_used = used;
    } else {
        text_free(&ahead);
    }
    if (connection->state == CONNECTION_READING && !connection->is_held) {
        if (connection->ahead_is_cut) connection_refuse_cut(connection);
    }
    if (connection->state != CONNECTION_CLOSING && !connection->is_held) {
        connection_read_on(connection);
    }
}

/* ---- Taking turns ---------------------------------------------------------------------------- */

/* Answers wait for the client: no more of them are made until it has taken some. */
static bool connection_is_behind(const struct connection *connection) {
    return connection_unsent(connection) > connection->server->settings->send_high_water;
}

static void connection_make_due(struct connection *connection) {
    connection->is_due = true;
    server_turn_soon(connection->server);
}

/* Neither reads nor parses on until the next turn; or, when the client is behind, until it is no
 * longer, for which it has the send timeout. */
static void connection_hold(struct connection *connection) {
    connection->is_held = true;
    transport_read_stop(&connection->transport);
    connection_await_turn(connection);
}

void connection_await_turn(struct connection *connection) {
    if (connection->is_broken || connection_is_behind(connection)) return;
    connection_make_due(connection);
}

bool connection_take_turns(struct server *server) {
    bool is_any_due = false;
    for (struct connection *connection = server->connections; connection;
         connection = connection->next) {
        if (!connection->is_due) continue; /* nothing here closes a connection */
        connection->is_due = false;
        connection->since_ms = uv_now(&server->loop);
        if (exchange_has_more(&connection->exchange)) {
            exchange_write_more(&connection->exchange);
        } else {
            connection_resume(connection);
        }
        is_any_due |= connection->is_due;
    }
    return is_any_due;
}

/* ---- Exchanges ------------------------------------------------------------------------------- */

static void request_id_make(char id[REQUEST_ID_MAX + 1]) {
    snprintf(id, REQUEST_ID_MAX + 1, "req-%016llx%016llx", (unsigned long long)server_random(),
             (unsigned long long)server_random());
}

static void exchange_identify(struct exchange *exchange) {
    struct http_slice given;
    http_head_find(exchange->head, "X-Request-Id", &given);
    bool usable = given.length > 0 && given.length <= REQUEST_ID_MAX;
    for (size_t i = 0; i < given.length && usable; i++) {
        usable = given.data[i] >= 0x20 && given.data[i] < 0x7f;
    }
    if (usable) {
        memcpy(exchange->request_id, given.data, given.length);
        exchange->request_id[given.length] = '\0';
        return;
    }
    request_id_make(exchange->request_id);
}

static void exchange_reset(struct connection *connection) {
    connection->exchange = (struct exchange){
        .server = connection->server,
        .connection = connection,
        .head = &connection->parser.head,
        .started_ns = time_now_ns(),
        .ttft_ms = -1,
        .tpot_ms = -1,
    };
    exchange_identify(&connection->exchange);
}

/* The head is complete: refuse what can be refused before a body is sent, or ask for the body. */
static void connection_begin_exchange(struct connection *connection) {
    static char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    struct exchange *exchange = &connection->exchange;
    const struct http_head *head = &connection->parser.head;
    connection->since_ms = uv_now(&connection->server->loop);
    exchange_reset(connection);
    router_admit(exchange);
    connection->parser.discards_body = exchange->refusal.status != 0 || exchange->ignores_body;
    bool has_body = head->chunked || head->content_length > 0;
    if (exchange->refusal.status != 0 && has_body &&
        (head->expects_continue || head->content_length > REFUSED_BODY_MAX ||
         connection->is_visitor)) {
        connection->state = CONNECTION_ANSWERING;
        exchange_answer_error(exchange, &exchange->refusal);
    } else if (head->expects_continue && has_body) {
        uv_buf_t piece = uv_buf_init(go_on, sizeof go_on - 1);
        connection_write(connection, &piece, 1);
    }
}

static void connection_dispatch(struct connection *connection) {
    struct exchange *exchange = &connection->exchange;
    connection->state = CONNECTION_ANSWERING;
    exchange->started_ns = time_now_ns();
    if (exchange->refusal.status != 0) {
        exchange_answer_error(exchange, &exchange->refusal);
    } else {
        exchange->handler(exchange);
    }
}

static void connection_answer_failure(struct connection *connection, int status,
                                      const char *message) {
    struct exchange *exchange = &connection->exchange;
    if (!exchange->server) exchange_reset(connection); /* the head was not complete, or too much */
    connection->state = CONNECTION_ANSWERING;
    struct api_error error;
    const char *code = status == 503 || status == 429 ? "server_overloaded" : NULL;
    api_error_set(&error, status, code, NULL, "%s", message);
    error.never_retry = status == 505; /* the same bytes will not do better */
    exchange->allow = ROUTER_METHODS;  /* of a 405 */
    exchange_answer_error(exchange, &error);
}

/* Bytes that are no request: there is no way to know where a next one would begin. */
static void connection_refuse(struct connection *connection) {
    const struct http_parser *parser = &connection->parser;
    connection_answer_failure(connection, parser->status, parser->error.message);
}

void connection_end_exchange(struct connection *connection, bool keep_alive) {
    connection->exchange = (struct exchange){0};
    connection->since_ms = uv_now(&connection->server->loop);
    if (!keep_alive) {
        connection_finish(connection);
        return;
    }
    http_parser_next(&connection->parser);
    connection->state = CONNECTION_READING;
    if (!connection->is_processing) connection_resume(connection);
}

/* ---- Writing --------------------------------------------------------------------------------- */

static void on_written(struct transport *transport, int status) {
    struct connection *connection = connection_of(transport);
    size_t low_water = connection->server->settings->send_high_water / 2;
    if (status < 0) connection_break(connection, uv_strerror(status));
    bool waits = connection->is_held || exchange_has_more(&connection->exchange);
    if (status == 0 && waits && transport_unsent(transport) <= low_water) {
        connection_await_turn(connection);
    }
}

size_t connection_unsent(const struct connection *connection) {
    return transport_unsent(&connection->transport);
}

void connection_write(struct connection *connection, const uv_buf_t *pieces, unsigned count) {
    if (connection->is_broken || connection->state == CONNECTION_CLOSING) return;
    int result = transport_write(&connection->transport, pieces, count);
    if (result != 0) connection_break(connection, uv_strerror(result));
}

void connection_break(struct connection *connection, const char *why) {
    if (connection->is_broken || connection->state == CONNECTION_CLOSING) return;
    connection->is_broken = true;
    log_message(&connection->server->log, LOG_DEBUG, "connection dropped: %s", why);
    server_sweep_soon(connection->server);
}

/* ---- Ending ---------------------------------------------------------------------------------- */

static void on_shut_down(struct transport *transport, int status) {
    struct connection *connection = connection_of(transport);
    if (status != 0) {
        connection_break(connection, uv_strerror(status));
        return;
    }
    connection->was_shut_down = true;
    connection->since_ms = uv_now(&connection->server->loop);
    if (connection->client_is_done) connection_close(connection);
}

/* Writes what is queued, says that no more will come, and reads on for a while. */
static void connection_finish(struct connection *connection) {
    if (connection->state == CONNECTION_CLOSING) return;
    connection->state = CONNECTION_LINGERING;
    connection->is_held = connection->is_due = false;
    connection->ahead_used = 0;
    text_free(&connection->ahead);
    http_parser_free(&connection->parser);
    connection_read_on(connection);
    int result = transport_shut_down(&connection->transport);
    if (result != 0) connection_break(connection, uv_strerror(result));
}

static void connection_linger(struct connection *connection, size_t length) {
    connection->heard_at_ms = uv_now(&connection->server->loop);
    connection->lingered_bytes += length;
    if (connection->lingered_bytes > LINGER_BYTES_MAX) {
        connection_break(connection, "it goes on sending what was refused");
    }
}

static void on_closed(struct transport *transport) {
    struct connection *connection = connection_of(transport);
    http_parser_free(&connection->parser);
    text_free(&connection->ahead);
    free(connection);
}

static const struct transport_owner *transport_owner(void) {
    static const struct transport_owner owner = {
        .on_read = on_read,
        .on_written = on_written,
        .on_shut_down = on_shut_down,
        .on_closed = on_closed,
    };
    return &owner;
}

/* Only callbacks of libuv come here, never code that answers: see exchange.h on jobs. */
static void connection_close(struct connection *connection) {
    if (connection->state == CONNECTION_CLOSING) return;
    bool was_answering = connection->state == CONNECTION_ANSWERING;
    connection->state = CONNECTION_CLOSING;
    connection->is_held = connection->is_due = false;
    connection_unlink(connection);
    if (was_answering) exchange_abandon(&connection->exchange);
    transport_close(&connection->transport, !was_answering && !connection->is_broken);
}

/* What a stopping server could not finish is at least told so. */
static void connection_interrupt(struct connection *connection) {
    struct api_error error;
    api_error_set(&error, 503, "draining", NULL,
                  "the server is shutting down and could not finish this request");
    if (connection->state == CONNECTION_ANSWERING) {
        exchange_interrupt(&connection->exchange, &error);
    } else if (connection->state == CONNECTION_READING && connection->parser.head.complete) {
        connection->state = CONNECTION_ANSWERING;
        exchange_answer_error(&connection->exchange, &error);
    }
}

void connection_interrupt_all(struct server *server) {
    for (struct connection *connection = server->connections; connection;
         connection = connection->next) {
        connection_interrupt(connection); /* ends at most in lingering: the list stays as it is */
    }
}

/* ---- Timeouts -------------------------------------------------------------------------------- */

/* For a body of which so many bytes have come. */
static double body_limit_s(const struct connection *connection, uint64_t bytes) {
    return connection->server->settings->body_timeout + (double)bytes / BODY_BYTES_PER_S;
}

static void connection_time_out(struct connection *connection, const char *message) {
    connection->was_slow = true;
    connection_answer_failure(connection, 408, message);
}

static void sweep_reading(struct connection *connection, double waited_s) {
    const struct serve_settings *settings = connection->server->settings;
    const struct http_parser *parser = &connection->parser;
    if (!transport_is_open(&connection->transport)) {
        double limit_s = connection->is_visitor ? VISITOR_S : settings->header_timeout;
        if (waited_s > limit_s) connection_close(connection);
    } else if (connection->is_visitor) {
        if (waited_s > VISITOR_S) {
            connection_answer_failure(connection, 503, "too many connections; try again");
        }
    } else if (http_parser_is_idle(parser)) {
        if (waited_s > settings->idle_timeout) connection_close(connection);
    } else if (!parser->head.complete) {
        if (waited_s > settings->header_timeout) {
            connection_time_out(connection, "the request head did not arrive in time");
        }
    } else if (waited_s > body_limit_s(connection, parser->body_seen)) {
        connection_time_out(connection, "the request body did not arrive in time");
    }
}

/* Until its answer is out the send timeout counts, not this. */
static void sweep_lingering(struct connection *connection, uint64_t now_ms, double waited_s) {
    bool is_sending = now_ms - connection->heard_at_ms <= (uint64_t)(LINGER_S * 1000);
    double limit_s = body_limit_s(connection, connection->lingered_bytes);
    if (limit_s > LINGER_LONGEST_S) limit_s = LINGER_LONGEST_S;
    if (!is_sending || connection->is_visitor || connection->was_slow || limit_s < LINGER_S) {
        limit_s = LINGER_S;
    }
    if (connection->was_shut_down && waited_s > limit_s) connection_close(connection);
}

/* True while the client takes what is written, or there is nothing to take. */
static bool client_takes_bytes(struct connection *connection, uint64_t now_ms) {
    size_t unsent = connection_unsent(connection);
    uint64_t taken = connection->transport.queued_bytes - unsent;
    if (unsent == 0 || taken != connection->taken_bytes) connection->taken_at_ms = now_ms;
    connection->taken_bytes = taken;
    double stalled_s = (double)(now_ms - connection->taken_at_ms) / 1000;
    return stalled_s <= connection->server->settings->send_timeout;
}

static void connection_sweep(struct connection *connection, uint64_t now_ms) {
    struct exchange *exchange = &connection->exchange;
    double waited_s = (double)(now_ms - connection->since_ms) / 1000;
    transport_deliver_end(&connection->transport);
    if (connection->state == CONNECTION_CLOSING) return;
    if (connection->is_broken || !client_takes_bytes(connection, now_ms)) {
        connection_close(connection);
    } else if (connection->state == CONNECTION_READING) {
        if (!connection->is_held) sweep_reading(connection, waited_s);
    } else if (connection->state == CONNECTION_LINGERING) {
        sweep_lingering(connection, now_ms, waited_s);
    } else if (connection->state == CONNECTION_ANSWERING) {
        exchange_ping(exchange, now_ms);
    }
}

void connection_sweep_all(struct server *server) {
    uint64_t now_ms = uv_now(&server->loop);
    for (struct connection *connection = server->connections, *next; connection;
         connection = next) {
        next = connection->next; /* closing unlinks this one, and no other */
        connection_sweep(connection, now_ms);
    }
}

bool connection_all_flushed(const struct server *server) {
    for (const struct connection *connection = server->connections; connection;
         connection = connection->next) {
        bool has_more = exchange_has_more(&connection->exchange);
        if (has_more || connection_unsent(connection) > 0) return false;
    }
    return true;
}

void connection_close_all(struct server *server) {
    while (server->connections) connection_close(server->connections);
}

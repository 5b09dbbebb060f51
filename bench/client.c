#include "bench/client.h"

#include <stdlib.h>
#include <string.h>

enum connection_state {
    CONNECTION_OPENING, /* connecting, shaking hands */
    CONNECTION_BUSY,
    CONNECTION_IDLE,
    CONNECTION_CLOSING, /* uv_close was called; freed when that is done */
};

/* One connection and the exchange on it. In client->idle while idle, else in client->busy. */
struct connection {
    uv_tcp_t tcp;
    uv_connect_t connecting;
    struct tls_session *tls; /* NULL: plain */
    struct client *client;
    struct connection *next, *previous;
    enum connection_state state;
    size_t writes_pending;
    bool reused;    /* it carried an exchange before this one */
    bool heard;     /* a byte of this answer came */
    bool cancelled; /* this exchange was left on purpose */
    bool reports;   /* `done` is still to be called, when closed */
    struct text_buffer request;
    size_t cancel_after;
    struct exchange_result result;
    struct answer answer;
    void *tag;
};

static void list_add(struct connection **list, struct connection *connection) {
    connection->previous = NULL;
    connection->next = *list;
    if (*list) (*list)->previous = connection;
    *list = connection;
}

static void list_remove(struct connection **list, struct connection *connection) {
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        *list = connection->next;
    if (connection->next) connection->next->previous = connection->previous;
}

static void connection_open(struct connection *connection);
static void connection_write(struct connection *connection);
static bool send_tls_output(struct connection *connection);

void client_init(struct client *client, uv_loop_t *loop, const struct target *target,
                 double timeout, client_done *done) {
    client->loop = loop;
    client->target = target;
    client->timeout_ns = (uint64_t)(timeout * 1e9);
    client->done = done;
    client->idle = client->busy = NULL;
    client->busy_count = client->connects = 0;
}

/* ---- The end of a connection, and of an exchange --------------------------------------------- */

static void on_closed(uv_handle_t *handle) {
    struct connection *connection = handle->data;
    struct client *client = connection->client;
    if (connection->reports) {
        list_remove(&client->busy, connection);
        client->busy_count--;
        client->done(connection->tag, &connection->result);
    }
    answer_free(&connection->answer);
    text_free(&connection->request);
    tls_session_destroy(connection->tls);
    free(connection);
}

/* No answer of anybody's depends on whether the server hears the goodbye. */
static void connection_close(struct connection *connection) {
    connection->state = CONNECTION_CLOSING;
    if (connection->tls) {
        tls_session_end(connection->tls);
        send_tls_output(connection);
    }
    uv_close((uv_handle_t *)&connection->tcp, on_closed);
}

/* The exchange is over and so is the connection. Telling waits until the handle is closed: a
 * connect that fails at once would else recurse from client_send into itself. */
static void connection_end(struct connection *connection) {
    if (connection->state == CONNECTION_CLOSING) return;
    if (connection->state == CONNECTION_IDLE) {
        list_remove(&connection->client->idle, connection);
    } else {
        connection->reports = true;
        connection->result = (struct exchange_result){
            .started_ns = connection->result.started_ns,
            .ended_ns = time_now_ns(),
            .cancelled = connection->cancelled,
            .answer = &connection->answer,
        };
    }
    connection_close(connection);
}

static void connection_fail(struct connection *connection, enum failure failure,
                            const char *detail) {
    answer_fail(&connection->answer, failure, detail);
    connection_end(connection);
}

/* A whole answer came and the connection may be kept. */
static void connection_finish(struct connection *connection) {
    struct client *client = connection->client;
    bool keeps = connection->answer.keeps_alive && connection->writes_pending == 0;
    if (!keeps) {
        connection_end(connection);
        return;
    }
    struct exchange_result result = {
        .started_ns = connection->result.started_ns,
        .ended_ns = time_now_ns(),
        .answer = &connection->answer,
    };
    list_remove(&client->busy, connection);
    client->busy_count--;
    connection->state = CONNECTION_IDLE;
    list_add(&client->idle, connection); /* first, so that `done` sends its next request on it */
    client->done(connection->tag, &result);
}

/* ---- Reading --------------------------------------------------------------------------------- */

static void on_allocate(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer) {
    (void)suggested;
    struct connection *connection = handle->data;
    *buffer = uv_buf_init(connection->client->buffer, sizeof connection->client->buffer);
}

static void retry(struct connection *connection) {
    struct client *client = connection->client;
    struct connection *fresh = calloc(1, sizeof *fresh);
    if (!fresh) {
        connection_fail(connection, FAILURE_CLOSED, "no memory to connect again");
        return;
    }
    fresh->client = client;
    fresh->request = connection->request;
    fresh->cancel_after = connection->cancel_after;
    fresh->result.started_ns = connection->result.started_ns;
    fresh->tag = connection->tag;
    connection->request = (struct text_buffer){0};
    list_remove(&client->busy, connection);
    connection_close(connection);
    list_add(&client->busy, fresh);
    connection_open(fresh);
}

static void on_ended(struct connection *connection, const char *reason) {
    if (connection->state == CONNECTION_OPENING) {
        connection_fail(connection, FAILURE_CONNECT, reason);
        return;
    }
    if (connection->state == CONNECTION_BUSY && connection->reused && !connection->heard) {
        retry(connection);
        return;
    }
    if (connection->state == CONNECTION_BUSY) {
        answer_end(&connection->answer);
        answer_fail(&connection->answer, FAILURE_CLOSED, reason);
    }
    connection_end(connection);
}

static void take_text(struct connection *connection, const char *text, size_t length) {
    if (connection->state != CONNECTION_BUSY) { /* an answer that nobody asked for */
        connection_end(connection);
        return;
    }
    connection->heard = true;
    bool complete = answer_feed(&connection->answer, text, length, time_now_ns());
    if (complete) {
        connection_finish(connection);
    } else if (connection->cancel_after && connection->answer.chunks >= connection->cancel_after) {
        connection->cancelled = true;
        connection_end(connection);
    }
}

/* Text comes before an end, and with it the connection may have gone on to another request. */
static void take_tls(struct connection *connection, const char *bytes, size_t length) {
    const char *text;
    size_t text_length;
    enum tls_state state = tls_session_feed(connection->tls, bytes, length, &text, &text_length);
    bool sent = send_tls_output(connection);
    if (text_length > 0) take_text(connection, text, text_length);
    if (connection->state == CONNECTION_CLOSING) return;
    if (state == TLS_FAILED)
        on_ended(connection, tls_session_failure(connection->tls));
    else if (state == TLS_ENDED)
        on_ended(connection, "the server ended TLS");
    else if (!sent)
        on_ended(connection, "TLS could not be sent");
    else if (state == TLS_OPEN && connection->state == CONNECTION_OPENING)
        connection_write(connection);
}

static void on_read(uv_stream_t *stream, ssize_t length, const uv_buf_t *buffer) {
    struct connection *connection = stream->data;
    if (length == 0) return;
    if (length < 0)
        on_ended(connection, uv_strerror((int)length));
    else if (connection->tls)
        take_tls(connection, buffer->base, (size_t)length);
    else
        take_text(connection, buffer->base, (size_t)length);
}

/* ---- Sending --------------------------------------------------------------------------------- */

/* What the socket does not take at once. */
struct pending_write {
    uv_write_t writing;
    char bytes[];
};

static void on_written(uv_write_t *writing, int status) {
    struct connection *connection = writing->handle->data;
    connection->writes_pending--;
    free(writing); /* its first member */
    /* The reading side tells how it ended; a server may answer before it has read everything. */
    (void)status;
}

/* False: no memory. That a connection has ended, the reading side sees. */
static bool send_bytes(struct connection *connection, const char *bytes, size_t length) {
    uv_stream_t *stream = (uv_stream_t *)&connection->tcp;
    uv_buf_t piece = {.base = (char *)(uintptr_t)bytes, .len = length};
    int written = length ? uv_try_write(stream, &piece, 1) : 0;
    size_t sent = written > 0 ? (size_t)written : 0;
    if (sent == length) return true;
    struct pending_write *write = malloc(sizeof *write + length - sent);
    if (!write) return false;
    memcpy(write->bytes, bytes + sent, length - sent);
    piece = (uv_buf_t){.base = write->bytes, .len = length - sent};
    if (uv_write(&write->writing, stream, &piece, 1, on_written) == 0)
        connection->writes_pending++;
    else
        free(write);
    return true;
}

static bool send_tls_output(struct connection *connection) {
    size_t length;
    const char *output = tls_output(connection->tls, &length);
    bool sent = send_bytes(connection, output, length);
    tls_output_clear(connection->tls);
    return sent;
}

static bool encrypt_request(struct connection *connection) {
    const struct text_buffer *request = &connection->request;
    for (size_t at = 0; at < request->length; at += TLS_RECORD_MAX) {
        size_t left = request->length - at;
        if (!tls_session_write(connection->tls, request->data + at,
                               left < TLS_RECORD_MAX ? left : TLS_RECORD_MAX)) {
            tls_output_clear(connection->tls);
            return false;
        }
    }
    return send_tls_output(connection);
}

static void connection_write(struct connection *connection) {
    const struct text_buffer *request = &connection->request;
    connection->state = CONNECTION_BUSY;
    bool sent = connection->tls ? encrypt_request(connection)
                                : send_bytes(connection, request->data, request->length);
    if (!sent) connection_fail(connection, FAILURE_CLOSED, "the request could not be sent");
}

static void on_connected(uv_connect_t *connecting, int status) {
    struct connection *connection = connecting->data;
    if (connection->state != CONNECTION_OPENING) return; /* cancelled meanwhile */
    if (status != 0) {
        connection_fail(connection, FAILURE_CONNECT, uv_strerror(status));
        return;
    }
    uv_tcp_nodelay(&connection->tcp, 1);
    status = uv_read_start((uv_stream_t *)&connection->tcp, on_allocate, on_read);
    if (status != 0) {
        connection_fail(connection, FAILURE_CONNECT, uv_strerror(status));
        return;
    }
    const struct target *target = connection->client->target;
    if (!target->tls) {
        connection_write(connection);
        return;
    }
    connection->tls = tls_session_connect(target->tls, target->host);
    if (!connection->tls || !send_tls_output(connection))
        connection_fail(connection, FAILURE_CONNECT, "no memory for TLS");
}

/* Starts connecting for the request that the connection, new and in the busy list, holds. */
static void connection_open(struct connection *connection) {
    struct client *client = connection->client;
    answer_init(&connection->answer);
    answer_begin(&connection->answer);
    connection->state = CONNECTION_OPENING;
    connection->tcp.data = connection->connecting.data = connection;
    client->connects++;
    uv_tcp_init(client->loop, &connection->tcp); /* cannot fail: the socket comes later */
    int result = uv_tcp_connect(&connection->connecting, &connection->tcp,
                                (const struct sockaddr *)&client->target->address, on_connected);
    if (result != 0) connection_fail(connection, FAILURE_CONNECT, uv_strerror(result));
}

bool client_send(struct client *client, const struct text_buffer *request, size_t cancel_after,
                 uint64_t started_ns, void *tag) {
    struct connection *connection = client->idle;
    bool reused = connection != NULL;
    if (reused)
        list_remove(&client->idle, connection);
    else
        connection = calloc(1, sizeof *connection);
    if (!connection) return false;
    connection->client = client;
    connection->cancel_after = cancel_after;
    connection->result = (struct exchange_result){.started_ns = started_ns};
    connection->tag = tag;
    connection->reused = reused;
    connection->heard = false;
    connection->request.length = 0;
    text_append(&connection->request, request->data, request->length);
    list_add(&client->busy, connection);
    client->busy_count++;
    if (connection->request.failed) { /* told as a failure, once the loop turns */
        if (!reused) uv_tcp_init(client->loop, &connection->tcp);
        connection->tcp.data = connection;
        connection->state = CONNECTION_BUSY;
        answer_begin(&connection->answer);
        connection_fail(connection, FAILURE_CONNECT, "no memory for the request");
    } else if (reused) {
        answer_begin(&connection->answer);
        connection_write(connection);
    } else {
        connection_open(connection);
    }
    return true;
}

/* ---- All of them ----------------------------------------------------------------------------- */

void client_check_timeouts(struct client *client, uint64_t now_ns) {
    for (struct connection *c = client->busy; c; c = c->next) {
        if (c->state == CONNECTION_CLOSING) continue;
        if (now_ns - c->result.started_ns <= client->timeout_ns) continue;
        connection_fail(c, FAILURE_TIMEOUT, "no whole answer within --timeout");
    }
}

void client_cancel_all(struct client *client) {
    for (struct connection *c = client->busy; c; c = c->next) {
        if (c->state == CONNECTION_CLOSING) continue;
        c->cancelled = true;
        connection_end(c);
    }
}

void client_close_idle(struct client *client) {
    while (client->idle) connection_end(client->idle);
}

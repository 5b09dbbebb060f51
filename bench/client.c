#include "bench/client.h"

#include <stdlib.h>
#include <string.h>

enum connection_state {
    CONNECTION_OPENING,
    CONNECTION_BUSY,
    CONNECTION_IDLE,
    CONNECTION_CLOSING, /* uv_close was called; freed when that is done */
};

/* One connection and the exchange on it. In client->idle while idle, else in client->busy. */
struct connection {
    uv_tcp_t tcp;
    uv_connect_t connecting;
    uv_write_t writing;
    struct client *client;
    struct connection *next, *previous;
    enum connection_state state;
    bool write_pending;
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

void client_init(struct client *client, uv_loop_t *loop, const struct sockaddr_storage *address,
                 double timeout, client_done *done) {
    client->loop = loop;
    client->address = *address;
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
    free(connection);
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
    connection->state = CONNECTION_CLOSING;
    uv_close((uv_handle_t *)&connection->tcp, on_closed);
}

static void connection_fail(struct connection *connection, enum failure failure,
                            const char *detail) {
    answer_fail(&connection->answer, failure, detail);
    connection_end(connection);
}

/* A whole answer came and the connection may be kept. */
static void connection_finish(struct connection *connection) {
    struct client *client = connection->client;
    bool keeps = connection->answer.keeps_alive && !connection->write_pending;
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
    connection->state = CONNECTION_CLOSING;
    uv_close((uv_handle_t *)&connection->tcp, on_closed);
    list_add(&client->busy, fresh);
    connection_open(fresh);
}

static void on_ended(struct connection *connection, const char *reason) {
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

static void on_read(uv_stream_t *stream, ssize_t length, const uv_buf_t *buffer) {
    struct connection *connection = stream->data;
    if (length == 0) return;
    if (length < 0) {
        on_ended(connection, uv_strerror((int)length));
        return;
    }
    if (connection->state != CONNECTION_BUSY) { /* an answer that nobody asked for */
        connection_end(connection);
        return;
    }
    connection->heard = true;
    bool complete = answer_feed(&connection->answer, buffer->base, (size_t)length, time_now_ns());
    if (complete) {
        connection_finish(connection);
    } else if (connection->cancel_after && connection->answer.chunks >= connection->cancel_after) {
        connection->cancelled = true;
        connection_end(connection);
    }
}

/* ---- Sending --------------------------------------------------------------------------------- */

static void on_written(uv_write_t *writing, int status) {
    struct connection *connection = writing->data;
    connection->write_pending = false;
    /* The reading side tells how it ended; a server may answer before it has read everything. */
    (void)status;
}

static void connection_write(struct connection *connection) {
    struct text_buffer *request = &connection->request;
    uv_stream_t *stream = (uv_stream_t *)&connection->tcp;
    uv_buf_t bytes = uv_buf_init(request->data, (unsigned)request->length);
    connection->state = CONNECTION_BUSY;
    int written = uv_try_write(stream, &bytes, 1);
    if (written == (int)request->length) return;
    if (written > 0) {
        bytes.base += written;
        bytes.len -= (size_t)written;
    }
    connection->writing.data = connection;
    connection->write_pending = true;
    if (uv_write(&connection->writing, stream, &bytes, 1, on_written) != 0)
        connection->write_pending = false; /* the reading side sees the connection's end */
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
    connection_write(connection);
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
                                (const struct sockaddr *)&client->address, on_connected);
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

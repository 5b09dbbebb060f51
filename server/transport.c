#include "server/transport.h"

#include <stdlib.h>
#include <string.h>

#include "tls/tls.h"

#define TCP_KEEPALIVE_S 60
/* Encrypted bytes that are gathered before they are sent. */
#define OUTPUT_BYTES ((size_t)64 << 10)
/* A client can ask TLS for answers (new keys, say) without end; one that does not read them is
 * dropped beyond so many bytes. */
#define UNASKED_BYTES_MAX ((size_t)64 << 10)

_Static_assert(TRANSPORT_READ_BYTES <= TLS_FEED_MAX, "one read is one feed");

static void on_allocate(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer);
static void on_read(uv_stream_t *stream, ssize_t length, const uv_buf_t *buffer);
static int send_output(struct transport *transport, bool is_unasked);

static uv_stream_t *stream_of(struct transport *transport) {
    return (uv_stream_t *)&transport->tcp;
}

int transport_accept(struct transport *transport, uv_tcp_t *listener, struct tls_context *tls) {
    uv_tcp_init(listener->loop, &transport->tcp); /* cannot fail: no descriptor yet */
    transport->tcp.data = transport;
    int result = uv_accept((uv_stream_t *)listener, stream_of(transport));
    if (result != 0) return result;
    if (tls) {
        transport->tls = tls_session_create(tls);
        if (!transport->tls) return UV_ENOMEM;
    }
    uv_tcp_nodelay(&transport->tcp, 1);
    uv_tcp_keepalive(&transport->tcp, 1, TCP_KEEPALIVE_S);
    return transport_read_start(transport);
}

bool transport_is_open(const struct transport *transport) {
    return !transport->tls || tls_session_state(transport->tls) != TLS_HANDSHAKE;
}

/* ---- Reading --------------------------------------------------------------------------------- */

int transport_read_start(struct transport *transport) {
    if (transport->is_reading) return 0;
    transport->is_reading = true;
    return uv_read_start(stream_of(transport), on_allocate, on_read);
}

void transport_read_stop(struct transport *transport) {
    uv_read_stop(stream_of(transport));
    transport->is_reading = false;
}

static void on_allocate(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer) {
    (void)suggested;
    struct transport *transport = handle->data;
    *buffer = uv_buf_init(transport->read_buffer, TRANSPORT_READ_BYTES);
}

void transport_deliver_end(struct transport *transport) {
    if (transport->end == 0 || !transport->is_reading || transport->is_closing) return;
    int end = transport->end;
    transport->end = 0;
    transport->owner->on_read(transport, NULL, end);
}

/* What the client says after its end, or after a failure, is thrown away. */
static void read_tls(struct transport *transport, const char *data, size_t length) {
    const char *text;
    size_t text_length;
    if (tls_session_state(transport->tls) >= TLS_ENDED) return;
    enum tls_state state = tls_session_feed(transport->tls, data, length, &text, &text_length);
    int result = send_output(transport, true);
    if (result < 0) transport->owner->on_written(transport, result);
    if (text_length > 0) transport->owner->on_read(transport, text, (ssize_t)text_length);
    if (state < TLS_ENDED) return;
    transport->end = state == TLS_FAILED ? UV_EPROTO : UV_EOF;
    if (tls_session_is_plain_http(transport->tls)) {
        tls_session_destroy(transport->tls);
        transport->tls = NULL;
        transport->end = UV_EPROTONOSUPPORT;
    }
    transport_deliver_end(transport);
}

static void on_read(uv_stream_t *stream, ssize_t length, const uv_buf_t *buffer) {
    struct transport *transport = stream->data;
    if (length == 0) return; /* libuv's EAGAIN */
    if (length > 0 && transport->tls) {
        read_tls(transport, buffer->base, (size_t)length);
    } else {
        transport->owner->on_read(transport, buffer->base, length);
    }
}

const char *transport_failure(const struct transport *transport) {
    return tls_session_failure(transport->tls);
}

/* ---- Writing --------------------------------------------------------------------------------- */

struct write_request {
    uv_write_t request;
    char bytes[];
};

static void on_written(uv_write_t *request, int status) {
    struct transport *transport = request->handle->data;
    free(request); /* its first member */
    if (status != UV_ECANCELED) transport->owner->on_written(transport, status);
}

/* Copies the pieces without their first `skip` bytes and leaves them to libuv. */
static int queue_bytes(struct transport *transport, const uv_buf_t *pieces, unsigned count,
                       size_t skip, size_t length) {
    struct write_request *write = malloc(sizeof *write + length);
    if (!write) return UV_ENOMEM;
    transport->queued_bytes += length;
    char *at = write->bytes;
    for (unsigned i = 0; i < count; i++) {
        size_t skipped = skip < pieces[i].len ? skip : pieces[i].len;
        skip -= skipped;
        if (pieces[i].len == skipped) continue;
        memcpy(at, pieces[i].base + skipped, pieces[i].len - skipped);
        at += pieces[i].len - skipped;
    }
    uv_buf_t piece = {.base = write->bytes, .len = length};
    int result = uv_write(&write->request, stream_of(transport), &piece, 1, on_written);
    if (result != 0) free(write);
    return result;
}

static int send_bytes(struct transport *transport, const uv_buf_t *pieces, unsigned count) {
    size_t length = 0, sent = 0;
    for (unsigned i = 0; i < count; i++) length += pieces[i].len;
    if (transport_unsent(transport) == 0) {
        int result = uv_try_write(stream_of(transport), pieces, count);
        if (result < 0 && result != UV_EAGAIN) return result;
        if (result > 0) sent = (size_t)result;
    }
    return sent < length ? queue_bytes(transport, pieces, count, sent, length - sent) : 0;
}

/* Sends what TLS has for the client; is_unasked: nobody here wanted to say something. */
static int send_output(struct transport *transport, bool is_unasked) {
    size_t length;
    const char *output = tls_output(transport->tls, &length);
    uv_buf_t piece = {.base = (char *)output, .len = length};
    int result = length > 0 ? send_bytes(transport, &piece, 1) : 0;
    tls_output_clear(transport->tls);
    if (transport_unsent(transport) == 0) {
        transport->unasked_bytes = 0;
    } else if (is_unasked) {
        transport->unasked_bytes += length;
    }
    return result == 0 && transport->unasked_bytes > UNASKED_BYTES_MAX ? UV_ENOBUFS : result;
}

static int encrypt(struct transport *transport, const char *record, size_t length) {
    size_t gathered;
    if (!tls_session_write(transport->tls, record, length)) {
        tls_output_clear(transport->tls);
        return UV_EPROTO;
    }
    tls_output(transport->tls, &gathered);
    return gathered < OUTPUT_BYTES ? 0 : send_output(transport, false);
}

/* The pieces are joined, so that as few records as can be are made of them. */
static int write_tls(struct transport *transport, const uv_buf_t *pieces, unsigned count) {
    char record[TLS_RECORD_MAX];
    size_t used = 0;
    int result = 0;
    for (unsigned i = 0; i < count; i++) {
        const char *data = pieces[i].base;
        size_t length = pieces[i].len;
        while (length > 0 && result == 0) {
            size_t taken = length < sizeof record - used ? length : sizeof record - used;
            memcpy(record + used, data, taken);
            used += taken;
            data += taken;
            length -= taken;
            if (used < sizeof record) continue;
            result = encrypt(transport, record, used);
            used = 0;
        }
    }
    if (result == 0 && used > 0) result = encrypt(transport, record, used);
    return result == 0 ? send_output(transport, false) : result;
}

int transport_write(struct transport *transport, const uv_buf_t *pieces, unsigned count) {
    return transport->tls ? write_tls(transport, pieces, count)
                          : send_bytes(transport, pieces, count);
}

size_t transport_unsent(const struct transport *transport) {
    return uv_stream_get_write_queue_size((const uv_stream_t *)&transport->tcp);
}

/* ---- Ending ---------------------------------------------------------------------------------- */

static void on_shut_down(uv_shutdown_t *request, int status) {
    struct transport *transport = request->handle->data;
    if (status != UV_ECANCELED) transport->owner->on_shut_down(transport, status);
}

int transport_shut_down(struct transport *transport) {
    if (transport->tls) {
        tls_session_end(transport->tls);
        int result = send_output(transport, false);
        if (result != 0) return result;
    }
    return uv_shutdown(&transport->shutdown, stream_of(transport), on_shut_down);
}

static void on_closed(uv_handle_t *handle) {
    struct transport *transport = handle->data;
    tls_session_destroy(transport->tls);
    transport->owner->on_closed(transport);
}

void transport_close(struct transport *transport, bool orderly) {
    if (transport->is_closing) return;
    transport->is_closing = true;
    transport->is_reading = false;
    if (orderly && transport->tls && transport_unsent(transport) == 0) {
        tls_session_end(transport->tls);
        send_output(transport, false); /* if the socket takes it */
    }
    uv_close((uv_handle_t *)&transport->tcp, on_closed);
}

/* A client's socket as bytes in and bytes out, plain or under TLS: its owner need not know which.
 *
 * What is written goes out at once as far as the socket takes it; the rest is copied and queued.
 * Loop thread only. Only callbacks of libuv call the owner, never a function of this file.
 */
#ifndef FATHOM_TRANSPORT_H
#define FATHOM_TRANSPORT_H

#include <uv.h>

#include "base/base.h"

struct tls_context;
struct tls_session;
struct transport;

struct transport_owner {
    /* length > 0: bytes, valid during the call. UV_EOF: the client sends no more.
     * UV_EPROTONOSUPPORT: it speaks HTTP where TLS is spoken; what is written to it now goes out
     * plain. UV_EPROTO: TLS failed. Else the socket did. */
    void (*on_read)(struct transport *transport, const char *data, ssize_t length);
    /* The socket took bytes that were queued, or (negative) failed to. */
    void (*on_written)(struct transport *transport, int status);
    void (*on_shut_down)(struct transport *transport, int status);
    void (*on_closed)(struct transport *transport); /* its memory may go */
};

/* Zeroed by its owner before transport_accept. */
struct transport {
    uv_tcp_t tcp;
    uv_shutdown_t shutdown;
    const struct transport_owner *owner;
    struct tls_session *tls; /* NULL: plain */
    char *read_buffer;       /* TRANSPORT_READ_BYTES, shared: emptied before the next read */
    bool is_reading;
    bool is_closing;
    int end;               /* negative: the last on_read, owed while not reading */
    uint64_t queued_bytes; /* that did not fit the socket at once */
    size_t unasked_bytes;  /* of TLS itself, since the socket last took everything */
};

#define TRANSPORT_READ_BYTES ((size_t)64 << 10)

/* Takes the connection that `listener` has; with `tls` not NULL a handshake comes first. After a
 * failure, a negative UV_ code, the transport must be closed. */
int transport_accept(struct transport *transport, uv_tcp_t *listener, struct tls_context *tls);

/* True once there is no handshake to wait for. */
bool transport_is_open(const struct transport *transport);

int transport_read_start(struct transport *transport);
void transport_read_stop(struct transport *transport);

/* Calls on_read with an end that came while reading was stopped, if it goes on by now. */
void transport_deliver_end(struct transport *transport);

const char *transport_failure(const struct transport *transport); /* after UV_EPROTO: why */

/* 0 or a negative UV_ code, after which the transport can only be closed. */
int transport_write(struct transport *transport, const uv_buf_t *pieces, unsigned count);
size_t transport_unsent(const struct transport *transport); /* bytes queued */

/* Says after all that is queued that no more will come; on_shut_down follows if it returns 0. */
int transport_shut_down(struct transport *transport);

/* on_closed follows. `orderly`: nothing was left unsaid, so that under TLS the client is told that
 * this end is no cut. */
void transport_close(struct transport *transport, bool orderly);

#endif

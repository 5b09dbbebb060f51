/* TLS, either side, as a function of bytes: what came from the peer goes in, what the peer said and
 * what must be sent to it come out. No sockets here, no clocks.
 *
 * TLS 1.2 and 1.3, no renegotiation, no client certificates; ALPN chooses http/1.1. A context and
 * its sessions belong to one thread: they share the context's two buffers, so that an idle session
 * keeps none.
 */
#ifndef FATHOM_TLS_H
#define FATHOM_TLS_H

#include "base/base.h"

#define TLS_FEED_MAX   ((size_t)64 << 10) /* bytes of one tls_session_feed */
#define TLS_RECORD_MAX ((size_t)16 << 10) /* bytes of one tls_session_write */

struct tls_context;
struct tls_session;

enum tls_state {
    TLS_HANDSHAKE,
    TLS_OPEN,
    TLS_ENDED,  /* the peer said that it sends no more; it may still read */
    TLS_FAILED, /* not TLS, or not as agreed: nothing more can be read or written */
};

/* Reads the server's certificate with those between it and a root, and its key, both PEM, the key
 * without passphrase. FATHOM_INVALID: the error names the flag, the file and the reason. The
 * context outlives its sessions. */
int tls_server_context_create(const char *certificate_path, const char *key_path,
                              struct tls_context **context, struct error *error);

/* `verify`: servers must have a certificate for their host that leads to a root of the system's, or
 * of the file and folder that SSL_CERT_FILE and SSL_CERT_DIR name. */
int tls_client_context_create(bool verify, struct tls_context **context, struct error *error);

/* Behind its sessions. NULL is allowed. */
void tls_context_destroy(struct tls_context *context);

/* The server's side of a connection, which the client begins. NULL: no memory. */
struct tls_session *tls_session_create(struct tls_context *context);

/* The client's side of a connection to `host`, a name or an address; tls_output has what it says
 * first. NULL: no memory. */
struct tls_session *tls_session_connect(struct tls_context *context, const char *host);
void tls_session_destroy(struct tls_session *session); /* NULL is allowed */

/* Takes what came from the peer, at most TLS_FEED_MAX bytes; not after TLS_ENDED or TLS_FAILED.
 * What it said is left in *text and *text_length, valid until the next call for any session of the
 * context; it may be there in every state. So may something to be sent in tls_output: answers of
 * the handshake, an alert. */
enum tls_state tls_session_feed(struct tls_session *session, const char *data, size_t length,
                                const char **text, size_t *text_length);

/* Encrypts at most TLS_RECORD_MAX bytes into tls_output, from TLS_OPEN on. False: the session
 * cannot be written to (any more), or there is no memory. */
bool tls_session_write(struct tls_session *session, const char *text, size_t length);

/* Says that no more will come from here. Without effect before TLS_OPEN or after a failure. */
void tls_session_end(struct tls_session *session);

/* What the calls since the last tls_output_clear have for their peer, which must be sent, in this
 * order, before another session of the context is called. Valid until the next call. */
const char *tls_output(const struct tls_session *session, size_t *length);
void tls_output_clear(struct tls_session *session);

enum tls_state tls_session_state(const struct tls_session *session);

/* Of TLS_FAILED: why, a static phrase; and whether the peer sent a request in plain HTTP. */
const char *tls_session_failure(const struct tls_session *session);
bool tls_session_is_plain_http(const struct tls_session *session);

#endif

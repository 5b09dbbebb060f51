#include "tls/tls.h"

#include <stdlib.h>
#include <string.h>

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "api/api.h"

/* What is fed, and what an unfinished record from before may add. */
#define TEXT_MAX (TLS_FEED_MAX + SSL3_RT_MAX_ENCRYPTED_LENGTH)

struct tls_context {
    SSL_CTX *ssl;
    BIO_METHOD *method;
    struct text_buffer output;
    char text[TEXT_MAX];
};

struct tls_session {
    struct tls_context *context;
    SSL *ssl;
    enum tls_state state;
    const char *input; /* what OpenSSL has not read yet of what is being fed */
    size_t input_length;
    const char *failure;
    bool is_plain_http;
};

/* ---- The bytes that OpenSSL reads and writes ------------------------------------------------- */

static int bytes_read(BIO *bio, char *out, int capacity) {
    struct tls_session *session = BIO_get_data(bio);
    size_t length = session->input_length;
    BIO_clear_retry_flags(bio);
    if (capacity <= 0) return 0;
    if (length == 0) {
        BIO_set_retry_read(bio);
        return -1;
    }
    if (length > (size_t)capacity) length = (size_t)capacity;
    memcpy(out, session->input, length);
    session->input += length;
    session->input_length -= length;
    return (int)length;
}

static int bytes_write(BIO *bio, const char *data, int length) {
    struct tls_session *session = BIO_get_data(bio);
    struct text_buffer *output = &session->context->output;
    BIO_clear_retry_flags(bio);
    if (length <= 0) return 0;
    text_append(output, data, (size_t)length);
    return output->failed ? -1 : length;
}

static long bytes_control(BIO *bio, int command, long number, void *pointer) {
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH;
}

static BIO_METHOD *bytes_method(void) {
    BIO_METHOD *method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "bytes");
    if (!method) return NULL;
    BIO_meth_set_read(method, bytes_read);
    BIO_meth_set_write(method, bytes_write);
    BIO_meth_set_ctrl(method, bytes_control);
    return method;
}

/* ---- Certificate and key --------------------------------------------------------------------- */

/* The first error is the cause; those after it are where it was noticed. */
static const char *first_reason(void) {
    unsigned long code = ERR_peek_error();
    if (code == 0) return "out of memory";
    if (ERR_SYSTEM_ERROR(code)) return strerror(ERR_GET_REASON(code));
    const char *reason = ERR_reason_error_string(code);
    return reason ? reason : "unknown reason";
}

static int refuse_file(const char *flag, const char *path, const char *what, struct error *error) {
    if (ERR_SYSTEM_ERROR(ERR_peek_error())) {
        return error_set(error, FATHOM_INVALID, "--%s %s: %s", flag, path, first_reason());
    }
    return error_set(error, FATHOM_INVALID, "--%s %s: %s (%s)", flag, path, what, first_reason());
}

/* OpenSSL would ask at the terminal. */
static int no_passphrase(char *out, int capacity, int writing, void *context) {
    (void)out, (void)capacity, (void)writing, (void)context;
    return -1;
}

static int load_pair(SSL_CTX *ssl, const char *certificate_path, const char *key_path,
                     struct error *error) {
    ERR_clear_error();
    SSL_CTX_set_default_passwd_cb(ssl, no_passphrase);
    if (SSL_CTX_use_certificate_chain_file(ssl, certificate_path) != 1) {
        return refuse_file("tls-cert", certificate_path, "no usable certificate in PEM form",
                           error);
    }
    int result = SSL_CTX_use_PrivateKey_file(ssl, key_path, SSL_FILETYPE_PEM);
    bool is_mismatch = ERR_GET_REASON(ERR_peek_error()) == X509_R_KEY_VALUES_MISMATCH;
    if (result != 1 && !is_mismatch) {
        return refuse_file("tls-key", key_path, "no private key in PEM form without passphrase",
                           error);
    }
    if (result != 1 || SSL_CTX_check_private_key(ssl) != 1) {
        return error_set(error, FATHOM_INVALID, "--tls-key %s is not the key of --tls-cert %s",
                         key_path, certificate_path);
    }
    return 0;
}

static const unsigned char our_protocol[] = "\x08http/1.1"; /* a length and a name */

/* A client that offers protocols and not this one would not understand the answers. */
static int choose_protocol(SSL *ssl, const unsigned char **chosen, unsigned char *chosen_length,
                           const unsigned char *offered, unsigned offered_length, void *context) {
    (void)ssl, (void)context;
    unsigned char *found;
    int result = SSL_select_next_proto(&found, chosen_length, our_protocol, sizeof our_protocol - 1,
                                       offered, offered_length);
    *chosen = found;
    return result == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

static struct tls_context *context_create(const SSL_METHOD *side, struct error *error) {
    struct tls_context *context = calloc(1, sizeof *context);
    if (context) context->ssl = SSL_CTX_new(side);
    if (context) context->method = bytes_method();
    if (!context || !context->ssl || !context->method) {
        tls_context_destroy(context);
        error_set(error, FATHOM_NO_MEMORY, "no memory for TLS");
        return NULL;
    }
    SSL_CTX_set_min_proto_version(context->ssl, TLS1_2_VERSION);
    SSL_CTX_set_options(context->ssl, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_mode(context->ssl, SSL_MODE_RELEASE_BUFFERS);
    /* Sessions are resumed by tickets, which the clients keep. */
    SSL_CTX_set_session_cache_mode(context->ssl, SSL_SESS_CACHE_OFF);
    return context;
}

int tls_server_context_create(const char *certificate_path, const char *key_path,
                              struct tls_context **out, struct error *error) {
    struct tls_context *context = context_create(TLS_server_method(), error);
    if (!context) return FATHOM_NO_MEMORY;
    SSL_CTX_set_alpn_select_cb(context->ssl, choose_protocol, NULL);
    int result = load_pair(context->ssl, certificate_path, key_path, error);
    if (result != 0) {
        tls_context_destroy(context);
        return result;
    }
    *out = context;
    return 0;
}

int tls_client_context_create(bool verify, struct tls_context **out, struct error *error) {
    struct tls_context *context = context_create(TLS_client_method(), error);
    if (!context) return FATHOM_NO_MEMORY;
    ERR_clear_error();
    if (SSL_CTX_set_alpn_protos(context->ssl, our_protocol, sizeof our_protocol - 1) != 0 ||
        (verify && SSL_CTX_set_default_verify_paths(context->ssl) != 1)) {
        tls_context_destroy(context);
        return error_set(error, FATHOM_NO_MEMORY, "TLS for a client: %s", first_reason());
    }
    SSL_CTX_set_verify(context->ssl, verify ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, NULL);
    *out = context;
    return 0;
}

void tls_context_destroy(struct tls_context *context) {
    if (!context) return;
    SSL_CTX_free(context->ssl);
    BIO_meth_free(context->method);
    text_free(&context->output);
    free(context);
}

/* ---- Sessions -------------------------------------------------------------------------------- */

static struct tls_session *session_new(struct tls_context *context) {
    struct tls_session *session = calloc(1, sizeof *session);
    if (!session) return NULL;
    session->context = context;
    session->ssl = SSL_new(context->ssl);
    BIO *bio = BIO_new(context->method);
    if (!session->ssl || !bio) {
        BIO_free(bio);
        tls_session_destroy(session);
        return NULL;
    }
    BIO_set_data(bio, session);
    BIO_set_init(bio, 1);
    SSL_set_bio(session->ssl, bio, bio);
    return session;
}

struct tls_session *tls_session_create(struct tls_context *context) {
    struct tls_session *session = session_new(context);
    if (session) SSL_set_accept_state(session->ssl);
    return session;
}

/* The certificate must be for this host. Addresses are not named to the server: RFC 6066, 3. */
static bool set_host(SSL *ssl, const char *host) {
    if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) == 1) return true;
    SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    return SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1;
}

struct tls_session *tls_session_connect(struct tls_context *context, const char *host) {
    const char *text;
    size_t length;
    struct tls_session *session = session_new(context);
    if (!session) return NULL;
    SSL_set_connect_state(session->ssl);
    if (set_host(session->ssl, host) &&
        tls_session_feed(session, NULL, 0, &text, &length) == TLS_HANDSHAKE)
        return session;
    tls_output_clear(session);
    tls_session_destroy(session);
    return NULL;
}

void tls_session_destroy(struct tls_session *session) {
    if (!session) return;
    SSL_free(session->ssl);
    free(session);
}

static void session_fail(struct tls_session *session) {
    session->state = TLS_FAILED;
    long verified = SSL_get_verify_result(session->ssl);
    bool is_refused = verified != X509_V_OK && SSL_get_verify_mode(session->ssl) != SSL_VERIFY_NONE;
    session->failure = is_refused ? X509_verify_cert_error_string(verified) : first_reason();
    session->is_plain_http = ERR_GET_LIB(ERR_peek_error()) == ERR_LIB_SSL &&
                             ERR_GET_REASON(ERR_peek_error()) == SSL_R_HTTP_REQUEST;
}

/* OpenSSL answers what it must while it reads: the handshake, updates of keys, alerts. */
enum tls_state tls_session_feed(struct tls_session *session, const char *data, size_t length,
                                const char **text, size_t *text_length) {
    size_t used = 0, got;
    char *out = session->context->text;
    session->input = data;
    session->input_length = length;
    ERR_clear_error();
    while (session->state < TLS_ENDED) {
        if (SSL_read_ex(session->ssl, out + used, TEXT_MAX - used, &got) == 1) {
            used += got;
            continue;
        }
        int why = SSL_get_error(session->ssl, 0);
        if (why == SSL_ERROR_WANT_READ) break;
        if (why == SSL_ERROR_ZERO_RETURN) {
            session->state = TLS_ENDED;
        } else {
            session_fail(session);
        }
    }
    if (session->state == TLS_HANDSHAKE && SSL_is_init_finished(session->ssl)) {
        session->state = TLS_OPEN;
    }
    *text = out;
    *text_length = used;
    return session->state;
}

bool tls_session_write(struct tls_session *session, const char *text, size_t length) {
    size_t written;
    if (session->state != TLS_OPEN && session->state != TLS_ENDED) return false;
    ERR_clear_error();
    if (SSL_write_ex(session->ssl, text, length, &written) == 1) return true;
    session_fail(session);
    return false;
}

void tls_session_end(struct tls_session *session) {
    if (session->state != TLS_OPEN && session->state != TLS_ENDED) return;
    ERR_clear_error();
    if (SSL_shutdown(session->ssl) < 0) session_fail(session);
}

const char *tls_output(const struct tls_session *session, size_t *length) {
    const struct text_buffer *output = &session->context->output;
    *length = output->length;
    return output->data;
}

void tls_output_clear(struct tls_session *session) {
    struct text_buffer *output = &session->context->output;
    if (output->failed) {
        text_free(output);
    } else {
        output->length = 0;
    }
}

enum tls_state tls_session_state(const struct tls_session *session) {
    return session->state;
}

const char *tls_session_failure(const struct tls_session *session) {
    return session->failure;
}

bool tls_session_is_plain_http(const struct tls_session *session) {
    return session->is_plain_http;
}

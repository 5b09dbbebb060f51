/* TLS as a function of bytes, against OpenSSL's own client and ours: no sockets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "tls/tls.h"

static struct tls_context *context;

static void write_pair(const char *certificate_path, const char *key_path) {
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *certificate = X509_new();
    assert_non_null(key);
    X509_set_version(certificate, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -60);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
    X509_set_pubkey(certificate, key);
    assert_true(X509_sign(certificate, key, EVP_sha256()) > 0);
    FILE *out = fopen(certificate_path, "w");
    assert_true(PEM_write_X509(out, certificate));
    fclose(out);
    out = fopen(key_path, "w");
    assert_true(PEM_write_PrivateKey(out, key, NULL, NULL, 0, NULL, NULL));
    fclose(out);
    X509_free(certificate);
    EVP_PKEY_free(key);
}

static int create_context(void **state) {
    (void)state;
    char folder[] = "/tmp/fathom-tls-XXXXXX", certificate[64], key[64];
    struct error error;
    assert_non_null(mkdtemp(folder));
    snprintf(certificate, sizeof certificate, "%s/certificate", folder);
    snprintf(key, sizeof key, "%s/key", folder);
    write_pair(certificate, key);
    assert_int_equal(tls_server_context_create(certificate, key, &context, &error), 0);
    unlink(certificate);
    unlink(key);
    rmdir(folder);
    return 0;
}

static int destroy_context(void **state) {
    (void)state;
    tls_context_destroy(context);
    return 0;
}

/* ---- Both ends ------------------------------------------------------------------------------- */

struct pair {
    struct tls_session *server;
    SSL_CTX *client_context;
    SSL *client;
    size_t piece; /* the server is fed so many bytes at a time; 0: all */
    char heard[1 << 17];
    size_t heard_length;
    enum tls_state state;
};

static void pair_open(struct pair *pair, int version, size_t piece) {
    memset(pair, 0, sizeof *pair);
    pair->piece = piece;
    pair->server = tls_session_create(context);
    pair->client_context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_min_proto_version(pair->client_context, version);
    SSL_CTX_set_max_proto_version(pair->client_context, version);
    pair->client = SSL_new(pair->client_context);
    assert_non_null(pair->server);
    SSL_set_bio(pair->client, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    SSL_set_connect_state(pair->client);
}

static void pair_close(struct pair *pair) {
    tls_session_destroy(pair->server);
    SSL_free(pair->client);
    SSL_CTX_free(pair->client_context);
}

static size_t take_output(struct pair *pair) {
    size_t length;
    const char *output = tls_output(pair->server, &length);
    if (length > 0) BIO_write(SSL_get_rbio(pair->client), output, (int)length);
    tls_output_clear(pair->server);
    return length;
}

static void feed(struct pair *pair, const char *data, size_t length) {
    while (length > 0) {
        size_t size = pair->piece && pair->piece < length ? pair->piece : length, text_length;
        if (size > TLS_FEED_MAX) size = TLS_FEED_MAX;
        char *copy = malloc(size); /* a read behind its end is seen by the sanitizer */
        const char *text;
        memcpy(copy, data, size);
        pair->state = tls_session_feed(pair->server, copy, size, &text, &text_length);
        free(copy);
        assert_true(pair->heard_length + text_length <= sizeof pair->heard);
        memcpy(pair->heard + pair->heard_length, text, text_length);
        pair->heard_length += text_length;
        take_output(pair);
        data += size;
        length -= size;
    }
}

/* Carries what the client has written. */
static void carry(struct pair *pair) {
    char *data;
    BIO *bio = SSL_get_wbio(pair->client);
    size_t length = (size_t)BIO_get_mem_data(bio, &data);
    char *copy = malloc(length + 1);
    memcpy(copy, data, length);
    (void)BIO_reset(bio);
    feed(pair, copy, length);
    free(copy);
}

static void shake_hands(struct pair *pair) {
    for (int i = 0; i < 10 && !(pair->state == TLS_OPEN && SSL_is_init_finished(pair->client));
         i++) {
        SSL_do_handshake(pair->client);
        carry(pair);
    }
    assert_int_equal(pair->state, TLS_OPEN);
}

static void check_client_hears(struct pair *pair, const char *text, size_t length) {
    char *heard = malloc(length + 1);
    size_t used = 0, got;
    while (used < length && SSL_read_ex(pair->client, heard + used, length - used, &got))
        used += got;
    assert_int_equal(used, length);
    assert_memory_equal(heard, text, length);
    free(heard);
}

/* ---- Tests ----------------------------------------------------------------------------------- */

static const int versions[] = {TLS1_2_VERSION, TLS1_3_VERSION};

static void test_both_ways(void **state) {
    (void)state;
    static const size_t pieces[] = {0, 1, 7, 1000, 16384};
    static char text[100000];
    struct pair pair;
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(i * 31 >> 3);
    for (size_t i = 0; i < 10; i++) {
        pair_open(&pair, versions[i % 2], pieces[i / 2]);
        shake_hands(&pair);
        size_t written;
        assert_int_equal(SSL_write_ex(pair.client, text, sizeof text, &written), 1);
        carry(&pair);
        assert_int_equal(pair.heard_length, sizeof text);
        assert_memory_equal(pair.heard, text, sizeof text);
        assert_true(tls_session_write(pair.server, text, TLS_RECORD_MAX));
        assert_true(tls_session_write(pair.server, "x", 1));
        take_output(&pair);
        check_client_hears(&pair, text, TLS_RECORD_MAX);
        check_client_hears(&pair, "x", 1);
        pair_close(&pair);
    }
}

static void test_the_ends(void **state) {
    (void)state;
    struct pair pair;
    char byte;
    for (size_t i = 0; i < 2; i++) {
        pair_open(&pair, versions[i], 0);
        tls_session_end(pair.server); /* before the handshake: nothing is said */
        assert_int_equal(take_output(&pair), 0);
        shake_hands(&pair);
        SSL_write(pair.client, "last", 4);
        SSL_shutdown(pair.client);
        carry(&pair);
        assert_int_equal(pair.state, TLS_ENDED);
        assert_int_equal(pair.heard_length, 4); /* together with the end, not lost to it */
        feed(&pair, "garbage behind the end", 22);
        assert_int_equal(pair.state, TLS_ENDED);
        assert_true(tls_session_write(pair.server, "answer", 6));
        tls_session_end(pair.server);
        tls_session_end(pair.server);
        assert_false(tls_session_write(pair.server, "late", 4));
        take_output(&pair);
        check_client_hears(&pair, "answer", 6);
        ERR_clear_error();
        assert_int_equal(SSL_read(pair.client, &byte, 1), 0);
        assert_int_equal(SSL_get_error(pair.client, 0), SSL_ERROR_ZERO_RETURN);
        pair_close(&pair);
    }
}

static void test_failures(void **state) {
    (void)state;
    struct pair pair;
    pair_open(&pair, TLS1_3_VERSION, 0);
    feed(&pair, "GET / HTTP/1.1\r\n\r\n", 18);
    assert_int_equal(pair.state, TLS_FAILED);
    assert_true(tls_session_is_plain_http(pair.server));
    assert_false(tls_session_write(pair.server, "x", 1));
    pair_close(&pair);

    pair_open(&pair, TLS1_3_VERSION, 1);
    feed(&pair, "\x16\x03\x01\xff\xff garbage", 13);
    assert_int_equal(pair.state, TLS_FAILED);
    assert_non_null(tls_session_failure(pair.server));
    assert_false(tls_session_is_plain_http(pair.server));
    pair_close(&pair);

    pair_open(&pair, TLS1_1_VERSION, 0);
    SSL_set_cipher_list(pair.client, "ALL:@SECLEVEL=0");
    SSL_do_handshake(pair.client);
    carry(&pair);
    assert_int_equal(pair.state, TLS_FAILED);
    assert_true(SSL_do_handshake(pair.client) < 0); /* it got an alert, not silence */
    assert_int_equal(SSL_get_error(pair.client, -1), SSL_ERROR_SSL);
    pair_close(&pair);
}

/* One session's failure, and what OpenSSL remembers of it, is none of another's. */
static void test_sessions_are_apart(void **state) {
    (void)state;
    struct pair good, bad;
    pair_open(&good, TLS1_3_VERSION, 5);
    SSL_do_handshake(good.client);
    for (int i = 0; i < 20; i++) {
        pair_open(&bad, versions[i % 2], 0);
        if (i % 4 < 2) shake_hands(&bad);
        feed(&bad, "\x17\x03\x03\x00\x20 0123456789 0123456789 0123456789", 37);
        assert_int_equal(bad.state, TLS_FAILED);
        pair_close(&bad);
        shake_hands(&good);
        SSL_write(good.client, "y", 1);
        carry(&good);
        assert_true(tls_session_write(good.server, "x", 1));
        take_output(&good);
        check_client_hears(&good, "x", 1);
    }
    assert_int_equal(good.heard_length, 20);
    pair_close(&good);
}

/* New keys are made when asked for: what that costs is the caller's to bound. */
static void test_keys_are_renewed(void **state) {
    (void)state;
    struct pair pair;
    pair_open(&pair, TLS1_3_VERSION, 0);
    shake_hands(&pair);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(SSL_key_update(pair.client, SSL_KEY_UPDATE_REQUESTED), 1);
        SSL_write(pair.client, "z", 1);
        carry(&pair);
        assert_int_equal(pair.state, TLS_OPEN);
        assert_true(tls_session_write(pair.server, "x", 1));
        take_output(&pair);
        check_client_hears(&pair, "x", 1);
    }
    assert_int_equal(pair.heard_length, 100);
    pair_close(&pair);
}

/* Carries what `from` has to send; returns how much that was. *text is what `to` heard. */
static size_t carry_ours(struct tls_session *from, struct tls_session *to, const char **text,
                         size_t *text_length) {
    size_t length;
    const char *output = tls_output(from, &length);
    char *copy = malloc(length + 1);
    if (length > 0) memcpy(copy, output, length);
    tls_output_clear(from);
    tls_session_feed(to, copy, length, text, text_length);
    free(copy);
    return length;
}

/* The server's certificate is its own issuer: one who checks refuses it, and says so. */
static void test_our_client(void **state) {
    (void)state;
    for (int verify = 0; verify < 2; verify++) {
        struct tls_context *client_context;
        const char *text;
        size_t length;
        assert_int_equal(tls_client_context_create(verify, &client_context, NULL), 0);
        struct tls_session *client = tls_session_connect(client_context, "127.0.0.1");
        struct tls_session *server = tls_session_create(context);
        assert_non_null(client);
        assert_false(tls_session_write(client, "early", 5));
        for (size_t moved = 1; moved > 0;)
            moved = carry_ours(client, server, &text, &length) +
                    carry_ours(server, client, &text, &length);
        if (verify) {
            assert_int_equal(tls_session_state(client), TLS_FAILED);
            assert_non_null(strstr(tls_session_failure(client), "self-signed certificate"));
            assert_int_equal(tls_session_state(server), TLS_FAILED); /* it got an alert */
        } else {
            assert_int_equal(tls_session_state(client), TLS_OPEN);
            assert_true(tls_session_write(client, "question", 8));
            carry_ours(client, server, &text, &length);
            assert_memory_equal(text, "question", 8);
            assert_true(tls_session_write(server, "answer", 6));
            tls_session_end(server);
            carry_ours(server, client, &text, &length);
            assert_int_equal(length, 6);
            assert_memory_equal(text, "answer", 6);
            assert_int_equal(tls_session_state(client), TLS_ENDED);
        }
        tls_session_destroy(client);
        tls_session_destroy(server);
        tls_context_destroy(client_context);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ways),        cmocka_unit_test(test_the_ends),
        cmocka_unit_test(test_failures),         cmocka_unit_test(test_sessions_are_apart),
        cmocka_unit_test(test_keys_are_renewed), cmocka_unit_test(test_our_client),
    };
    return cmocka_run_group_tests(tests, create_context, destroy_context);
}

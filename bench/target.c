/* The URL taken apart, the host looked up, one small document fetched. */
#include "bench/target.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "bench/answer.h"

static int url_error(const char *url, struct error *error) {
    return error_set(error, FATHOM_INVALID,
                     "the URL must be http[s]://HOST[:PORT][/PATH], of printable characters and "
                     "moderate length; got '%s'",
                     url);
}

static bool is_printable(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (text[i] <= 0x20 || text[i] >= 0x7f) return false;
    return true;
}

/* host[:port] or [v6][:port]; false: it is neither. */
static bool authority_parse(const char *text, size_t length, struct target *target) {
    bool bracketed = *text == '[';
    const char *host = text + bracketed, *end = text + length;
    const char *host_end = memchr(host, bracketed ? ']' : ':', (size_t)(end - host));
    if (!host_end && bracketed) return false;
    if (!host_end) host_end = end;
    const char *after = host_end + bracketed;
    size_t host_length = (size_t)(host_end - host);
    if (host_length == 0 || host_length >= sizeof target->host) return false;
    memcpy(target->host, host, host_length);
    target->host[host_length] = '\0';
    strcpy(target->port, target->is_https ? "443" : "80");
    if (after == end) return true;
    size_t port_length = (size_t)(end - after) - 1;
    if (*after != ':' || port_length == 0 || port_length >= sizeof target->port) return false;
    memcpy(target->port, after + 1, port_length);
    target->port[port_length] = '\0';
    return strspn(target->port, "0123456789") == port_length;
}

/* A path that names the endpoint already is kept; else it is the API's root, /v1 when empty. */
static bool paths_set(const char *path, bool chat, struct target *target) {
    const char *endpoint = chat ? "/chat/completions" : "/completions";
    size_t length = strlen(path), tail = strlen(endpoint);
    while (length && path[length - 1] == '/') length--;
    if (length >= tail && memcmp(path + length - tail, endpoint, tail) == 0) length -= tail;
    if (length == 0) {
        path = "/v1";
        length = 3;
    }
    if (length > sizeof target->path - 32) return false;
    snprintf(target->path, sizeof target->path, "%.*s%s", (int)length, path, endpoint);
    snprintf(target->models_path, sizeof target->models_path, "%.*s/models", (int)length, path);
    return true;
}

int target_parse(const char *url, bool chat, struct target *target, struct error *error) {
    *target = (struct target){.is_https = strncmp(url, "https://", 8) == 0};
    if ((!target->is_https && strncmp(url, "http://", 7) != 0) || !is_printable(url, strlen(url)))
        return url_error(url, error);
    const char *authority = strstr(url, "//") + 2;
    size_t length = strcspn(authority, "/");
    if (length == 0 || !authority_parse(authority, length, target) ||
        !paths_set(authority + length, chat, target)) {
        return url_error(url, error);
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    int result = getaddrinfo(target->host, target->port, &hints, &found);
    if (result != 0)
        return error_set(error, FATHOM_NOT_FOUND, "host '%s': %s", target->host,
                         gai_strerror(result));
    memcpy(&target->address, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    return 0;
}

int target_open(struct target *target, bool insecure, struct error *error) {
    return target->is_https ? tls_client_context_create(!insecure, &target->tls, error) : 0;
}

void target_close(struct target *target) {
    tls_context_destroy(target->tls);
    target->tls = NULL;
}

/* One GET, blocking. */
struct fetch {
    int socket;
    struct tls_session *tls; /* NULL: plain */
    const char *request;     /* NULL: it is sent */
    struct answer answer;
};

/* These return NULL, or why it cannot go on. */
static const char *send_whole(const struct fetch *fetch, const char *bytes, size_t length) {
    while (length > 0) {
        ssize_t sent = send(fetch->socket, bytes, length, MSG_NOSIGNAL);
        if (sent < 0) return strerror(errno);
        bytes += sent;
        length -= (size_t)sent;
    }
    return NULL;
}

static const char *send_tls_output(struct fetch *fetch) {
    size_t length;
    const char *output = tls_output(fetch->tls, &length);
    const char *failure = send_whole(fetch, output, length);
    tls_output_clear(fetch->tls);
    return failure;
}

static const char *take_tls(struct fetch *fetch, const char *bytes, size_t length) {
    const char *text, *failure;
    size_t text_length;
    enum tls_state state = tls_session_feed(fetch->tls, bytes, length, &text, &text_length);
    failure = send_tls_output(fetch);
    if (text_length > 0 && answer_feed(&fetch->answer, text, text_length, time_now_ns()))
        return NULL;
    if (state == TLS_FAILED) return tls_session_failure(fetch->tls);
    if (state == TLS_ENDED) answer_end(&fetch->answer);
    if (state != TLS_OPEN || !fetch->request || failure) return failure;
    if (!tls_session_write(fetch->tls, fetch->request, strlen(fetch->request)))
        return tls_session_failure(fetch->tls);
    fetch->request = NULL;
    return send_tls_output(fetch);
}

/* Sends the request and feeds the answer until it is complete. The limits of struct answer are
 * ours; that what came is not a completion is no matter here. */
static const char *fetch_run(struct fetch *fetch, double timeout) {
    char bytes[4096];
    uint64_t deadline = time_now_ns() + (uint64_t)(timeout * 1e9);
    const char *failure = fetch->tls ? send_tls_output(fetch)
                                     : send_whole(fetch, fetch->request, strlen(fetch->request));
    while (!failure && !fetch->answer.complete) {
        ssize_t got = recv(fetch->socket, bytes, sizeof bytes, 0);
        if (got < 0)
            failure = strerror(errno);
        else if (got == 0)
            answer_end(&fetch->answer);
        else if (fetch->tls)
            failure = take_tls(fetch, bytes, (size_t)got);
        else
            answer_feed(&fetch->answer, bytes, (size_t)got, time_now_ns());
        if (time_now_ns() >= deadline) failure = strerror(ETIMEDOUT);
    }
    return failure;
}

static const char *fetch_open(struct fetch *fetch, const struct target *target, double timeout) {
    struct timeval limit = {.tv_sec = (time_t)timeout + 1};
    bool is_v6 = target->address.ss_family == AF_INET6;
    answer_init(&fetch->answer);
    answer_begin(&fetch->answer);
    fetch->socket = socket(target->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fetch->socket < 0) return strerror(errno);
    setsockopt(fetch->socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fetch->socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fetch->socket, (const struct sockaddr *)&target->address,
                is_v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in)) != 0)
        return strerror(errno);
    if (!target->tls) return NULL;
    fetch->tls = tls_session_connect(target->tls, target->host);
    return fetch->tls ? NULL : "no memory for TLS";
}

static void fetch_close(struct fetch *fetch) {
    tls_session_destroy(fetch->tls);
    if (fetch->socket >= 0) close(fetch->socket);
    answer_free(&fetch->answer);
}

int target_get(const struct target *target, const char *path, const char *api_key, double timeout,
               char **body, struct error *error) {
    char request[4096];
    int length = snprintf(request, sizeof request,
                          "GET %s HTTP/1.1\r\nHost: %s:%s\r\nConnection: close\r\n%s%s%s\r\n", path,
                          target->host, target->port, api_key ? "Authorization: Bearer " : "",
                          api_key ? api_key : "", api_key ? "\r\n" : "");
    if (length >= (int)sizeof request)
        return error_set(error, FATHOM_INVALID, "the path and the key are too long for a head");
    struct fetch fetch = {.socket = -1, .request = request};
    const char *failure = fetch_open(&fetch, target, timeout);
    if (!failure) failure = fetch_run(&fetch, timeout);
    const struct answer *answer = &fetch.answer;
    if (!failure && (answer->status != 200 || answer->body.length == 0))
        failure = answer->detail[0] ? answer->detail : "it answered nothing";
    int result = 0;
    if (failure) {
        result =
            error_set(error, FATHOM_IO, "%s://%s:%s%s: %s", target->is_https ? "https" : "http",
                      target->host, target->port, path, failure);
    } else {
        *body = strndup(answer->body.data, answer->body.length);
        if (!*body) result = error_set(error, FATHOM_NO_MEMORY, "no memory for the answer");
    }
    fetch_close(&fetch);
    return result;
}

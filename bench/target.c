/* Where requests go: the URL taken apart, the host looked up, one small document fetched. */
#include "bench/run.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

static int url_error(const char *url, struct error *error) {
    return error_set(error, FATHOM_INVALID,
                     "the URL must be http://HOST[:PORT][/PATH], of printable characters and "
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
    strcpy(target->port, "80");
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
    *target = (struct target){0};
    if (strncmp(url, "https://", 8) == 0)
        return error_set(error, FATHOM_UNSUPPORTED,
                         "https is not spoken here; measure behind the proxy that ends it");
    if (strncmp(url, "http://", 7) != 0 || !is_printable(url, strlen(url)))
        return url_error(url, error);
    const char *authority = url + 7;
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

/* Sends the request and feeds the answer until it is complete; false: errno says why. The limits
 * of struct answer are ours; that what came is not a completion is no matter here. */
static bool exchange(int connection, const char *request, size_t length, double timeout,
                     struct answer *answer) {
    char bytes[4096];
    uint64_t deadline = time_now_ns() + (uint64_t)(timeout * 1e9);
    if (send(connection, request, length, MSG_NOSIGNAL) != (ssize_t)length) return false;
    for (;;) {
        ssize_t got = recv(connection, bytes, sizeof bytes, 0);
        if (got < 0) return false;
        if (got == 0) return answer_end(answer);
        if (answer_feed(answer, bytes, (size_t)got, time_now_ns())) return true;
        if (time_now_ns() < deadline) continue;
        errno = ETIMEDOUT;
        return false;
    }
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
    bool is_v6 = target->address.ss_family == AF_INET6;
    struct timeval limit = {.tv_sec = (time_t)timeout + 1};
    struct answer answer;
    answer_init(&answer);
    answer_begin(&answer);
    int result = 0, connection = socket(target->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection >= 0) {
        setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    }
    if (connection < 0 ||
        connect(connection, (const struct sockaddr *)&target->address,
                is_v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in)) != 0 ||
        !exchange(connection, request, (size_t)length, timeout, &answer)) {
        result = error_set(error, FATHOM_IO, "http://%s:%s%s: %s", target->host, target->port, path,
                           strerror(errno));
    } else if (answer.status != 200 || answer.body.length == 0) {
        result = error_set(error, FATHOM_IO, "http://%s:%s%s: answered %s", target->host,
                           target->port, path, answer.detail[0] ? answer.detail : "nothing");
    } else {
        *body = strndup(answer.body.data, answer.body.length);
        if (!*body) result = error_set(error, FATHOM_NO_MEMORY, "no memory for the answer");
    }
    if (connection >= 0) close(connection);
    answer_free(&answer);
    return result;
}

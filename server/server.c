#include "server/server.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "server/endpoints.h"
#include "server/http_connection.h"
#include "tls/tls.h"

#define LISTEN_BACKLOG 1024
#define SWEEP_MS       250

/* ---- Callbacks of the loop ------------------------------------------------------------------- */

static void on_engine_wakeup(uv_async_t *async) {
    struct server *server = async->data;
    completions_take_events(server);
    /* The last answer may have been what draining or stopping waited for. */
    if (server->lifecycle.phase > PHASE_READY) server_sweep_soon(server);
}

void server_wake(void *context) {
    struct server *server = context;
    uv_async_send(&server->engine_wakeup);
}

static void watch_loop(struct server *server) {
    uint64_t now_ns = time_now_ns(), due_ns = server->sweep_due_ns;
    if (due_ns) {
        histogram_observe_ns(&server->metrics.loop_lag, now_ns > due_ns ? now_ns - due_ns : 0);
    }
    server->sweep_due_ns = now_ns + (uint64_t)SWEEP_MS * 1000000;
}

static void on_sweep(uv_timer_t *timer) {
    struct server *server = timer->data;
    watch_loop(server);
    if (server->accept_owed && !uv_is_closing((uv_handle_t *)&server->listener)) {
        server->accept_owed = false;
        connection_accept(server);
    }
    connection_sweep_all(server);
    service_watch(&server->service, server_is_healthy(server));
    lifecycle_sweep(server);
}

static void on_turn(uv_idle_t *idle) {
    if (!connection_take_turns(idle->data)) uv_idle_stop(idle);
}

void server_turn_soon(struct server *server) {
    uv_idle_start(&server->turn, on_turn); /* again while active: nothing happens */
}

void server_sweep_soon(struct server *server) {
    if (!uv_is_closing((uv_handle_t *)&server->sweep)) {
        server->sweep_due_ns = 0;
        uv_timer_start(&server->sweep, on_sweep, 0, SWEEP_MS);
    }
}

static void on_connection(uv_stream_t *listener, int status) {
    struct server *server = listener->data;
    if (status == 0) connection_accept(server);
}

double server_stalled_s(const struct server *server) {
    struct engine_stats stats;
    if (!server->engine) return 0;
    engine_get_stats(server->engine, &stats);
    uint64_t now_ns = time_now_ns(), moved_ns = stats.last_step_at_ns;
    return !stats.idle && now_ns > moved_ns ? (double)(now_ns - moved_ns) / 1e9 : 0;
}

bool server_is_healthy(const struct server *server) {
    return server_stalled_s(server) < server->settings->stuck_timeout;
}

uint64_t server_random(void) {
    uint64_t value;
    if (uv_random(NULL, NULL, &value, sizeof value, 0, NULL) != 0) value = time_now_ns();
    return value;
}

/* ---- Listening ------------------------------------------------------------------------------- */

/* An address is taken as it is; a name (localhost) is looked up once, before anything runs. */
static int resolve_host(struct server *server, struct sockaddr_storage *address,
                        struct error *error) {
    const struct serve_settings *settings = server->settings;
    int port = (int)settings->port;
    if (uv_ip4_addr(settings->host, port, (struct sockaddr_in *)address) == 0) return 0;
    if (uv_ip6_addr(settings->host, port, (struct sockaddr_in6 *)address) == 0) return 0;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    int result = getaddrinfo(settings->host, NULL, &hints, &found);
    if (result != 0) {
        return error_set(error, FATHOM_INVALID, "--host %s: %s", settings->host,
                         gai_strerror(result));
    }
    memcpy(address, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    /* The port is at the same place in both families of address. */
    ((struct sockaddr_in *)address)->sin_port = htons((uint16_t)port);
    return 0;
}

static int server_listen(struct server *server, struct error *error) {
    struct sockaddr_storage address = {0};
    bool is_given = server->service.listener >= 0;
    int result;
    if (is_given) {
        result = uv_tcp_open(&server->listener, server->service.listener);
    } else {
        result = resolve_host(server, &address, error);
        if (result != 0) return result;
        result = uv_tcp_bind(&server->listener, (struct sockaddr *)&address, 0);
    }
    if (result == 0) {
        result = uv_listen((uv_stream_t *)&server->listener, LISTEN_BACKLOG, on_connection);
    }
    if (result != 0 && is_given) {
        return error_set(error, FATHOM_IO, "cannot listen on the socket in LISTEN_FDS: %s",
                         uv_strerror(result));
    }
    if (result != 0) {
        return error_set(error, FATHOM_IO, "cannot listen on %s port %zu: %s%s",
                         server->settings->host, server->settings->port, uv_strerror(result),
                         result == UV_EADDRINUSE ? "; take another with --port N" : "");
    }
    int length = sizeof address;
    char name[64] = "";
    uv_tcp_getsockname(&server->listener, (struct sockaddr *)&address, &length);
    uv_ip_name((struct sockaddr *)&address, name, sizeof name);
    bool is_ip6 = address.ss_family == AF_INET6;
    log_announce(&server->log, "listening on %s://%s%s%s:%d", server->tls ? "https" : "http",
                 is_ip6 ? "[" : "", name, is_ip6 ? "]" : "",
                 ntohs(((struct sockaddr_in *)&address)->sin_port));
    return 0;
}

void server_stop_listening(struct server *server) {
    uv_handle_t *listener = (uv_handle_t *)&server->listener;
    if (!uv_is_closing(listener)) uv_close(listener, NULL);
}

/* ---- Life ------------------------------------------------------------------------------------ */

/* Connections are file descriptors: take as many as the system lets this process have. */
static void raise_descriptor_limit(struct server *server) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < server->settings->max_connections + CONNECTION_VISITORS_MAX + 64) {
        log_message(&server->log, LOG_WARNING,
                    "the system allows %llu open files, fewer than --max-connections %zu needs",
                    (unsigned long long)limit.rlim_cur, server->settings->max_connections);
    }
}

static int server_open(struct server *server, struct error *error) {
    const struct serve_settings *settings = server->settings;
    int result = service_open(&server->service, error);
    if (result == 0) {
        result =
            api_keys_load(&server->keys, settings->api_key_file, getenv("FATHOM_API_KEY"), error);
    }
    if (result == 0 && settings->tls_certificate) {
        result = tls_server_context_create(settings->tls_certificate, settings->tls_key,
                                           &server->tls, error);
    }
    if (result != 0) return result;
    server->log.format = settings->log_format;
    server->log.level = settings->log_level;
    server->started_at = (int64_t)time(NULL);
    server->context.served_name = settings->served_name ? settings->served_name : "";
    metrics_init(&server->metrics);
    signal(SIGPIPE, SIG_IGN); /* a client that left is an error of write, not our end */
    raise_descriptor_limit(server);
    result = uv_loop_init(&server->loop);
    if (result == 0) {
        server->listener.data = server->sweep.data = server->engine_wakeup.data = server;
        server->turn.data = server;
        uv_tcp_init(&server->loop, &server->listener); /* these three cannot fail: no descriptor */
        uv_timer_init(&server->loop, &server->sweep);
        uv_idle_init(&server->loop, &server->turn);
        result = uv_async_init(&server->loop, &server->engine_wakeup, on_engine_wakeup);
    }
    if (result == 0) return 0;
    return error_set(error, FATHOM_IO, "cannot start the event loop: %s", uv_strerror(result));
}

static void close_handle(uv_handle_t *handle, void *context) {
    (void)context;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

void server_close_handles(struct server *server) {
    /* Its thread wakes the loop until it is gone, so it goes before the handle that it wakes. */
    engine_destroy(server->engine);
    server->engine = NULL;
    uv_walk(&server->loop, close_handle, NULL);
    /* libuv has just given them back to the system, which would kill: the end is near and
     * orderly. */
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
}

static void server_free(struct server *server) {
    api_keys_free(&server->keys);
    tls_context_destroy(server->tls);
    service_close(&server->service);
    free(server);
}

int server_run(const struct serve_settings *settings) {
    struct server *server = calloc(1, sizeof *server);
    struct error error;
    if (!server) {
        fprintf(stderr, "error: no memory for a server\n");
        return EXIT_FAILURE;
    }
    server->settings = settings;
    int result = server_open(server, &error);
    if (result != 0) {
        log_message(&server->log, LOG_ERROR, "%s", error.message);
        server_free(server);
        return EXIT_FAILURE;
    }
    result = lifecycle_watch_signals(server, &error);
    if (result == 0) result = server_listen(server, &error);
    if (result == 0) result = lifecycle_load(server, &error);
    if (result != 0) {
        log_message(&server->log, LOG_ERROR, "%s", error.message);
        server->lifecycle.exit_code = EXIT_FAILURE;
        server_close_handles(server);
    } else {
        uv_timer_start(&server->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
    }
    uv_run(&server->loop, UV_RUN_DEFAULT);
    model_destroy(server->model);
    uv_loop_close(&server->loop);
    int exit_code = server->lifecycle.exit_code;
    server_free(server);
    return exit_code;
}

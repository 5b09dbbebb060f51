/* The process that serves: one libuv loop on the main thread, one engine thread, one struct.
 *
 * Everything in struct server belongs to the loop thread, but for `lifecycle.loader` while it loads
 * (its thread writes `log` too).
 */
#ifndef FATHOM_SERVER_H
#define FATHOM_SERVER_H

#include <uv.h>

#include "api/api.h"
#include "server/api_keys.h"
#include "server/lifecycle.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/service.h"
#include "server/settings.h"
#include "server/transport.h"

#define EVENT_BATCH 256

struct connection;
struct tls_context;
struct completion_job;

struct server {
    const struct serve_settings *settings;
    struct log log;
    uv_loop_t loop;
    uv_tcp_t listener;
    struct service service;
    uv_timer_t sweep;
    uint64_t sweep_due_ns; /* time_now_ns of the next one; 0: it was asked for, so is never late */
    uv_async_t engine_wakeup; /* the engine has events */
    uv_idle_t turn;           /* active while connections are due */
    struct lifecycle lifecycle;

    struct model *model; /* these three: NULL or empty until loaded */
    struct engine *engine;
    struct api_context context;
    struct auto_options auto_quality; /* the settings', its floor and `previous` found */

    struct tls_context *tls;        /* NULL: connections are plain */
    struct connection *connections; /* list */
    size_t connection_count;
    size_t queued_bodies, queued_body_bytes; /* on the thread pool */
    bool accept_owed; /* a connection could not be taken; until it is, libuv listens to no other */
    size_t job_count; /* requests between acceptance and the engine's last word on them */
    struct completion_job *ready_jobs; /* list: events came, to be written after the batch */

    struct api_keys keys;
    struct metrics metrics;
    int64_t started_at; /* Unix seconds */

    /* Shared: what is read is handled before the next read. */
    char read_buffer[TRANSPORT_READ_BYTES];
    struct engine_event events[EVENT_BATCH];
};

/* Serves until a signal ends it. Returns the process's exit code. */
int server_run(const struct serve_settings *settings);

void server_stop_listening(struct server *server);

/* For engine_options.notify: any thread, never blocks. */
void server_wake(void *server);

/* The last act: closes the handles that are left, after which the loop ends. */
void server_close_handles(struct server *server);

/* Runs connection_take_turns in the loop's next turn, after other sockets were looked at. */
void server_turn_soon(struct server *server);

/* Runs the sweep in the loop's next turn, to close connections that broke in this one. */
void server_sweep_soon(struct server *server);

/* 64 bits that no client can predict: request ids, seeds of requests without one. */
uint64_t server_random(void);

/* Seconds since the engine last finished a step, or woke, while it has something to do; else 0. */
double server_stalled_s(const struct server *server);

/* It is not stalled for --stuck-timeout. */
bool server_is_healthy(const struct server *server);

#endif

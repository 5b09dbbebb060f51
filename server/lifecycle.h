/* Loading, ready, draining, stopping: the phases of the process and what moves it on.
 *
 *   loading --model loaded--> ready --signal--> draining --idle or timeout--> stopping
 *      `------------signal or failure------------------------------------------^
 *
 * The listener is open from the first phase on; a second signal goes to stopping from anywhere,
 * which takes seconds at most and hears no further one: the exit code says how it went.
 */
#ifndef FATHOM_LIFECYCLE_H
#define FATHOM_LIFECYCLE_H

#include <uv.h>

#include "base/base.h"

struct server;
struct model;
struct engine;

enum { LIFECYCLE_SIGNALS = 3 }; /* SIGTERM, SIGINT, SIGHUP */

enum phase { PHASE_LOADING, PHASE_READY, PHASE_DRAINING, PHASE_STOPPING };

/* Written by the loading thread, read by the loop after `loaded` was sent. */
struct model_loading {
    uv_thread_t thread;
    struct model *model;
    struct engine *engine;
    int result;
    struct error error;
    int percent_shown;
};

struct lifecycle {
    enum phase phase;
    int exit_code;
    bool loader_running;
    struct model_loading loader;
    uv_async_t loaded;
    uv_signal_t signals[LIFECYCLE_SIGNALS];
    bool was_interrupted; /* the drain timeout has passed, and clients were told */
    uint64_t drain_deadline_ms, stop_deadline_ms; /* uv_now */
};

/* Starts watching signals: before the listener is announced, since that may be answered by one. */
int lifecycle_watch_signals(struct server *server, struct error *error);

/* Starts loading the model. The listener is open already. */
int lifecycle_load(struct server *server, struct error *error);

/* A few times a second: ends draining when nothing is left to finish. */
void lifecycle_sweep(struct server *server);

/* Drops every connection; once the engine has let go of their requests, the loop ends. */
void lifecycle_stop(struct server *server, int exit_code);

#endif

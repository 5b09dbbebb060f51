#include "server/lifecycle.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/command.h"
#include "server/http_connection.h"
#include "server/server.h"

/* For the engine to give back cancelled requests, before exiting anyway. */
#define STOP_PATIENCE_MS 5000
/* For clients to take the news that the drain timeout cut their requests off. */
#define INTERRUPT_PATIENCE_MS 2000
/* Between two progress lines. */
#define PROGRESS_PERCENT 10

/* ---- Loading --------------------------------------------------------------------------------- */

/* Loading thread. */
static void on_progress(void *context, double fraction, const char *phase) {
    struct server *server = context;
    struct model_loading *loader = &server->lifecycle.loader;
    int percent = (int)(fraction * 100);
    if (percent < loader->percent_shown + PROGRESS_PERCENT) return;
    loader->percent_shown = percent;
    log_message(&server->log, LOG_INFO, "loading: %d %% (%s)", percent, phase);
}

/* Loading thread: the two things that take long. What it writes, the loop reads after `loaded`. */
static void loader_run(void *context) {
    struct server *server = context;
    struct model_loading *loader = &server->lifecycle.loader;
    struct model_options model_options = server->settings->model;
    struct engine_options engine_options = server->settings->engine;
    model_options.progress = on_progress;
    model_options.progress_context = server;
    engine_options.notify = server_wake;
    engine_options.notify_context = server;
    loader->result =
        model_load(server->settings->model_path, &model_options, &loader->model, &loader->error);
    if (loader->result == 0) {
        if (engine_options.kv_budget == 0)
            engine_options.kv_budget = model_default_kv_budget(loader->model);
        loader->result =
            engine_create(loader->model, &engine_options, &loader->engine, &loader->error);
    }
    uv_async_send(&server->lifecycle.loaded);
}

static size_t find_lowest_tier(const struct model_info *info) {
    size_t lowest = 0;
    for (size_t i = 1; i < info->tier_count; i++) {
        if (info->tiers[i].target_skip > info->tiers[lowest].target_skip) lowest = i;
    }
    return lowest;
}

static int find_tiers(struct server *server, struct error *error) {
    const struct serve_settings *settings = server->settings;
    const struct model_info *info = model_get_info(server->model);
    struct api_context *context = &server->context;
    struct auto_options *choices = &server->auto_quality;
    const char *name = settings->default_quality;
    context->default_tier = info->default_tier;
    context->default_is_auto = name && strcmp(name, "auto") == 0;
    *choices = settings->auto_quality;
    choices->floor = find_lowest_tier(info);
    int result = 0;
    if (name && !context->default_is_auto) {
        result = command_find_tier(server->model, "default-quality", name, strlen(name),
                                   &context->default_tier, error);
    }
    name = settings->auto_floor;
    if (result == 0 && name) {
        result = command_find_tier(server->model, "auto-floor", name, strlen(name), &choices->floor,
                                   error);
    }
    return result;
}

/* Takes over what was loaded. */
static int lifecycle_adopt(struct server *server, struct error *error) {
    struct model_loading *loader = &server->lifecycle.loader;
    server->model = loader->model;
    server->engine = loader->engine;
    if (loader->result != 0) {
        *error = loader->error;
        return loader->result;
    }
    const struct model_info *info = model_get_info(server->model);
    struct api_context *context = &server->context;
    context->tokenizer = command_tokenizer(server->model, error);
    if (!context->tokenizer) return FATHOM_UNSUPPORTED;
    if (!server->settings->served_name) context->served_name = info->name;
    context->model = info;
    context->created = server->started_at;
    context->chat_format = server->settings->chat_format;
    context->max_sequence = engine_max_sequence(server->engine);
    context->max_choices = server->settings->engine.queue_limit;
    return find_tiers(server, error);
}

static void log_model(struct server *server) {
    const struct model_info *info = model_get_info(server->model);
    struct engine_stats stats;
    engine_get_stats(server->engine, &stats);
    char weights[32], budget[32];
    log_message(
        &server->log, LOG_INFO,
        "serving %s: %zu blocks x %zu, %zu tiers, context %zu, %s %s weights, %s KV budget on %s",
        server->context.served_name, info->blocks, info->hidden, info->tier_count, info->context,
        size_format(info->weight_bytes, weights, sizeof weights), info->weights,
        size_format(stats.kv_bytes_budget, budget, sizeof budget), info->device);
    const struct cost_model *cost = model_get_cost(server->model);
    const struct cost_point *point = &cost->points[0];
    double step_ns = point->step_ns + point->head_ns +
                     (double)cost->blocks * (point->attn_ns + point->mlp_ns);
    char skipped[48] = ""; /* where sub-layers can be */
    if (point->step_ns > 0) {
        snprintf(skipped, sizeof skipped, ", %.2f with all skipped", point->step_ns / 1e6);
    }
    log_message(&server->log, LOG_INFO,
                "a step of one row takes %.2f ms here%s; ridge at %zu rows; %s", step_ns / 1e6,
                skipped, cost->ridge, model_get_cost_note(server->model));
}

static void on_loaded(uv_async_t *async) {
    struct server *server = async->data;
    struct lifecycle *lifecycle = &server->lifecycle;
    struct error error;
    if (!lifecycle->loader_running) return;
    uv_thread_join(&lifecycle->loader.thread);
    lifecycle->loader_running = false;
    int result = lifecycle_adopt(server, &error);
    if (result != 0) {
        log_message(&server->log, LOG_ERROR, "%s", error.message);
        lifecycle_stop(server, 1);
        return;
    }
    log_model(server);
    lifecycle->phase = PHASE_READY;
    log_announce(&server->log, "ready");
    service_notify(&server->service, "READY=1");
}

/* ---- Signals and draining -------------------------------------------------------------------- */

static const char *signal_name(int number) {
    if (number == SIGINT) return "interrupt";
    return number == SIGHUP ? "hangup" : "termination";
}

static void on_signal(uv_signal_t *handle, int number) {
    struct server *server = handle->data;
    struct lifecycle *lifecycle = &server->lifecycle;
    const char *name = signal_name(number);
    if (lifecycle->phase == PHASE_STOPPING) {
        return; /* seconds away at most, and with the right exit code */
    } else if (lifecycle->phase == PHASE_DRAINING) {
        log_message(&server->log, LOG_WARNING, "second signal: stopping now");
        connection_interrupt_all(server);
        lifecycle_stop(server, 0);
    } else if (lifecycle->phase == PHASE_LOADING) {
        log_message(&server->log, LOG_INFO, "%s while loading: stopping", name);
        lifecycle_stop(server, 0);
    } else {
        lifecycle->phase = PHASE_DRAINING;
        lifecycle->drain_deadline_ms =
            uv_now(&server->loop) + (uint64_t)(server->settings->drain_timeout * 1000);
        log_message(&server->log, LOG_INFO, "%s: finishing %zu requests, for %.0f s at most", name,
                    server->job_count, server->settings->drain_timeout);
        service_notify(&server->service, "STOPPING=1");
        /* A socket that outlives this process: new connections wait in it for the next one. */
        if (server->service.listener >= 0) server_stop_listening(server);
        lifecycle_sweep(server);
    }
}

void lifecycle_sweep(struct server *server) {
    struct lifecycle *lifecycle = &server->lifecycle;
    uint64_t now_ms = uv_now(&server->loop);
    if (lifecycle->phase == PHASE_DRAINING) {
        bool is_drained = server->job_count == 0 && connection_all_flushed(server);
        if (!is_drained && now_ms < lifecycle->drain_deadline_ms) return;
        if (!is_drained && !lifecycle->was_interrupted) {
            log_message(&server->log, LOG_WARNING, "drain timeout: %zu requests were not finished",
                        server->job_count);
            connection_interrupt_all(server);
            lifecycle->was_interrupted = true;
            lifecycle->drain_deadline_ms = now_ms + INTERRUPT_PATIENCE_MS;
            return;
        }
        lifecycle_stop(server, 0);
    } else if (lifecycle->phase == PHASE_STOPPING) {
        if (server->job_count == 0) {
            server_close_handles(server);
        } else if (now_ms >= lifecycle->stop_deadline_ms) {
            _exit(lifecycle->exit_code); /* an engine that does not answer cannot be joined */
        }
    }
}

/* ---- Start and stop -------------------------------------------------------------------------- */

static int start_error(int result, struct error *error) {
    if (result == 0) return 0;
    return error_set(error, FATHOM_IO, "cannot start the server: %s", uv_strerror(result));
}

int lifecycle_watch_signals(struct server *server, struct error *error) {
    static const int numbers[LIFECYCLE_SIGNALS] = {SIGTERM, SIGINT, SIGHUP};
    int result = 0;
    for (size_t i = 0; result == 0 && i < LIFECYCLE_SIGNALS; i++) {
        uv_signal_t *handle = &server->lifecycle.signals[i];
        struct sigaction before;
        /* Under nohup a closed terminal is no reason to end. */
        if (numbers[i] == SIGHUP && sigaction(SIGHUP, NULL, &before) == 0 &&
            before.sa_handler == SIG_IGN) {
            continue;
        }
        result = uv_signal_init(&server->loop, handle);
        handle->data = server;
        if (result == 0) result = uv_signal_start(handle, on_signal, numbers[i]);
    }
    return start_error(result, error);
}

int lifecycle_load(struct server *server, struct error *error) {
    struct lifecycle *lifecycle = &server->lifecycle;
    lifecycle->loaded.data = server;
    int result = uv_async_init(&server->loop, &lifecycle->loaded, on_loaded);
    if (result == 0) result = uv_thread_create(&lifecycle->loader.thread, loader_run, server);
    lifecycle->loader_running = result == 0;
    return start_error(result, error);
}

void lifecycle_stop(struct server *server, int exit_code) {
    struct lifecycle *lifecycle = &server->lifecycle;
    lifecycle->exit_code = exit_code;
    lifecycle->phase = PHASE_STOPPING;
    lifecycle->stop_deadline_ms = uv_now(&server->loop) + STOP_PATIENCE_MS;
    /* Loading cannot be told to stop, and nothing that it does needs undoing. */
    if (lifecycle->loader_running) _exit(exit_code);
    server_stop_listening(server);
    service_notify(&server->service, "STOPPING=1");
    connection_close_all(server);
    server_sweep_soon(server);
}

/* The endpoints that answer at once from what is known: models, health, version, metrics. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/endpoints.h"
#include "server/server.h"

void models_handle(struct exchange *exchange) {
    struct text_buffer body = {0};
    models_write(&exchange->server->context, &body);
    exchange_answer_json(exchange, &body);
}

static int hex_value(char digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    char lower = (char)(digit | 0x20);
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* Percent-decodes into a string; NULL for a wrong escape, an encoded NUL or no memory. */
static char *percent_decode(const char *text, size_t length) {
    char *decoded = malloc(length + 1), *out = decoded;
    for (size_t i = 0; decoded && i < length; i++) {
        char byte = text[i];
        if (byte == '%') {
            int high = i + 2 < length ? hex_value(text[i + 1]) : -1;
            int low = i + 2 < length ? hex_value(text[i + 2]) : -1;
            byte = high >= 0 && low >= 0 ? (char)(high * 16 + low) : '\0';
            i += 2;
        }
        if (byte == '\0') {
            free(decoded);
            return NULL;
        }
        *out++ = byte;
    }
    if (decoded) *out = '\0';
    return decoded;
}

void model_handle(struct exchange *exchange) {
    struct http_slice path = http_head_slice(exchange->head, exchange->head->path);
    size_t prefix = strlen("/v1/models/");
    struct text_buffer body = {0};
    struct api_error error;
    char *id = percent_decode(path.data + prefix, path.length - prefix);
    if (!id) {
        api_error_set(&error, 400, NULL, NULL, "the model's name in the path is not well encoded");
        exchange_answer_error(exchange, &error);
    } else if (model_write(&exchange->server->context, id, &body, &error) != 0) {
        exchange_answer_error(exchange, &error);
    } else {
        exchange_answer_json(exchange, &body);
    }
    free(id);
}

static void answer_status(struct exchange *exchange, const char *status) {
    struct text_buffer body = {0};
    text_append_format(&body, "{\"status\":\"%s\"}", status);
    exchange_answer_json(exchange, &body);
}

void health_handle(struct exchange *exchange) {
    struct api_error error;
    if (server_is_healthy(exchange->server)) {
        answer_status(exchange, "ok");
        return;
    }
    api_error_set(&error, 503, "engine_stuck", NULL,
                  "requests are waiting and the engine has not finished a step for %.0f s",
                  exchange->server->settings->stuck_timeout);
    exchange_answer_error(exchange, &error);
}

/* The router has refused already while loading or draining. */
void ready_handle(struct exchange *exchange) {
    answer_status(exchange, "ready");
}

void metrics_handle(struct exchange *exchange) {
    struct text_buffer body = {0};
    metrics_write(exchange->server, &body);
    exchange_answer_text(exchange, "text/plain; version=0.0.4; charset=utf-8", &body);
}

static void write_step(const struct step_record *step, const struct model_info *model,
                       struct text_buffer *out) {
    text_append_format(out,
                       "{\"step\":%llu,\"rows\":%zu,\"decode_rows\":%zu,\"logit_rows\":%zu,"
                       "\"bodies\":{\"none\":%zu,\"dense\":%zu,\"gather\":%zu},"
                       "\"modelled_ms\":%.6g,\"predicted_ms\":%.6g,\"real_ms\":%.6g,"
                       "\"thread_ms\":%.6g,\"end_ms\":%.15g,\"tiers\":{",
                       (unsigned long long)step->number, step->rows, step->decode_rows,
                       step->logit_rows, step->body_none, step->body_dense, step->body_gather,
                       (double)step->modelled_ns / 1e6, (double)step->predicted_ns / 1e6,
                       (double)step->real_ns / 1e6, (double)step->thread_ns / 1e6,
                       (double)step->at_ns / 1e6);
    for (size_t i = 0; i < model->tier_count; i++) {
        if (i > 0) text_append_string(out, ",");
        text_append_json(out, model->tiers[i].name, strlen(model->tiers[i].name));
        text_append_format(out, ":%u", step->tiers[i]);
    }
    text_append_string(out, "}}");
}

/* The last steps, oldest first; end_ms is of a clock that only goes on. */
void steps_handle(struct exchange *exchange) {
    const struct server *server = exchange->server;
    size_t capacity = server->settings->engine.step_log;
    struct text_buffer body = {0};
    struct api_error error;
    if (capacity == 0) {
        api_error_set(&error, 404, NULL, NULL,
                      "steps are not kept; --debug-steps N keeps the last");
        exchange_answer_error(exchange, &error);
        return;
    }
    struct step_record *steps = calloc(capacity, sizeof *steps);
    if (!steps) {
        exchange_answer_no_memory(exchange);
        return;
    }
    size_t count = engine_get_steps(server->engine, steps, capacity);
    text_append_string(&body, "{\"steps\":[");
    for (size_t i = 0; i < count; i++) {
        if (i > 0) text_append_string(&body, ",");
        write_step(&steps[i], model_get_info(server->model), &body);
    }
    text_append_string(&body, "]}");
    free(steps);
    exchange_answer_json(exchange, &body);
}

void version_handle(struct exchange *exchange) {
    const struct server *server = exchange->server;
    struct text_buffer body = {0};
    const struct model_info *model = server->model ? model_get_info(server->model) : NULL;
    struct version_info info = {
        .version = FATHOM_VERSION,
        .build = __VERSION__,
        .backend = model ? model->backend : NULL,
        .isa = model ? model->isa : NULL,
    };
    version_write(&info, &body);
    exchange_answer_json(exchange, &body);
}

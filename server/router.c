#include "server/router.h"

#include <string.h>
#include <strings.h>

#include "server/endpoints.h"
#include "server/http_connection.h"
#include "server/server.h"

enum route_needs { NEEDS_NOTHING, NEEDS_MODEL, NEEDS_READY };

struct route {
    const char *path;
    enum route_needs needs;
    exchange_handler handler;
    bool takes_rest; /* "/v1/models/" and anything after it */
    bool is_post;    /* else GET, and HEAD with it */
    bool is_open; /* without an API key: what a supervisor asks, and the page, which asks for one */
    bool is_probe; /* even when there are too many connections */
};

static const struct route routes[] = {
    {.path = "/", .needs = NEEDS_NOTHING, .handler = page_handle, .is_open = true},
    {.path = "/v1/completions",
     .needs = NEEDS_READY,
     .handler = completions_handle,
     .is_post = true},
    {.path = "/v1/chat/completions",
     .needs = NEEDS_READY,
     .handler = chat_completions_handle,
     .is_post = true},
    {.path = "/v1/models", .needs = NEEDS_MODEL, .handler = models_handle},
    {.path = "/v1/models/", .needs = NEEDS_MODEL, .handler = model_handle, .takes_rest = true},
    {.path = "/tokenize", .needs = NEEDS_READY, .handler = tokenize_handle, .is_post = true},
    {.path = "/detokenize", .needs = NEEDS_READY, .handler = detokenize_handle, .is_post = true},
    {.path = "/health",
     .needs = NEEDS_MODEL,
     .handler = health_handle,
     .is_open = true,
     .is_probe = true},
    {.path = "/ready",
     .needs = NEEDS_READY,
     .handler = ready_handle,
     .is_open = true,
     .is_probe = true},
    {.path = "/metrics", .needs = NEEDS_NOTHING, .handler = metrics_handle, .is_probe = true},
    {.path = "/debug/steps", .needs = NEEDS_MODEL, .handler = steps_handle},
    {.path = "/version", .needs = NEEDS_NOTHING, .handler = version_handle},
    {.path = "/openapi.json", .needs = NEEDS_NOTHING, .handler = openapi_handle},
};

static const struct route *route_find(struct http_slice path) {
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const struct route *route = &routes[i];
        size_t length = strlen(route->path);
        bool fits = route->takes_rest ? path.length > length : path.length == length;
        if (fits && memcmp(path.data, route->path, length) == 0) return route;
    }
    return NULL;
}

/* OPTIONS of any path that exists: what the path can do, and for browsers that they may. */
static void options_handle(struct exchange *exchange) {
    exchange_answer(exchange, 204, NULL, NULL, 0);
}

static void admit_origin(struct exchange *exchange) {
    struct http_slice origin;
    const char *allowed = exchange->server->settings->cors_origin;
    if (!allowed || !http_head_find(exchange->head, "Origin", &origin)) return;
    if (strcmp(allowed, "*") == 0 || http_slice_equals(origin, allowed)) {
        exchange->cors_origin = allowed;
        exchange->is_preflight = exchange->head->method == HTTP_METHOD_OPTIONS;
    }
}

static bool key_is_accepted(const struct exchange *exchange) {
    const struct api_keys *keys = &exchange->server->keys;
    struct http_slice authorization;
    if (keys->count == 0) return true;
    return http_head_find(exchange->head, "Authorization", &authorization) &&
           api_keys_accept(keys, authorization.data, authorization.length);
}

static int admit_phase(const struct route *route, struct exchange *exchange) {
    enum phase phase = exchange->server->lifecycle.phase;
    if (route->needs >= NEEDS_MODEL && phase == PHASE_LOADING) {
        return api_error_set(&exchange->refusal, 503, "loading", NULL,
                             "the model is still being loaded; try again");
    }
    if (route->needs == NEEDS_READY && phase > PHASE_READY) {
        return api_error_set(&exchange->refusal, 503, "draining", NULL,
                             "the server is shutting down; use another one");
    }
    return 0;
}

/* Of the parameters behind a media type; none is UTF-8, as of JSON. */
static bool charset_is_utf8(const char *at, const char *end) {
    static const char name[] = "charset=";
    for (const char *next; at < end; at = next) {
        const char *stop = memchr(at, ';', (size_t)(end - at));
        next = stop ? stop + 1 : end;
        if (!stop) stop = end;
        while (at < stop && strchr(" \t", *at)) at++;
        while (at < stop && strchr(" \t", stop[-1])) stop--;
        size_t length = sizeof name - 1;
        if ((size_t)(stop - at) < length || strncasecmp(at, name, length) != 0) continue;
        struct http_slice value = {at + length, (size_t)(stop - at) - length};
        if (value.length > 1 && *value.data == '"' && stop[-1] == '"')
            value = (struct http_slice){value.data + 1, value.length - 2};
        if (!http_slice_equals_any_case(value, "utf-8") &&
            !http_slice_equals_any_case(value, "utf8") &&
            !http_slice_equals_any_case(value, "us-ascii"))
            return false;
    }
    return true;
}

/* Of two tiers, nobody knows which is meant. */
static int admit_quality(struct exchange *exchange) {
    static const char name[] = "X-Quality";
    const struct http_head *head = exchange->head;
    struct http_slice first;
    http_head_find(head, name, &first);
    for (size_t i = 0; i < head->field_count; i++) {
        if (!http_slice_equals_any_case(http_head_slice(head, head->names[i]), name)) continue;
        struct http_slice value = http_head_slice(head, head->values[i]);
        if (value.length == first.length && memcmp(value.data, first.data, first.length) == 0)
            continue;
        return api_error_set(&exchange->refusal, 400, NULL, name,
                             "X-Quality is given more than once, with different tiers");
    }
    return 0;
}

/* A body must have a length, and be JSON in plain bytes if it says what it is. */
static int admit_body(struct exchange *exchange) {
    const struct http_head *head = exchange->head;
    struct http_slice type, coding;
    if (!head->chunked && !head->has_content_length) {
        return api_error_set(&exchange->refusal, 411, NULL, NULL,
                             "the request has neither Content-Length nor a chunked body");
    }
    if (http_head_find(head, "Content-Type", &type)) {
        const char *type_end = type.data + type.length;
        size_t length = 0;
        while (length < type.length && !strchr("; \t", type.data[length])) length++;
        type.length = length;
        if (!http_slice_equals_any_case(type, "application/json")) {
            return api_error_set(&exchange->refusal, 415, NULL, NULL,
                                 "Content-Type must be application/json; got '%.*s'",
                                 (int)(type.length < 64 ? type.length : 64), type.data);
        }
        if (!charset_is_utf8(type.data + type.length, type_end)) {
            return api_error_set(&exchange->refusal, 415, NULL, NULL,
                                 "a body must be UTF-8; Content-Type names another charset");
        }
    }
    if (http_head_find(head, "Content-Encoding", &coding) &&
        !http_slice_equals_any_case(coding, "identity")) {
        return api_error_set(&exchange->refusal, 415, NULL, NULL,
                             "a compressed body is not understood; send it plain");
    }
    return 0;
}

void router_admit(struct exchange *exchange) {
    const struct http_head *head = exchange->head;
    struct http_slice path = http_head_slice(head, head->path);
    const struct route *route = route_find(path);
    bool is_options = head->method == HTTP_METHOD_OPTIONS;
    bool is_everything = is_options && http_slice_equals(path, "*");
    admit_origin(exchange);
    exchange->ignores_body = true;
    exchange->allow = ROUTER_METHODS;
    if (!route && !is_everything) {
        api_error_set(&exchange->refusal, 404, NULL, NULL, "there is no path '%.*s' here",
                      (int)(path.length < 128 ? path.length : 128), path.data);
        return;
    }
    if (route) exchange->allow = route->is_post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
    if (is_options) {
        exchange->handler = options_handle;
        return;
    }
    bool is_get = head->method == HTTP_METHOD_GET || head->method == HTTP_METHOD_HEAD;
    bool is_post = head->method == HTTP_METHOD_POST;
    if (route->is_post ? !is_post : !is_get) {
        api_error_set(&exchange->refusal, 405, NULL, NULL, "%s takes %s", route->path,
                      exchange->allow);
        return;
    }
    if (!route->is_open && !key_is_accepted(exchange)) {
        api_error_set(&exchange->refusal, 401, "invalid_api_key", NULL,
                      "give a valid API key as 'Authorization: Bearer KEY'");
        return;
    }
    if (exchange->connection->is_visitor && !route->is_probe) {
        api_error_set(&exchange->refusal, 503, "server_overloaded", NULL,
                      "too many connections; try again");
        return;
    }
    if (admit_phase(route, exchange) != 0) return;
    if (route->is_post && (admit_body(exchange) != 0 || admit_quality(exchange) != 0)) return;
    exchange->ignores_body = !route->is_post;
    exchange->handler = route->handler;
}

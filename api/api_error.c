#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "api/api.h"

/* The SDKs choose their exception class by status; `type` is for people and logs. */
static const char *type_of_status(int status) {
    switch (status) {
    case 401:
        return "authentication_error";
    case 429:
        return "rate_limit_error";
    case 503:
        return "service_unavailable_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

int api_error_set(struct api_error *error, int status, const char *code, const char *param,
                  const char *format, ...) {
    *error = (struct api_error){.status = status, .type = type_of_status(status), .code = code};
    error->retry_after_s = status == 429 || status == 503 ? 1 : 0;
    error->never_retry = status == 500;
    snprintf(error->param, sizeof error->param, "%s", param ? param : "");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return FATHOM_INVALID;
}

int api_error_from_engine(struct api_error *error, const struct error *cause) {
    switch (cause->code) {
    case FATHOM_FULL:
        return api_error_set(error, 429, "server_overloaded", NULL, "%s", cause->message);
    case FATHOM_NO_MEMORY:
        return api_error_set(error, 503, NULL, NULL, "%s", cause->message);
    case FATHOM_TOO_LARGE:
        return api_error_set(error, 400, "kv_budget_exceeded", NULL, "%s", cause->message);
    case FATHOM_INVALID:
    case FATHOM_UNSUPPORTED:
        return api_error_set(error, 400, NULL, NULL, "%s", cause->message);
    case FATHOM_NOT_FOUND:
        return api_error_set(error, 404, NULL, NULL, "%s", cause->message);
    default:
        return api_error_set(error, 500, NULL, NULL, "%s", cause->message);
    }
}

static void append_or_null(struct text_buffer *out, const char *text) {
    if (text && *text) {
        text_append_json(out, text, strlen(text));
    } else {
        text_append_string(out, "null");
    }
}

void api_error_write(const struct api_error *error, struct text_buffer *out) {
    text_append_string(out, "{\"error\":{\"message\":");
    text_append_json(out, error->message, strlen(error->message));
    text_append_string(out, ",\"type\":");
    append_or_null(out, error->type);
    text_append_string(out, ",\"param\":");
    append_or_null(out, error->param);
    text_append_string(out, ",\"code\":");
    append_or_null(out, error->code);
    text_append_string(out, "}}");
}

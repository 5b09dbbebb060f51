#include "server/log.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warning", "info", "debug"};

/* A line being written: cut, never overrun. The last byte is kept for the line end. */
struct line {
    char bytes[LOG_LINE_MAX];
    size_t length;
};

static void line_append(struct line *line, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

int log_parse_level(const char *text, enum log_level *level, struct error *error) {
    for (size_t i = 0; i < sizeof level_names / sizeof *level_names; i++) {
        if (strcmp(text, level_names[i]) != 0) continue;
        *level = (enum log_level)i;
        return 0;
    }
    return error_set(error, FATHOM_INVALID,
                     "--log-level must be error, warning, info or debug; got '%s'", text);
}

int log_parse_format(const char *text, enum log_format *format, struct error *error) {
    bool json = strcmp(text, "json") == 0;
    if (!json && strcmp(text, "text") != 0) {
        return error_set(error, FATHOM_INVALID, "--log-format must be text or json; got '%s'",
                         text);
    }
    *format = json ? LOG_JSON : LOG_TEXT;
    return 0;
}

static void line_append(struct line *line, const char *format, ...) {
    size_t room = sizeof line->bytes - 1 - line->length;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line->bytes + line->length, room, format, arguments);
    va_end(arguments);
    if (length > 0) line->length += (size_t)length < room ? (size_t)length : room - 1;
}

/* What clients chose (paths, ids) reaches a terminal or a JSON parser: printable ASCII passes,
 * quotes and backslashes are escaped, everything else becomes '?'. */
static void line_append_quoted(struct line *line, const char *text, size_t length) {
    line_append(line, "\"");
    for (size_t i = 0; i < length && i < 512; i++) {
        unsigned char byte = (unsigned char)text[i];
        bool escaped = byte == '"' || byte == '\\';
        line_append(line, "%s%c", escaped ? "\\" : "", byte >= 0x20 && byte < 0x7f ? byte : '?');
    }
    line_append(line, "\"");
}

static void line_append_time(struct line *line) {
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    line_append(line, "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ", parts.tm_year + 1900,
                parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                now.tv_nsec / 1000000);
}

static void line_write(struct line *line, struct log *log) {
    line->bytes[line->length++] = '\n';
    struct pollfd writable = {.fd = STDERR_FILENO, .events = POLLOUT};
    bool has_room = poll(&writable, 1, 0) == 1 && (writable.revents & POLLOUT);
    if (!has_room || write(STDERR_FILENO, line->bytes, line->length) < 0) log->dropped++;
}

static void write_message(struct log *log, enum log_level level, const char *format,
                          va_list arguments) {
    char message[1024];
    vsnprintf(message, sizeof message, format, arguments);
    struct line line = {.length = 0};
    if (log->format == LOG_JSON) {
        line_append(&line, "{\"time\":\"");
        line_append_time(&line);
        line_append(&line, "\",\"level\":\"%s\",\"message\":", level_names[level]);
        line_append_quoted(&line, message, strlen(message));
        line_append(&line, "}");
    } else {
        bool plain = level >= LOG_INFO;
        line_append(&line, "%s%s%s", plain ? "" : level_names[level], plain ? "" : ": ", message);
    }
    line_write(&line, log);
}

void log_message(struct log *log, enum log_level level, const char *format, ...) {
    if (level > log->level) return;
    va_list arguments;
    va_start(arguments, format);
    write_message(log, level, format, arguments);
    va_end(arguments);
}

void log_announce(struct log *log, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_message(log, LOG_INFO, format, arguments);
    va_end(arguments);
}

/* name="value" or "name":"value", by format. */
static void line_append_name(struct line *line, const struct log *log, const char *name) {
    line_append(line, log->format == LOG_JSON ? ",\"%s\":" : " %s=", name);
}

static void line_append_ms(struct line *line, const struct log *log, const char *name, double ms) {
    if (ms < 0) return;
    line_append_name(line, log, name);
    line_append(line, "%.3f", ms);
}

void log_request(struct log *log, const struct log_request *request) {
    if (log->level < LOG_INFO) return;
    struct line line = {.length = 0};
    line_append(&line, log->format == LOG_JSON ? "{\"time\":\"" : "");
    line_append_time(&line);
    line_append(&line, log->format == LOG_JSON ? "\",\"level\":\"info\"" : " request");
    line_append_name(&line, log, "id");
    line_append_quoted(&line, request->id, strlen(request->id));
    line_append_name(&line, log, "method");
    line_append_quoted(&line, request->method, request->method_length);
    line_append_name(&line, log, "path");
    line_append_quoted(&line, request->path, request->path_length);
    line_append_name(&line, log, "status");
    line_append(&line, "%d", request->status);
    if (request->error) {
        line_append_name(&line, log, "error");
        line_append_quoted(&line, request->error, strlen(request->error));
    }
    if (request->tier) {
        line_append_name(&line, log, "tier");
        line_append_quoted(&line, request->tier, strlen(request->tier));
        line_append_name(&line, log, "prompt_tokens");
        line_append(&line, "%zu", request->prompt_tokens);
        line_append_name(&line, log, "completion_tokens");
        line_append(&line, "%zu", request->completion_tokens);
        line_append_ms(&line, log, "ttft_ms", request->ttft_ms);
        line_append_ms(&line, log, "tpot_ms", request->tpot_ms);
    }
    line_append_ms(&line, log, "total_ms", request->total_ms);
    if (log->format == LOG_JSON) line_append(&line, "}");
    line_write(&line, log);
}

/* Lines on standard error: one per request, and what an operator should know.
 *
 * The loop thread must never wait for whoever reads the log: a line that the pipe has no room for
 * now is dropped and counted. Lines are at most LOG_LINE_MAX bytes, so that one write is one whole
 * line.
 */
#ifndef FATHOM_LOG_H
#define FATHOM_LOG_H

#include "base/base.h"

/* PIPE_BUF: a pipe that polls writable takes that many bytes without blocking. */
#define LOG_LINE_MAX 4096

enum log_level { LOG_ERROR, LOG_WARNING, LOG_INFO, LOG_DEBUG };
enum log_format { LOG_TEXT, LOG_JSON };

/* Any thread may write; the settings do not change after start. */
struct log {
    enum log_format format;
    enum log_level level;
    _Atomic uint64_t dropped; /* lines */
};

/* One answered, failed or abandoned request. */
struct log_request {
    const char *id;
    const char *method, *path; /* not NUL-terminated; empty when the request line never came */
    size_t method_length, path_length;
    int status;        /* 499: the client left before the answer was complete */
    const char *error; /* what the client was told, also in a stream that began with 200; or NULL */
    const char *tier;  /* NULL: not a completion */
    size_t prompt_tokens, completion_tokens;
    double ttft_ms, tpot_ms; /* negative: no such time */
    double total_ms;
};

int log_parse_level(const char *text, enum log_level *level, struct error *error);
int log_parse_format(const char *text, enum log_format *format, struct error *error);

void log_message(struct log *log, enum log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Written at every level: the lines that scripts wait for. */
void log_announce(struct log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));

void log_request(struct log *log, const struct log_request *request);

#endif

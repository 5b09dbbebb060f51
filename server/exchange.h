/* One request and its answer: the seam between connections and endpoints.
 *
 * An endpoint gets an exchange whose request is complete and answers it once: with exchange_answer*
 * at once or later, or as a stream. To answer later it attaches a job; if the client leaves or the
 * server stops first, `abandon` is called and the exchange must not be touched again. Loop thread
 * only. No function for endpoints ever calls `abandon`, so a job never vanishes under the code that
 * answers for it.
 */
#ifndef FATHOM_EXCHANGE_H
#define FATHOM_EXCHANGE_H

#include "api/api.h"
#include "server/http_head.h"

#define REQUEST_ID_MAX 128

struct server;
struct connection;
struct exchange;

typedef void (*exchange_handler)(struct exchange *exchange);

struct exchange {
    struct server *server;
    struct connection *connection;
    const struct http_head *head; /* of the request */
    char request_id[REQUEST_ID_MAX + 1];
    uint64_t started_ns; /* the request was complete; time_now_ns */

    /* By the router, once the head is known. */
    exchange_handler handler;
    struct api_error refusal; /* status != 0: the answer, whatever the body will be */
    const char *allow;        /* methods of the path, for Allow */
    const char *cors_origin;  /* NULL: no CORS headers */
    bool is_preflight;
    bool ignores_body;

    /* By an endpoint that answers later. */
    void *job;
    void (*abandon)(void *job);

    const char *more_fields; /* of the answer's head: complete lines, needed until it is given */

    int status;          /* of the answer, once it has begun */
    bool streams;        /* the answer is under way */
    uint64_t sent_at_ms; /* of the last piece of a stream; uv_now */

    /* Of a long answer that is under way: its body, and how much of that was written. */
    struct text_buffer body;
    size_t body_written;

    const struct api_error *failure; /* what the answer says, for the log line; NULL: it is whole */

    /* For the log line of a completion. */
    const char *tier; /* NULL: no completion; must live as long as the model */
    size_t prompt_tokens, completion_tokens;
    double ttft_ms, tpot_ms; /* negative: none */
};

void exchange_attach(struct exchange *exchange, void *job, void (*abandon)(void *job));

/* Gives the request's body, NUL-terminated, to the caller, who frees it. NULL when it is empty. */
char *exchange_take_body(struct exchange *exchange, size_t *length);

/* The whole answer; the exchange is over. content_type NULL: no body. */
void exchange_answer(struct exchange *exchange, int status, const char *content_type,
                     const char *body, size_t length);
/* 200 with a body that the exchange takes over and frees; 500 when it could not be built. A long
 * one goes out in slices, while the loop serves others. */
void exchange_answer_text(struct exchange *exchange, const char *content_type,
                          struct text_buffer *body);
void exchange_answer_json(struct exchange *exchange, struct text_buffer *body);
void exchange_answer_error(struct exchange *exchange, const struct api_error *error);
void exchange_answer_no_memory(struct exchange *exchange); /* 500 */

/* 200, text/event-stream; then any number of pieces; then the end, and the exchange is over. A
 * client that reads slower than the high-water mark allows is disconnected soon after (`abandon`
 * follows). */
void exchange_begin_stream(struct exchange *exchange);
void exchange_send(struct exchange *exchange, const char *data, size_t length);
void exchange_end_stream(struct exchange *exchange);
/* The error as the stream's last word, and its end. */
void exchange_fail_stream(struct exchange *exchange, const struct api_error *error);

/* ---- For the connection ---------------------------------------------------------------------- */

/* A long answer is under way: some of it is still to be written. */
bool exchange_has_more(const struct exchange *exchange);
/* Writes the next slice of it; with the last one the exchange is over. */
void exchange_write_more(struct exchange *exchange);

/* The client left: tells the job, and writes the log line with status 499. */
void exchange_abandon(struct exchange *exchange);
/* The server stops: tells the job, and the client with an error, or by cutting a long answer. */
void exchange_interrupt(struct exchange *exchange, const struct api_error *error);
/* A comment when a stream has been silent for long, so that nothing between cuts the connection. */
void exchange_ping(struct exchange *exchange, uint64_t now_ms);

#endif

/* One answer of a server: HTTP (llhttp), then a stream of events or a JSON body, judged.
 *
 * Pure: bytes and the time they came go in. Whatever the server sends ends as a success or as one
 * kind of failure, within the limits below. */
#ifndef FATHOM_BENCH_ANSWER_H
#define FATHOM_BENCH_ANSWER_H

#include <llhttp.h>

#include "api/api.h"
#include "bench/events.h"

#define ANSWER_HEAD_MAX    ((size_t)64 << 10)
#define ANSWER_BODY_MAX    ((size_t)64 << 20) /* of what is kept: a body that is not a stream */
#define ANSWER_VALUES_MAX  ((size_t)1 << 20)  /* keys and values of one JSON text */
#define ANSWER_TOKENS_MAX  16777216           /* a usage that says more is wrong */
#define ANSWER_QUALITY_MAX 32

enum failure {
    FAILURE_NONE,
    FAILURE_CONNECT,      /* no connection */
    FAILURE_CLOSED,       /* the connection ended before the answer did */
    FAILURE_TIMEOUT,      /* the answer took too long */
    FAILURE_OVERLOADED,   /* 429 or 503 */
    FAILURE_CLIENT_ERROR, /* any other 4xx */
    FAILURE_SERVER_ERROR, /* any other 5xx */
    FAILURE_HTTP,         /* not HTTP/1, or a status that answers nothing */
    FAILURE_TOO_LARGE,    /* over a limit above */
    FAILURE_CONTENT,      /* not the JSON, or the events, that were asked for */
    FAILURE_ERROR_EVENT,  /* an error in mid-stream */
    FAILURE_TRUNCATED,    /* the stream ended without finish_reason and without [DONE] */
    FAILURE_KINDS,
};
const char *failure_name(enum failure failure); /* "connect": stable, for reports */

struct answer {
    /* The result; complete when answer_feed or answer_end has said so. */
    enum failure failure;
    char detail[120]; /* what the server or the parser said of a failure, printable ASCII */
    int status;       /* 0: no status line came */
    bool keeps_alive; /* the connection may carry another request */
    bool is_stream;
    /* As the usage states them. Without it output_tokens are the chunks with text. */
    size_t prompt_tokens, output_tokens, cached_tokens;
    char quality[ANSWER_QUALITY_MAX]; /* as the server names it; empty: not */
    size_t chunks;                    /* events of a stream with choices, be their text empty */
    uint64_t first_ns, last_ns;       /* of a chunk; 0: none came. last_ns also of a whole body */
    float *gaps;                      /* [gap_count] seconds between chunks */
    size_t gap_count;

    /* The reading. */
    llhttp_t framing;
    struct event_reader events;
    struct text_buffer body;
    size_t head_bytes, gap_capacity;
    char field[16], value[32]; /* of the header under way, cut to fit */
    size_t field_length, value_length;
    size_t text_chunks;
    uint64_t now_ns;
    bool complete, got_done, got_finish;
};

void answer_init(struct answer *answer);
void answer_begin(struct answer *answer); /* before each answer; keeps the memory */
void answer_free(struct answer *answer);

/* Both return true when the answer is complete, be it a failure. */
bool answer_feed(struct answer *answer, const char *data, size_t length, uint64_t now_ns);
bool answer_end(struct answer *answer); /* the connection ended */

/* Ends the answer as a failure, unless it has ended. */
void answer_fail(struct answer *answer, enum failure failure, const char *detail);

#endif

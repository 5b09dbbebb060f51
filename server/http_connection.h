/* One connection: bytes to requests, answers to bytes, in order, under limits and timeouts.
 *
 * One exchange at a time. While one is answered, reading goes on: the end of a client comes behind
 * all that it has sent, so this is the only way to see it. Later requests wait; of their bytes, as
 * many are kept as the largest request has. Whoever sends more gets the answers to what was kept,
 * then 429, and the connection's end: what came after was thrown away.
 *
 * Requests that are answered at once come in turns, and so do the slices of a long answer, so that
 * no client keeps the loop to itself; and only while the client takes the answers: nobody can make
 * the server hold more than the high-water mark and one answer.
 *
 * A client that says that it sends no more (a half-close; under TLS a close_notify) gets the
 * answers that are complete. One that says so while an answer is being made has left: TCP cannot
 * tell a half-close from a closed program, and to go on would compute answers that nobody reads.
 *
 * After the last answer what still comes is read and thrown away, for a while: to close with unread
 * input would reset the connection, and could take the answer away from a client that sends all of
 * a large body before it reads why that was refused.
 */
#ifndef FATHOM_HTTP_CONNECTION_H
#define FATHOM_HTTP_CONNECTION_H

#include "server/exchange.h"
#include "server/http_parser.h"
#include "server/transport.h"

#define CONNECTION_VISITORS_MAX 64

enum connection_state {
    CONNECTION_READING,   /* between requests, or inside one */
    CONNECTION_ANSWERING, /* an exchange is under way */
    CONNECTION_LINGERING, /* the last answer is out, or on its way; input is thrown away */
    CONNECTION_CLOSING,   /* libuv has it; freed when that is done */
};

struct connection {
    struct transport transport;
    struct server *server;
    struct connection *previous, *next;
    enum connection_state state;
    uint64_t since_ms;   /* uv_now when the wait that a timeout limits began */
    bool is_processing;  /* inside the parse loop, which goes on by itself after an answer */
    bool is_visitor;     /* over the limit: answers probes, refuses the rest, closes */
    bool is_broken;      /* writing failed or fell behind: closed by the next sweep */
    bool is_held;        /* between requests: waits for its turn, or for the client to take bytes */
    bool is_due;         /* its turn comes next: held, or with more of an answer to write */
    bool was_shut_down;  /* our side: everything was sent */
    bool client_is_done; /* its side: no more requests */
    bool was_slow;       /* a timeout ended its request */
    struct http_parser parser;
    struct exchange exchange;
    struct text_buffer ahead;           /* bytes that came while answering or held */
    size_t ahead_used;                  /* of these, the first so many are parsed */
    bool ahead_is_cut;                  /* more came than is kept, and was thrown away */
    uint64_t lingered_bytes;            /* that came behind the last answer */
    uint64_t heard_at_ms;               /* when the last of them came */
    uint64_t queued_bytes, taken_bytes; /* that did not fit the socket at once; of these, by now */
    uint64_t taken_at_ms;               /* when the client was last seen to take some */
};

/* Accepts one connection. A few more than the limit are taken as visitors, so that probes reach a
 * server that is full and others are told; beyond those, clients wait to be accepted. */
void connection_accept(struct server *server);

/* Goes on with the connections that are due; true if some are due again. */
bool connection_take_turns(struct server *server);

/* Looks at every connection's timeouts; called a few times a second. */
void connection_sweep_all(struct server *server);

/* Every byte of every answer has been handed to the operating system. */
bool connection_all_flushed(const struct server *server);
/* Answers 503 for every request under way, in the stream if that has begun. */
void connection_interrupt_all(struct server *server);
void connection_close_all(struct server *server);

/* For exchange.c. Bytes go out at once as far as the socket takes them, the rest is copied. A
 * failure marks the connection broken: whoever answers need not look. */
void connection_write(struct connection *connection, const uv_buf_t *pieces, unsigned count);
size_t connection_unsent(const struct connection *connection);
void connection_break(struct connection *connection, const char *why);
/* The exchange has more to write: exchange_write_more is called in a turn to come, when the client
 * has taken enough of what was written. */
void connection_await_turn(struct connection *connection);
/* The exchange's answer is complete: next request, or the end of the connection. */
void connection_end_exchange(struct connection *connection, bool keep_alive);

#endif
